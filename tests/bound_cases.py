"""Products that round in many ways, and how far their results are from the truth.

The truth is exact for float64, by integers; for narrower types it is float64's, whose own error is
far below what the bounds of these types allow, and is added to what is found.
"""

import math

import numpy as np
import torch

import spamm_torch

KINDS = (
    *("normal", "positive", "huge", "tiny", "subnormal", "cancelling", "one large", "wide"),
    *("decay", "banded", "zeros", "alike", "chemistry"),
)
_BLOCKS = (32, 64, (32, 64, 32), (64, 32, 128))


def _range(dtype):
    """The exponents of the largest number, and of the least normal and subnormal ones."""
    info = torch.finfo(dtype)
    return tuple(
        math.floor(math.log2(x)) for x in (info.max, info.tiny, info.smallest_normal * info.eps)
    )


def operands(kind, dtype, shape, random, chemistry):
    """A pair (M, K), (K, N) of one kind, rounded to ``dtype``."""
    m, k, n = shape
    a, b = random.standard_normal((m, k)), random.standard_normal((k, n))
    largest, least, last = _range(dtype)
    if kind in ("positive", "alike"):
        a, b = abs(a), abs(b)
    if kind == "alike":  # every addition rounds in the same way
        a, b = np.full_like(a, 1 + 1 / 3), np.full_like(b, 1 + 1 / 7)
    elif kind == "huge":  # results may overflow
        a, b = (
            x * 2.0 ** random.integers(largest - 12, largest - 1) for x in (a, b * 2.0**-largest)
        )
    elif kind == "tiny":  # products fall below what is normal
        half = -random.integers(-least // 2 - 8, -last // 2 + 4)
        a, b = a * 2.0**half, b * 2.0**half
    elif kind == "subnormal":
        a, b = a * 2.0 ** (last + random.integers(1, 8)), b * 2.0 ** random.integers(-4, 8)
    elif kind == "cancelling" and k > 1:
        half = k // 2
        a[:, half : 2 * half] = a[:, :half]
        b[half : 2 * half] = -b[:half] * (1 + 1e-3 * random.standard_normal((half, n)))
    elif kind == "one large":
        a[random.integers(m), random.integers(k)] *= 2.0 ** random.integers(4, 12)
        b[random.integers(k), random.integers(n)] *= 2.0 ** random.integers(4, 12)
    elif kind == "wide":
        spread = min(largest, -least) // 3
        a, b = (x * 2.0 ** random.integers(-spread, spread // 2, x.shape) for x in (a, b))
    elif kind in ("decay", "banded"):
        away_a, away_b = (abs(np.subtract.outer(*map(np.arange, x.shape))) for x in (a, b))
        a, b = a * 0.8**away_a, b * 0.8**away_b
        if kind == "banded":
            a[away_a > 8], b[away_b > 8] = 0, 0
    elif kind == "zeros":
        a[random.random(a.shape) < 0.9] = 0
        b[: k // 2] = 0
    elif kind == "chemistry":
        left, right = (chemistry[random.integers(len(chemistry))] for _ in range(2))
        at = [random.integers(0, len(left) - size + 1) for size in shape]
        a = left[at[0] : at[0] + m, at[1] : at[1] + k].copy()
        b = right[at[1] : at[1] + k, at[2] : at[2] + n].copy()
    return (torch.from_numpy(x).to(dtype) for x in (a, b))


def cases(dtype, count, device, chemistry, seed=0, most=100):
    """Yields kind, operands and options, ``count`` of them."""
    random = np.random.default_rng(seed)
    for number in range(count):
        kind = KINDS[number % len(KINDS)]
        shape = [int(x) for x in random.integers(1, most, 3)]
        a, b = (x.to(device) for x in operands(kind, dtype, shape, random, chemistry))
        options = {"block": _BLOCKS[random.integers(len(_BLOCKS))], "tau": 0.0}
        if number % 3:
            options = {"block": options["block"], "max_error": 2.0 ** -random.integers(4, 24)}
        added = {}
        if number % 4 == 3:
            input = torch.from_numpy(random.standard_normal((shape[0], shape[2])))
            size = min(1e4, float(a.double().norm() * b.double().norm()) or 1.0)
            added = {"input": (input * size / 64).to(device, dtype)}
            added |= {"alpha": float(random.normal()), "beta": float(random.normal())}
        yield kind, a, b, options, added


def multiplied(a, b, options, added):
    """The result and its SkipInfo."""
    if not added:
        return spamm_torch.mm(a, b, **options, return_info=True)
    rest = {name: added[name] for name in ("alpha", "beta")}
    return spamm_torch.addmm(added["input"], a, b, **rest, **options, return_info=True)


# ---- The truth ----------------------------------------------------------------------------------


class _Exact:
    """float64 numbers as integers of any length, in units of a power of two."""

    def __init__(self, values):
        values = np.atleast_1d(values)
        mantissa, exponent = np.frexp(values)
        whole, exponent = (mantissa * 2.0**53).astype(np.int64), exponent - 53
        self.unit = int(exponent[whole != 0].min(initial=0))
        shifts = np.where(whole != 0, exponent - self.unit, 0)
        self.values = whole.astype(object) << shifts.astype(object)

    @classmethod
    def of(cls, values, unit):
        self = cls.__new__(cls)
        self.values, self.unit = values, unit
        return self

    def __matmul__(self, other):
        return self.of(self.values.dot(other.values), self.unit + other.unit)

    def __mul__(self, other):
        return self.of(self.values * other.values, self.unit + other.unit)

    def __sub__(self, other):
        unit = min(self.unit, other.unit)
        a, b = (x.values << (x.unit - unit) for x in (self, other))
        return self.of(a - b, unit)

    def norm(self):
        squares = int((self.values * self.values).sum())
        spare = max(0, 120 - squares.bit_length()) // 2
        root = math.isqrt(squares << 2 * spare)
        cut = max(0, root.bit_length() - 60)
        return math.ldexp(float(root >> cut), cut + self.unit - spare)


def _exact_error(result, a, b, added):
    a, b, result = (_Exact(x.cpu().numpy()) for x in (a, b, result))
    truth = a @ b
    if added:
        minus_beta = _Exact(np.array([-added["beta"]]))
        input = _Exact(added["input"].cpu().numpy())
        truth = truth * _Exact(np.array([added["alpha"]])) - minus_beta * input
    return (truth - result).norm()


def error(result, a, b, added):
    """norm(result - truth), at least."""
    if result.dtype == torch.float64:
        return _exact_error(result, a, b, added)
    a, b, wide = (x.double() for x in (a, b, result))
    truth, size = a @ b, (a.abs() @ b.abs()).norm()
    if added:
        alpha, beta, input = added["alpha"], added["beta"], added["input"].double()
        truth = alpha * truth + beta * input
        size = abs(alpha) * size + abs(beta) * input.norm()
    unsure = (a.shape[1] + 4) * 2.0**-52 * size
    return ((truth - wide).norm() + unsure).item()
