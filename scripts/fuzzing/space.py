"""Cases, the numbers in their operands, and how an answer is compared with the oracle's."""

import math
import random
import sys
import warnings
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))  # where the oracle lies
import matrices
import reference

warnings.filterwarnings("ignore", message="Sparse ")  # that torch's own are in beta, and unchecked

DTYPES = {"float32": torch.float32, "float64": torch.float64}
DTYPES |= {"float16": torch.float16, "bfloat16": torch.bfloat16}
BLOCKS = (64, 32, 128, *(of for of in product((32, 64, 128), repeat=3) if len({*of}) > 1))
EDGES = (1, 2, 3, 8, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 160, 200, 0)
EXACT = {"patchy", "zeros"}  # patterns whose products sum exactly in float32, whatever the order
PATTERNS = ("patchy", "zeros", "patchy", "normal", "normal", "rows", "huge", "tiny", "nan", "inf")
SEEDS = tuple(range(1000))


class Mismatch(AssertionError):
    """A difference, in one line."""


def expect(holds, what):
    if not holds:
        raise Mismatch(what)


def draw(space, rng):
    """A case: one of the choices for each name, the simplest of which is the first."""
    return {name: rng.choice(choices) for name, choices in space.items()}


def shrunk(case, space, fails):
    """The case with as many of the first choices as it can have while it still fails."""
    settled = False
    while not settled:
        settled = True
        for name, choices in space.items():
            for simpler in choices[: choices.index(case[name])]:
                if fails(case | {name: simpler}):
                    case, settled = case | {name: simpler}, False
                    break
    return case


def as_drawn(value):
    """A value from JSON, which makes lists of tuples."""
    return tuple(map(as_drawn, value)) if isinstance(value, list) else value


# ---- Numbers ------------------------------------------------------------------------------------


def values(shape, pattern, dtype, seed):
    """A tensor on the CPU; the same one for the same arguments."""
    if pattern == "zeros":
        return torch.zeros(shape, dtype=dtype)
    if pattern == "patchy":
        flat = shape if len(shape) > 1 else (1, *shape)
        return matrices.patchy(*flat, dtype=dtype, seed=seed).reshape(shape)
    found = matrices.normal(*shape, dtype=torch.float64, seed=seed).clamp(-4, 4)
    info, rng = torch.finfo(dtype), random.Random(seed)
    if pattern == "rows":  # powers of two that change from row to row
        most, rows = 6 if dtype == torch.float16 else 30, (*shape[:1], *(1,) * (len(shape) - 1))
        powers = np.random.default_rng(seed).integers(-most, most + 1, rows)
        found = found * torch.from_numpy(2.0**powers)
    elif pattern == "huge":  # of float64 such that the oracle's own sums stay in range
        found = found * (1e150 if dtype == torch.float64 else info.max / 8)
    elif pattern == "tiny":  # normal and subnormal
        found = found * info.smallest_normal
    found = found.to(dtype)
    if pattern in ("nan", "inf") and found.numel():
        for _ in range(rng.choice((1, 3))):
            place = rng.randrange(found.numel())
            found.view(-1)[place] = rng.choice((1, -1)) * float(pattern)
    return found


def laid_out(layouts, name, tensor, device):
    """The tensor on the CPU and on the device, both in the layout."""
    here = layouts[name](tensor)
    return here, here if device.type == "cpu" else layouts[name](tensor.to(device))


# ---- Comparisons --------------------------------------------------------------------------------


def expect_norms(found, oracle, what="norm map", digits=1e-5):
    """Norms are right to 1e-5 (1e-12 in float64) over the whole range of their type."""
    found, info = reference.to_array(found), torch.finfo(found.dtype)
    expect(found.shape == oracle.shape, f"{what}: shape {found.shape}, not {oracle.shape}")
    digits, most = (digits, info.max * (1 - digits)) if info.bits == 32 else (1e-12, info.max)
    with np.errstate(all="ignore"):
        near = np.abs(found - oracle) <= oracle * digits + float(info.smallest_normal * info.eps)
        near |= (found == oracle) | (np.isnan(found) & np.isnan(oracle))
        near |= (oracle >= most) & ((found >= most) | np.isnan(found))  # nothing is skipped
    at = np.argwhere(~near)[:1].tolist()
    expect(not at, f"{what}: {found[~near][:1]}, not {oracle[~near][:1]}, at {at}")


