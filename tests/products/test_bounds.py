"""Bounds that leave nothing out: norm(result - truth) <= total_bound, of all that tells it."""

import functools
import json
import math

import bound_cases
import matrices
import pytest
import support
import torch
import torch.nn.functional as F
from support import one_thread  # noqa: F401  the fixture is automatic

import spamm_torch
from models.water import matrices as water
from spamm_torch import linalg, sparse
from spamm_torch.linalg import projectors


@functools.cache
def chemistry():
    """F, S and D of 36 water molecules, by the program ergo."""
    of = water.load()
    return [x.numpy() for x in (of.fock, of.overlap, of.density)]


def seeds(dtype, count):
    """So many, and few of float64, whose truth takes long."""
    return range(2 if dtype == torch.float64 else count)


def looseness(dtype, device, count):
    """Of the largest error over its bound, by kind of operands: of all, and of rounding alone."""
    most = 40 if dtype == torch.float64 else 100
    found = {kind: (0.0, 0.0) for kind in bound_cases.KINDS}
    given = bound_cases.cases(dtype, count, device, chemistry(), most=most)
    for kind, a, b, options, added in given:
        c, info = bound_cases.multiplied(a, b, options, added)
        bound = info.total_bound.item()
        assert not math.isnan(bound)
        if math.isinf(bound):
            assert kind == "huge" or not c.isfinite().all()  # it may overflow, or does
            continue
        error = bound_cases.error(c, a, b, added)
        assert error <= bound, (kind, a.shape, b.shape, options, error, bound)
        ratio, of_rounding = error / bound if bound else 0.0, 0.0
        if options.get("tau") == 0.0:
            assert error <= info.rounding_bound.item()
            of_rounding = ratio
        found[kind] = tuple(map(max, found[kind], (ratio, of_rounding)))
    return found


def test_the_bound_holds_for_2000_products(dtype, device):
    found = looseness(dtype, device, 2000)
    print(f"\n{device.type} {dtype}: largest error over bound", json.dumps(found))
    # A bound that says nothing would hold, too.
    assert max(ratio for ratio, _ in found.values()) > 0.5
    assert max(ratio for _, ratio in found.values()) > 1e-3


def test_batches_and_layers(dtype, device):
    for seed in seeds(dtype, 20):
        a, b = (matrices.fading(90, 90, dtype, device, seed=seed + i) for i in (0, 40))
        batch = torch.stack([a, b])
        c, info = spamm_torch.bmm(batch, batch.mT, max_error=1e-3, block=32, return_info=True)
        errors = [bound_cases.error(x, y, y.mT, {}) for x, y in zip(c, batch, strict=True)]
        assert math.hypot(*errors) <= info.total_bound
        bias = matrices.normal(90, dtype=dtype, device=device)
        c, info = spamm_torch.linear(a, b, bias, max_error=1e-3, block=32, return_info=True)
        added = {"input": bias.expand(90, 90), "alpha": 1.0, "beta": 1.0}
        assert bound_cases.error(c, a, b.t(), added) <= info.total_bound


@pytest.mark.parametrize("commute", [False, True])
def test_symmetric_products(dtype, commute, device):
    for seed in seeds(dtype, 20):
        a = matrices.symmetric(80, dtype=dtype, device=device, seed=seed)
        b = a * 2 if commute else a
        knob = {"max_error": 2.0 ** -(5 * seed + 3), "block": 32, "symmetric": True}
        c, info = spamm_torch.mm(a, b, **knob, return_info=True)
        assert bound_cases.error(c, a, b, {}) <= info.total_bound


def test_nothing_but_zeros(device):
    a = torch.zeros(70, 70, device=device)
    for tau in (0.0, 1.0):
        info = spamm_torch.mm(a, a, tau=tau, return_info=True)[1]
        assert info.total_bound == info.rounding_bound == 0
    assert spamm_torch.mm(a[:0], a, tau=0.0, return_info=True)[1].total_bound == 0


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_what_is_not_finite_has_no_bound(bad, device):
    a = matrices.normal(70, 70, device=device)
    a[3, 4] = bad
    for b in (a, torch.zeros_like(a)):
        assert spamm_torch.mm(a, b, tau=1.0, return_info=True)[1].total_bound == math.inf


def test_out_may_be_an_operand(device):
    x = matrices.fading(100, 100, device=device)
    given, options = x.clone(), {"beta": 2, "alpha": -1, "max_error": 1e-4, "block": 32}
    _, expected = spamm_torch.addmm(x, x, x, **options, return_info=True)
    c, info = spamm_torch.addmm(x, x, x, **options, out=x, return_info=True)
    assert info.total_bound == expected.total_bound
    added = {"input": given, "alpha": -1.0, "beta": 2.0}
    assert bound_cases.error(c, given, given, added) <= info.total_bound


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
        c, info = spamm_torch.conv2d(x, w, **more, **knob, return_info=True)
        for addend in (None if bias is None else bias[:, None, None], residual):
            y = y if addend is None else y + addend.double()
        truth = ACTIVATIONS[activation](y)
        unsure = 1e-13 * (y.norm() + x.double().norm() * w.double().norm())
        bound = info.total_bound + (unsure if dtype == torch.float64 else -unsure)
        assert (c.double() - truth).norm() <= bound
        if activation != "relu6" or residual is None or dtype != torch.float16:
            assert bound < math.inf


