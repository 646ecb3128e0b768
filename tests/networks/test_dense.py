"""Dense convolutions of generated forwards: the op in eager mode, torch's calls for compilers."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from spamm_torch.networks.calls import dense_conv2d

CALLS = torch.ops.spamm_torch.dense_conv2d.default


class Layer(nn.Module):
    def __init__(self, activation, channels=(16, 24), groups=1):
        super().__init__()
        self.conv = nn.Conv2d(*channels, 3, padding=1, groups=groups)
        self.activation = activation

    def forward(self, x, residual=None):
        conv = self.conv
        geometry = (conv.stride, conv.padding, conv.dilation, conv.groups)
        options = {"residual": residual, "activation": self.activation}
        return dense_conv2d(x, conv.weight, conv.bias, *geometry, **options)


def targets_of(layer, *inputs):
    """What a compiler sees, and the result."""
    seen = []

    def keep(graph, _):
        seen.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    torch._dynamo.reset()
    with torch.no_grad():
        return seen, torch.compile(layer, fullgraph=True, backend=keep)(*inputs)


@pytest.mark.parametrize("activation", ["none", "relu", "hardswish"])
def test_on_cpus_the_op_serves(activation):
    torch.manual_seed(0)
    layer, x = Layer(activation), torch.randn(2, 16, 5, 6)
    seen, compiled = targets_of(layer, x)
    assert seen == [CALLS]
    assert torch.equal(compiled, layer(x))


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("activation", "groups", "in_one"),
    [("relu", 1, True), ("relu", 16, False), ("none", 1, False), ("hardswish", 1, False)],
)
@pytest.mark.parametrize("with_residual", [False, True])
def test_on_cuda_compilers_get_what_cudnn_does_not_join(activation, groups, in_one, with_residual):
    torch.manual_seed(0)
    layer = Layer(activation, (16, 32), groups).to("cuda", torch.half)
    x = torch.randn(2, 16, 5, 6, device="cuda", dtype=torch.half)
    inputs = (x, torch.randn(2, 32, 5, 6).to(x)) if with_residual else (x,)
    seen, compiled = targets_of(layer, *inputs)
    assert (CALLS in seen) == in_one
    with torch.no_grad():
        torch.testing.assert_close(compiled, layer(*inputs))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("with_residual", [False, True])
def test_nan_passes_the_relu(dtype, with_residual):
    """For all numbers of channels: what cuDNN computes depends on their alignment."""
    shapes = itertools.product((1, 5, 64), (3, 8, 64, 100), (10, 16, 104), (1, 3))
    for images, channels, out_channels, kernel in shapes:
        input = torch.randn(images, channels, 7, 7).to("cuda", dtype)
        input = input.contiguous(memory_format=torch.channels_last)
        input[0, 0, 0, 0] = torch.nan
        weight = torch.randn(out_channels, channels, kernel, kernel).to(input)
        expected = F.conv2d(input, weight, padding=kernel // 2)
        residual = torch.randn_like(expected) if with_residual else None
        args = (input, weight, None, 1, kernel // 2)
        found = dense_conv2d(*args, residual=residual, activation="relu")
        assert found.isnan().equal(expected.isnan()), (images, channels, out_channels, kernel)
