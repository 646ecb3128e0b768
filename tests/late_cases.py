"""Calls of every op with the tensors it reads, and a kernel that writes such a tensor late.

The kernel lets its successor on the stream start at once (programmatic dependent launch), as
kernels of this library, of cuBLAS and of Triton may, and touches its memory only later.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

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


@dataclass
class Case:
    """A call, and the tensors it reads."""

    name: str
    tensors: dict
    call: Callable
    unread: tuple = ()  # operands that some kernels need not read

    def changed(self, operand):
        """Another value of the operand, with which the result is another."""
        old = self.tensors[operand]
        new = torch.empty_like(old)  # keeps the layout
        if operand.startswith("norm"):
            return new.zero_()
        return new.copy_(2 * old) if operand != "tau" else new.fill_(1e9)

    def run(self, **other):
        results = self.call(**{**self.tensors, **other})
        results = results if isinstance(results, (tuple, list)) else [results]
        return tuple(x for x in results if x is not None)


def number(value, device="cpu"):
    return torch.tensor(value, dtype=torch.float64, device=device)


class Values:
    """Random tensors on a device, the same ones every time."""

    def __init__(self, device, seed=0):
        self._given = {"device": device, "generator": torch.Generator(device).manual_seed(seed)}

    def normal(self, *shape, dtype=torch.float16, scale=1.0):
        return (torch.randn(*shape, **self._given) * scale).to(dtype)

    def uniform(self, *shape):
        return torch.rand(*shape, **self._given)

    def pictures(self, *shape, dtype=torch.float16, scale=1.0):
        return self.normal(*shape, dtype=dtype, scale=scale).to(memory_format=torch.channels_last)


def call_of(op, allow_tf32=False, **setting):
    """An op with a setting, which gets tensors by name."""

    def call(**tensors):
        with float32_precision("high" if allow_tf32 else "highest"):
            return op(**setting, **tensors)

    return call


def stage_cases(device):
    values = Values(device)
    for dtype in (*HALF_TYPES, torch.float32, torch.float64):
        a, b = values.normal(512, 640, dtype=dtype), values.normal(640, 384, dtype=dtype)
        yield Case(f"norm_map {dtype}", {"a": a}, call_of(OPS.norm_map, block=(64, 64)))
        both = {"a": a, "b": b}
        yield Case(f"norm_maps {dtype}", both, call_of(OPS.norm_maps, block=(64, 64, 64)))


def search_cases(device):
    """Cases that read norm maps, of one block and more."""
    values = Values(device)

    def work(**tensors):
        return OPS.row_work(**tensors)[0]

    for edge in (1, 8, 40, 150, 200, 600):
        maps = {name: values.uniform(edge, edge) + 0.1 for name in ("norm_a", "norm_b")}
        if edge > 1:  # a single product is kept, whatever its norms
            ratio = call_of(OPS.find_tau, valid_ratio=0.3)
            yield Case(f"search {edge}", maps, ratio)
            faded = {**maps, "norm_a": maps["norm_a"] * values.uniform(edge, edge) ** 8}
            yield Case(f"error search {edge}", faded, call_of(OPS.find_tau, max_error=0.3))
        at_tau = {**maps, "tau": number(0.3 if edge > 1 else 0.005, device)}
        yield Case(f"valid_counts {edge}", at_tau, OPS.valid_counts)
        yield Case(f"row_work {edge}", at_tau, work)
        if edge > 1:
            yield Case(f"error_bound {edge}", at_tau, OPS.error_bound)
        at_tau = {**maps, "tau": number(10.0, device)}
        unread = ("tau",)  # whatever is above all products
        yield Case(f"error_bound of all {edge}", at_tau, OPS.error_bound, unread)


def product_cases(device, dtype, allow_tf32=False):
    values = Values(device)
    product = functools.partial(call_of, OPS.spamm, allow_tf32)
    for side in (300, 2560):  # 2560: thread blocks claim tiles
        shapes = {"a": (side, 256), "b": (256, side)}
        both = {name: values.normal(*shape, dtype=dtype) for name, shape in shapes.items()}
        added = {**both, "input": values.normal(side, dtype=dtype)}
        yield Case(f"product {side}", added, product(threshold=200.0))
        given = {**both, "tau": number(200.0, device)}
        yield Case(f"product {side}, tau on the device", given, product())
        yield Case(f"product {side}, ratio", both, product(valid_ratio=0.4))
        maps = {f"norm_{name}": spamm_torch.norm_map(x) for name, x in both.items()}
        yield Case(f"product {side}, norms given", both | maps, product(threshold=200.0))


# Images, channels, size, kernel, stride, padding, and output channels.
GEOMETRIES = {
    "few channels out": (128, 64, 16, 3, 1, 1, 64),
    "3 x 3": (8, 64, 28, 3, 1, 1, 256),
    "1 x 1": (16, 256, 28, 1, 1, 0, 128),
    "1 x 1, stride 2": (16, 128, 28, 1, 2, 0, 256),
    "few images": (2, 128, 14, 3, 1, 1, 128),
    "segments": (64, 512, 4, 3, 1, 1, 256),
    "several tiles": (128, 64, 16, 3, 1, 1, 192),
}


def convolution_cases(device, dtype, names=tuple(GEOMETRIES), allow_tf32=False):
    """Layers of networks: with what is skipped and nothing, with a residual, with a pool."""
    values = Values(device)
    pictures = functools.partial(values.pictures, dtype=dtype)
    for name in names:
        images, channels, size, kernel, stride, padding, out_channels = GEOMETRIES[name]
        both = {
            "input": pictures(images, channels, size, size),
            "weight": pictures(out_channels, channels, kernel, kernel, scale=0.05),
        }
        out, bias = (size + 2 * padding - kernel) // stride + 1, values.normal(out_channels)
        every = {**both, "bias": bias.to(dtype)}
        every["residual"] = pictures(images, out_channels, out, out)
        norms = {"norm_weight": OPS.conv2d_weight_norm(both["weight"])}
        geometry = {"stride": (stride, stride), "padding": (padding, padding)}
        call = functools.partial(call_of, allow_tf32=allow_tf32, **geometry)
        boxes = call(OPS.conv2d, threshold=4.0, pixel_block=(1, 8, 8), activation="silu")
        residual = call(OPS.conv2d_with_norms, threshold=4.0, activation="relu")
        leaky = {**every, "slope": values.normal(out_channels, dtype=torch.float32)}
        slope = call(OPS.conv2d, threshold=4.0, activation="leaky_relu")
        calls = {"slope": (leaky, slope), "residual": (every, residual), "boxes": (every, boxes)}
        if dtype in HALF_TYPES:  # of others torch's convolution serves
            unskipped = call(OPS.conv2d, threshold=0.0, activation="leaky_relu")
            calls["nothing skipped"] = (leaky, unskipped)
            pinned = call(OPS.conv2d, threshold=0.0, **norms)
            calls["nothing skipped, weight's norms"] = (both, pinned)
        if images == 128:
            skipping = functools.partial(call, OPS.conv2d_with_norms)
            calls["ratio"] = (both, skipping(valid_ratio=0.4))
            on_device = {**both, "tau": number(4.0, device)}
            calls["tau on the device"] = (on_device, skipping())
            calls["weight's norms"] = (both | norms, skipping(threshold=4.0))
            # Norms of every (64 images, pixel, 64 channels), as one layer leaves them for the next.
            of_input = spamm_torch.norm_map(both["input"].permute(2, 3, 0, 1), 64)
            all_norms = both | norms | {"norm_input": of_input.permute(2, 0, 1, 3).contiguous()}
            calls["all norms given"] = (all_norms, skipping(threshold=4.0))
        if (kernel == 3 and images > 2) and dtype in HALF_TYPES:
            tensors = {**both, "bias": every["bias"], "input": pictures(64, channels, 8, 8)}
            pooled = call_of(OPS.conv2d_max_pool, padding=(1, 1), activation="relu")
            calls["conv and pool"] = (tensors, pooled)
        yield from (Case(f"{name}, {what}", *case) for what, case in calls.items())


def layer_cases(device):
    """Few channels, and pools."""
    values = Values(device)
    few = {"input": values.pictures(128, 3, 16, 16), "weight": values.pictures(64, 3, 3, 3)}
    few |= {"bias": values.normal(64), "residual": values.pictures(128, 64, 16, 16)}
    few["slope"] = values.normal(64, dtype=torch.float32)
    for op in (OPS.conv2d, OPS.conv2d_with_norms):
        call = call_of(op, padding=(1, 1), threshold=0.0, activation="leaky_relu")
        yield Case(f"few channels, {op}", few, call)
    for dtype in HALF_TYPES:
        x = {"input": values.pictures(128, 64, 16, 16, dtype=dtype)}
        for kernel, padding in ((2, 0), (3, 1)):
            pool = {"kernel_size": kernel, "stride": 2, "padding": padding}
            yield Case(f"max_pool2d {pool} {dtype}", x, call_of(OPS.max_pool2d, **pool))


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


FAMILIES = {"stages": stage_cases, "layers": layer_cases, "searches": search_cases}
FLOATS = {"float32": torch.float32, "float32 as TF32": torch.float32, "float64": torch.float64}
for of, dtype in {**{str(dtype)[6:]: dtype for dtype in HALF_TYPES}, **FLOATS}.items():
    typed = {"dtype": dtype, "allow_tf32": of.endswith("TF32")}
    FAMILIES[f"products of {of}"] = functools.partial(product_cases, **typed)
    if of not in ("bfloat16", "float32 as TF32"):
        FAMILIES[f"symmetric products of {of}"] = functools.partial(symmetric_cases, dtype=dtype)
    if dtype in HALF_TYPES:
        FAMILIES[f"convolutions of {of}"] = functools.partial(convolution_cases, dtype=dtype)
    elif dtype == torch.float32:
        some = functools.partial(convolution_cases, names=("several tiles",), **typed)
        FAMILIES[f"convolutions of {of}"] = some
