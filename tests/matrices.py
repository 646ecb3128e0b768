"""Matrices that tests share: with decay, exactly summable, and in every layout in memory."""

import numpy as np
import torch

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
EDGES = (32, 64, 128)


def norm_dtype(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


# ---- Values -------------------------------------------------------------------------------------


def exponential_decay(n, base=0.9, dtype=torch.float32, device="cpu"):
    """base^|i-j|, rounded once from float64."""
    i = torch.arange(n, dtype=torch.float64, device=device)
    return (base ** (i[:, None] - i).abs()).to(dtype)


def fading(rows, columns, dtype=torch.float32, device="cpu", seed=0, rate=20):
    """Normal entries that fade away from the diagonal, so that parts need different blocks."""
    i = torch.arange(rows, dtype=torch.float64)[:, None] / max(rows, 1)
    j = torch.arange(columns, dtype=torch.float64) / max(columns, 1)
    fade = torch.exp(-rate * (i - j).abs())
    return (normal(rows, columns, dtype=torch.float64, seed=seed) * fade).to(device, dtype)


def normal(*shape, dtype=torch.float32, device="cpu", seed=0):
    """Normally distributed entries."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)


def patchy(*shape, dtype=torch.float32, device="cpu", seed=0):
    """Integers of -3 to 3, times 1, 1/2, 1/4, 1/8 or 0 in each patch of 32 x 32.

    Products of two such matrices are multiples of 1/64: with K below 29,000 every partial sum is
    exact in float32 in any order, and in TF32 as well, so that a right result has but one rounding.
    The patches give the block products well-spread norms.
    """
    *batch, rows, columns = shape
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-3, 4, shape, generator=generator).double()
    patches = (*batch, -(-rows // 32), -(-columns // 32))
    scales = torch.tensor([1, 1 / 2, 1 / 4, 1 / 8, 0], dtype=torch.float64)
    scale = scales[torch.randint(0, len(scales), patches, generator=generator)]
    scale = scale.repeat_interleave(32, -2).repeat_interleave(32, -1)
    return (values * scale[..., :rows, :columns]).to(device, dtype)


def symmetric(n, dtype=torch.float32, device="cpu", seed=0):
    """The upper triangle of a patchy matrix and its mirror image."""
    upper = patchy(n, n, dtype=dtype, device=device, seed=seed).triu()
    return upper + upper.triu(1).mT


NORM_KINDS = ("continuous", "ties", "one value", "decades", "subnormal", "outliers", "specials")


def norms(rng, kind, shape, dtype):
    """Norms with many equal products, with products of zero, below normal numbers, or NaN."""
    if kind == "ties":
        values = rng.integers(0, 4, shape).astype(float)
    elif kind == "one value":
        values = np.full(shape, 0.3)
    elif kind == "decades":
        values = 10.0 ** rng.uniform(-12, 12, shape)
    elif kind == "subnormal":
        lowest = -23 if dtype == torch.float32 else -162
        values = 10.0 ** rng.uniform(lowest, lowest + 4, shape)
    elif kind == "outliers":
        values = np.abs(rng.standard_normal(shape))
        values = np.where(values < 2.2, 0.3, 1e6 * values)
    else:
        values = rng.random(shape)
    if kind == "specials":
        chosen = rng.random(shape)
        values = np.where(chosen < 0.2, 0.0, values)
        values = np.where(chosen > 0.9, rng.choice([np.inf, np.nan, 3e38], shape), values)
    return torch.from_numpy(values).to(dtype)


# ---- Layouts: (..., rows, columns) -> the same shape in other strides ---------------------------


def _misaligned(t):
    """A window amid NaN: odd leading dimension, one element past an aligned address."""
    wide = torch.nn.functional.pad(t, (1, 2 + t.shape[-1] % 2, 1, 1), value=float("nan"))
    return wide[..., 1:-1, 1 : 1 + t.shape[-1]]


def _wide_rows(t):
    """An aligned window in a larger matrix: rows of a multiple of 64 elements, the rest NaN."""
    wide = torch.nn.functional.pad(t, (0, 64 + -t.shape[-1] % 64), value=float("nan"))
    return wide[..., : t.shape[-1]]


def _sliding(t):
    """Overlapping rows: row i starts one element after row i - 1 does."""
    rows, columns = t.shape[-2:]
    line = t.reshape(-1)[: max(rows + columns - 1, 0)]
    if line.numel() < rows + columns - 1 or t.dim() > 2 or t.numel() == 0:
        return t
    return line.as_strided((rows, columns), (1, 1))


# Those of stride 0 and overlapping rows repeat some of the values.
LAYOUTS = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.mT.contiguous().mT,
    "every other row": lambda t: t.repeat_interleave(2, -2)[..., ::2, :],
    "every third column": lambda t: t.repeat_interleave(3, -1)[..., ::3],
    "misaligned": _misaligned,
    "wide rows": _wide_rows,
    "one row": lambda t: t[..., :1, :].expand(t.shape),
    "one column": lambda t: t[..., :1].expand(t.shape),
    "sliding": _sliding,
}
BATCH_LAYOUTS = {
    **LAYOUTS,
    "batch last": lambda t: t.movedim(0, -1).contiguous().movedim(-1, 0),
    "one matrix": lambda t: t[:1].expand(t.shape),
}
