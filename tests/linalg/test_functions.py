"""Functions of matrices, dense and block-sparse, against eigenvectors; what they refuse."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from support import (
    one_thread,  # noqa: F401  the fixture is automatic
)

from density import sources
from density.measuring import measure, methods
from density.sources import Problem
from models.files import UserError
from spamm_torch import linalg, sparse

N = 150  # of 160 rows in blocks of 32
FORMS = ("dense", "sparse", "padded")


def decaying(seed=0, base=0.6):
    """Symmetric, about 1 on the diagonal."""
    generator = torch.Generator().manual_seed(seed)
    i = torch.arange(N)
    a = torch.rand(N, N, generator=generator, dtype=torch.float64) - 0.5
    return (a + a.mT) * base ** (i[:, None] - i).abs().double()


def given(a, form):
    """A matrix in a form, and the options that say which."""
    if form == "dense":
        return a, {"block": 32}
    if form == "sparse":
        a = torch.block_diag(a, torch.eye(10, dtype=a.dtype))  # no padding
        return sparse.from_dense(a, 32), {}
    return sparse.from_dense(a, 32), {"size": N}


def dense(a):
    return a if a.layout == torch.strided else sparse.to_dense(a, (N, N))


def function_of(a, function):
    values, vectors = torch.linalg.eigh(a)
    return (vectors * function(values)) @ vectors.mT


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("n", [0, 1, 2, 3, 7, 12])
@pytest.mark.parametrize("max_error", [0.0, 1e-6, 1e-3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_matrix_power(form, n, max_error, dtype):
    a = (decaying() + 0.1 * decaying(1).triu()).to(dtype)  # not symmetric
    given_a, options = given(a, form)
    found = linalg.matrix_power(given_a, n, max_error=max_error, **options)
    whole = (given_a if form == "dense" else sparse.to_dense(given_a)).double()
    right = torch.linalg.matrix_power(whole, n)
    if form == "padded" and n == 0:
        right.diagonal()[N:] = 0
    got = found.matrix if form == "dense" else sparse.to_dense(found.matrix)
    error, size = torch.linalg.vector_norm(got - right), torch.linalg.vector_norm(whole)
    rounding = max(1, size**n) * (1e-13 if dtype == torch.float64 else 1e-5)
    assert error <= found.error_bound + rounding
    assert [step.step for step in found.iterations][:2] == ["a^2", "a^3" if n in (3, 7) else "a^4"][
        : len(found.iterations)
    ]
    assert (found.error_bound > 0) == (max_error > 0 and n > 1)


@pytest.mark.parametrize("form", FORMS)
def test_in_basis(form):
    f, right = decaying(1), function_of(torch.eye(N).double() + 0.3 * decaying(), torch.rsqrt)
    (a, options), (z, _) = given(f, form), given(right, form)
    found = linalg.in_basis(a, z, max_error=0.0, **options)
    torch.testing.assert_close(dense(found.matrix)[:N, :N], right @ f @ right)
    assert found.matrix.layout == a.layout


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("max_error", [1e-7, 1e-9])
def test_purify(form, max_error):
    h = decaying(base=0.4) + torch.diag(2.0 * (-1.0) ** torch.arange(N)).double()
    a, options = given(h, form)
    if form == "sparse":  # what it adds lies at 1, above the occupied states
        assert torch.linalg.eigvalsh(h)[N // 2 - 1] < 0
    heard = []
    found = linalg.purify(
        a, N, max_error=max_error, callback=lambda *said: heard.append(said), **options
    )
    values, vectors = torch.linalg.eigh(h)
    right = vectors[:, : N // 2] @ vectors[:, : N // 2].mT
    x = dense(found.matrix)
    assert x.dtype == torch.float64
    energy = 2 * (x * h).sum() - 2 * values[: N // 2].sum()
    assert abs(energy) <= 10 * max_error * N
    assert torch.linalg.vector_norm(x - right) <= max_error * math.sqrt(N / 2)
    off = torch.linalg.vector_norm(x @ h - h @ x)
    assert off <= found.residual <= off + max_error * math.sqrt(N) * 5
    assert [number for number, _ in heard] == list(range(len(found.iterations)))
    assert [step.residual for step in found.iterations] == [residual for _, residual in heard]
    assert {step.dtype for step in found.iterations} == {torch.float64}
    assert found.error_bound == sum(step.error_bound for step in found.iterations) > 0
    assert all(0 < step.valid_ratio <= 1 for step in found.iterations)
    if form == "padded":
        assert not sparse.to_dense(found.matrix)[N:].any()


@pytest.mark.parametrize("form", ["dense", "sparse"])
def test_gershgorin(form):
    a = decaying()
    lowest, highest = linalg.gershgorin(given(a, form)[0])
    values = torch.linalg.eigvalsh(a)
    assert lowest <= values[0]
    assert values[-1] <= highest
    radius = a.abs().sum(1) - a.diagonal().abs()
    assert lowest == pytest.approx(float((a.diagonal() - radius).min()))


# ---- Purification --------------------------------------------------------------------------------


SITES = 320


@pytest.fixture(scope="module")
def chain():
    return sources.chain(SITES, 0.2)


@pytest.fixture(scope="module")
def waters():
    """The embedded cluster, its F in an orthogonal basis."""
    problem = sources.embedded("default")
    z = linalg.inverse_factor(problem.overlap, max_error=1e-11, block=32).matrix
    fock = linalg.in_basis(problem.fock, z, max_error=1e-13, block=32).matrix
    return replace(problem, fock=fock)


def purify(fock, occupied, **given):
    return linalg.purify(fock, 2 * occupied, **given, block=32)


@pytest.mark.parametrize("max_error", [1e-7, 1e-9])
@pytest.mark.parametrize(("name", "most"), [("chain", 3), ("waters", 10)])
def test_the_energy_is_off_by_about_what_was_allowed(request, device, name, most, max_error):
    """In hartree an atom."""
    problem = request.getfixturevalue(name)
    run = purify(problem.fock.to(device), problem.occupied, energy_error=max_error)
    x = run.matrix.cpu()
    assert x.dtype == torch.float64
    energy = 2 * torch.linalg.eigvalsh(problem.fock)[: problem.occupied].sum().item()
    assert abs(2 * (x * problem.fock).sum().item() - energy) < most * max_error * problem.atoms
    assert torch.linalg.vector_norm(x @ x - x) < 1e3 * max_error  # each may lose max_error * 160
    assert 2 * x.trace().item() == pytest.approx(problem.electrons, abs=300 * most * max_error)
    assert name == "waters" or max(step.valid_ratio for step in run.iterations) < 0.5


@pytest.mark.parametrize("gap", [2.0, 0.5, 0.2])
def test_the_last_four_iterations_are_accurate(gap):
    """The first step is predicted; a pair of steps more is what a wrong guess may cost."""
    problem = sources.chain(200, gap)
    iterations = purify(problem.fock, problem.occupied, energy_error=1e-8).iterations
    budgets = [(each.max_error, each.dtype) for each in iterations]
    first, last = budgets[0], (1e-8, torch.float64)
    count = budgets.count(last)
    assert 4 <= count <= 6
    assert budgets == [first] * (len(budgets) - count) + [last] * count
    assert first == (pytest.approx((1e-8 / 4000) ** 0.5), torch.float32)


def test_iterations_tell_what_was_done(chain):
    run = purify(chain.fock, chain.occupied, max_error=1e-6)
    edge = chain.fock[0, 0].abs() + 1  # by Gershgorin's circles
    x = (edge * torch.eye(len(chain.fock)) - chain.fock) / (2 * edge)
    for iteration in run.iterations[:6]:
        assert iteration.residual == pytest.approx((x - x @ x).trace().item(), rel=1e-5)
        x = x @ x if iteration.step == "X^2" else 2 * x - x @ x
    assert run.seconds == pytest.approx(sum(iteration.seconds for iteration in run.iterations))
    assert run.iterations[-1].residual < 1e-2 < run.iterations[0].residual


# ---- Arguments that are refused before the first product, and answers that are none -------------


SIZE = 100
CHAIN = torch.diag((-1.0) ** torch.arange(SIZE)).double()
CHAIN += 0.2 * (torch.diag(torch.ones(SIZE - 1), 1) + torch.diag(torch.ones(SIZE - 1), -1))
ABOVE = CHAIN + 5 * torch.eye(SIZE)  # of levels above 0, where those of padding lie below


def ring(sites):
    """Sites with their two neighbours."""
    a = torch.roll(torch.eye(sites, dtype=torch.float64), 1, 0)
    return a + a.mT


FUNCTIONS = {
    "purify": lambda a, **options: linalg.purify(a, SIZE, max_error=1e-8, **options),
    "inverse_sqrt": lambda a, **options: linalg.inverse_sqrt(a, max_error=1e-9, **options),
    "inverse_factor": lambda a, **options: linalg.inverse_factor(a, max_error=1e-9, **options),
    "sign": lambda a, **options: linalg.sign(a, max_error=1e-9, **options),
    "in_basis": lambda a, **options: linalg.in_basis(a, a, max_error=1e-9, **options),
}
POWERS = {"matrix_power": lambda a, **options: linalg.matrix_power(a, 3, max_error=0.0, **options)}


def test_products_that_padding_does_not_matter_to():
    given = sparse.from_dense(ABOVE, 32)
    found = linalg.in_basis(given, given, max_error=0.0).matrix
    torch.testing.assert_close(sparse.to_dense(found, (SIZE, SIZE)), ABOVE @ ABOVE @ ABOVE)
    assert linalg.matrix_power(given, 2, max_error=0.0).matrix.shape == (128, 128)


def test_asymmetry_by_rounding_is_in_the_bound():
    a = ABOVE.clone()
    a[3, 4] += 1e-12
    for name in ("inverse_factor", "inverse_sqrt"):
        exact, found = (FUNCTIONS[name](x) for x in (ABOVE, a))
        assert found.total_bound > exact.total_bound
    exact, found = (FUNCTIONS["purify"](x).matrix for x in (ABOVE, a))
    assert torch.equal(found, found.mT)
    assert torch.linalg.vector_norm(exact - found) < 1e-11


# ---- Nothing that is wrong ----------------------------------------------------------------------


def test_states_that_have_no_gap():
    """Rings with two states at the Fermi level, levels of four states each, cut in half, and all
    states but one at a level.
    """
    q = torch.linalg.qr(
        torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(0)).double()
    )[0]
    levels = (q * torch.arange(25.0).double().repeat_interleave(4)) @ q.mT
    complete = torch.eye(SIZE).double() - 1
    for h in (ring(SIZE), -ring(SIZE), (levels + levels.mT) / 2, complete):
        for options in ({"max_error": 1e-8}, {"energy_error": 1e-7}):
            with pytest.raises(linalg.NotConverged, match=f"a gap above the {SIZE // 2} occ"):
                linalg.purify(h, SIZE, **options)
    of = Problem("ring", ring(8), 8, 8), methods([1e-9])
    with pytest.raises(UserError, match=r"a gap above the 4 occupied states; got"):
        measure(ring(8), *of, repeats=1, block=32, progress=print)


def test_a_power_of_one_is_a_copy():
    for a in (ABOVE, sparse.from_dense(ABOVE, 32)):
        found = linalg.matrix_power(a, 1, max_error=0.0).matrix
        values = (a, found) if a is ABOVE else (a.values(), found.values())
        assert torch.equal(*values)
        assert values[0].data_ptr() != values[1].data_ptr()


@pytest.mark.parametrize(("scale", "power"), [(1e99, 6), (1e149, 7), (1e-149, 7)])
def test_bounds_where_powers_overflow(scale, power):
    a = torch.randn(34, 34, generator=torch.Generator().manual_seed(0)).double() * scale
    found = linalg.matrix_power(a, power, max_error=1e-3)
    assert not math.isnan(found.error_bound)
    assert found.matrix.isfinite().all() or found.error_bound == math.inf


def test_another_default_device():
    with torch.device("meta"):
        found = [function(ABOVE).matrix for function in (FUNCTIONS | POWERS).values()]
        found.append(linalg.matrix_power(ABOVE, 0, max_error=0.0).matrix)
        n = len(ABOVE)  # arrays of numpy have no device
        solver = linalg.DensitySolver(np.eye(n), positions=np.arange(3.0 * n).reshape(n, 3))
        assert abs(solver(np.diag(np.arange(1.0 * n)), 2).density.trace() - 2) < 1e-8
    assert {x.device.type for x in found} == {"cpu"}
