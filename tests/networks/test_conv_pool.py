"""Convolutions joined with a max pool, and groups joined to one product."""

import copy
import json
import pickle

import pytest
import torch
from small_models import Made, is_served, source_of, trained
from torch import nn
from torch.nn import functional as F

from spamm_torch import SpAMMConfig, convert_, record_stats, revert_
from spamm_torch.networks.operands import joined_setting, joined_weight

OPS = torch.ops.spamm_torch


class Stage(nn.Module):
    """Convolution, batch norm, ReLU and a pool."""

    def __init__(self, pool=None, relu=F.relu):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64)
        self.relu, self.pool = relu, pool or nn.MaxPool2d(2)

    def forward(self, x):
        return self.pool(self.relu(self.bn(self.conv(x))))


def stage(device="cpu", dtype=torch.float32, **options):
    torch.manual_seed(0)
    model = trained(Stage(**options)).to(device, dtype)
    return model.to(memory_format=torch.channels_last)


def images(device="cpu", dtype=torch.float32, count=3, size=6):
    generator = torch.Generator().manual_seed(2)
    input = torch.randn(count, 64, size, size, generator=generator)
    return input.to(device, dtype, memory_format=torch.channels_last)


def calls_of_both(model):
    """How many convolutions of the generated forward compute the pool behind them."""
    return source_of(model).count("conv2d_max_pool(")


@pytest.fixture
def pooled(measured):
    """Converts a model as if the convolution with its pool were the fastest of its engines."""
    measured([9.0, 8.0, 1.0], [9.0, 8.0, 1.0])

    def convert(model, input):
        return convert_(model, example_input=input)

    return convert


@pytest.mark.parametrize(("with_pool", "calls"), [(7.4, 1), (9.0, 0)])
def test_a_plan_of_spamm_alone_pools_where_that_was_faster(measured, with_pool, calls):
    measured([7.5, 8.0, with_pool], [9.0, 8.0, 1.0])  # dense alone; the whole model all SpAMM
    model, input = stage(), images()
    convert_(model, example_input=input)
    with torch.no_grad():
        model(input)
    assert calls_of_both(model) == calls


