"""The backend of torch.compile: results, engines, late changes, and what a model goes through."""

import copy
import functools
import pickle

import pytest
import torch
import torchvision
from processes import python
from small_models import pictures, resnet, trained
from support import Made, captured, raises_line, relative_error
from torch import nn
from torch.nn import functional as F
from torchvision.ops import FrozenBatchNorm2d

import spamm_torch
import spamm_torch.networks.backend as backend_room
import spamm_torch.networks.choice as choice_room
from spamm_torch import SpAMMConfig, convert_, explain, fuse, record_stats, refresh_, revert_
from spamm_torch._timing import Timing
from spamm_torch.networks.choice import Choice


def network(name):
    """A network of torchvision or else of timm."""
    torch.manual_seed(0)
    if hasattr(torchvision.models, name):
        return trained(getattr(torchvision.models, name)(weights=None))
    return trained(pytest.importorskip("timm").create_model(name))


def compiled(model, inner="eager", measure=False, **options):
    given = {"inner": inner, "measure": measure}
    return torch.compile(model, backend="spamm_torch", fullgraph=True, options=given, **options)


def test_import_leaves_the_compiler_alone_which_knows_the_backend():
    code = """if True:
        import sys, spamm_torch
        print([m for m in ("torch._dynamo", "torch._inductor", "torchvision") if m in sys.modules])
        import torch
        print("spamm_torch" in torch._dynamo.list_backends())
    """
    assert python("-c", code, check=True).stdout.split() == ["[]", "True"]


THOROUGH = ("densenet121", "efficientnet_b0", "regnet_y_400mf", "shufflenet_v2_x0_5")
THOROUGH += ("resnetv2_50", "cspdarknet53", "mobilenetv4_conv_small")


@pytest.mark.parametrize(
    "name",
    ["resnet18", "mobilenet_v3_small"]
    + [pytest.param(name, marks=pytest.mark.thorough) for name in THOROUGH],
)
def test_network_gives_what_it_gave(name):
    model, images = network(name), pictures(size=64)
    expected = model(images)
    assert relative_error(compiled(model)(images), expected) < 1e-5
    report = explain(model)
    convolutions = sum(isinstance(module, nn.Conv2d) for module in model.modules())
    assert len(report) == convolutions
    assert {row.action for row in report} == {"dense"}
    if name == "resnet18":
        assert report["layer1.0.conv1"].absorbed == ("bn", "relu")
        assert report["layer1.0.conv2"].absorbed == ("bn", "add", "relu")
        assert report["layer2.0.downsample.0"].absorbed == ("bn",)


@pytest.mark.inductor
def test_inductor_computes_the_rest():
    model = resnet().to(memory_format=torch.channels_last)
    images = pictures().to(memory_format=torch.channels_last)
    run = compiled(model, "inductor")
    assert relative_error(run(images), model(images)) < 1e-5
    model.conv1.weight.mul_(2)  # the packed copies follow
    assert relative_error(run(images), model(images)) < 1e-5


@pytest.mark.inductor
@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_frozen_weights_of_a_cpu_are_left_to_inductor(inner):
    model, images = conv().eval(), torch.randn(2, 32, 9, 9)
    run = compiled(model, inner)
    with torch._inductor.config.patch(freezing=True):
        assert relative_error(run(images), model(images)) < 1e-5
    (row,) = explain(model)
    assert (row.action, row.reason[:6]) == {
        "eager": ("dense", "table:"),
        "inductor": ("left", "frozen"),
    }[inner]


# ---- What a call absorbs -------------------------------------------------------------------------


def conv(*rest, groups=1, **options):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(32, 32, 3, groups=groups, **options), *rest)


def function(of):
    """A convolution, and a function of it and of its input."""
    torch.manual_seed(0)
    return Made(lambda m, x: of(m.conv(x), x), conv=nn.Conv2d(32, 32, 3, padding=1))


