"""Bounds of a result's distance from what it stands for, rounding included.

docs/error_bound.md has the proof. All follows from norm maps and the norm of the result, by tensor
operations on their device, and nothing waits for it. Numbers are 0-d float64, rounded up.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ._arguments import ACTIVATIONS, norm_dtype

_ops = torch.ops.spamm_torch

# Norms that were computed twice, or of a block and its mirror image, agree to this factor.
NEAR = {torch.float32: 1 + 2.0**-15, torch.float64: 1 + 2.0**-40}
# Below a threshold that was found by so much, the least product that was kept is no near one.
BELOW = {torch.float32: 1 - 2.0**-14, torch.float64: 1 - 2.0**-38}
SLACK = 1 + 2.0**-16  # for the rounding of norms, 2^-18, and of what is computed here


# ---- How kernels round --------------------------------------------------------------------------


class Sums(NamedTuple):
    """The rounding of a kernel's sum over n of K, in at most v block products: by at most ``fixed +
    each * n`` units of the sum of the magnitudes, and with pieces by ``min(n, piece) + v`` units
    more.
    """

    unit: float
    fixed: float = 0.0
    each: float = 0.0
    piece: int = 0


_SINGLE, _DOUBLE = 2.0**-24, 2.0**-53
_TF32 = 1.02 * 2.0**14  # units that operands lose which are rounded to eleven bits
_OF_KERNEL = {
    "cpu-plain": Sums(_DOUBLE, piece=128),
    "cpu-plain-float32": Sums(_SINGLE, piece=128),
    "cpu-plain-half": Sums(_SINGLE, piece=512),
    "cpu-brgemm-vnni": Sums(_SINGLE, each=1),
    "sm90-wgmma-f16": Sums(_SINGLE, each=2),
    "sm90-wgmma-bf16": Sums(_SINGLE, each=2),
    "sm90-wgmma-f32x3": Sums(_SINGLE, fixed=132, each=1 / 16),
    "sm90-wgmma-f32x1": Sums(_SINGLE, fixed=_TF32, each=4),
    "sm90-dmma-f64": Sums(_DOUBLE, each=1),
    "sm80-mma-f16": Sums(_SINGLE, each=4),
    "sm80-mma-bf16": Sums(_SINGLE, each=4),
    "sm80-mma-tf32": Sums(_SINGLE, fixed=_TF32, each=4),
    "sm80-simt-f32": Sums(_SINGLE, fixed=132, each=1 / 16),
    "sm80-dmma-f64": Sums(_DOUBLE, each=1),
}
# The rounding of a stored result: with this relative error, or this absolute one where numbers end.
_STORED = {
    torch.float16: (2.0**-11, 2.0**-25),
    torch.bfloat16: (2.0**-8, 2.0**-126),
    torch.float32: (0.0, 0.0),
    torch.float64: (0.0, 0.0),
}


def sums_of(device: torch.device, dtype: torch.dtype, block: tuple[int, int, int]) -> Sums:
    """The rounding of such matrices' kernel; in a graph, which outlives settings, of the worst."""
    if not torch.compiler.is_compiling() and device.type in ("cpu", "cuda"):
        return _OF_KERNEL[_ops.backend_for(device, dtype, block)]
    if dtype == torch.float64:
        return Sums(_DOUBLE, each=1, piece=128)
    on_host = device.type == "cpu"
    fixed = _TF32 if dtype == torch.float32 and not on_host else 0.0
    return Sums(_SINGLE, fixed, 1 if on_host else 4, 512 if on_host else 0)


# ---- Norms --------------------------------------------------------------------------------------


def norm(x: Tensor) -> Tensor:
    """The Frobenius norm, right to 2^-18; inf where an entry is not finite."""
    x = x.detach().flatten()
    if x.dtype == torch.float64:  # whose squares may leave its range
        peak = torch.cat((x.abs(), x.new_full((1,), torch.finfo(x.dtype).tiny))).amax()
        found = torch.linalg.vector_norm(x / peak) * peak
    else:
        found = torch.linalg.vector_norm(x, dtype=torch.float64)
    return _or_inf(found)


def rounded_up(number: Tensor, dtype: torch.dtype) -> Tensor:
    x = number.to(dtype)
    return torch.where(x < number, torch.nextafter(x, torch.full_like(x, math.inf)), x)


def _or_inf(x: Tensor) -> Tensor:
    return x.masked_fill(~x.isfinite(), math.inf)


class Maps(NamedTuple):
    """The norms of two operands' blocks (m, k, n). ``lost``: such norms' error bound where all is
    skipped. ``most``: the number of products that a block of the result has at most, 0-d.
    """

    norm_a: Tensor
    norm_b: Tensor
    block: tuple[int, int, int]
    lost: Callable[[Tensor, Tensor], Tensor]
    most: Tensor

    def size(self) -> Tensor:
        """At least the norm of the product of the magnitudes; inf where it may overflow."""
        if not (self.norm_a.numel() and self.norm_b.numel()):
            return self.norm_a.new_zeros((), dtype=torch.float64)
        largest = self.norm_a.amax() * self.norm_b.amax()
        found = self.lost(self.norm_a, self.norm_b).double()
        return found.masked_fill(~largest.isfinite(), math.inf)

    def flushed(self, least: float) -> Tensor:
        """At least what is lost where entries below ``least`` count as 0."""
        (m, k, n), a, b = self.block, self.norm_a, self.norm_b
        of_a = self.lost(a.clamp(max=least * math.sqrt(m * k)), b)
        return of_a.double() + self.lost(a, b.clamp(max=least * math.sqrt(k * n))).double()


