"""Work that layers pass on and take over: a max pool's, groups joined to one product, norms."""

import copy
import pickle

import pytest
import torch
from small_models import Made, OfFunction, compiled, is_served, pictures, source_of, trained
from torch import nn
from torch.nn import functional as F

import spamm_torch
from spamm_torch import SpAMMConfig, convert_, revert_
from spamm_torch.networks.install import fused_of
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


def stage(device="cpu", dtype=torch.float32, kind=Stage, **options):
    torch.manual_seed(0)
    model = trained(kind(**options)).to(device, dtype)
    return model.to(memory_format=torch.channels_last)


def images(device="cpu", dtype=torch.float32, count=3, size=6):
    return pictures(count, 64, size, dtype).to(device, memory_format=torch.channels_last)


def calls_of_both(model):
    """The number of convolutions of the generated forward that compute the pool behind them."""
    return source_of(model).count("conv2d_max_pool(")


@pytest.fixture
def pooled(measured):
    """Converts a model as if the convolution with its pool were the fastest of its engines."""
    measured([9.0, 8.0, 1.0], [9.0, 8.0, 1.0])

    def convert(model, input):
        return convert_(model, example_input=input)

    return convert


@pytest.mark.parametrize(
    ("of_layer", "of_models", "calls"),
    [
        ([7.5, 8.0, 7.4], [9.0, 8.0, 1.0], 1),  # dense alone; the whole model all SpAMM
        ([7.5, 8.0, 9.0], [9.0, 8.0, 1.0], 0),
        ([1.0, 8.0, 9.0], [9.0, 1.0, 8.0], 0),  # dense
        ([9.0, 1.0, 8.0], [9.0, 8.0, 1.0, 8.0], 0),
    ],
)
def test_it_is_a_call_of_its_own_where_that_is_faster(of_layer, of_models, calls, measured):
    measured(of_layer, of_models)
    model, input = stage(), images()
    with torch.no_grad():
        expected = model(input)
        (row,) = convert_(model, example_input=input)
        assert ("pool" in row.absorbed) == calls_of_both(model) == calls
        torch.testing.assert_close(model(input), expected)


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


class Read(Stage):
    """The value before the pool is a result, too."""

    def forward(self, x):
        x = self.relu(self.bn(self.conv(x)))
        return self.pool(x), x


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((Stage, {"pool": pool}) for pool in (nn.MaxPool2d(3, 2, 1), nn.MaxPool2d(2, 1))),
        *((Stage, {"pool": nn.MaxPool2d(2, ceil_mode=True)}), (Stage, {"pool": nn.AvgPool2d(2)})),
        *((Stage, {"relu": F.silu}), (Stage, {"relu": nn.Identity()}), (Read, {})),
    ],
)
def test_other_pools_and_activations_and_what_is_read_twice_stay(kind, options, pooled):
    model, input = stage(kind=kind, **options), images()
    with torch.no_grad():
        expected = model(input)
        (row,) = pooled(model, input)
        assert "pool" not in row.absorbed
        torch.testing.assert_close(model(input), expected)


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
        found, seen = compiled(model, input)
        assert torch.equal(found, expected)
        assert seen == [OPS.conv2d_max_pool.default]
        exported = torch.export.export(model, (input,), strict=True).module()
        assert torch.equal(exported(input), expected)


OTHER_POOLS = {
    "plain": nn.MaxPool2d(2),
    "overlapping": nn.MaxPool2d(3, 2, 1),
    "uneven": nn.MaxPool2d((3, 2), (1, 2), (1, 0), ceil_mode=True),
    "dilated": nn.MaxPool2d(2, 1, 0, 2),
}


@pytest.mark.parametrize("pool", OTHER_POOLS.values(), ids=OTHER_POOLS.keys())
@pytest.mark.parametrize("count", [3, 40])
def test_pools_give_the_values_of_torch(device, pool, count):
    dtype, most = (torch.float16, 5e-3) if device.type == "cuda" else (torch.float32, 1e-5)
    model = trained(nn.Sequential(nn.Conv2d(64, 32, 3, padding=1), nn.BatchNorm2d(32), pool))
    model = model.to(device, dtype).to(memory_format=torch.channels_last)
    input = images(device, dtype, count, (11, 10))
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
    # Depthwise layers, unseen batches and huge weights stay.
    for conv in (
        nn.Conv2d(64, 128, 3, groups=64),
        nn.Conv2d(4096, 4096, 3, groups=64, device="meta"),
    ):
        assert joined_setting(conv, images) is None
    assert joined_setting(nn.Conv2d(64, 64, 3, groups=2), 0) is None


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

        report.save(tmp_path / "settings.json")
        again = copy.deepcopy(model)
        convert_(again, tmp_path / "settings.json")
        for twin in (again, copy.deepcopy(converted), pickle.loads(pickle.dumps(converted))):
            assert torch.equal(twin(input), converted(input))

        for changed in (model, converted):
            changed[2].weight.mul_(2)
            changed[5].bias.add_(1)
        torch.testing.assert_close(converted(input), model(input), **tolerance)


# ---- Norms travel between converted layers: from convolutions and max pools to those that skip ---


TAU = 30.0
SKIPS = SpAMMConfig(tau=TAU)