class Sums(NamedTuple):
    """The rounding of a kernel's sum over n of K, in at most v block products: by at most ``fixed +
    each * n`` units of the sum of the magnitudes, and with pieces by ``min(n, piece) + v`` units
    more. docs/error_bound.md has the proof.
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
_STORED = {torch.float16: (2.0**-11, 2.0**-25), torch.bfloat16: (2.0**-8, 2.0**-126)}
_STORED |= {torch.float32: (0.0, 0.0), torch.float64: (0.0, 0.0)}


def sums_of(device, dtype, block):
    """The rounding of such matrices' kernel."""
    return _OF_KERNEL[torch.ops.spamm_torch.backend_for(device, dtype, block)]


def sums_of_conv(device, dtype):
    """The rounding of a convolution's sums, in any order, as its kernels differ."""
    sums = sums_of(device, dtype, (64, 64, 64))
    return sums._replace(each=1 if device.type == "cpu" or dtype == torch.float64 else 4, piece=1)


def rounding(exact, size, inner, sums, dtype, *, alpha=1.0, slope=1.0, own=0.0, passes=0):
    """The most that an entry may be off, as docs/error_bound.md proves.

    sums: of the kernel, None where they are exact. size: the magnitudes that an entry adds. inner:
    how many products. slope, own and passes: of what follows the sum: its largest slope, what it
    rounds, relative to its argument, and how often it is stored before the last time. The oracle's
    own sum, which rounds as well, counts in float64.
    """
    double = dtype == torch.float64
    least = torch.finfo(torch.float64 if double else torch.float32).smallest_normal
    relative, absolute = _STORED[dtype]
    if sums is None:
        return 1.01 * torch.finfo(dtype).eps / 2 * np.abs(exact) + least
    units = sums.fixed + sums.each * inner + 8
    if sums.piece:
        units += min(inner, sums.piece) + math.ceil(inner / 32)  # no block is less deep
    gamma = np.expm1((units + double * (inner + 8)) * sums.unit)
    before = (1 + gamma) * size
    bound = gamma * size + 2 * least * max(alpha, 1.0) * (inner + 8) * (1 + gamma)
    bound = slope * (bound + 1.01 * passes * relative * before) + own * before
    return bound + absolute * (1 + passes) + relative * (np.abs(exact) + bound)


# The share that an entry of float32 may lose on CUDA where 64 x 64 numbers share a power of two, of
# the product of their norms. float16 ends 2^-39 below the largest number, with one split part
# 2^-36: so much is lost of either operand for each k. 128 magnitudes sum to at most 2^3.5 norms.
LOST_OF_SPLIT, LOST_OF_TF32 = 2.0**-34, 2.0**-31


def flushed(multiply, a, b, least):
    """The most that is lost where each entry may be off by ``least``, or count as 0."""
    a, b = a.abs(), b.abs()
    return multiply(a.clamp(max=least), b) + multiply(a, b.clamp(max=least))


def expect_near(found, exact, bound, size, what="result"):
    """An answer is within ``bound`` of the exact one, and NaN or infinite where that is.

    Where the magnitudes of what is added, ``size``, leave the sums' range, it may be anything.
    """
    dtype, found = found.dtype, reference.to_float64(found)
    expect(found.shape == exact.shape, f"{what}: shape {found.shape}, not {exact.shape}")
    sums = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).max / 8
    most = torch.finfo(dtype).max
    with np.errstate(all="ignore"):
        near = (np.abs(found - exact) <= bound) | (found == exact)
        near |= (np.isnan(found) & np.isnan(exact)) | (np.isfinite(size) & (size >= sums))
        overflows = (np.abs(exact) + bound >= most) & (np.sign(found) == np.sign(exact))
        near |= overflows & (np.abs(found) >= most * (1 - 2.0**-7))
        off = np.nanmax(np.where(near, 0, np.abs(found - exact) / bound), initial=0)
    at, wrong = np.argwhere(~near)[:1].tolist(), np.count_nonzero(~near)
    got = f"{found[~near][:1]}, not {exact[~near][:1]}, at {at}, {off:.3g} of the bound"
    expect(not wrong, f"{what}: {got}, in {wrong} of {found.size} places")


def expect_bits(found, wanted, what):
    """Equal bits, but that any NaN is a NaN, and zeros have no sign."""
    shapes = tuple(found.shape), tuple(wanted.shape)
    expect(shapes[0] == shapes[1], f"{what}: shape {shapes[0]}, not {shapes[1]}")
    found, wanted = found.detach().cpu(), wanted.detach().cpu()
    wrong = int((~((found == wanted) | (found.isnan() & wanted.isnan()))).sum())
    expect(not wrong, f"{what}: {wrong} of {found.numel()} entries differ")