def dense_maps(
    norm_a: Tensor, norm_b: Tensor, deciding: Tensor, tau: Tensor, block: tuple[int, int, int]
) -> Maps:
    """The bounds of dense operands; ``deciding`` is what of B decides what is skipped."""

    def lost(a: Tensor, b: Tensor) -> Tensor:
        return _ops.error_bound(a, b, a.new_full((), math.inf))

    counts = _ops.valid_counts(norm_a, deciding, tau)
    pairs = _ops.valid_counts(norm_a.sign(), norm_b.sign(), tau.new_full((), 0.5))
    most = counts.minimum(pairs)
    most = most.amax() if most.numel() else most.new_zeros(())
    return Maps(norm_a, norm_b, block, lost, most)


# ---- Bounds -------------------------------------------------------------------------------------


class Made(NamedTuple):
    """The making of a result: a slope-bounded function of (alpha * A B + what was added).

    Attributes:
        dtype: of operands and result. sums: of the kernel. entries: of the result.
        alpha: the factor of A B. added: norms of what was added, with their factors.
        slope: the largest of the function. own: what the function rounds, relative to its argument.
        passes: over the result that round it, besides the last.
        hides: from which norm on the function may hide that something overflowed.
        mirrored: how much larger the error may be than that of a triangle says.
        are_near: whether the kernel decides by norms that may differ a little from the maps, as
            those of a block's mirror image do.
    """

    dtype: torch.dtype
    sums: Sums
    entries: float
    alpha: float = 1.0
    added: tuple[Tensor, ...] = ()
    slope: float | Tensor = 1.0
    own: float | Tensor = 0.0
    passes: float = 0.0
    hides: float = math.inf
    mirrored: float = 1.0
    are_near: bool = False

    def near(self, dtype: torch.dtype) -> float:
        """The factor by which norms of this type may differ."""
        return NEAR[dtype] if self.are_near else 1.0


def conv_made(
    output: Tensor,
    device: torch.device,
    addends: tuple[Tensor | None, Tensor | None],
    activation: str,
    is_torchs: bool,
    slope: float | Tensor | None = None,
) -> Made:
    """The making of a convolution on a device; of ``is_torchs``, torch's own, nothing is proven."""
    dtype, entries = output.dtype, output.numel()
    sums = sums_of(device, dtype, (64, 64, 64))
    # In any order, as the convolutions' kernels differ.
    each = 1 if device.type == "cpu" or dtype == torch.float64 else 4
    sums = Sums(sums.unit, sums.fixed, each, piece=1)
    added = [
        1.01 * (entries / x.numel()) ** 0.5 * norm(x)
        for x in addends
        if x is not None and x.numel()
    ]
    largest, own = ACTIVATIONS[activation]
    # A backend may add the residual, and apply all but clamps, each with a rounding of its own; a
    # tensor of slopes is rounded before the latter.
    passes = (addends[1] is not None) + (own > 0) + isinstance(slope, Tensor)
    hides = torch.finfo(norm_dtype(dtype)).max / 4
    if activation == "relu6" and passes and dtype == torch.float16:
        hides = 2.0**15
    if is_torchs:
        hides = -1.0
    if dtype == torch.float64 and (activation != "hardswish" or device.type == "cpu"):
        own = min(own, 2.0**-48)  # elsewhere torch's hardswish has 1 / 6 in float32
    if slope is not None:
        slopes = torch.as_tensor(slope, dtype=torch.float64).detach()
        largest = torch.cat((slopes.flatten().abs(), slopes.new_ones(1))).amax()
        own = own * largest
    hides = hides if activation != "none" or is_torchs else math.inf
    return Made(dtype, sums, entries, 1.0, tuple(added), largest, own, passes, hides, are_near=True)


Bounds = tuple[Tensor, Tensor]


def bounds(maps: Maps, made: Made, skipping: Tensor) -> Callable[[Tensor], Bounds]:
    """A function that gives, for the norm of the result, the bounds of rounding and of everything;
    ``skipping``: the bound of what skipping loses of A B.
    """
    alpha, sums, unit = abs(made.alpha), made.sums, made.sums.unit
    least = torch.finfo(norm_dtype(made.dtype)).tiny
    most = maps.most.double()
    depth = most * maps.block[1]
    units = sums.fixed + sums.each * depth + 8  # 8: alpha, beta, what is added, the last sums
    if sums.piece:
        units = units + depth.clamp(max=sums.piece) + most
    gamma = torch.expm1(units * unit)
    size = maps.size() if alpha else maps.norm_a.new_zeros((), dtype=torch.float64)
    added = torch.stack(made.added).sum() if made.added else torch.zeros_like(size)
    found = (alpha * gamma + min(alpha, least)) * size + math.expm1(8 * unit) * added
    if alpha and made.dtype != torch.float16:  # whose products no kernel flushes
        found = found + alpha * maps.flushed(least)
    each = 2 * least * max(alpha, 1.0) * made.entries**0.5
    anything = (most > 0) | (len(made.added) > 0)
    found = found + each * (1 + gamma) * (depth + 8) * anything
    relative, absolute = _STORED[made.dtype]
    before = alpha * (1 + gamma) * size + 1.01 * added  # at least the norm of the argument
    found = made.slope * (found + 1.01 * made.passes * relative * before) + made.own * before
    found = found + absolute * (1 + made.passes) * made.entries**0.5 * anything
    found = found.masked_fill(~(before < made.hides), math.inf)
    skipping = made.slope * alpha * skipping.double() if alpha else torch.zeros_like(size)

    def complete(norm_c: Tensor) -> Bounds:
        rounding = _or_inf((found + relative * norm_c) * (SLACK * made.mirrored))
        return rounding, _or_inf((made.mirrored * skipping + rounding) * (1 + 2.0**-48))

    return complete
