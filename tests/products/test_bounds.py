"""Bounds that leave nothing out: norm(result - truth) <= total_bound, of all that tells it."""

import functools
import json
import math

import matrices
import numpy as np
import pytest
import reference
import support
import torch
import torch.nn.functional as F
from support import one_thread  # noqa: F401  the fixture is automatic

import spamm_torch
from models.water import matrices as water
from spamm_torch import sparse


@functools.cache
def chemistry():
    """F, S and D of 36 water molecules, by the program ergo."""
    of = water.load()
    return [x.numpy() for x in (of.fock, of.overlap, of.density)]


def seeds(dtype, count):
    """So many, and few of float64, whose truth takes long."""
    return range(2 if dtype == torch.float64 else count)


def looseness(dtype, device, count):
    """Least ratios of the largest error over its bound, by kind of operands: of all, and of
    rounding alone.
    """
    most = 40 if dtype == torch.float64 else 100
    found = {kind: (0.0, 0.0) for kind in KINDS}
    given = cases(dtype, count, device, chemistry(), most=most)
    for kind, a, b, options, added in given:
        c, info = multiplied(a, b, options, added)
        bound = info.total_bound.item()
        assert not math.isnan(bound)
        if math.isinf(bound):
            assert kind == "huge" or not c.isfinite().all()  # it may overflow, or does
            continue
        error = error_of(c, a, b, added)
        assert error <= bound, (kind, a.shape, b.shape, options, error, bound)
        ratio, of_rounding = error / bound if bound else 0.0, 0.0
        if options.get("tau") == 0.0:
            assert error <= info.rounding_bound.item()
            of_rounding = ratio
        found[kind] = tuple(map(max, found[kind], (ratio, of_rounding)))
    return found


@pytest.mark.parametrize("count", [400, pytest.param(2000, marks=pytest.mark.thorough)])
def test_the_bound_holds_for_many_products(dtype, device, count):
    found = looseness(dtype, device, count)
    print(f"\n{device.type} {dtype}: largest error over bound", json.dumps(found))
    # A bound that says nothing would hold, too.
    assert max(ratio for ratio, _ in found.values()) > 0.5
    assert max(ratio for _, ratio in found.values()) > 1e-3


