"""Bounds that leave nothing out: norm(result - truth) <= total_bound, of all that tells it."""

import functools
import math
import random
from fractions import Fraction

import matrices
import numpy as np
import pytest
import support
import torch
import torch.nn.functional as F
from support import one_thread  # noqa: F401  the fixture is automatic

import fuzz
import spamm_torch
from fuzzing import products as drawn
from fuzzing import space
from spamm_torch import linalg, sparse
from spamm_torch.linalg import purification


def seeds(dtype, count):
    """So many, and few of float64, whose truth takes long."""
    return range(2 if dtype == torch.float64 else count)


def distance(x):
    """(rows, columns): how far each entry is from the diagonal."""
    row, column = (torch.arange(size) for size in x.shape[-2:])
    return (row[:, None] - column).abs()


# Kinds of matrices, made of normal numbers.
KINDS = {
    "positive": torch.abs,
    "alike": lambda x: torch.full_like(x, 1 + 1 / 3),  # every addition rounds in the same way
    "wide": lambda x: x * 2.0 ** (3 * x).round(),
    "one large": lambda x: x * torch.where(torch.arange(x.shape[-1]) == 5, 2.0**9, 1.0),
    "cancelling": lambda x: x - 0.999 * x.roll(1, -1),
    "decay": lambda x: x * 0.8 ** distance(x),
    "banded": lambda x: x * (distance(x) <= 8),
    "sparse": lambda x: x * (x.abs() > 1.6),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("set_tf32")  # which cases change
def test_the_bound_holds_for_many_products(monkeypatch, dtype, device, kind):
    """Products of every form and layout, with what skipping and rounding lose."""

    def values(shape, pattern, dtype, seed):
        found = right(shape, pattern, dtype, seed)
        if pattern != "normal" or found.numel() == 0:
            return found
        return KINDS[kind](found.double()).to(dtype)

    right = space.values
    monkeypatch.setattr(space, "values", values)
    normal, rng = ("normal",), random.Random(0)
    of = {"dtype": (str(dtype)[6:],), "pattern_a": normal, "pattern_b": normal}
    for _ in range(25):
        case = {"family": "dense", **space.draw(drawn.DENSE | of, rng)}
        assert fuzz.problem(case, device) is None, case


def test_bounds_are_near_the_error(dtype, device):
    """A bound that says nothing would hold, too."""
    row, ratios = torch.ones(1, 40, dtype=dtype, device=device), []
    info = spamm_torch.mm(row.T, row, tau=math.inf, return_info=True)[1]
    assert 40 <= info.total_bound < 80
    for terms in range(1, 40):
        x = torch.full((40, terms), 4 / 3, dtype=dtype, device=device)
        c, info = spamm_torch.mm(x, x.T, tau=0.0, return_info=True)
        assert info.rounding_bound <= info.total_bound
        off = Fraction(c[0, 0].item()) - Fraction(x[0, 0].item()) ** 2 * terms
        ratios.append(40 * abs(off) / Fraction(info.rounding_bound.item()))
    assert 1e-3 < max(ratios) <= 1


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
            slope = 3 * matrices.normal(40 if number % 4 == 1 else 1, dtype=dtype, device=device)
            more["slope"] = slope.item() if number % 8 == 3 else slope
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


def _hamiltonian(n=96, gap=1.0):
    coupled = matrices.exponential_decay(n, 0.3, 0.4, torch.float64)
    return coupled + torch.diag(gap * (-1.0) ** torch.arange(n)).double()


@functools.cache
def _projector(gap):
    """Eigenvectors refined in extended precision (Ogita and Aishima, 2018)."""
    h = _hamiltonian(gap=gap)
    h, x = (a.numpy().astype(np.longdouble) for a in (h, torch.linalg.eigh(h)[1]))
    for _ in range(2):
        off, inside = np.eye(len(h)) - x.T @ x, x.T @ h @ x
        values = inside.diagonal() / (1 - off.diagonal())
        gaps = values - values[:, None] + np.eye(len(h))
        change = (inside + values * off) / gaps
        np.fill_diagonal(change, off.diagonal() / 2)
        x = x + x @ change
    occupied = x[:, : len(h) // 2]
    p = occupied @ occupied.T
    return 3 * p @ p - 2 * p @ p @ p


LOOSE = [{"schedule": linalg.loose_then_tight(error, loose=10)} for error in (1e-8, 1e-6)]


@pytest.mark.parametrize("form", ["dense", "sparse"])
@pytest.mark.parametrize("knob", ["max_error", "error", *LOOSE], ids=str)
@pytest.mark.parametrize("gap", [2.0, 0.7])
def test_purifications(form, knob, gap):
    h = _hamiltonian(gap=gap)
    given = (h, {"block": 32}) if form == "dense" else (sparse.from_dense(h, 32), {})
    errors = {"max_error": (0.0, 1e-10, 1e-8, 1e-6), "error": (1e-3, 1e-6, 1e-9)}.get(str(knob))
    for options in [{knob: error} for error in errors] if errors else [knob]:
        found = linalg.purify(given[0], len(h), **options, **given[1])
        x = found.matrix if form == "dense" else sparse.to_dense(found.matrix)
        assert 0 < np.linalg.norm(x.numpy() - _projector(gap)) <= found.total_bound
        assert found.total_bound <= options.get("error", 1e-2)
        if options.get("error", 0) > 1e-6:
            assert any(step.valid_ratio < 1 for step in found.iterations)


def test_an_error_that_rounding_does_not_allow():
    with pytest.raises(linalg.NotConverged, match="expected an error that rounding"):
        linalg.purify(_hamiltonian(), 96, error=1e-15, block=32)


def test_purifications_of_which_nothing_is_proven():
    torchs_own = linalg.constant(linalg.Budget(None))
    assert linalg.purify(_hamiltonian(), 96, schedule=torchs_own).total_bound == math.inf
    start, end = (0.0, 0.0), (80.0, 1e-9, 0.0)

    def bound(error, end=end):
        return purification.prove([(True, error), (False, error)] * 4, start, end, 160, 80)[0]

    assert 1e-6 < bound(1e-7) < 1e-4
    assert bound(0.3) == math.inf  # no gap is left
    assert bound(1e-7, (79.0, 1e-9, 0.0)) == math.inf  # not so many states
    assert bound(1e-7, (80.0, 0.3, 0.0)) == math.inf  # not near 0 and 1
    assert bound(math.nan) == bound(math.inf) == math.inf


# ---- The estimate -------------------------------------------------------------------------------


def test_the_estimate_is_seldom_below_the_error(dtype, device):
    generator = torch.Generator(device).manual_seed(0)
    a, b = (matrices.fading(100, 100, dtype, device, seed=seed) for seed in (0, 1))
    input = matrices.normal(100, dtype=dtype, device=device)
    c = spamm_torch.addmm(input, a, b, beta=2, alpha=-1, max_error=0.05, block=32)
    added = {"input": input, "beta": 2, "alpha": -1}
    error = (c.double() - (2 * input.double() - a.double() @ b.double())).norm()
    of = functools.partial(spamm_torch.linalg.error_estimate, c, a, b, **added, generator=generator)
    for options, most in (({}, 3), ({"probes": 100}, 1.6), ({"confidence": 0.5}, 2)):
        found = torch.stack([of(**options) for _ in range(40)]) / error
        share = (found >= 1).double().mean()
        assert share >= options.get("confidence", 0.999) - 1e-6
        assert found.mean() < most
    # The worst of all errors: of one rank.
    c = torch.zeros(100, 100, dtype=dtype, device=device)
    found = [spamm_torch.linalg.error_estimate(c, a[:, :1], b[:1]) for _ in range(40)]
    assert min(found) >= (a[:, :1].double() @ b[:1].double()).norm()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_the_estimate_of_block_sparse_matrices(dtype, device):
    """The bounds of the dense ones, whichever of them are block-sparse."""
    sparse = spamm_torch.sparse
    a = sparse.from_dense(matrices.fading(128, 192, dtype, device, seed=0), 32, drop=0.1)
    b = sparse.from_dense(matrices.fading(192, 64, dtype, device, seed=1), 32, drop=0.1)
    input = sparse.from_dense(torch.eye(128, 64, dtype=dtype, device=device), 32)
    c = sparse.from_dense(spamm_torch.mm(*map(sparse.to_dense, (a, b)), max_error=0.05), 32)
    given = {"c": c, "a": a, "b": b, "input": input}
    dense = {name: sparse.to_dense(x) for name, x in given.items()}

    def estimate(**of):
        generator = torch.Generator(device).manual_seed(0)
        return spamm_torch.linalg.error_estimate(**of, beta=1e-3, generator=generator)

    right = estimate(**dense)
    assert right > 0
    for changed in (given, *({name: x} for name, x in given.items())):
        torch.testing.assert_close(estimate(**dense | changed), right, rtol=1e-9, atol=0)
    none = sparse.from_dense(torch.zeros(0, 64, dtype=dtype, device=device), 32)
    empty = torch.zeros(0, 192, dtype=dtype, device=device)
    assert spamm_torch.linalg.error_estimate(none, empty, b) == 0


def test_bounds_where_nothing_is_multiplied():
    """alpha = 0: sums that overflow do not count, dense or block-sparse."""
    c, a, b = (matrices.normal(64, 64, seed=seed) for seed in range(3))
    given = {"alpha": 0, "beta": 0.5, "valid_ratio": 0.25, "return_info": True, "block": 32}
    for make in (torch.clone, lambda x: spamm_torch.sparse.from_dense(x, 32)):
        found, info = spamm_torch.addmm(make(c), make(a * 1e18), make(b * 1e18), **given)
        error = (found.to_dense() - c / 2).double().norm()
        assert error <= info.total_bound < 1
        assert not info.error_bound.isnan()


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"probes": 0}, ValueError, "at least 1 of probes"),
        ({"confidence": 1.0}, ValueError, "between 0 and 1; got 20 and 1.0"),
        ({"a": torch.ones(3, 4)}, RuntimeError, r"expected c \(M, N\), a \(M, K\) and b"),
        ({"a": [1]}, TypeError, "a must be"),
        ({"a": torch.eye(4).to_sparse()}, TypeError, "error_estimate expects dense or sparse_bsr"),
        (
            {name: torch.eye(64).to_sparse_bsr(32) for name in "cab"}
            | {"input": torch.eye(32).to_sparse_bsr(32)},
            RuntimeError,
            r"must have c's shape \(64, 64\); got \(32, 32\)",
        ),
    ],
)
def test_bad_arguments_of_the_estimate(options, kind, words):
    given = {name: torch.ones(4, 4) for name in "cab"} | options
    with pytest.raises(kind, match=words):
        spamm_torch.linalg.error_estimate(**given)


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
