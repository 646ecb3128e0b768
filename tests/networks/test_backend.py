"""The backend of torch.compile: results, engines, late changes, and what a model goes through."""

import copy
import pickle

import pytest
import torch
import torchvision
from processes import python
from support import one_thread, raises_line  # noqa: F401  the fixture is automatic
from torch import nn
from torch.nn import functional as F
from torchvision.ops import FrozenBatchNorm2d

import spamm_torch.networks.backend as backend_room
from spamm_torch import SpAMMConfig, convert_, explain, fuse, refresh_


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


def varied(model):
    """The model in eval mode, with batch norms that change what they get."""
    generator = torch.Generator().manual_seed(3)
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            scales = [] if norm.weight is None else [norm.weight.data]
            shifts = [] if norm.bias is None else [norm.bias.data]
            for tensor in (norm.running_mean, *shifts):
                tensor.uniform_(-0.2, 0.2, generator=generator)
            for tensor in (norm.running_var, *scales):
                tensor.uniform_(0.7, 1.3, generator=generator)
    return model.eval()


def network(name, **options):
    torch.manual_seed(0)
    return varied(getattr(torchvision.models, name)(weights=None, **options))


def pictures(size=64, count=2, seed=1):
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(seed))


def compiled(model, inner="eager", measure=False, **options):
    given = {"inner": inner, "measure": measure}
    return torch.compile(model, backend="spamm_torch", fullgraph=True, options=given, **options)


def relative_error(got, expected):
    return ((got - expected).norm() / expected.norm()).item()


def test_import_leaves_the_compiler_alone():
    unwanted = "'torch._dynamo', 'torch._inductor', 'torchvision'"
    code = f"import sys, spamm_torch; print([m for m in ({unwanted}) if m in sys.modules])"
    assert python("-c", code, check=True).stdout.strip() == "[]"


def test_backend_is_known_by_its_name():
    code = "import spamm_torch, torch; print('spamm_torch' in torch._dynamo.list_backends())"
    assert python("-c", code, check=True).stdout.strip() == "True"


@pytest.mark.parametrize(
    "name",
    [
        "resnet18",
        "mobilenet_v3_small",
        *(
            pytest.param(name, marks=pytest.mark.thorough)
            for name in ("densenet121", "efficientnet_b0", "regnet_y_400mf", "shufflenet_v2_x0_5")
        ),
    ],
)
@torch.no_grad()
def test_network_gives_what_it_gave(name):
    model, images = network(name), pictures()
    expected = model(images)
    assert relative_error(compiled(model)(images), expected) < 1e-5
    report = explain(model)
    convolutions = sum(isinstance(module, nn.Conv2d) for module in model.modules())
    assert len(report) == convolutions
    assert {row.action for row in report} == {"dense"}


@torch.no_grad()
def test_resnet_absorbs_all_that_follows():
    model = network("resnet18")
    compiled(model)(pictures())
    report = explain(model)
    assert report["layer1.0.conv1"].absorbed == ("bn", "relu")
    assert report["layer1.0.conv2"].absorbed == ("bn", "add", "relu")
    assert report["layer2.0.downsample.0"].absorbed == ("bn",)


@pytest.mark.inductor
@torch.no_grad()
def test_inductor_computes_the_rest():
    model = network("resnet18").to(memory_format=torch.channels_last)
    images = pictures().to(memory_format=torch.channels_last)
    run = compiled(model, "inductor")
    assert relative_error(run(images), model(images)) < 1e-5
    model.conv1.weight.mul_(2)  # the packed copies follow
    assert relative_error(run(images), model(images)) < 1e-5


# ---- What a call absorbs -------------------------------------------------------------------------


def conv(*rest, groups=1, **options):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(32, 32, 3, groups=groups, **options), *rest)