@pytest.fixture
def passing_norms(computing_norms):
    """Builds converted networks whose layers pass norms on."""

    def residual_block_and_pool(m, x):
        y = F.relu(m.conv2(F.relu(m.bn1(m.conv1(x)))) + x)
        return m.conv3(m.pool(y))

    def build(config=SKIPS, pool=None, forward=residual_block_and_pool):
        torch.manual_seed(0)
        layers = {name: nn.Conv2d(64, 64, 3, padding=1) for name in ("conv1", "conv2")}
        layers |= {"bn1": nn.BatchNorm2d(64), "conv3": nn.Conv2d(64, 64, 1)}
        model = trained(Made(forward, **layers, pool=pool or nn.MaxPool2d(2)))
        convert_(model, config)
        return model

    return build


def code_of(model):
    """The names of the ops that the generated forward with norms calls."""
    forward = fused_of(model).forward_with_norms(True)
    return None if forward is None else forward.__code__.co_names


def operands_of(model, layers):
    """Weight and bias of each layer."""
    return [fused_of(model).operands[3 * layer : 3 * layer + 2] for layer in range(layers)]


def dark_pictures(images=70):
    return pictures(images, 64, 8) * torch.linspace(0, 1, 8)


@torch.no_grad()
def test_norms_travel_as_if_layers_were_called_by_hand(passing_norms):
    model, x = passing_norms(), dark_pictures()
    (w1, b1), (w2, b2), (w3, b3) = operands_of(model, 3)
    own = model.conv1.weight.detach()  # not folded: a layer skips by that
    first = {"padding": 1, "activation": "relu", "norm_weight": OPS.conv2d_weight_norm(own)}
    y, norms = spamm_torch.conv2d(x, w1, b1, tau=TAU, return_norms=True, **first)
    del first["norm_weight"]
    y = spamm_torch.conv2d(y, w2, b2, tau=TAU, residual=x, norm_input=norms, **first)
    y, norms = OPS.max_pool2d(y, [2, 2], norms=True)
    y = spamm_torch.conv2d(y, w3, b3, tau=TAU, norm_input=norms)
    assert torch.equal(model(x), y)
    skipping, dense = (spamm_torch.conv2d(x, w1, b1, tau=tau, **first) for tau in (TAU, 0.0))
    assert not torch.equal(skipping, dense)


def test_what_the_reader_does_not_need_is_not_computed(passing_norms):
    model = passing_norms()
    names = code_of(model)
    assert "_spamm_torch_conv2d_with_norms" in names
    assert "_spamm_torch_max_pool2d" in names
    convert_(model, SpAMMConfig(tau=0.0), overrides={"conv2": SpAMMConfig(tau=0.0)})
    assert code_of(model) is None
    convert_(model, SpAMMConfig(tau=TAU, pixel_block=(1, 8, 8)))
    assert code_of(model) is None


@pytest.mark.parametrize(
    ("pool", "takes_norms"),
    [
        (nn.MaxPool2d(3, 2, 1), True),
        (lambda x: F.max_pool2d(x, 2), True),
        (lambda x: F.max_pool2d(x, 3, stride=2, padding=1, ceil_mode=True), True),
        (nn.AvgPool2d(2), False),
        (lambda x: F.max_pool2d(x, 2).relu_(), False),
        (lambda x: torch.sigmoid(x), False),
    ],
)
@torch.no_grad()
def test_pools_that_pass_norms_on(pool, takes_norms, passing_norms):
    model = passing_norms(pool=pool if isinstance(pool, nn.Module) else OfFunction(pool))
    assert ("_spamm_torch_max_pool2d" in code_of(model)) == takes_norms
    found = model(dark_pictures())
    fused_of(model)._reads_norms = False
    assert torch.equal(found, model(dark_pictures()))


@torch.no_grad()
def test_norms_of_a_value_that_is_written_do_not_travel(passing_norms):
    def forward(m, x):
        y = F.relu(m.conv1(x))
        y.mul_(8.0)
        return m.conv2(y)

    model = passing_norms(forward=forward)
    (w1, b1), (w2, b2) = operands_of(model, 2)
    y = spamm_torch.conv2d(dark_pictures(), w1, b1, 1, 1, tau=TAU, activation="relu")
    expected = spamm_torch.conv2d(8 * y, w2, b2, 1, 1, tau=TAU)
    assert torch.equal(model(dark_pictures()), expected)
    assert code_of(model) is None


@torch.no_grad()
def test_small_batches_take_norms_themselves(passing_norms):
    one, other = passing_norms(), passing_norms()
    fused_of(one)._reads_norms = False
    assert torch.equal(one(dark_pictures(8)), other(dark_pictures(8)))


def test_layers_that_skip_nothing_get_the_norms_of_their_weights(device):
    """Kernels leave out what meets padding alone, but for infinite weights."""
    model = trained(nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU()))
    model = model.to(device, torch.float16).to(memory_format=torch.channels_last)
    input = pictures(70, 64, 4, torch.float16).to(device, memory_format=torch.channels_last)
    with torch.no_grad():
        convert_(model, SpAMMConfig(tau=0.0), overrides={"0": SpAMMConfig(tau=0.0)})
        expected = torch.ops.spamm_torch.conv2d(
            *(input, model[0].weight, model[0].bias, 1, 1), threshold=0.0, activation="relu"
        )
        weight, _, norms = fused_of(model).operands
        assert torch.equal(norms, torch.ops.spamm_torch.conv2d_weight_norm(weight))
        assert torch.equal(model(input), expected)
        model[0].weight[3, 5, 0, 0] = torch.inf
        found = model(input)
    assert found[:, 3, 0].isnan().all()
    assert torch.equal(found[:, 4:], expected[:, 4:])
