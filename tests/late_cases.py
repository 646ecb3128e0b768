"""Calls of every op with the tensors it reads, and a kernel that writes such a tensor late.

The kernel lets its successor on the stream start at once (programmatic dependent launch), as
kernels of this library, of cuBLAS and of Triton may, and touches its memory only later.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from support import float32_precision

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
    unread: tuple = ()  # operands that some kernels need not read

    def changed(self, operand):
        old = self.tensors[operand]
        new = torch.empty_like(old)  # keeps the layout
        return new.copy_(self.change.get(operand, twice)(old))

    def run(self, **other):
        results = self.call(**{**self.tensors, **other})
        results = results if isinstance(results, (tuple, list)) else [results]
        return tuple(x for x in results if x is not None)


def tf32(allowed):
    return float32_precision("high" if allowed else "highest")


def layer_norms(x):
    """Norms of every (64 images, pixel, 64 channels), as one layer passes them on to the next."""
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
    yield Case("find_tau_for_error", maps, lambda **maps: OPS.find_tau(**maps, max_error=0.1))
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
        given = {**both, "tau": tau}
        yield Case(f"product {side}, tau on the device", given, product, {"tau": huge})
        yield Case(f"product {side}, ratio", both, lambda **t: product(**t, valid_ratio=0.4))
        maps = {"norm_a": spamm_torch.norm_map(a), "norm_b": spamm_torch.norm_map(b)}
        change = dict.fromkeys("ab", torch.neg) | dict.fromkeys(maps, torch.zeros_like)
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
        yield Case(f"max_pool2d, norms {dtype}", x, lambda x: OPS.max_pool2d(x, 2, 2, norms=True))


# Images, channels, output channels, size, kernel, stride, padding.
GEOMETRIES = {
    "3 x 3": (8, 64, 256, 28, 3, 1, 1),
    "1 x 1": (16, 256, 128, 28, 1, 1, 0),
    "1 x 1, stride 2": (16, 128, 256, 28, 1, 2, 0),
    "few images": (2, 128, 128, 14, 3, 1, 1),
    "segments": (64, 512, 256, 4, 3, 1, 1),
}


def network_cases(device, dtype):
    """Layers of networks: with nothing skipped, with a residual, of few images, with a pool."""
    values = Values(device)
    pictures = functools.partial(values.pictures, dtype=dtype)
    for name, (images, channels, out_channels, size, kernel, *place) in GEOMETRIES.items():
        setting = dict(zip(("stride", "padding"), place, strict=True))
        both = {
            "input": pictures(images, channels, size, size),
            "weight": pictures(out_channels, channels, kernel, kernel, scale=0.05),
        }
        out = (size + 2 * setting["padding"] - kernel) // setting["stride"] + 1
        bias = {"bias": values.normal(out_channels, dtype=dtype)}
        every = {**both, **bias, "residual": pictures(images, out_channels, out, out)}
        dense = functools.partial(OPS.conv2d, **setting, threshold=0.0)
        yield Case(f"nothing skipped, {name}", every, dense)
        pinned = functools.partial(dense, norm_weight=OPS.conv2d_weight_norm(both["weight"]))
        yield Case(f"nothing skipped, weight's norms, {name}", both, pinned, {"weight": torch.neg})
        setting["threshold"] = 4.0
        with_norms = functools.partial(OPS.conv2d_with_norms, **setting, activation="relu")
        yield Case(f"residual, {name}", every, with_norms)
        boxes = functools.partial(OPS.conv2d, **setting, pixel_block=(1, 8, 8), activation="silu")
        yield Case(f"boxes, {name}", every, boxes)
        if (kernel == 3 and images > 2) or images == 64:
            tensors = {**both, **bias, "input": pictures(64, channels, 8, 8)}
            pooled = functools.partial(OPS.conv2d_max_pool, padding=(1, 1), activation="relu")
            yield Case(f"conv and pool, {name}", tensors, pooled)
    tensors = {"input": pictures(128, 64, 8, 8), "weight": pictures(64, 64, 3, 3, scale=0.1)}
    pooled = functools.partial(OPS.conv2d_max_pool, padding=(1, 1), activation="relu")
    yield Case("conv and pool, resident weight", tensors, pooled)
    tensors = {"input": pictures(64, 3, 16, 16), "weight": pictures(64, 3, 3, 3)}
    tensors["residual"] = pictures(64, 64, 16, 16)
    few = functools.partial(OPS.conv2d, padding=(1, 1), threshold=0.0, activation="relu")
    yield Case("few channels, residual", tensors, few)
    pool = functools.partial(OPS.max_pool2d, kernel_size=3, stride=2, padding=1)
    yield Case("max_pool2d, 3 x 3", {"input": pictures(8, 64, 32, 32)}, pool)


def symmetric_cases(device, dtype):
    """Products of a symmetric matrix with entries that decay, also into given tensors."""
    values = Values(device)

    def decay(size):
        place = torch.arange(size, device=device)
        x = values.normal(size, size, dtype=torch.float32)
        x = x * torch.exp(-(place[:, None] - place).abs() / 100.0)
        return ((x + x.t()) / 2).to(dtype)

    def into(a, b, input):
        out, norms = torch.empty_like(a), torch.empty_like(spamm_torch.norm_map(a))
        OPS.spamm_into(a, b, out=out, threshold=1.0, input=input, beta=2, alpha=-1, norms=norms)
        return out, norms

    def in_place(x):
        x = x.clone()
        OPS.spamm_into(x, x, out=x, threshold=1.0, input=x, beta=2, alpha=-1)
        return x

    def square(x, **knob):
        return OPS.spamm_with_norms(x, x, **knob, symmetric=True)

    for size in (300, 1000):
        x = {"x": decay(size)}
        yield Case(f"symmetric {size}", x, functools.partial(square, threshold=1.0))
        yield Case(f"symmetric {size}, by error", x, functools.partial(square, max_error=1e-3))
        tensors = {"a": decay(size), "b": x["x"], "input": decay(size)}
        yield Case(f"into {size}", tensors, into)
        yield Case(f"in place {size}", {"x": decay(size)}, in_place)


def search_cases(device):
    """Cases of what reads norm maps, of one block and more."""
    values = Values(device)

    def work(norm_a, norm_b, tau):
        return OPS.row_work(norm_a, norm_b, tau)[0]

    for edge in (1, 8, 40, 150, 600):
        maps = {
            name: torch.rand(edge, edge, device=device, generator=values.generator) + 0.1
            for name in ("norm_a", "norm_b")
        }
        search = functools.partial(OPS.find_tau, max_error=0.3)
        if edge > 1:  # a single product is kept, whatever its norms
            maps["norm_a"] *= torch.rand(edge, edge, device=device, generator=values.generator) ** 8
            yield Case(f"error search {edge}", maps, search, {"norm_a": torch.sqrt})
        change = dict.fromkeys(maps, torch.zeros_like)
        bound = functools.partial(OPS.error_bound, tau=number(0.3 if edge > 1 else 10.0))
        yield Case(f"error_bound {edge}", maps, bound, change)
        tensors = {**maps, "tau": torch.full((), 0.01, device=device)}
        change["tau"] = huge
        yield Case(f"row_work {edge}", tensors, work, change)


FAMILIES = {"stages": stage_cases, "layers": layer_cases, "searches": search_cases}
for of, cases, types in (
    ("layers of networks", network_cases, HALF_TYPES),
    ("symmetric products", symmetric_cases, (torch.float16, torch.float32, torch.float64)),
):
    for dtype in types:
        name = f"{of} of {str(dtype).removeprefix('torch.')}"
        FAMILIES[name] = functools.partial(cases, dtype=dtype)
for of, dtype, channels in (  # output channels of convolutions; those of 64 have resident weights
    ("float16", torch.float16, (64, 128)),
    ("bfloat16", torch.bfloat16, (64, 192)),
    ("float32", torch.float32, (128,)),
    ("float32 as TF32", torch.float32, (128,)),
    ("float64", torch.float64, ()),
):
    typed = {"dtype": dtype, "allow_tf32": of.endswith("TF32")}
    FAMILIES[f"products of {of}"] = functools.partial(product_cases, **typed)
    for count in channels:
        name = f"convolutions of {of}, {count} channels"
        FAMILIES[name] = functools.partial(conv_cases, **typed, out_channels=count)