def test_torchs_own_convolution_has_no_bound(device):
    x, w = matrices.normal(1, 8, 6, 6, device=device), matrices.normal(8, 4, 3, 3, device=device)
    for tau, expected in ((0.0, True), (torch.zeros(()), True), (1e-6, False)):
        info = spamm_torch.conv2d(x, w, groups=2, tau=tau, return_info=True)[1]
        assert info.total_bound.isinf() == expected


# ---- Block-sparse products and functions of matrices --------------------------------------------


@pytest.mark.parametrize("drop", [None, math.inf])
def test_block_sparse_products(dtype, drop):
    for seed in seeds(dtype, 30):
        a, b, input = (matrices.fading(96, 96, dtype, seed=3 * seed + i) for i in range(3))
        x, y, z = (sparse.from_dense(m, 32, drop=1e-3) for m in (a, b, input))
        a, b, input = map(sparse.to_dense, (x, y, z))
        knob = {"max_error": 2.0 ** -(5 * seed % 24 + 3), "drop": drop}
        c, info = spamm_torch.mm(x, y, **knob, return_info=True)
        assert bound_cases.error(sparse.to_dense(c), a, b, {}) <= info.total_bound
        scale = {"beta": 2.0, "alpha": -0.3}
        c, info = spamm_torch.addmm(z, x, y, **scale, **knob, return_info=True)
        added = {"input": input, **scale}
        assert bound_cases.error(sparse.to_dense(c), a, b, added) <= info.total_bound
        assert info.total_bound >= info.error_bound.double()


def _hamiltonian(n=160, gap=1.0):
    coupled = matrices.exponential_decay(n, 0.3, 0.4, torch.float64)
    return coupled + torch.diag(gap * (-1.0) ** torch.arange(n)).double()


def _projector(h, occupied):
    vectors = torch.linalg.eigh(h)[1][:, :occupied]
    return vectors @ vectors.mT


def _forms(h):
    return {"dense": (h, {"block": 32}), "sparse": (sparse.from_dense(h, 32), {})}


@pytest.mark.parametrize("form", ["dense", "sparse"])
@pytest.mark.parametrize("max_error", [0.0, 1e-10, 1e-8, 1e-6])
def test_the_bound_of_a_purification(form, max_error):
    for gap in (2.0, 0.7):
        h = _hamiltonian(gap=gap)
        a, options = _forms(h)[form]
        for schedule in (
            linalg.constant(linalg.Budget(max_error)),
            linalg.loose_then_tight(max_error, loose=10),
        ):
            found = linalg.purify(a, 160, schedule=schedule, **options)
            x = found.matrix if form == "dense" else sparse.to_dense(found.matrix)
            error = (x - _projector(h, 80)).norm().item()
            assert error <= found.total_bound + 1e-12
            if max_error <= 1e-8 and schedule.is_constant:
                assert found.total_bound < 1e-4


@pytest.mark.parametrize("form", ["dense", "sparse"])
@pytest.mark.parametrize("error", [1e-3, 1e-6, 1e-9])
def test_the_error_of_a_purification_is_the_knob(form, error):
    h = _hamiltonian()
    a, options = _forms(h)[form]
    found = linalg.purify(a, 160, error=error, **options)
    x = found.matrix if form == "dense" else sparse.to_dense(found.matrix)
    assert (x - _projector(h, 80)).norm() <= found.total_bound <= error
    if error > 1e-6:
        assert any(step.valid_ratio < 1 for step in found.iterations)


def test_an_error_that_rounding_does_not_allow():
    with pytest.raises(linalg.NotConverged, match="expected an error that rounding"):
        linalg.purify(_hamiltonian(), 160, error=1e-15, block=32)


def test_purifications_of_which_nothing_is_proven():
    torchs_own = linalg.constant(linalg.Budget(None))
    assert linalg.purify(_hamiltonian(), 160, schedule=torchs_own).total_bound == math.inf
    start, end = projectors.Start(0.0, 0.0), projectors.End(80.0, 1e-9, 0.0)

    def bound(error, end=end):
        return projectors.prove([(True, error), (False, error)] * 4, start, end, 160, 80).bound

    assert 1e-6 < bound(1e-7) < 1e-4
    assert bound(0.3) == math.inf  # no gap is left
    assert bound(1e-7, end._replace(trace=79.0)) == math.inf  # not so many states
    assert bound(1e-7, end._replace(residual=0.3)) == math.inf  # not near 0 and 1
    assert bound(math.nan) == bound(math.inf) == math.inf


@pytest.mark.parametrize("n", [2, 3, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_bound_of_a_power(n, dtype):
    a = matrices.fading(150, 150, torch.float64, rate=40).to(dtype)
    for max_error in (0.0, 1e-4):
        found = linalg.matrix_power(a, n, max_error=max_error, block=32)
        error = (found.matrix.double() - torch.linalg.matrix_power(a.double(), n)).norm()
        assert error <= found.total_bound + 1e-13 * a.norm() ** n
        assert found.error_bound <= found.total_bound < math.inf


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


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"probes": 0}, ValueError, "at least 1 of probes"),
        ({"confidence": 1.0}, ValueError, "between 0 and 1; got 20 and 1.0"),
        ({"a": torch.ones(3, 4)}, RuntimeError, r"expected c \(M, N\), a \(M, K\) and b"),
        ({"a": [1]}, TypeError, "a must be"),
    ],
)
def test_bad_arguments_of_the_estimate(options, kind, words):
    given = {name: torch.ones(4, 4) for name in "cab"} | options
    with pytest.raises(kind, match=words):
        spamm_torch.linalg.error_estimate(**given)
