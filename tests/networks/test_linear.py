"""Linear layers with ReLU in generated forwards: torch's values, by one call where there is one."""

import itertools
import linecache

import pytest
import torch
from small_models import is_served, trained
from torch import nn
from torch.nn import functional as F

from spamm_torch import convert_
from spamm_torch.networks.calls import linear_relu
from spamm_torch.networks.install import fused_of

RELUS = {
    "module": nn.ReLU(),
    "in place": nn.ReLU(inplace=True),
    "function": F.relu,
    "method": lambda x: x.relu_(),
}


class Head(nn.Module):
    """A convolution to convert, two linear layers with ReLU, and one without."""

    def __init__(self, relu, bias=True):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.fc1, self.fc2 = nn.Linear(16, 24, bias=bias), nn.Linear(24, 24, bias=bias)
        self.fc3 = nn.Linear(24, 5, bias=bias)
        self.relu = relu

    def forward(self, x):
        x = F.relu(self.bn(self.conv(x))).mean((2, 3))
        return self.fc3(self.relu(self.fc2(self.relu(self.fc1(x)))))


def head(relu=F.relu, device="cpu", dtype=torch.float32, **options):
    return trained(Head(relu, **options)).to(device, dtype)


def images(device="cpu", dtype=torch.float32, count=6):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 3, 8, 8, generator=generator).to(device, dtype)


def calls_of_both(model):
    """How many times the generated forward computes a linear layer with its ReLU."""
    source = linecache.getlines(fused_of(model).forward.__code__.co_filename)
    return "".join(source).count("linear_relu(")


@pytest.mark.parametrize("relu", RELUS.values(), ids=RELUS.keys())
@pytest.mark.parametrize("count", [1, 6])
def test_heads_give_the_values_of_torch(device, relu, count):
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    model, input = head(relu, device, dtype), images(device, dtype, count)
    with torch.no_grad():
        expected = model(input)
        convert_(model)
        assert calls_of_both(model) == 2
        assert is_served(model, input)
        torch.testing.assert_close(model(input), expected, rtol=4e-3, atol=4e-3)


def test_a_value_that_is_read_twice_stays():
    class Read(Head):
        def forward(self, x):
            x = self.fc1(F.relu(self.bn(self.conv(x))).mean((2, 3)))
            return x + F.relu(x)

    model = trained(Read(F.relu))
    with torch.no_grad():
        expected = model(images())
        convert_(model)
        assert calls_of_both(model) == 0
        torch.testing.assert_close(model(images()), expected)


def test_without_a_bias_it_stays():
    model = head(bias=False)
    convert_(model)
    assert calls_of_both(model) == 0


def test_hooks_and_replaced_layers_are_noticed():
    model, seen = head(), []
    with torch.no_grad():
        convert_(model)
        model.fc1.register_forward_hook(lambda *_: seen.append("fc1"))
        model(images())
        model.fc2 = nn.Linear(24, 24)
        other = model(images())
        model.fc2.bias.fill_(50)
        assert not torch.equal(model(images()), other)
    assert seen == ["fc1"] * 3


def test_linear_layers_behind_frozen_convolutions_learn(device):
    model = head(device=device)
    model.conv.requires_grad_(False)
    model.bn.requires_grad_(False)
    convert_(model)
    model(images(device)).sum().backward()
    assert model.fc1.weight.grad.abs().sum() > 0


def test_compilers_see_torchs_own_calls():
    model, input = head(), images()
    with torch.no_grad():
        convert_(model)
        expected = model(input)
        exported = torch.export.export(model, (input,), strict=True)
        calls = [str(node.target) for node in exported.graph.nodes]
        assert not any("_addmm_activation" in call for call in calls)
        torch.testing.assert_close(exported.module()(input), expected)
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(input), expected)


@pytest.mark.cuda
def test_weights_that_compute_otherwise_do_it_themselves():
    """As quantised ones do: they may know linear alone."""

    class Doubled(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            if function is torch._addmm_activation:
                raise NotImplementedError
            if function is F.linear:
                input, weight, bias = args
                args = (input, 2 * weight.as_subclass(torch.Tensor), bias)
            return super().__torch_function__(function, types, args, kwargs or {})

    layer, input = nn.Linear(8, 4).to("cuda"), torch.randn(3, 8, device="cuda")
    with torch.no_grad():
        expected = F.linear(input, 2 * layer.weight, layer.bias).relu()
        weight = layer.weight.detach().as_subclass(Doubled)
        layer.weight = nn.Parameter(weight, requires_grad=False)
        assert isinstance(layer.weight, Doubled)
        found = linear_relu(input, layer)
    torch.testing.assert_close(found.as_subclass(torch.Tensor), expected)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 5, 64, 300])
def test_nan_passes_the_relu(dtype, rows):
    """For all numbers of features: what cuBLASLt computes depends on their alignment."""
    for features in itertools.product((1, 8, 24, 100, 256, 1000), (2, 10, 64, 100, 512)):
        layer = nn.Linear(*features).to("cuda", dtype)
        input = torch.randn(rows, features[0], device="cuda", dtype=dtype)
        input[0, 0] = torch.nan
        with torch.no_grad():
            assert linear_relu(input, layer).isnan().equal(layer(input).relu().isnan()), features


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "size", [(9, 72, 40), (4, 512, 512), (128, 512, 512), (512, 4096, 1024), (64, 25088, 512)]
)
def test_one_call_on_cuda(dtype, size):
    rows, in_features, out_features = size
    layer = nn.Linear(in_features, out_features).to("cuda", dtype)
    input = torch.randn(rows, in_features, device="cuda", dtype=dtype)
    input[3, 5] = torch.nan
    with torch.no_grad():
        with torch.profiler.profile() as profile:
            found = linear_relu(input, layer)
        expected = layer(input).relu()
    called = {event.key for event in profile.key_averages()}
    assert "aten::_addmm_activation" in called
    assert "aten::relu" not in called
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2, equal_nan=True)
    assert found[3].isnan().all()