@pytest.mark.parametrize("own", [torch.float32, torch.float64])
def test_one_budget_for_skipping_and_precision_holds_for_2000_products(own):
    """The oracle's rule alone: no kernel follows it."""
    drawn, largest = np.zeros(4, int), 0.0
    for number, (_, a, b, options, _) in enumerate(cases(own, 2000, "cpu", chemistry(), most=40)):
        m, k, n = (edge // 4 for edge in reference.edges(options["block"]))
        maps = reference.norm_map(a, (m, k)), reference.norm_map(b, (k, n))
        size = np.prod([np.linalg.norm(norms.astype(np.longdouble)) for norms in maps])
        whole = reference.error_bound(*maps, math.inf)
        if not 0 < float(size) < torch.finfo(own).max or not whole < torch.finfo(own).max:
            continue
        budget = size * 2.0 ** -(number % 40)
        chosen, bound = reference.classes(*maps, (m, k, n), budget)
        assert bound <= budget
        c = torch.from_numpy(reference.multiply_by_class(a, b, chosen, (m, k, n)))
        limits, inner = torch.finfo(own), a.shape[1]
        rounding = 2 * inner * limits.eps * whole
        rounding += 2 * (inner + 8) * limits.tiny * math.sqrt(c.numel())
        error = error_of(c, a, b, {})
        assert error <= bound + rounding, (number, a.shape, b.shape, options)
        drawn += np.bincount(chosen.ravel(), minlength=4)
        largest = max(largest, float(error / (bound + rounding)))
    assert all(drawn > 100), drawn
    assert largest > 0.5  # a bound that says nothing would hold, too


def test_batches_and_layers(dtype, device):
    for seed in seeds(dtype, 20):
        a, b = (matrices.fading(90, 90, dtype, device, seed=seed + i) for i in (0, 40))
        batch = torch.stack([a, b])
        c, info = spamm_torch.bmm(batch, batch.mT, max_error=1e-3, block=32, return_info=True)
        errors = [error_of(x, y, y.mT, {}) for x, y in zip(c, batch, strict=True)]
        assert math.hypot(*errors) <= info.total_bound
        bias = matrices.normal(90, dtype=dtype, device=device)
        c, info = spamm_torch.linear(a, b, bias, max_error=1e-3, block=32, return_info=True)
        added = {"input": bias.expand(90, 90), "alpha": 1.0, "beta": 1.0}
        assert error_of(c, a, b.t(), added) <= info.total_bound


@pytest.mark.parametrize("commute", [False, True])
def test_symmetric_products(dtype, commute, device):
    for seed in seeds(dtype, 20):
        a = matrices.symmetric(80, dtype=dtype, device=device, seed=seed)
        b = a * 2 if commute else a
        knob = {"max_error": 2.0 ** -(5 * seed + 3), "block": 32, "symmetric": True}
        c, info = spamm_torch.mm(a, b, **knob, return_info=True)
        assert error_of(c, a, b, {}) <= info.total_bound


def test_nothing_but_zeros_and_what_is_not_finite(device):
    a = torch.zeros(70, 70, device=device)
    for tau in (0.0, 1.0):
        info = spamm_torch.mm(a, a, tau=tau, return_info=True)[1]
        assert info.total_bound == info.rounding_bound == 0
    assert spamm_torch.mm(a[:0], a, tau=0.0, return_info=True)[1].total_bound == 0
    for bad in (math.inf, math.nan):
        x = matrices.normal(70, 70, device=device)
        x[3, 4] = bad
        for b in (x, a):
            assert spamm_torch.mm(x, b, tau=1.0, return_info=True)[1].total_bound == math.inf


def test_out_may_be_an_operand(device):
    x = matrices.fading(100, 100, device=device)
    given, options = x.clone(), {"beta": 2, "alpha": -1, "max_error": 1e-4, "block": 32}
    _, expected = spamm_torch.addmm(x, x, x, **options, return_info=True)
    c, info = spamm_torch.addmm(x, x, x, **options, out=x, return_info=True)
    assert info.total_bound == expected.total_bound
    added = {"input": given, "alpha": -1.0, "beta": 2.0}
    assert error_of(c, given, given, added) <= info.total_bound


# ---- Convolutions -------------------------------------------------------------------------------


# F's hardswish has 1 / 6 in float32 on CUDA.
ACTIVATIONS = support.ACTIVATIONS | {"hardswish": lambda x: x * (x + 3).clamp(0, 6) / 6}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_convolutions(dtype, activation, device, exact_reference):
    random = torch.Generator().manual_seed(0)
    for number in range(30):
        channels, images = (int(torch.randint(1, 70, (), generator=random)) for _ in range(2))
        scale = 2.0 ** torch.randint(-6, 6, (), generator=random)
        x = matrices.normal(images % 5 + 1, channels, 7, 6, dtype=dtype, device=device, seed=number)
        w = matrices.normal(40, channels, 3, 3, dtype=dtype, device=device, seed=number + 1) * scale
        bias = matrices.normal(40, dtype=dtype, device=device) if number % 2 else None
        y = F.conv2d(x.double(), w.double(), padding=1)
        residual = torch.randn_like(y).to(dtype) if number % 3 == 2 else None
        more = {"bias": bias, "residual": residual, "activation": activation, "padding": 1}
        knob = {"tau": 0.0} if number % 4 == 0 else {"max_error": 2.0 ** -(number % 12)}
        truth = ACTIVATIONS[activation]
        if activation == "leaky_relu" and number % 2:
            slope = more["slope"] = 3 * matrices.normal(40, dtype=dtype, device=device)
            truth = functools.partial(F.prelu, weight=slope.double())
        c, info = spamm_torch.conv2d(x, w, **more, **knob, return_info=True)
        for addend in (None if bias is None else bias[:, None, None], residual):
            y = y if addend is None else y + addend.double()
        truth = truth(y)
        unsure = 1e-13 * (y.norm() + x.double().norm() * w.double().norm())
        bound = info.total_bound + (unsure if dtype == torch.float64 else -unsure)
        assert (c.double() - truth).norm() <= bound
        if "tau" in knob and support.is_torchs(x, w, padding=1, **knob):
            assert bound == math.inf
        elif activation != "relu6" or residual is None or dtype != torch.float16:
            assert bound < math.inf


def test_convolutions_of_float64_and_exact_sums(device):
    for seed in range(6):
        x = matrices.normal(2, 5, 7, 6, dtype=torch.float64, device=device, seed=seed)
        w = matrices.normal(40, 5, 3, 3, dtype=torch.float64, device=device, seed=seed + 1)
        bias = matrices.normal(40, dtype=torch.float64, device=device)
        knob = {"max_error": 2.0 ** -(4 * seed)} if seed % 2 else {"tau": 0.0}
        c, info = spamm_torch.conv2d(x, w, bias, padding=1, **knob, return_info=True)
        columns = F.unfold(x, 3, padding=1).transpose(0, 1).flatten(1)
        added = {"input": bias[:, None].expand(40, columns.shape[1]), "alpha": 1.0, "beta": 1.0}
        error = error_of(c.transpose(0, 1).flatten(1), w.flatten(1), columns, added)
        assert 0 < error <= info.total_bound


def test_torchs_own_convolution_has_no_bound(device):
    x, w = matrices.normal(1, 8, 6, 6, device=device), matrices.normal(8, 4, 3, 3, device=device)
    for tau, expected in ((0.0, True), (torch.zeros(()), True), (1e-6, False)):
        info = spamm_torch.conv2d(x, w, groups=2, tau=tau, return_info=True)[1]
        assert info.total_bound.isinf() == expected


# ---- Block-sparse products and functions of matrices --------------------------------------------


@pytest.mark.parametrize("drop", [None, math.inf])
def test_block_sparse_products(dtype, drop):
    """With what is added; tests/robustness has the others."""
    for seed in seeds(dtype, 30):
        a, b, input = (matrices.fading(96, 96, dtype, seed=3 * seed + i) for i in range(3))
        x, y, z = (sparse.from_dense(m, 32, drop=1e-3) for m in (a, b, input))
        a, b, input = map(sparse.to_dense, (x, y, z))
        knob = {"max_error": 2.0 ** -(5 * seed % 24 + 3), "drop": drop}
        scale = {"beta": 2.0, "alpha": -0.3}
        c, info = spamm_torch.addmm(z, x, y, **scale, **knob, return_info=True)
        added = {"input": input, **scale}
        assert error_of(sparse.to_dense(c), a, b, added) <= info.total_bound
        assert info.total_bound >= info.error_bound.double()


def test_bounds_where_nothing_is_multiplied():
    """alpha = 0: sums that overflow do not count, dense or block-sparse."""
    c, a, b = (matrices.normal(64, 64, seed=seed) for seed in range(3))
    given = {"alpha": 0, "beta": 0.5, "valid_ratio": 0.25, "return_info": True, "block": 32}
    for make in (torch.clone, lambda x: spamm_torch.sparse.from_dense(x, 32)):
        found, info = spamm_torch.addmm(make(c), make(a * 1e18), make(b * 1e18), **given)
        error = (found.to_dense() - c / 2).double().norm()
        assert error <= info.total_bound < 1
        assert not info.error_bound.isnan()


# ---- Products that round in many ways, and how far their results are from the truth -------------


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


def error_of(result, a, b, added):
    """norm(result - truth), at least: in float64, or in long double of float64."""
    wide = np.longdouble if result.dtype == torch.float64 else np.float64
    a, b, found = (x.cpu().double().numpy().astype(wide) for x in (a, b, result))
    truth, size = a @ b, np.linalg.norm(abs(a) @ abs(b))
    if added:
        alpha, beta = added["alpha"], added["beta"]
        input = added["input"].cpu().double().numpy().astype(wide)
        truth = alpha * truth + beta * input
        size = abs(alpha) * size + abs(beta) * np.linalg.norm(input)
    return float(np.linalg.norm(truth - found) + (a.shape[1] + 4) * np.finfo(wide).eps * size)
