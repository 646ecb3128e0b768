"""The threshold of a call, the share of products that it keeps, and a bound of what it loses.

All come from norm maps, by tensor operations on the operands' device. Nothing waits for it.
"""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from ._arguments import Knobs, conv_block

_ops = torch.ops.spamm_torch


class SkipInfo(NamedTuple):
    """The products that a call skipped, as ``return_info=True`` reports.

    The first three are 0-d tensors on the operands' device, of the norms' dtype (float32, or
    float64 for float64 operands), without a gradient. Reading one on the host waits for the device.

    Attributes:
        tau: the threshold: given, or found for the ``valid_ratio`` or ``max_error`` of the call,
            and then the least product that was kept.
        valid_ratio: the share of block products that were computed, from 0 to 1.
        error_bound: a proven bound of the Frobenius norm of the error from skipping, absolute (in
            the result's units, before ``alpha`` and an activation). Rounding is not in it.
        block: the blocks (m, k, n) of the call, and pixel_block, of a convolution: its pixel block;
            None for other products. A tau that was found means the same with these alone.
    """

    tau: Tensor
    valid_ratio: Tensor
    error_bound: Tensor
    block: tuple[int, int, int]
    pixel_block: tuple[int, int, int] | None = None


class NormMaps(NamedTuple):
    """The norm maps of a product, and their blocks; ``skip_norm_b`` decides what is skipped."""

    norm_a: Tensor
    norm_b: Tensor
    skip_norm_b: Tensor
    block: tuple[int, int, int]
    pixel_block: tuple[int, int, int] | None = None


def share_of_valid(norm_a: Tensor, norm_b: Tensor, tau: Tensor) -> Tensor:
    """The share of valid block products, by the op valid_counts; see ``valid_ratio``."""
    counts = _ops.valid_counts(norm_a, norm_b, tau)
    products = counts.numel() * norm_a.shape[-1]
    if products == 0:
        return norm_a.new_ones(())
    valid = counts.sum(dtype=torch.int64).double()
    # Divides by a tensor: CUDA divides by a number as a multiplication by its rounded inverse.
    return valid.div(valid.new_full((), products)).to(norm_a.dtype)


def skip_info(maps: NormMaps, knobs: Knobs) -> SkipInfo:
    """The :class:`SkipInfo` of a product of operands with these norm maps."""
    norm_a, norm_b, deciding = maps[:3]
    apart = None if deciding is norm_b else deciding
    if knobs["threshold"] is not None:
        tau = norm_a.new_full((), knobs["threshold"])
    elif knobs["tau"] is not None:
        tau = norm_a.new_zeros(()).add(knobs["tau"]).to(norm_a.dtype)  # copies no host memory
    else:
        searched = {"max_error": knobs["max_error"], "skip_norm_b": apart}
        tau = _ops.find_tau(norm_a, norm_b, knobs["valid_ratio"], **searched)
    lost = _ops.error_bound(norm_a, norm_b, tau, skip_norm_b=apart)
    return SkipInfo(tau, share_of_valid(norm_a, deciding, tau), lost, *maps[3:])


def as_multiplied(operand: Tensor) -> Tensor:
    """The operand as autocast lets the op multiply it, outside autograd."""
    return operand.detach().to(multiplied_dtype(operand))


def multiplied_dtype(operand: Tensor) -> torch.dtype:
    """The type in which autocast lets the op multiply an operand."""
    device = operand.device.type
    if (
        operand.dtype == torch.float64
        or not operand.is_floating_point()
        or operand.is_meta  # there is no autocast on meta
        or not torch.is_autocast_enabled(device)
    ):
        return operand.dtype
    return torch.get_autocast_dtype(device)


# ---- Convolutions -------------------------------------------------------------------------------


Pair: TypeAlias = tuple[int, int]
Geometry: TypeAlias = tuple[Pair, Pair, Pair, int]  # stride, padding, dilation, groups