class LowRank(nn.Module):
    """A weight that is computed of parameters in each call, as adapters and standardised ones."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(32, 32, 1, 1))
        self.down, self.up = nn.Parameter(torch.randn(2, 32)), nn.Parameter(torch.randn(32, 2))
        self.norm = nn.BatchNorm2d(32)

    def forward(self, x):
        weight = self.weight + (self.up @ self.down).view(32, 32, 1, 1)
        mean, deviation = weight.mean((1, 2, 3), keepdim=True), weight.std((1, 2, 3), keepdim=True)
        return F.relu(self.norm(F.conv2d(x, (weight - mean) / deviation)))


NORM = nn.BatchNorm2d(32)
ABSORBED = {
    "relu": (conv(nn.ReLU()), "relu"),
    "relu in place": (conv(NORM, nn.ReLU(inplace=True)), "bn relu"),
    "relu6": (conv(NORM, nn.ReLU6()), "bn relu6"),
    "hardswish": (conv(nn.Hardswish()), "hardswish"),
    "silu": (conv(NORM, nn.SiLU(inplace=True)), "bn silu"),
    "leaky relu": (conv(nn.LeakyReLU()), "leaky_relu"),
    "leaky relu of another slope": (conv(nn.LeakyReLU(-0.2)), "leaky_relu"),
    "prelu": (conv(NORM, nn.PReLU(32)), "bn prelu"),
    "prelu of one slope": (conv(nn.PReLU()), "prelu"),
    "prelu of computed slopes": (function(lambda y, x: F.prelu(y, x.mean((0, 2, 3)))), ""),
    "gelu": (conv(NORM, nn.GELU()), "bn"),
    "relu before batch norm": (conv(nn.ReLU(), NORM), "relu"),
    "two batch norms": (conv(NORM, nn.BatchNorm2d(32, affine=False)), "bn bn"),
    "frozen batch norm": (conv(FrozenBatchNorm2d(32), nn.ReLU()), "scale shift relu"),
    "dropout": (conv(nn.Dropout(), NORM, nn.Dropout2d(), nn.ReLU()), "bn relu"),
    "depthwise": (conv(NORM, nn.ReLU(), groups=32), "bn relu"),
    "padding of a mode": (conv(NORM, padding=1, padding_mode="reflect"), "bn"),
    "padding by name": (conv(NORM, padding="same", dilation=2), "bn"),
    "gate of sigmoid": (function(lambda y, x: y * torch.sigmoid(y)), "silu"),
    "gate of hardsigmoid": (function(lambda y, x: F.hardsigmoid(y) * y), "hardswish"),
    "clamp": (function(lambda y, x: y.clamp(0, 6)), "relu6"),
    "sum": (function(lambda y, x: (x + y).relu()), "add relu"),
    "sum in place": (function(lambda y, x: y.add_(x).relu_()), "add relu"),
    "sum in place of the other": (function(lambda y, x: x.clone().add_(y)), ""),
    "sum with a factor": (function(lambda y, x: torch.add(y, x, alpha=2)), ""),
    "sum of a row": (function(lambda y, x: y + x[:, :, :1]), ""),
    "sum of itself": (function(lambda y, x: y + y), ""),
    "scaled": (function(lambda y, x: F.relu(0.5 * y + 1)), "scale shift relu"),
    "input written before the sum": (function(lambda y, x: y + x.mul_(2)), ""),
    "read twice": (function(lambda y, x: (y.relu(), y)[0] + y.mean()), ""),
    "computed weight": (LowRank(), "bn relu"),
}


@pytest.mark.parametrize("name", ABSORBED)
def test_call_absorbs(name):
    made, absorbed = ABSORBED[name]
    model = trained(copy.deepcopy(made))
    images = torch.randn(2, 32, 9, 9)
    expected = model(images.clone())
    run = compiled(model)
    torch.testing.assert_close(run(images.clone()), expected, rtol=1e-4, atol=1e-4)
    assert " ".join(explain(model)[0].absorbed) == absorbed
    fused = fuse(torch.fx.symbolic_trace(model), [images.clone()], inner="eager")
    torch.testing.assert_close(fused(images.clone()), expected, rtol=1e-4, atol=1e-4)
    assert [" ".join(row.absorbed) for row in explain(fused)] == [absorbed]
    for parameter in model.parameters():
        parameter.mul_(1.1)
    torch.testing.assert_close(run(images.clone()), model(images.clone()), rtol=1e-4, atol=1e-4)


def test_what_is_left_says_why():
    images, model = torch.randn(2, 32, 9, 9), conv(nn.BatchNorm2d(32), nn.ReLU()).eval()
    run = compiled(model)
    with torch.enable_grad():
        run(images).sum().backward()
    assert explain(model)[0].reason.startswith("gradients are wanted")
    assert model[0].weight.grad is not None
    with torch.autocast("cpu", torch.bfloat16):
        run(images)
    assert explain(model)[0].reason == "under autocast"
    model.train()
    run(images)
    assert explain(model)[0].absorbed == ()
    others = nn.Sequential(nn.ConvTranspose2d(32, 32, 3), *conv(nn.ReLU())).eval()
    compiled(others)(images[0])
    reasons = [row.reason for row in explain(others)]
    assert reasons == ["not a 2-d convolution", "no batch of images"]


def test_layers_of_one_name_have_a_row_each():
    model = nn.ModuleList(function(lambda y, x: F.leaky_relu(y, 0.2)) for _ in range(2)).eval()
    for images in (torch.randn(1, 32, 9, 9), torch.randn(2, 32, 9, 9)):
        for block in model:
            block.compile(backend="spamm_torch", options={"inner": "eager", "measure": False})
            block(images)
    rows = [(row.name, row.absorbed) for row in explain(model)]
    assert rows == [("0.conv", ("leaky_relu",)), ("1.conv", ("leaky_relu",))]


def test_arguments_are_refused():
    model, images = conv().eval(), torch.randn(1, 32, 5, 5)
    for options, text in (
        ({"inner": "xla"}, "xla"),
        ({"measure": 1}, "measure"),
        ({"inner": "eager", "epilogue_fusion": True}, "the only other option .*; got epilogue_fus"),
    ):
        run = torch.compile(model, backend="spamm_torch", options=options)
        with pytest.raises(Exception, match=text):
            run(images)
    model.compile(backend="spamm_torch", options={"inner": "eager"})  # torch leaves it alone
    with torch.no_grad():
        model(images)
    with raises_line(ValueError, r"torch.compile\(model\) does"):
        explain(model)
    with raises_line(TypeError, "GraphModule"):
        fuse(model)
    with raises_line(ValueError, "inner"):
        fuse(torch.fx.symbolic_trace(model), inner="xla")


# ---- What a model goes through -------------------------------------------------------------------


def test_compiled_in_place_it_keeps_its_state_and_is_copied():
    model, images = resnet(), pictures()
    keys, expected = list(model.state_dict()), model(images)
    model.compile(backend="spamm_torch", options={"inner": "eager", "measure": False})
    for twin in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert relative_error(twin(images), expected) < 1e-5
        assert list(twin.state_dict()) == keys
    wrapped = compiled(resnet())
    for twin in (wrapped, copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped))):
        assert relative_error(twin(images), expected) < 1e-5


def test_sizes_that_change():
    model = resnet()
    run = compiled(model, dynamic=True)
    for count, size in ((2, 32), (3, 48), (4, 32)):
        images = pictures(count, size=size)
        assert relative_error(run(images), model(images)) < 1e-5


def test_any_number_of_images_gets_the_engines_of_the_largest_batch(monkeypatch):
    seen = []

    def times_of(calls, _):
        seen.append(len(calls))
        return [Timing(1.0), Timing(3.0 - len(seen))][: len(calls)]

    monkeypatch.setattr(choice_room, "times_of", times_of)
    monkeypatch.setattr(choice_room, "_measured", {})
    model = conv(nn.ReLU()).eval()
    run = compiled(model, measure=True)
    for count in (8, 3, 8):
        images = torch.randn(count, 32, 9, 9)
        assert relative_error(run(images), model(images)) < 1e-5
    row = explain(model)["0"]
    assert row.reason.startswith("measured")
    assert [name for name, _ in row.times] == ["dense", "spamm"]
    assert seen == [2]
    run(torch.randn(3, 32, 12, 12))  # of another size
    assert len(seen) > 1


def test_exported_program_is_fused_and_exported_again():
    model, images = resnet(), (pictures(),)
    expected = model(*images)
    bare = fuse(torch.fx.symbolic_trace(model), inner="eager")  # without an example
    assert explain(bare)["layer1.0.conv2"].absorbed == ("bn",)
    module = torch.export.export(model, images).module()
    fused = fuse(module, inner="eager")
    assert all("bn" in row.absorbed for row in explain(fused))
    assert {row.absorbed for row in explain(fused)} >= {("bn", "relu"), ("bn", "add", "relu")}
    again = torch.export.export(fused, images).module()
    for call in (bare, fused, again, fuse(module)):
        assert relative_error(call(*images), expected) < 1e-5
    assert relative_error(module(*images), expected) == 0


def test_exported_layers_that_skip_are_fused():
    model, images = conv(nn.BatchNorm2d(32), nn.ReLU(), padding=1), torch.randn(64, 32, 6, 6)
    convert_(trained(model), tau=20.0)
    expected = model(images)
    assert not torch.equal(expected, revert_(copy.deepcopy(model))(images))
    fused = fuse(torch.export.export(model, (images,)).module())
    assert relative_error(fused(images), expected) < 1e-5
    assert [(row.action, row.absorbed) for row in explain(fused)] == [("spamm", ("bn", "relu"))]


def test_layers_that_skip_keep_their_own_epilogue():
    torch.manual_seed(0)
    slope = nn.Parameter(torch.randn(32))

    def forward(m, x):
        more = {"residual": m.first(x), "activation": "leaky_relu", "padding": 1, "tau": 20.0}
        y = spamm_torch.conv2d(m.last(x), m.first.weight, slope=m.slope, **more)
        return F.relu6(spamm_torch.conv2d(y, m.first.weight, slope=-0.3, **more))

    make = functools.partial(spamm_torch.SpAMMConv2d, 32, 32, 3, padding=1, tau=20.0)
    layers = {"first": make(activation="silu"), "last": nn.Sequential(make(), nn.PReLU())}
    model = Made(forward, **layers, slope=slope)
    images = torch.randn(64, 32, 6, 6)
    assert relative_error(compiled(model)(images), model(images)) < 1e-5
    assert [row.absorbed for row in explain(model)] == [(), ("prelu",), (), ()]


@pytest.fixture
def called(monkeypatch):
    """Layers compute norms on the way, as on Hopper; and a list of what compiled graphs call."""
    monkeypatch.setattr(backend_room, "computes_output_norms", lambda *_: True)
    calls, inner = [], backend_room._inner

    def compile_rest(module, *rest):
        calls.extend(str(node.target) for node in module.graph.nodes)
        return inner(module, *rest)

    monkeypatch.setattr(backend_room, "_inner", compile_rest)
    return calls


WITH_NORMS = "spamm_torch.conv2d_with_norms.default"


def test_skipping_layers_skip_the_same_products(called):
    """Also by norms of the layer before."""
    torch.manual_seed(0)
    layers = [(nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU()) for _ in range(3)]
    model = trained(nn.Sequential(*(part for layer in layers for part in layer)))
    model[1].weight.mul_(3)  # folded weights have other norms
    images = torch.randn(64, 64, 6, 6) * torch.linspace(0, 1, 6).square()
    convert_(model, SpAMMConfig(tau=30.0))
    with record_stats(model) as stats:
        expected = model(images)
    assert all(0.1 < of.valid_ratio < 0.8 for of in stats.values())
    assert relative_error(compiled(model)(images), expected) < 1e-5
    assert {row.absorbed for row in explain(model)} == {("bn", "relu")}
    assert called.count(WITH_NORMS) == 2


def written(change):
    """Two convolutions, and a change of the value between them; a third behind a pool."""
    torch.manual_seed(0)

    def forward(m, x):
        y = F.relu(m.conv1(x))
        change(y)
        return m.conv3(F.max_pool2d(m.conv2(y), 2))

    return Made(forward, **{f"conv{i}": nn.Conv2d(64, 64, 3, padding=1) for i in (1, 2, 3)})


@pytest.mark.parametrize(
    ("change", "count"),
    [
        (lambda y: y.mul_(8.0), 0),
        (lambda y: y.view(-1).mul_(8.0), 0),
        (lambda y: y.mul(8.0), 1),
    ],
)
def test_norms_travel_with_values_that_nothing_writes(change, count, called):
    model, images = written(change), torch.rand(70, 64, 12, 12) * torch.linspace(0, 1, 12)
    dense = model.eval()(images)
    convert_(model, tau=20.0)
    expected = model(images)
    assert relative_error(expected, dense) > 1e-3
    assert relative_error(compiled(model)(images), expected) < 1e-5
    assert called.count(WITH_NORMS) == count


@pytest.fixture
def taking(monkeypatch):
    """Lets every convolution get one engine, where it can."""

    def take(engine):
        choose = backend_room.choose

        def chosen(site, *given):
            is_grouped = 1 < site.geometry[3] < site.weight.meta["example_value"].shape[0]
            can_be = {"groups joined": is_grouped, "spamm, pool": site.pool is not None}
            can_be["spamm"] = site.geometry[3] == 1
            if can_be.get(engine, True):
                return Choice(engine, "of the test")
            return choose(site, *given)

        monkeypatch.setattr(backend_room, "choose", chosen)

    return take


class Mixed(nn.Module):
    """Batch norms, sums, pools of both kinds, groups, and convolutions that absorb nothing."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.bn1 = nn.Conv2d(32, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64)
        self.second, self.bn2 = nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64)
        self.grouped = nn.Conv2d(64, 128, 3, stride=2, groups=4)
        self.depthwise = nn.Conv2d(128, 128, 3, padding=1, groups=128)
        self.last = nn.Conv2d(128, 16, 1)

    def forward(self, x):
        y = F.max_pool2d(F.relu(self.bn1(self.first(x))), 2)
        z = F.max_pool2d(F.relu(self.bn2(self.second(y)) + y), 3, 2, 1)
        return self.last(F.silu(self.depthwise(F.hardswish(self.grouped(z)))))