class Function(nn.Module):
    """A convolution, and a function of it and of its input."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.function = nn.Conv2d(32, 32, 3, padding=1), function

    def forward(self, x):
        return self.function(self.conv(x), x)


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
    "leaky relu of another slope": (conv(nn.LeakyReLU(0.1)), ""),
    "prelu": (conv(NORM, nn.PReLU(32)), "bn"),
    "gelu": (conv(NORM, nn.GELU()), "bn"),
    "relu before batch norm": (conv(nn.ReLU(), NORM), "relu"),
    "two batch norms": (conv(NORM, nn.BatchNorm2d(32, affine=False)), "bn bn"),
    "frozen batch norm": (conv(FrozenBatchNorm2d(32), nn.ReLU()), "scale shift relu"),
    "dropout": (conv(nn.Dropout(), NORM, nn.Dropout2d(), nn.ReLU()), "bn relu"),
    "depthwise": (conv(NORM, nn.ReLU(), groups=32), "bn relu"),
    "padding of a mode": (conv(NORM, padding=1, padding_mode="reflect"), "bn"),
    "padding by name": (conv(NORM, padding="same", dilation=2), "bn"),
    "padding before": (nn.Sequential(nn.ZeroPad2d(1), *conv(NORM)), "bn"),
    "padding of one side": (nn.Sequential(nn.ZeroPad2d((0, 1, 0, 1)), *conv(NORM)), "bn"),
    "gate of sigmoid": (Function(lambda y, x: y * torch.sigmoid(y)), "silu"),
    "gate of hardsigmoid": (Function(lambda y, x: F.hardsigmoid(y) * y), "hardswish"),
    "clamp": (Function(lambda y, x: y.clamp(0, 6)), "relu6"),
    "sum": (Function(lambda y, x: (x + y).relu()), "add relu"),
    "sum in place": (Function(lambda y, x: y.add_(x).relu_()), "add relu"),
    "sum in place of the other": (Function(lambda y, x: x.clone().add_(y)), ""),
    "sum of a row": (Function(lambda y, x: y + x[:, :, :1]), ""),
    "sum of itself": (Function(lambda y, x: y + y), ""),
    "scaled": (Function(lambda y, x: F.relu(0.5 * y + 1)), "scale shift relu"),
    "input written before the sum": (Function(lambda y, x: y + x.mul_(2)), ""),
    "read twice": (Function(lambda y, x: (y.relu(), y)[0] + y.mean()), ""),
    "computed weight": (LowRank(), "bn relu"),
}


@pytest.mark.parametrize("name", ABSORBED)
@torch.no_grad()
def test_call_absorbs(name):
    made, absorbed = ABSORBED[name]
    model = varied(copy.deepcopy(made))
    images = torch.randn(2, 32, 9, 9)
    expected = model(images.clone())
    run = compiled(model)
    torch.testing.assert_close(run(images.clone()), expected, rtol=1e-4, atol=1e-4)
    assert " ".join(explain(model)[0].absorbed) == absorbed
    for parameter in model.parameters():
        parameter.mul_(1.1)
    torch.testing.assert_close(run(images.clone()), model(images.clone()), rtol=1e-4, atol=1e-4)


def test_what_is_left_says_why():
    images, model = torch.randn(2, 32, 9, 9), conv(nn.BatchNorm2d(32), nn.ReLU()).eval()
    run = compiled(model)
    run(images).sum().backward()
    assert explain(model)[0].reason.startswith("gradients are wanted")
    assert model[0].weight.grad is not None
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        run(images)
        assert explain(model)[0].reason == "under autocast"
    with torch.no_grad():
        model.train()
        run(images)
        assert explain(model)[0].absorbed == ()
        transposed, single = nn.ConvTranspose2d(32, 32, 3), conv(nn.ReLU())
        others = nn.Sequential(transposed, *single).eval()
        compiled(others)(images[0])
        reasons = [row.reason for row in explain(others)]
        assert reasons == ["not a 2-d convolution", "no batch of images"]


def test_arguments_are_refused():
    model, images = conv().eval(), torch.randn(1, 32, 5, 5)
    for options, text in (({"inner": "xla"}, "xla"), ({"measure": 1}, "measure")):
        run = torch.compile(model, backend="spamm_torch", options=options)
        with torch.no_grad(), pytest.raises(Exception, match=text):
            run(images)
    with raises_line(ValueError, "compiled"):
        explain(model)
    with raises_line(TypeError, "GraphModule"):
        fuse(model)
    with raises_line(ValueError, "inner"):
        fuse(torch.fx.symbolic_trace(model), inner="xla")


# ---- What a model goes through -------------------------------------------------------------------


@torch.no_grad()
def test_compiled_in_place_it_keeps_its_state_and_is_copied():
    model, images = network("resnet18"), pictures(32)
    keys, expected = list(model.state_dict()), model(images)
    model.compile(backend="spamm_torch", options={"inner": "eager", "measure": False})
    for twin in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert relative_error(twin(images), expected) < 1e-5
        assert list(twin.state_dict()) == keys
    wrapped = compiled(network("resnet18"))
    for twin in (wrapped, copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped))):
        assert relative_error(twin(images), expected) < 1e-5


@torch.no_grad()
def test_sizes_that_change():
    model = network("resnet18")
    run = compiled(model, dynamic=True)
    for count, size in ((2, 32), (3, 48), (4, 32)):
        images = pictures(size, count)
        assert relative_error(run(images), model(images)) < 1e-5


@torch.no_grad()
def test_exported_program_is_fused_and_exported_again():
    model, images = network("resnet18"), (pictures(32),)
    expected = model(*images)
    module = torch.export.export(model, images).module()
    fused = fuse(module, inner="eager")
    assert all("bn" in row.absorbed for row in explain(fused))
    assert {row.absorbed for row in explain(fused)} >= {("bn", "relu"), ("bn", "add", "relu")}
    again = torch.export.export(fused, images).module()
    for call in (fused, again, fuse(module)):
        assert relative_error(call(*images), expected) < 1e-5
    assert relative_error(module(*images), expected) == 0


@torch.no_grad()
def test_traced_graph_is_fused_with_and_without_an_example():
    model, images = network("resnet18"), pictures(32)
    graph = torch.fx.symbolic_trace(model)
    for example, absorbed in (([images], ("bn", "add", "relu")), (None, ("bn",))):
        fused = fuse(graph, example, inner="eager")
        assert relative_error(fused(images), model(images)) < 1e-5
        assert explain(fused)["layer1.0.conv2"].absorbed == absorbed
    assert torch.equal(graph(images), model(images))


@torch.no_grad()
def test_engines_are_measured_once_for_a_shape():
    model, images = conv(nn.ReLU(), *conv(nn.ReLU())).eval(), torch.randn(2, 32, 12, 12)
    expected = model(images)
    assert relative_error(compiled(model, measure=True)(images), expected) < 1e-5
    first, last = explain(model)
    assert first.reason.startswith("measured")
    assert {name for name, _ in first.times} == {"dense", "spamm"}
    assert {name for name, _ in last.times} == {"dense", "spamm"}
    other = copy.deepcopy(model)
    compiled(other, measure=True)(images)
    assert explain(other)[0].times == first.times


@torch.no_grad()
def test_skipping_layers_skip_the_same_products(monkeypatch):
    """Also by norms of the layer before, as devices whose kernels compute them."""
    monkeypatch.setattr(backend_room, "computes_output_norms", lambda *_: True)
    torch.manual_seed(0)
    layers = [(nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU()) for _ in range(3)]
    model = varied(nn.Sequential(*(part for layer in layers for part in layer)))
    images = torch.randn(64, 64, 6, 6) * torch.rand(64, 1, 6, 6).square()
    dense = model(images)
    convert_(model, SpAMMConfig(tau=60.0), fuse=False)
    expected = model(images)
    assert relative_error(expected, dense) > 1e-3
    graphs = []
    inner = backend_room._inner
    monkeypatch.setattr(
        backend_room, "_inner", lambda m, *rest: graphs.append(m) or inner(m, *rest)
    )
    assert relative_error(compiled(model)(images), expected) < 1e-5
    assert {row.absorbed for row in explain(model)} == {("bn", "relu")}
    called = [str(node.target) for node in graphs[0].graph.nodes]
    assert called.count("spamm_torch.conv2d_with_norms.default") == 2


@torch.no_grad()
def test_refresh_reaches_what_was_compiled():
    model, images = network("resnet18"), pictures(32)
    run = compiled(model)
    run(images)
    for parameter in model.parameters():
        parameter.data.mul_(0.9)
    assert relative_error(run(images), model(images)) > 1e-2
    assert refresh_(model) is model
    assert relative_error(run(images), model(images)) < 1e-5


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["resnetv2_50", "cspdarknet53", "mobilenetv4_conv_small"])
@torch.no_grad()
def test_networks_of_timm(name):
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    model, images = varied(timm.create_model(name)), pictures()
    assert relative_error(compiled(model)(images), model(images)) < 1e-5
    assert not [row for row in explain(model) if row.action == "left"]


@torch.no_grad()
def test_network_of_onnx2torch(tmp_path):
    onnx2torch = pytest.importorskip("onnx2torch")
    model, images = network("resnet18"), pictures(32)
    torch.onnx.export(model, (images,), tmp_path / "net.onnx", dynamo=False)
    graph = onnx2torch.convert(str(tmp_path / "net.onnx")).eval()
    run = compiled(graph)
    assert relative_error(run(images), model(images)) < 1e-5
    assert {row.absorbed for row in explain(graph)} >= {("relu",), ("add", "relu")}
