"""Nearest upsampling in generated forwards: torch's values, strides and gradients."""

import pytest
import torch
from small_models import OfFunction, is_served, trained
from torch import nn
from torch.nn import functional as F

from spamm_torch import convert_
from spamm_torch.networks import calls
from spamm_torch.networks.calls import enlarged, upsample_nearest
from spamm_torch.networks.install import fused_of


@pytest.fixture(autouse=True)
def small_images_too(monkeypatch):
    """Pixels of the tests' small images are repeated as those of large ones are."""
    monkeypatch.setattr(calls, "_LEAST_BYTES", 0)


class Level(nn.Module):
    """An upsampling inside, and a skip connection past it."""

    def __init__(self, up):
        super().__init__()
        self.down, self.bn = nn.Conv2d(16, 32, 3, 2, 1), nn.BatchNorm2d(32)
        self.inner = nn.Sequential(up, nn.Conv2d(32, 16, 3, padding=1))
        self.up = up

    def forward(self, x):
        y = F.relu(self.bn(self.down(x)))
        return self.up(y), self.inner(y)


SERVED = {
    "scale": nn.Upsample(scale_factor=2),
    "scales": nn.Upsample(scale_factor=(2, 3)),
    "size": nn.Upsample(size=(12, 10)),
    "old name": nn.UpsamplingNearest2d(scale_factor=2),
    "function": OfFunction(lambda x: F.interpolate(x, scale_factor=2.0)),
    "size by position": OfFunction(lambda x: F.interpolate(x, (18, 10), mode="nearest")),
    "of a shape": OfFunction(lambda x: F.interpolate(x, size=(x.shape[2] * 4, x.size(3) * 2))),
    "not whole": nn.Upsample(scale_factor=1.5),
    "smaller": OfFunction(lambda x: F.interpolate(x, size=3)),
}
NOT_SERVED = {
    "bilinear": nn.Upsample(scale_factor=2, mode="bilinear"),
    "exact": nn.Upsample(scale_factor=2, mode="nearest-exact"),
    "recomputed": nn.Upsample(scale_factor=1.7, recompute_scale_factor=True),
    "recomputed function": OfFunction(
        lambda x: F.interpolate(x, scale_factor=1.7, recompute_scale_factor=True)
    ),
}


def level(up):
    torch.manual_seed(0)
    return trained(Level(up))


def pictures(dtype=torch.float32, layout=torch.channels_last):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(3, 16, 12, 10, generator=generator).to(dtype, memory_format=layout)


def calls_upsample_nearest(model):
    forward = fused_of(model).forward
    names = (forward.__globals__.get(name) for name in forward.__code__.co_names)
    return upsample_nearest in names


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format], ids=str)
@pytest.mark.parametrize("with_example", [True, False])
@pytest.mark.parametrize("name", [*SERVED, *NOT_SERVED])
@torch.no_grad()
def test_values_and_strides(device, name, with_example, layout, measured):
    measured([2.0, 1.0, 3.0], [9.0, 1.0, 2.0, 3.0])
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    up = {**SERVED, **NOT_SERVED}[name]
    model = level(up).to(device, dtype).to(memory_format=layout)
    input = pictures(dtype, layout).to(device)
    options = {"example_input": input} if with_example else {}
    convert_(model, **options)
    assert is_served(model, input)
    assert calls_upsample_nearest(model) == (name in SERVED)
    found, _ = model(input)
    fused = fused_of(model)
    weight, bias = fused.operands[:2]
    expected = up(torch.ops.spamm_torch.dense_conv2d(input, weight, bias, 2, 1, activation="relu"))
    assert torch.equal(found, expected)
    assert found.stride() == expected.stride()


@torch.no_grad()
def test_a_changed_setting_is_noticed():
    up = nn.Upsample(scale_factor=2)
    model = level(up)
    convert_(model)
    assert is_served(model, pictures())
    up.scale_factor = 3
    found, _ = model(pictures())
    assert found.shape[2:] == (18, 15)


