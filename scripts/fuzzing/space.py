"""What a case is, the numbers in its operands, and how an answer is compared with the oracle's."""

import random
import sys
import warnings
from pathlib import Path

import numpy as np
import torch

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))  # where the oracle lies
import matrices
import reference

warnings.filterwarnings("ignore", message="Sparse ")  # that torch's own are in beta, and unchecked

DTYPES = {"float32": torch.float32, "float64": torch.float64}
DTYPES |= {"float16": torch.float16, "bfloat16": torch.bfloat16}
BLOCKS = (64, 32, 128, (128, 64, 128), (32, 64, 128), (64, 128, 32), (128, 32, 64))
EDGES = (1, 2, 3, 8, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 160, 200, 0)
EXACT = {"patchy", "zeros"}  # patterns whose products sum exactly in float32, whatever the order
PATTERNS = ("patchy", "zeros", "patchy", "normal", "normal", "rows", "huge", "tiny", "nan", "inf")
SEEDS = tuple(range(1000))


class Mismatch(AssertionError):
    """What differed, in one line."""


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


def rounding(exact, size, inner, dtype, *, once=False, tf32=False):
    """How far an entry may be off that sums ``inner`` products, whose magnitudes sum to ``size``.

    As reference.rounding_bound. A product may itself be too small for the type of the sums, or
    flushed to zero. once: the sums are exact.
    """
    double = dtype == torch.float64
    u = reference.UNIT_ROUNDOFF[dtype if double else torch.float32]
    bound = (
        1.01 * reference.UNIT_ROUNDOFF[dtype] * np.abs(exact) + torch.finfo(dtype).smallest_normal
    )
    if once:
        return bound
    steps = (1 + double) * (6 * inner**0.5 + inner / 4 + 3)
    bound = bound + (steps * u + 2 * reference.TF32_ROUNDOFF * tf32) * size
    return bound + inner * torch.finfo(dtype if double else torch.float32).smallest_normal


def expect_near(found, exact, bound, size, what="result"):
    """An answer is within ``bound`` of the exact one, and NaN or infinite where that is.

    Where the magnitudes of what is added, ``size``, leave the range of the sums, a right answer may
    be anything.
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
