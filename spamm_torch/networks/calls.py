"""The functions that generated forwards call: each picks the faster of an op and torch's own.

A compiler gets torch's own calls, since Inductor joins these with their neighbours. So does a call
that wants a gradient.
"""

import ctypes
import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .nodes import constant_when_compiled, pair_of

_ops = torch.ops.spamm_torch
_conv2d, _conv2d_max_pool = _ops.conv2d.default, _ops.conv2d_max_pool.default
_max_pool2d = _ops.max_pool2d.default

_HALF_OR_SINGLE = (torch.float16, torch.bfloat16, torch.float32)
_PLAIN = (Tensor, nn.Parameter)

_freezes = constant_when_compiled(lambda: bool(torch._inductor.config.freezing))


def activated(values: Tensor, activation: str) -> Tensor:
    """The activation of this name, as torch has it, in memory of its own."""
    if activation == "none":
        return values.clone()
    result: Tensor = getattr(F, activation)(values)
    return result


def dense_conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *geometry: Any,
    residual: Tensor | None = None,
    activation: str = "none",
    packed: Tensor | None = None,
) -> Tensor:
    """The op ``dense_conv2d``, for a compiler in parts; eager calls take the ``packed`` weight."""
    groups, is_compiled = geometry[3] if len(geometry) > 3 else 1, torch.compiler.is_compiling()
    if not is_compiled or not _compilers_make_more(weight, groups, activation):
        weight = weight if is_compiled or packed is None else packed
        options = {"residual": residual, "activation": activation}
        return _ops.dense_conv2d.default(input, weight, bias, *geometry, **options)
    output = F.conv2d(input, weight, bias, *geometry)
    if residual is not None:
        output = output + residual
    return output if activation == "none" else activated(output, activation)


def _compilers_make_more(weight: Tensor, groups: int, activation: str) -> bool:
    """On CUDA where cuDNN's fused call (csrc/cuda/conv/conv_sm80.cpp) does not take the weight,
    on a CPU where Inductor freezes it."""
    in_units = all(channels * weight.dtype.itemsize % 16 == 0 for channels in weight.shape[:2])
    is_one_call = activation == "relu" and groups == 1 and in_units and weight.dtype.itemsize == 2
    return not is_one_call if weight.is_cuda else weight.dtype == torch.float32 and _freezes()


def linear_relu(input: Tensor, linear: nn.Linear) -> Tensor:
    """``torch.relu(linear(input))`` up to rounding; on CUDA one call of cuBLASLt if it fits."""
    weight, bias = linear.weight, linear.bias
    if (
        bias is not None  # as it was when the forward was generated
        and type(weight) in _PLAIN  # a quantised weight, say, computes otherwise
        and type(bias) in _PLAIN
        and input.dim() == 2
        and input.dtype in _HALF_OR_SINGLE
        and all(features % 8 == 0 for features in weight.shape)  # else its ReLU loses NaN
        and _can_be_own(input, weight, bias)
    ):
        return torch._addmm_activation(bias, input, weight.t())
    return torch.relu(F.linear(input, weight, bias))


def _can_be_own(*tensors: Tensor) -> bool:
    """Whether a call on CUDA is neither compiled nor to be differentiated."""
    return (
        tensors[0].is_cuda
        and not torch.compiler.is_compiling()
        and not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors))
    )


def conv2d_max_pool(input: Tensor, *args: Any, **options: Any) -> Tensor:
    """The op ``conv2d_max_pool``, or two calls for a gradient or a single image."""
    if input.dim() == 4 and not (torch.is_grad_enabled() and input.requires_grad):
        return _conv2d_max_pool(input, *args, **options)
    return F.max_pool2d(_conv2d(input, *args, threshold=0.0, **options), 2)


def max_pool2d(
    input: Tensor, kernel_size: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool
) -> Tensor:
    """As ``torch.nn.functional.max_pool2d``, without a gradient."""
    pooling = (kernel_size, stride, padding, dilation, ceil_mode)
    if _is_own_batch(input) and input.dtype in _HALF_OR_SINGLE:
        return _max_pool2d(input, *pooling)[0]
    return F.max_pool2d(input, *pooling)


def _is_own_batch(input: Tensor) -> bool:
    is_batch = _can_be_own(input) and input.dim() == 4
    return is_batch and input.is_contiguous(memory_format=torch.channels_last)


_LEAST_BYTES = 1 << 22  # of a result: for fewer, Python's calls take longer than the copy saves
_MOST_ROWS = 1 << 20  # or columns: float32 numbers them exactly, with room for rounding

_WIDE = torch.complex128  # stands for any 16 bytes


def upsample_nearest(input: Tensor, size: Any, scale_factor: Any) -> Tensor:
    """As torch's ``interpolate(..., mode="nearest")``, bit for bit, without a gradient."""
    # Of one pixel or channel, torch tells the memory format of its result by strides.
    if _is_own_batch(input) and _has_wide_pixels(input) and not input.is_contiguous():
        before = input.shape[2:]
        after = size_after(before, size, scale_factor)
        if (
            after is not None
            and all(map(_is_repeat, before, after))
            and input.nbytes // math.prod(before) * math.prod(after) >= _LEAST_BYTES
        ):
            return enlarged(input, after)
    return F.interpolate(input, size, scale_factor)


def size_after(before: Sequence[int], size: Any, scale_factor: Any) -> tuple[int, int] | None:
    """Rows and columns of the result for a size or whole factors; None for others."""
    if (size is None) == (scale_factor is None):
        return None  # an error, for torch to tell
    given = pair_of(size if scale_factor is None else scale_factor)
    if given is None:
        return None
    kinds = (int,) if scale_factor is None else (int, float)
    if not all(type(x) in kinds and x % 1 == 0 for x in given):
        return None
    factors = (1, 1) if scale_factor is None else tuple(before)
    return int(given[0]) * factors[0], int(given[1]) * factors[1]


@functools.lru_cache(1 << 10)
def _is_repeat(before: int, after: int) -> bool:
    """Whether torch, whose steps are of float32, repeats each row (or column) equally often."""
    if before == 0 or after > _MOST_ROWS or after < before or after % before:
        return False
    factor = after // before
    return ctypes.c_float(1 / factor).value * factor >= 1


def _has_wide_pixels(images: Tensor) -> bool:
    """Whether a channels-last pixel is a number of whole, aligned 16 bytes."""
    size = images.element_size()
    places = (images.shape[1] * size, images.storage_offset() * size, images.data_ptr())
    return not any(place % _WIDE.itemsize for place in places)


def enlarged(images: Tensor, size: Sequence[int]) -> Tensor:
    """Channels-last images of whole aligned 16 bytes, each pixel repeated up to a multiple size."""
    pixels = images.permute(0, 2, 3, 1).view(_WIDE)
    count, height, width, chunks = pixels.shape
    image, row, column, chunk = pixels.stride()
    repeated = pixels.as_strided(  # one view: each costs time on the host
        (count, height, size[0] // height, width, size[1] // width, chunks),
        (image, row, 0, column, 0, chunk),
    )
    # Not reshape(), which returns a view where a factor or a length is 1.
    copied = repeated.clone(memory_format=torch.contiguous_format)
    return copied.view(count, *size, chunks).view(images.dtype).permute(0, 3, 1, 2)
