"""activation(convolution + bias + residual): conv2d with and without skipping, and dense_conv2d."""

import functools

import matrices
import pytest
import torch
import torch.nn.functional as F
from support import ACTIVATIONS, assert_near
from torch import nn

import spamm_torch
from spamm_torch import SpAMMConv2d

ops = torch.ops.spamm_torch

activations = pytest.mark.parametrize("activation", ACTIVATIONS)
skipping_nothing = functools.partial(spamm_torch.conv2d, tau=0.0)
each_call = pytest.mark.parametrize(
    "call", [skipping_nothing, ops.dense_conv2d], ids=["spamm", "dense"]
)
pytestmark = pytest.mark.usefixtures("exact_reference")


def case(device, dtype, channels=(40, 48), images=5, groups=1, size=(6, 7), seed=0):
    """Input, weight, bias and residual of a 3 x 3 convolution with padding, its sums about 1."""
    into, out = channels
    fan_in = 9 * into // groups
    make = lambda *shape, seed: matrices.normal(  # noqa: E731
        *shape, dtype=torch.float64, device=device, seed=seed
    )
    input = make(images, into, *size, seed=seed)
    weight = make(out, into // groups, 3, 3, seed=seed + 1) / fan_in**0.5
    bias = make(out, seed=seed + 2)
    residual = 2 * make(images, out, *size, seed=seed + 3)
    return [x.to(dtype) for x in (input, weight, bias, residual)]


def reference(input, weight, bias, residual=None, activation="none", slope=None, **geometry):
    """The same in float64 by torch."""
    sums = F.conv2d(
        input.double(), weight.double(), None if bias is None else bias.double(), **geometry
    )
    sums = sums if residual is None else sums + residual.double()
    if slope is None:
        return ACTIVATIONS[activation](sums)
    return F.prelu(sums, torch.as_tensor(slope, dtype=sums.dtype, device=sums.device))


def test_relu_is_a_name_of_an_activation(device, dtype):
    input, weight, bias, residual = case(device, dtype)
    call = functools.partial(spamm_torch.conv2d, input, weight, bias, residual=residual, padding=1)
    assert torch.equal(call(tau=0.5, relu=True), call(tau=0.5, activation="relu"))


@activations
@pytest.mark.parametrize("groups", [1, 8])
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("tf32", [False, True])
def test_large_channels_last_tensors(device, monkeypatch, activation, groups, with_residual, tf32):
    """Libraries have calls of their own for these."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", tf32)
    operands = case(device, torch.float32, (32, 64), images=8, size=(24, 24), groups=groups)
    input, weight, bias, residual = operands
    input = input.contiguous(memory_format=torch.channels_last)
    addend = residual if with_residual else None
    actual = ops.dense_conv2d(
        input, weight, bias, padding=1, groups=groups, residual=addend, activation=activation
    )
    expected = reference(input, weight, bias, addend, activation, padding=1, groups=groups)
    assert_near(actual, expected, 2e-3 if tf32 else None)
    assert actual.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.strength(3)
@each_call
@pytest.mark.parametrize(
    ("images", "channels"),
    [(2, (0, 6)), (2, (4, 0)), (0, (4, 6))],
    ids=["input", "output", "images"],
)
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_nothing_to_compute(device, call, images, channels, groups, activation):
    into, out = channels
    input = torch.randn(images, into, 5, 5, device=device)
    weight = torch.randn(out, into // groups, 3, 3, device=device)
    bias, residual = torch.randn(out, device=device), torch.randn(images, out, 3, 3, device=device)
    options = {"groups": groups, "residual": residual, "activation": activation}
    expected = ACTIVATIONS[activation](bias[:, None, None] + residual)
    torch.testing.assert_close(call(input, weight, bias, **options), expected)


@each_call
@pytest.mark.parametrize(
    ("activation", "slope"),
    [*((name, None) for name in ACTIVATIONS), *(("leaky_relu", of) for of in (-0.7, (), (4,)))],
)
@pytest.mark.parametrize("form", ["whole", "no bias", "one image"])
def test_gradients(device, call, activation, slope, form):
    """A tuple is the shape of a tensor of slopes. The ops take numbers by another name."""
    made = case(device, torch.float64, (3, 4), images=2, size=(4, 3))
    operands = dict(zip(("input", "weight", "bias", "residual"), made, strict=True))
    options = {"padding": 1, "activation": activation}
    if form == "no bias":
        del operands["bias"]
    elif form == "one image":
        operands |= {name: operands[name][0] for name in ("input", "residual")}
    if isinstance(slope, tuple):
        operands["slope"] = torch.full(slope, -0.7, dtype=torch.float64, device=device)
    elif slope is not None:
        options["negative_slope" if call is ops.dense_conv2d else "slope"] = slope
    names = list(operands)

    def convolve(*tensors):
        given = dict(zip(names, tensors, strict=True))
        return call(given.pop("input"), given.pop("weight"), **given, **options)

    for wanted in (names, names[:1], names[-1:]):
        given = [x.detach().requires_grad_(name in wanted) for name, x in operands.items()]
        # cuDNN's gradients may differ in their last bits from call to call.
        torch.autograd.gradcheck(convolve, given, nondet_tol=1e-12, fast_mode=True)
        torch.autograd.gradgradcheck(convolve, given, nondet_tol=1e-12, fast_mode=True)


def test_no_host_tensor_in_a_compiled_graph(device):
    """A float tau is a number of the graph. A CPU tensor would cut CUDA graphs into parts."""
    input, weight, bias, residual = case(device, torch.float32)
    layer = SpAMMConv2d(48, 40, 3, tau=0.5, activation="hardswish", device=device)
    linear, graphs = spamm_torch.SpAMMLinear(5, 3, tau=0.5, device=device), []

    def function(input):
        more = {"padding": 1, "residual": residual, "activation": "relu"}
        first = spamm_torch.conv2d(input, weight, bias, tau=0.5, **more)
        return linear(layer(first) + spamm_torch.conv2d(first, layer.weight, tau=0.0)[:, :1])

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    with torch.no_grad():
        traced = torch.compile(function, backend=backend, fullgraph=True)
        assert torch.equal(traced(input), function(input))
    [graph] = graphs
    values = [node.meta.get("example_value") for node in graph.graph.nodes]
    made = [x for x in values if isinstance(x, torch.Tensor)]
    assert len(made) > 4
    assert {x.device.type for x in made} == {device.type}
    assert all(x.dim() > 0 for x in made)
    torch._dynamo.reset()


@each_call
def test_autocast_casts_the_residual(device, call):
    input, weight, bias, residual = case(device, torch.float32)
    options = {"padding": 1, "activation": "leaky_relu"}
    options["slope"] = torch.linspace(-1, 2, 48, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        actual = call(input, weight, bias, residual=residual, **options)
    lower = [x.bfloat16() for x in (input, weight, bias)]
    assert actual.dtype == torch.bfloat16
    assert torch.equal(actual, call(*lower, residual=residual.bfloat16(), **options))


@activations
def test_the_module_applies_its_activation(device, activation):
    dense = nn.Conv2d(40, 48, 3, padding=1, device=device)
    layer = SpAMMConv2d.from_dense(dense, tau=0.0, activation=activation)
    input = torch.randn(4, 40, 6, 6, device=device)
    torch.testing.assert_close(
        layer(input), ACTIVATIONS[activation](dense(input)), atol=1e-4, rtol=1e-4
    )
    shown = "tau=0.0)" if activation == "none" else f"activation='{activation}')"
    assert repr(layer).endswith(shown)
    again = SpAMMConv2d.from_dense(layer, tau=1.0)
    assert again.activation == layer.activation
    assert SpAMMConv2d.from_dense(layer, tau=1.0, activation="none").activation is None
    assert SpAMMConv2d.from_dense(layer, tau=1.0, relu=False).activation is None
    assert SpAMMConv2d.from_dense(dense, tau=1.0, relu=True).activation == "relu"
    if activation == "none":
        assert type(layer.to_dense()) is nn.Conv2d
    else:
        with pytest.raises(ValueError, match=r"to_dense expects no activation"):
            layer.to_dense()