def default_pixel_block(has_tau: bool, images: int, n: int) -> tuple[int, int, int]:
    """(n, 1, 1) with a tau; else as many images as fit, the rest split with columns >= rows."""
    if has_tau:
        return n, 1, 1
    together = 1 << (max(1, min(images, n)).bit_length() - 1)
    rest = (n // together).bit_length() - 1
    return together, 1 << (rest // 2), 1 << (rest - rest // 2)


def conv2d_norm_maps(
    input: Tensor,
    weight: Tensor,
    geometry: Geometry,
    has_tau: bool,
    block: int | Sequence[int] | None,
    pixel_block: Sequence[int] | None,
    norm_weight: Tensor | None,
) -> NormMaps:
    """The norm maps (groups, MB, KB) and (groups, KB, NB) of a convolution of checked arguments."""
    batch = input if input.dim() == 4 else input.unsqueeze(0)
    groups = geometry[3]
    edges = conv_block(weight.shape[0] // groups, weight.shape[1], block, pixel_block)
    images, rows, columns = pixel_block or default_pixel_block(has_tau, batch.shape[0], edges[2])
    pixels = images, rows, columns
    if norm_weight is None:
        norm_weight = _ops.conv2d_weight_norm(weight, groups, block=edges, pixel_block=pixels)
    norms = _im2col_norms(batch, weight, geometry, edges[1], pixels)
    return NormMaps(norm_weight, *norms, edges, pixels)


def _im2col_norms(
    input: Tensor, weight: Tensor, geometry: Geometry, k: int, pixel_block: tuple[int, int, int]
) -> tuple[Tensor, Tensor]:
    """The norm map (groups, KB, NB) of an im2col matrix, and that by which products are skipped."""
    stride, padding, dilation, groups = geometry
    kernel, grid = weight.shape[2:], [input.shape[0]]
    sides = zip(input.shape[2:], kernel, stride, padding, dilation, strict=True)
    for size, window, s, p, d in sides:
        grid.append((size + 2 * p - d * (window - 1) - 1) // s + 1)
    counts = [-(-size // edge) for size, edge in zip(grid, pixel_block, strict=True)]
    missing = [c * e - size for c, e, size in zip(counts, pixel_block, grid, strict=True)]
    split = [number for pair in zip(counts, pixel_block, strict=True) for number in pair]
    has_squares = input.dtype != torch.float64  # float64 holds the squares of the narrower types
    pixels = _pixel_squares(input, groups, k) if has_squares else input.transpose(0, 1)
    padded = pad(pixels, (padding[1], padding[1], padding[0], padding[0]))
    maps = []
    for y, x in itertools.product(range(kernel[0]), range(kernel[1])):
        top, left = y * dilation[0], x * dilation[1]
        bottom = top + (grid[1] - 1) * stride[0] + 1
        right = left + (grid[2] - 1) * stride[1] + 1
        seen = padded[..., top : bottom : stride[0], left : right : stride[1]]
        whole = pad(seen, (0, missing[2], 0, missing[1], 0, missing[0]))
        if has_squares:
            sums = whole.reshape(*whole.shape[:2], *split).sum((3, 5, 7))
            maps.append(sums.flatten(2).sqrt().float())
        else:
            by_channel = whole.reshape(groups, input.shape[1] // groups, *split)
            rows = by_channel.permute(0, 1, 2, 4, 6, 3, 5, 7).flatten(2)
            maps.append(_ops.norm_map(rows, (k, math.prod(pixel_block))))
    norms = torch.cat(maps, 1)
    return norms, norms * _partial_block_scale(norms, grid, counts, pixel_block)


def _pixel_squares(input: Tensor, groups: int, k: int) -> Tensor:
    """Sums of squares (groups, ceil(channels of a group / k), N, H, W), in float64."""
    by_group = input.unflatten(1, (groups, input.shape[1] // groups))
    whole = pad(by_group, (0, 0, 0, 0, 0, -by_group.shape[2] % k))
    norms = torch.linalg.vector_norm(whole.unflatten(2, (-1, k)), dim=3, dtype=torch.float64)
    return norms.square().permute(1, 2, 0, 3, 4)


def _partial_block_scale(
    norms: Tensor, grid: list[int], counts: list[int], pixel_block: tuple[int, int, int]
) -> Tensor:
    """sqrt(n / c) for each pixel block, c being its pixels inside the output grid."""
    inside = []
    for size, count, edge in zip(grid, counts, pixel_block, strict=True):
        start = torch.arange(count, dtype=norms.dtype, device=norms.device) * edge
        inside.append((size - start).clamp_max(edge))
    images, rows, columns = inside
    pixels = (images[:, None, None] * rows[:, None] * columns).flatten()
    # By a tensor: CUDA would multiply by a number's rounded inverse.
    return torch.full_like(pixels, math.prod(pixel_block)).div(pixels).sqrt()
