"""Calls of every op with the tensors it reads, and a kernel that writes such a tensor late.

The kernel lets its successor on the stream start at once (programmatic dependent launch), as
kernels of this library, of cuBLAS and of Triton may, and touches its memory only later.
"""

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

import spamm_torch

OPS = torch.ops.spamm_torch
HALF_TYPES = (torch.float16, torch.bfloat16)

LATE_COPY = r"""
extern "C" __global__ void late_copy(const unsigned* from, unsigned* to, int words, int spins) {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  for (int i = 0; i < spins; ++i) __nanosleep(1000);
  __threadfence();
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < words; i += gridDim.x * blockDim.x) {
    ((volatile unsigned*)to)[i] = ((const volatile unsigned*)from)[i];
  }
}
"""
SPINS = 300  # of about a microsecond each


@functools.cache
def _late_copy_kernel():
    return torch.cuda._compile_kernel(LATE_COPY, "late_copy")


def late_copy(source, target, thread_blocks=4):
    """Copies `source` over `target`, of the same dense layout, late. On a CPU, at once."""
    size = source.numel() * source.element_size()
    assert size == target.numel() * target.element_size()
    assert size % 4 == 0
    if not source.is_cuda:
        target.copy_(source)
        return
    _late_copy_kernel()(
        grid=(thread_blocks, 1, 1), block=(256, 1, 1), args=[source, target, size // 4, SPINS]
    )


def twice(x):
    return x * 2


def huge(x):
    return torch.full_like(x, 1e9)


@dataclass
class Case:
    """A call, the tensors it reads, and how each is changed so that the result changes."""

    name: str
    tensors: dict
    call: Callable
    change: dict = field(default_factory=dict)

    def changed(self, operand):
        old = self.tensors[operand]
        new = torch.empty_like(old)  # keeps the layout
        return new.copy_(self.change.get(operand, twice)(old))

    def run(self, **other):
        results = self.call(**{**self.tensors, **other})
        return tuple(results) if isinstance(results, (tuple, list)) else (results,)


@contextlib.contextmanager
def tf32(allowed):
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def layer_norms(x):
    """Of every (64 images, pixel, 64 channels), as one layer passes them on to the next."""
    return spamm_torch.norm_map(x.permute(2, 3, 0, 1), 64).permute(2, 0, 1, 3).contiguous()


def number(value, device="cpu"):
    return torch.tensor(value, dtype=torch.float64, device=device)


class Values:
    """Random tensors on a device, the same ones every time."""

    def __init__(self, device):
        self.device = device
        self.generator = torch.Generator(device).manual_seed(0)

    def normal(self, *shape, dtype=torch.float16, scale=1.0):
        values = torch.randn(*shape, device=self.device, generator=self.generator)
        return (values * scale).to(dtype)

    def pictures(self, *shape, dtype=torch.float16, scale=1.0):
        return self.normal(*shape, dtype=dtype, scale=scale).to(memory_format=torch.channels_last)


def stage_cases(device):
    values = Values(device)
    for dtype in (*HALF_TYPES, torch.float32, torch.float64):
        a, b = values.normal(512, 640, dtype=dtype), values.normal(640, 384, dtype=dtype)
        yield Case(f"norm_map {dtype}", {"a": a}, lambda a: spamm_torch.norm_map(a))
        both = {"a": a, "b": b}
        yield Case(f"norm_maps {dtype}", both, lambda a, b: OPS.norm_maps(a, b, (64, 64, 64)))
    for edge in (8, 40, 200, 600):
        maps = {
            name: values.normal(edge, edge, dtype=torch.float32).abs() + 0.1
            for name in ("norm_a", "norm_b")
        }
        yield Case(
            f"find_tau {edge}", maps, lambda **maps: spamm_torch.find_tau(**maps, valid_ratio=0.3)
        )
    yield Case(
        "find_tau_for_error", maps, lambda **maps: OPS.find_tau_for_error(**maps, max_error=0.1)
    )
    maps = {**maps, "tau": number(0.5, device)}
    change = {"norm_a": torch.zeros_like, "norm_b": torch.zeros_like, "tau": huge}
    yield Case("valid_counts", maps, spamm_torch.valid_counts, change)
    yield Case("error_bound", maps, spamm_torch.error_bound, change)


def product_cases(device, dtype, allow_tf32):
    values = Values(device)

    def product(a, b, tau=None, **rest):
        if "valid_ratio" not in rest:
            rest["tau"] = number(200.0) if tau is None else tau
        with tf32(allow_tf32):
            return OPS.spamm(a, b, **rest)

    for side in (300, 2560):  # 2560: thread blocks claim tiles
        a, b = values.normal(side, 256, dtype=dtype), values.normal(256, side, dtype=dtype)
        both = {"a": a, "b": b}
        yield Case(f"product {side}", {**both, "input": values.normal(side, dtype=dtype)}, product)
        tau = number(200.0, device)
        yield Case(
            f"product {side}, tau on the device", {**both, "tau": tau}, product, {"tau": huge}
        )
        yield Case(f"product {side}, ratio", both, lambda **t: product(**t, valid_ratio=0.4))
        maps = {"norm_a": spamm_torch.norm_map(a), "norm_b": spamm_torch.norm_map(b)}
        change = {
            "a": torch.neg,
            "b": torch.neg,
            "norm_a": torch.zeros_like,
            "norm_b": torch.zeros_like,
        }
        yield Case(f"product {side}, norms given", {**both, **maps}, product, change)


def conv_cases(device, dtype, allow_tf32, out_channels):
    values = Values(device)

    def convolution(x, weight, bias=None, tau=None, **rest):
        if "valid_ratio" not in rest:
            rest["tau"] = number(20.0) if tau is None else tau
        with tf32(allow_tf32):
            return OPS.conv2d_with_norms(x, weight, bias, 1, 1, **rest)

    def boxes(x, weight):
        with tf32(allow_tf32):
            return OPS.conv2d(x, weight, None, 1, 1, tau=number(20.0), pixel_block=(1, 8, 8))

    x = values.pictures(128, 64, 16, 16, dtype=dtype)
    weight = values.pictures(out_channels, 64, 3, 3, dtype=dtype, scale=0.1)
    both = {"x": x, "weight": weight}
    with_bias = {**both, "bias": values.normal(out_channels, dtype=dtype)}
    yield Case("conv2d", with_bias, convolution)
    tau = number(20.0, device)
    yield Case("conv2d, tau on the device", {**both, "tau": tau}, convolution, {"tau": huge})
    yield Case("conv2d, ratio", both, lambda **t: convolution(**t, valid_ratio=0.4))
    yield Case("conv2d, several pixels a block", both, boxes)
    pinned = {**with_bias, "norm_weight": OPS.conv2d_weight_norm(weight)}
    change = {"weight": torch.neg, "norm_weight": torch.zeros_like}
    yield Case("conv2d, weight's norms given", pinned, convolution, change)
    all_norms = {**pinned, "norm_input": layer_norms(x)}
    change = {**change, "x": torch.neg, "norm_input": torch.zeros_like}
    yield Case("conv2d, all norms given", all_norms, convolution, change)


def layer_cases(device):
    values = Values(device)
    tensors = {
        "x": values.pictures(128, 3, 16, 16),
        "weight": values.pictures(64, 3, 3, 3),
        "bias": values.normal(64),
    }
    yield Case(
        "conv2d of few channels",
        tensors,
        lambda x, weight, bias: OPS.conv2d_with_norms(x, weight, bias, 1, 1, tau=number(0.0)),
    )
    for dtype in HALF_TYPES:
        x = {"x": values.pictures(128, 64, 16, 16, dtype=dtype)}
        yield Case(f"max_pool2d {dtype}", x, lambda x: OPS.max_pool2d(x, 2, 2))
        yield Case(
            f"max_pool2d_with_norms {dtype}", x, lambda x: OPS.max_pool2d_with_norms(x, 2, 2)
        )

    # Kind; stride, padding, dilation; groups, relu, weight_is_ready, kind of the knob; blocks.
    conv = (0, *(1, 1), *(1, 1), *(1, 1), *(1, 1, 0, 0), *(0, 0, 0), *(0, 0, 0))
    pool = (1, *(2, 2), *(2, 2), *(0, 0), *(1, 1), 0)
    weights = [
        values.pictures(64, 3, 3, 3),
        values.pictures(64, 64, 3, 3, scale=0.1),
        values.pictures(128, 64, 3, 3, scale=0.1),
    ]
    norms = [OPS.conv2d_weight_norm(weight) for weight in weights]

    def chain(x, **weights):
        knobs = [number(0.0), number(5.0), number(5.0)]
        layers = (*conv, *conv, *pool, *conv)
        return OPS.chain(x, list(weights.values()), [None] * 3, norms, knobs, layers)

    named = {f"weight{i}": weight for i, weight in enumerate(weights)}
    tensors = {"x": values.pictures(128, 3, 16, 16), **named}
    change = dict.fromkeys(named, torch.neg)  # keeps the norms
    yield Case("chain, weights' norms given", tensors, chain, change)


FAMILIES = {
    "stages": stage_cases,
    "layers": layer_cases,
    **{
        f"products of {name}": functools.partial(product_cases, dtype=dtype, allow_tf32=allow_tf32)
        for name, dtype, allow_tf32 in (
            ("float16", torch.float16, False),
            ("bfloat16", torch.bfloat16, False),
            ("float32", torch.float32, False),
            ("float32 as TF32", torch.float32, True),
            ("float64", torch.float64, False),
        )
    },
    **{
        f"convolutions of {name}": functools.partial(
            conv_cases, dtype=dtype, allow_tf32=allow_tf32, out_channels=out_channels
        )
        for name, dtype, allow_tf32, out_channels in (
            ("float16, resident weight", torch.float16, False, 64),
            ("bfloat16, resident weight", torch.bfloat16, False, 64),
            ("float16", torch.float16, False, 128),
            ("bfloat16", torch.bfloat16, False, 192),
            ("float32", torch.float32, False, 128),
            ("float32 as TF32", torch.float32, True, 128),
        )
    },
}