@pytest.mark.parametrize("relu", [F.relu, nn.ReLU(inplace=True), lambda x: x.relu()])
@pytest.mark.parametrize("pool", [nn.MaxPool2d(2), lambda x: F.max_pool2d(x, (2, 2))])
@pytest.mark.parametrize("size", [6, 7])
def test_the_pool_is_computed_in_the_call(device, relu, pool, size, pooled):
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    model = stage(device, dtype, relu=relu, pool=pool if isinstance(pool, nn.Module) else None)
    if not isinstance(pool, nn.Module):
        del model.pool
        model.pool = pool
    input = images(device, dtype, 70, size)
    with torch.no_grad():
        expected = model(input)
        (row,) = pooled(model, input)
        assert row.action == "spamm"
        assert row.absorbed == ("bn", "relu", "pool")
        assert [name for name, _ in row.times] == ["dense", "spamm", "spamm, pool"]
        assert calls_of_both(model) == 1
        assert is_served(model, input)
        torch.testing.assert_close(model(input), expected, rtol=4e-3, atol=4e-3)
        torch.testing.assert_close(model(input[0]), expected[0], rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize(
    ("of_layer", "of_models"),
    [([1.0, 8.0, 9.0], [9.0, 1.0, 8.0]), ([9.0, 1.0, 8.0], [9.0, 8.0, 1.0, 8.0])],
    ids=["dense", "spamm"],
)
def test_it_is_a_call_of_its_own_where_that_is_faster(of_layer, of_models, measured):
    measured(of_layer, of_models)
    model, input = stage(), images()
    with torch.no_grad():
        expected = model(input)
        (row,) = convert_(model, example_input=input)
        assert "pool" not in row.absorbed
        assert calls_of_both(model) == 0
        torch.testing.assert_close(model(input), expected)


@pytest.mark.parametrize(
    "options",
    [
        {"pool": nn.MaxPool2d(3, 2, 1)},
        {"pool": nn.MaxPool2d(2, ceil_mode=True)},
        {"pool": nn.MaxPool2d(2, 1)},
        {"pool": nn.AvgPool2d(2)},
        {"relu": F.silu},
        {"relu": nn.Identity()},
    ],
)
def test_other_pools_and_activations_stay(options, pooled):
    model, input = stage(**options), images()
    with torch.no_grad():
        expected = model(input)
        (row,) = pooled(model, input)
        assert "pool" not in row.absorbed
        torch.testing.assert_close(model(input), expected)


def test_a_value_that_is_read_twice_stays(pooled):
    class Read(Stage):
        def forward(self, x):
            x = self.relu(self.bn(self.conv(x)))
            return self.pool(x), x

    model, input = trained(Read()), images()
    with torch.no_grad():
        (row,) = pooled(model, input)
    assert row.absorbed == ("bn", "relu")


def test_without_an_example_and_where_it_skips_a_layer_keeps_its_pool(pooled):
    assert "pool" not in convert_(stage())[0].absorbed
    model, input = stage(), images()
    convert_(model, SpAMMConfig(tau=0.5), overrides={"conv": SpAMMConfig(tau=0.5)})
    assert calls_of_both(model) == 0
    revert_(model)
    (row,) = pooled(model, input)
    assert "pool" in row.absorbed


def test_settings_copies_and_pickles_keep_it(tmp_path, pooled):
    model, input = stage(), images()
    with torch.no_grad():
        report = pooled(model, input)
        expected = model(input)
        report.save(tmp_path / "net.json")
        again = stage()
        assert convert_(again, tmp_path / "net.json")[0].absorbed == ("bn", "relu", "pool")
        for other in (again, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert calls_of_both(other) == 1
            assert torch.equal(other(input), expected)
        revert_(model)
        assert type(model) is Stage
        torch.testing.assert_close(model(input), expected)


def test_settings_of_a_pool_and_a_tau_are_refused(tmp_path, pooled):
    file = tmp_path / "net.json"
    pooled(stage(), images()).save(file)
    settings = json.loads(file.read_text())
    for wrong in ({"pool": "yes"}, {"pool": True, "setting": {"tau": 0.5}}):
        layer = settings["layers"]["conv"] | wrong
        file.write_text(json.dumps({**settings, "layers": {"conv": layer}}))
        with pytest.raises(ValueError, match="must have true as pool where"):
            convert_(stage(), file)


def test_weights_that_change_and_a_pool_with_a_hook_are_noticed(pooled):
    model, input, seen = stage(), images(), []
    with torch.no_grad():
        pooled(model, input)
        before = model(input)
        model.conv.bias += 1
        revert_(own := copy.deepcopy(model))
        assert not torch.equal(model(input), before)
        torch.testing.assert_close(model(input), own(input))
        model.pool.register_forward_hook(lambda *_: seen.append("pool"))
        model(input)
    assert seen == ["pool"]


def test_compilers_see_one_call(pooled):
    model, input = stage(), images()
    with torch.no_grad():
        pooled(model, input)
        expected = model(input)
        seen = []

        def keep(graph, _):
            seen.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
            return graph.forward

        assert torch.equal(torch.compile(model, fullgraph=True, backend=keep)(input), expected)
        assert seen == [OPS.conv2d_max_pool.default]
        exported = torch.export.export(model, (input,), strict=True).module()
        assert torch.equal(exported(input), expected)


OTHER_POOLS = {
    "plain": nn.MaxPool2d(2),
    "overlapping": nn.MaxPool2d(3, 2, 1),
    "uneven": nn.MaxPool2d((3, 2), (1, 2), (1, 0), ceil_mode=True),
    "dilated": nn.MaxPool2d(2, 1, 0, 2),
}


def with_pool(pool):
    return trained(nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), pool))


@pytest.mark.parametrize("pool", OTHER_POOLS.values(), ids=OTHER_POOLS.keys())
@pytest.mark.parametrize("images", [3, 40])
def test_pools_give_the_values_of_torch(device, pool, images):
    dtype, most = (torch.float16, 5e-3) if device.type == "cuda" else (torch.float32, 1e-5)
    model = with_pool(pool).to(device, dtype).to(memory_format=torch.channels_last)
    torch.manual_seed(0)
    input = torch.randn(images, 16, 11, 10, device=device).to(dtype)
    input = input.contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        convert_(model)
        assert is_served(model, input)
        torch.testing.assert_close(model(input), pool(model[:2](input)), rtol=most, atol=most)


def test_pools_that_return_indices_stay():
    pools = {"pool": nn.MaxPool2d(2, return_indices=True), "unpool": nn.MaxUnpool2d(2)}
    unpooled = lambda m, x: m.unpool(*m.pool(m.conv(x).relu()))  # noqa: E731
    model = trained(Made(unpooled, conv=nn.Conv2d(3, 8, 3, padding=1), **pools))
    input = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        expected = model(input)
        convert_(model)
        torch.testing.assert_close(model(input), expected)


# ---- Grouped convolutions as one product whose zero blocks are skipped ---------------------------


