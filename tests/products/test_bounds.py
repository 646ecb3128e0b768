"""Bounds that leave nothing out: norm(result - truth) <= total_bound, of all that tells it."""

import functools
import math
import random
from fractions import Fraction

import matrices
import pytest
import support
import torch
import torch.nn.functional as F
from support import one_thread  # noqa: F401  the fixture is automatic

import fuzz
import spamm_torch
from fuzzing import products as drawn
from fuzzing import space


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
    of = {"dtype": (str(dtype)[6:],), "pattern_a": normal, "pattern_b": normal, "tf32": (False,)}
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
        c = c.transpose(0, 1).flatten(1)
        drawn.expect_bound(c, w.flatten(1), columns, info, bias[:, None])


def test_torchs_own_convolution_has_no_bound(device):
    x, w = matrices.normal(1, 8, 6, 6, device=device), matrices.normal(8, 4, 3, 3, device=device)
    for tau, expected in ((0.0, True), (torch.zeros(()), True), (1e-6, False)):
        info = spamm_torch.conv2d(x, w, groups=2, tau=tau, return_info=True)[1]
        assert info.total_bound.isinf() == expected


def test_bounds_where_nothing_is_multiplied():
    """alpha = 0: sums that overflow do not count, dense or block-sparse."""
    c, a, b = (matrices.normal(64, 64, seed=seed) for seed in range(3))
    given = {"alpha": 0, "beta": 0.5, "valid_ratio": 0.25, "return_info": True, "block": 32}
    for make in (torch.clone, lambda x: spamm_torch.sparse.from_dense(x, 32)):
        found, info = spamm_torch.addmm(make(c), make(a * 1e18), make(b * 1e18), **given)
        error = (found.to_dense() - c / 2).double().norm()
        assert error <= info.total_bound < 1
        assert not info.error_bound.isnan()
