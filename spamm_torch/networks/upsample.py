"""Nearest upsampling in generated forwards, as a copy that repeats pixels.

On an H200 torch's own kernel for channels-last half types moves 0.4 TB/s, and a copy of 16 bytes at
a time ten times as much. On CPUs torch's own is as fast.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from .capture import Island
from .leaves import reason_not_plain

_KINDS = (nn.Upsample, nn.UpsamplingNearest2d)
_ARGUMENTS = ("size", "scale_factor")
_DEFAULTS = {"align_corners": None, "recompute_scale_factor": None, "antialias": False}
_LEAST_BYTES = 1 << 22  # of a result: for fewer, Python's calls take longer than the copy saves
_MOST_ROWS = 1 << 20  # or columns: float32 numbers them exactly, with room for rounding

_WIDE = torch.complex128  # stands for any 16 bytes

# Size, scale factor: one of them None. Values or, of functions, nodes of the graph.
Upsampling: TypeAlias = tuple[Any, Any]


def find_upsamplings(island: Island) -> dict[fx.Node, Upsampling]:
    """The nearest upsamplings of an island, in the graph's order."""
    found = {node: _upsampling(island.module, node) for node in island.graph.nodes}
    return {node: given for node, given in found.items() if given is not None}


def _upsampling(root: nn.Module, node: fx.Node) -> Upsampling | None:
    if not is_nearest(node, root):
        return None
    if node.op == "call_module":
        upsample: Any = root.get_submodule(str(node.target))
        is_plain = len(node.args) == 1 and not node.kwargs and reason_not_plain(upsample) is None
        if not is_plain or upsample.recompute_scale_factor:
            return None
        return (upsample.size, upsample.scale_factor)
    given: dict[str, Any] = dict(zip(_ARGUMENTS, node.args[1:], strict=False))
    given |= node.kwargs
    is_plain = all(given.get(name, usual) == usual for name, usual in _DEFAULTS.items())
    if not node.args or not is_plain:
        return None
    return (given.get("size"), given.get("scale_factor"))


def is_nearest(node: fx.Node, root: nn.Module) -> bool:
    """Whether a node is torch's nearest upsampling, by whatever factors."""
    if node.op == "call_module":
        module = root.get_submodule(str(node.target))
        return type(module) in _KINDS and module.mode == "nearest"
    if node.op != "call_function" or node.target is not F.interpolate or len(node.args) > 3:
        return False
    return node.kwargs.get("mode", "nearest") == "nearest"


def upsample_nearest(input: Tensor, size: Any, scale_factor: Any) -> Tensor:
    """As ``torch.nn.functional.interpolate(..., mode="nearest")``, bit for bit, without a gradient.

    Args:
        input: (N, C, H, W), or anything else that torch takes.
        size: rows and columns of the result, one number for both, or None.
        scale_factor: likewise, instead of a size.
    """
    if _can_be_repeated(input):
        after = size_after(input.shape[2:], size, scale_factor)
        if after is not None and _repeats_faster(input, after):
            return enlarged(input, after)
    return F.interpolate(input, size, scale_factor)


def _can_be_repeated(input: Tensor) -> bool:
    return (
        not torch.compiler.is_compiling()  # Inductor fuses torch's own with what reads it
        and not (torch.is_grad_enabled() and input.requires_grad)
        and input.is_cuda
        and input.dim() == 4
        and input.is_contiguous(memory_format=torch.channels_last)
        and _has_wide_pixels(input)
        # Of one pixel or channel, torch tells the memory format of its result by strides.
        and not input.is_contiguous()
    )


def _repeats_faster(input: Tensor, after: tuple[int, int]) -> bool:
    height, width = input.shape[2:]
    if not (_is_repeat(height, after[0]) and _is_repeat(width, after[1])):
        return False
    return input.nbytes * (after[0] // height) * (after[1] // width) >= _LEAST_BYTES


def size_after(before: Sequence[int], size: Any, scale_factor: Any) -> tuple[int, int] | None:
    """Rows and columns of the result for a size or whole factors; None for others.

    Args:
        before: rows and columns of the input.
    """
    if (size is None) == (scale_factor is None):
        return None  # an error, for torch to tell
    given = pair_of(size if scale_factor is None else scale_factor)
    if given is None or not all(_is_whole(x, scale_factor is not None) for x in given):
        return None
    factors = (1, 1) if scale_factor is None else tuple(before)
    return int(given[0]) * factors[0], int(given[1]) * factors[1]


def _is_whole(x: Any, may_be_float: bool) -> bool:
    return type(x) is int or (may_be_float and type(x) is float and x.is_integer())


def pair_of(value: Any) -> tuple[Any, Any] | None:
    if not isinstance(value, (tuple, list)):
        return value, value
    return (value[0], value[1]) if len(value) == 2 else None


@functools.lru_cache(1 << 10)
def _is_repeat(before: int, after: int) -> bool:
    """Whether torch repeats each row (or column) equally often.

    It takes row floor(i * step) for row i, where step is 1 / factor in float32. If that was rounded
    down, as for a factor of 41, it may take the row before.
    """
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
    """Channels-last images with each pixel repeated up to ``size``, 16 aligned bytes at a time.

    Args:
        images: (N, C, H, W); the bytes of a pixel are a multiple of 16, as is its address.
        size: rows and columns of the result, multiples of H and W.
    """
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