ENGINES = ("dense", "torch", "spamm", "spamm, pool", "groups joined")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_every_engine_computes_the_same(engine, layout, taking, device):
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    model = trained(Mixed()).to(device, dtype).to(memory_format=layout)
    images = torch.randn(70, 32, 24, 22).to(device, dtype).to(memory_format=layout)
    taking(engine)
    run = compiled(model)
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if device.type == "cuda" else {}
    for _ in range(2):
        torch.testing.assert_close(run(images), model(images), **tolerance)
        assert run(images).stride() == model(images).stride()
        for tensor in (model.grouped.weight, model.second.bias, model.bn1.running_var):
            tensor.mul_(1.5)
    assert engine in {row.action for row in explain(model)}
    absorbed = {row.name: row.absorbed for row in explain(model)}
    pooled = ("bn", "relu", "pool")[: 2 + (engine == "spamm, pool")]
    assert absorbed["first"] == (("bn",) if engine == "torch" else pooled)
    assert absorbed["second"] == (("bn",) if engine == "torch" else ("bn", "add", "relu"))


@pytest.mark.parametrize("activation", [F.relu, F.relu6, F.hardswish, F.silu, F.leaky_relu])
@pytest.mark.parametrize("adds", [False, True])
def test_packed_weights_give_the_values_of_others(activation, adds):
    """On CPUs layers of channels-last float32 read copies in oneDNN's layout."""
    last = {"memory_format": torch.channels_last}
    model = function(lambda y, x: activation(y + x if adds else y)).to(**last)
    images = torch.randn(2, 32, 9, 9).to(**last)
    images[0, 3] = torch.nan
    run = compiled(model)
    for _ in range(2):
        found, expected = run(images), model(images)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4, equal_nan=True)
        assert found.stride() == expected.stride()
        model.conv.weight.mul_(2)
    (call,) = backend_room._calls_of(model)
    assert [buffer.is_mkldnn for buffer in call._buffers] == [True]
    with torch.backends.mkldnn.flags(enabled=False):
        torch._dynamo.reset()
        compiled(other := copy.deepcopy(model))(images)
    assert not any(call._buffers for call in backend_room._calls_of(other))