@pytest.fixture
def joins_groups(monkeypatch):
    """Measured times by which joined groups are fastest."""
    from spamm_torch.networks import engines as engines_module
    from spamm_torch.networks.engines import Choice, Chooser, fastest

    def choose(engines, times):
        joined = engines.get("groups joined")
        return fastest(engines, times) if joined is None else Choice(joined, "measured")

    monkeypatch.setattr(engines_module, "fastest", choose)
    monkeypatch.setattr(Chooser, "_fastest", lambda self, _: self._chosen())


def network():
    torch.manual_seed(0)
    layers = [
        *(nn.Conv2d(3, 192, 3), nn.ReLU()),
        *(nn.Conv2d(192, 192, 3, padding=1, groups=12, bias=False), nn.BatchNorm2d(192)),
        nn.ReLU(),
        *(nn.Conv2d(192, 192, 3, stride=2, groups=8), nn.SiLU()),
        nn.Conv2d(192, 192, 3, groups=192),
    ]
    return nn.Sequential(*layers).eval()


@pytest.mark.parametrize("groups", [2, 3, 12])
def test_one_group_computes_the_same(groups):
    weight, input = torch.randn(24, 24 // groups, 3, 2), torch.randn(2, 24, 7, 8)
    joined = joined_weight(weight, groups)
    assert joined.shape == (24, 24, 3, 2)
    expected = F.conv2d(input, weight, groups=groups)
    torch.testing.assert_close(F.conv2d(input, joined), expected)


@pytest.mark.parametrize(("images", "block"), [(1, (1, 8, 8)), (33, (32, 1, 2)), (500, (64, 1, 1))])
def test_blocks_follow_the_batch(images, block):
    assert joined_setting(nn.Conv2d(64, 64, 3, groups=2), images).pixel_block == block


def test_depthwise_layers_unseen_batches_and_huge_weights_stay():
    assert joined_setting(nn.Conv2d(64, 128, 3, groups=64), 8) is None
    assert joined_setting(nn.Conv2d(64, 64, 3, groups=2), 0) is None
    assert joined_setting(nn.Conv2d(4096, 4096, 3, groups=64, device="meta"), 8) is None


def test_a_converted_network_joins_groups(device, joins_groups, tmp_path):
    model, input = network().to(device), torch.randn(8, 3, 20, 20, device=device)
    tolerance = {"rtol": 1e-2, "atol": 1e-2} if device.type == "cuda" else {}  # TF32
    with torch.no_grad():
        expected = model(input)
        converted = copy.deepcopy(model)
        report = convert_(converted, example_input=input)
        assert ["groups" in row.absorbed for row in report] == [False, True, True, False]
        assert type(converted[2]) is nn.Conv2d
        torch.testing.assert_close(converted(input), expected, **tolerance)
        torch.testing.assert_close(converted(input[:3]), expected[:3], **tolerance)
        with record_stats(converted) as stats:
            converted(input)
        assert stats["2"].valid_ratio == pytest.approx(1 / 3)

        report.save(tmp_path / "settings.json")
        again = copy.deepcopy(model)
        convert_(again, tmp_path / "settings.json")
        for twin in (again, copy.deepcopy(converted), pickle.loads(pickle.dumps(converted))):
            assert torch.equal(twin(input), converted(input))

        for changed in (model, converted):
            changed[2].weight.mul_(2)
            changed[5].bias.add_(1)
        torch.testing.assert_close(converted(input), model(input), **tolerance)


def test_deviations_are_computed_group_by_group():
    layers = nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3, groups=4), nn.ReLU()
    model, input = nn.Sequential(*layers).eval(), torch.zeros(2, 3, 32, 32)
    input[:, :, 4:9, 4:9] = torch.rand(2, 3, 5, 5)
    example = {"example_input": input, "reference": torch.zeros(1, 3, 32, 32)}
    expected, report = model(input), convert_(model, **example)
    assert not any("groups" in row.absorbed for row in report)
    with torch.no_grad():
        torch.testing.assert_close(model(input), expected)


def test_settings_of_one_group_hold_no_dense_setting(tmp_path):
    model = nn.Sequential(nn.Conv2d(32, 32, 3), nn.ReLU())
    report = convert_(model)
    text = str(report.to_dict()["layers"]["0"])
    assert "'setting': None" in text
    layers = report.to_dict()
    layers["layers"]["0"]["setting"] = SpAMMConfig(tau=1e-3).to_dict()
    path = tmp_path / "settings.json"
    path.write_text(json.dumps(layers))
    with pytest.raises(ValueError, match="spamm with a setting; got 'dense' with"):
        convert_(model, path)