@torch.no_grad()
def test_compiled_code_has_one_graph_with_torch_s_own(device):
    """Inductor fuses it with its neighbours; a copy of 16 bytes at a time it could not."""
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    model, input = level(nn.Upsample(scale_factor=2)).to(device, dtype), pictures(dtype).to(device)
    convert_(model)
    graphs = []

    def backend(module, _):
        graphs.append(module.graph)
        return module.forward

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    assert torch.equal(compiled(input)[0], model(input)[0])
    (graph,) = graphs
    assert sum(node.target is F.interpolate for node in graph.nodes) == 2
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("factors", [(1, 2), (3, 2), (4, 4)], ids=str)
def test_pixels_are_repeated_16_bytes_at_a_time(device, dtype, factors):
    images = torch.randn(3, 24, 5, 6).to(device, dtype, memory_format=torch.channels_last)
    expected = F.interpolate(images, scale_factor=factors)
    found = enlarged(images, expected.shape[2:])
    assert torch.equal(found, expected)
    assert found.stride() == expected.stride()


@pytest.mark.parametrize("size", [(5, 6), (1, 6), (5, 1)], ids=str)
@pytest.mark.parametrize("factors", [(1, 1), (2, 1), (1, 2), (2, 2)], ids=str)
def test_a_result_has_memory_of_its_own(device, size, factors):
    images = torch.randn(2, 8, *size, device=device).to(memory_format=torch.channels_last)
    expected = F.interpolate(images, scale_factor=factors)
    found = enlarged(images, expected.shape[2:])
    images.zero_()
    assert torch.equal(found, expected)
    found[:, :, 0, 0] = 7
    assert torch.equal(found[:, :, 1:], expected[:, :, 1:])


def test_factors_for_which_torch_repeats_pixels():
    """In float32 a step may be a little less than 1 / factor; torch then reads the row before."""
    judged = {factor: calls._is_repeat(300, 300 * factor) for factor in range(1, 65)}
    row = torch.arange(300.0)
    for factor, repeats in judged.items():
        found = F.interpolate(row.view(1, 1, -1), scale_factor=factor).flatten()
        if repeats:
            assert torch.equal(found, row.repeat_interleave(factor))
    assert all(judged[factor] for factor in range(1, 25))
    assert not judged[41]
    assert not calls._is_repeat(300, 450)
    assert not calls._is_repeat(300, 100)


@pytest.mark.parametrize(
    ("size", "scale_factor", "after"),
    [
        (None, 2, (10, 12)),
        (None, (2.0, 3), (10, 18)),
        (15, None, (15, 15)),
        (torch.Size([10, 6]), None, (10, 6)),
        (None, 1.5, None),
        (None, (2,), None),
        (None, None, None),
        (10, 2, None),
    ],
)
def test_sizes(size, scale_factor, after):
    assert calls.size_after((5, 6), size, scale_factor) == after


@pytest.mark.cuda
def test_a_cuda_graph_captures_it():
    images = pictures(torch.float16).cuda()
    upsample_nearest(images, None, 2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = upsample_nearest(images, None, 2)
    images.mul_(3)
    graph.replay()
    assert torch.equal(found, F.interpolate(images, scale_factor=2))


@pytest.mark.cuda
@pytest.mark.parametrize("images", ["wide", "narrow", "one pixel", "off the grid", "a row of many"])
def test_on_cuda_any_images_give_torch_s(images, monkeypatch):
    copies = []
    monkeypatch.setattr(calls, "enlarged", lambda *args: copies.append(1) or enlarged(*args))
    of = {
        "wide": lambda x: x,
        "narrow": lambda x: x[:, :3].contiguous(memory_format=torch.channels_last),
        "one pixel": lambda x: x[:, :, :1, :1].contiguous(),
        "off the grid": lambda x: (
            x.permute(0, 2, 3, 1).flatten()[1:5761].view(3, 12, 10, 16).permute(0, 3, 1, 2)
        ),
        "a row of many": lambda x: x[:, :, ::2],
    }[images]
    both = torch.cat([pictures(torch.float16)] * 2).contiguous(memory_format=torch.channels_last)
    input = of(both.cuda())
    expected = F.interpolate(input, scale_factor=2)
    found = upsample_nearest(input, None, 2)
    assert torch.equal(found, expected)
    assert found.stride() == expected.stride()
    assert bool(copies) == (images == "wide")