@pytest.mark.cuda
def test_a_captured_graph_reads_what_refresh_writes():
    model, images = resnet().cuda().half(), pictures().cuda().half()
    run = compiled(model)
    graph, result = captured(lambda: run(images))
    model.bn1.bias.add_(1)
    graph.replay()
    stale = result.clone()
    refresh_(model)
    graph.replay()
    assert not torch.equal(result, stale)
    torch.testing.assert_close(result, model(images), rtol=2e-2, atol=2e-2)


def test_distributed_data_parallel(tmp_path):
    model, images = resnet(), pictures()
    expected = model(images)
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        parallel = nn.parallel.DistributedDataParallel(model)
        run = torch.compile(parallel, backend="spamm_torch", options={"inner": "eager"})
        assert relative_error(run(images), expected) < 1e-5
    finally:
        torch.distributed.destroy_process_group()


def test_network_of_onnx2torch(tmp_path):
    onnx2torch = pytest.importorskip("onnx2torch")
    model, images = network("resnet18"), pictures(size=32)
    torch.onnx.export(model, (images,), tmp_path / "net.onnx", dynamo=False)
    graph = onnx2torch.convert(str(tmp_path / "net.onnx")).eval()
    run = compiled(graph)
    assert relative_error(run(images), model(images)) < 1e-5
    assert {row.absorbed for row in explain(graph)} >= {("relu",), ("add", "relu")}


def test_reports_of_nothing_and_without_settings(tmp_path):
    linear, convolution = nn.Linear(3, 3).eval(), nn.Conv2d(3, 4, 3).eval()
    for model, x in ((linear, torch.ones(2, 3)), (convolution, torch.ones(1, 3, 5, 5))):
        compiled(model)(x)
    assert str(explain(linear)) == "no convolutions"
    with raises_line(ValueError, "settings"):
        explain(convolution).save(tmp_path / "engines.json")
    assert not (tmp_path / "engines.json").exists()
