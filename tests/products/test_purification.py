"""Purification: against eigenvectors, and what its schedules are for; the parts of the example."""

import math

import pytest
import torch
from support import one_thread  # noqa: F401  the fixture is automatic

from density import basis, sources
from density.measuring import measure, methods
from density.problem import Problem
from models.errors import UserError
from spamm_torch import linalg
from spamm_torch.linalg import Budget, Schedule, constant, loose_then_tight

SITES = 320


@pytest.fixture(scope="module")
def chain():
    return sources.chain(SITES, 0.2)


@pytest.fixture(scope="module")
def waters():
    """The embedded cluster, and its F in the basis S^(-1/2)."""
    problem = sources.embedded("default")
    return problem, basis.transformed(problem.fock, basis.inverse_root(problem.overlap))


def purify(fock, occupied, schedule):
    return linalg.purify(fock, 2 * occupied, schedule=schedule, block=32)


def exact(fock, occupied):
    """The projector on the lowest states and the energy of two electrons in each."""
    energies, vectors = torch.linalg.eigh(fock)
    return vectors[:, :occupied] @ vectors[:, :occupied].mT, 2 * energies[:occupied].sum().item()


def energy_error(x, fock, problem):
    """In hartree an atom."""
    _, energy = exact(fock, problem.occupied)
    return abs(2 * (x * fock).sum().item() - energy) / problem.atoms


def test_nothing_skipped_gives_the_projector_of_the_eigenvectors(chain, device):
    right, _ = exact(chain.fock, chain.occupied)
    for budget in (Budget(None), Budget(0)):
        run = purify(chain.fock.to(device), chain.occupied, constant(budget))
        assert run.matrix.device.type == device.type
        torch.testing.assert_close(run.matrix.cpu(), right, rtol=0, atol=1e-9)
        assert all(iteration.valid_ratio == 1 for iteration in run.iterations)


@pytest.mark.parametrize("first_dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("max_error", [1e-7, 1e-9])
def test_a_schedule_costs_the_energy_about_its_budget(chain, device, max_error, first_dtype):
    schedule = loose_then_tight(max_error, first_dtype)
    run = purify(chain.fock.to(device), chain.occupied, schedule)
    x = run.matrix.cpu()
    assert x.dtype == torch.float64
    assert energy_error(x, chain.fock, chain) < 3 * max_error
    assert torch.linalg.vector_norm(x @ x - x) < 1e3 * max_error  # each may lose max_error * 160
    assert 2 * x.trace().item() == pytest.approx(SITES, abs=1e3 * max_error)
    assert max(iteration.valid_ratio for iteration in run.iterations) < 0.5


def test_a_schedule_on_a_real_fock_matrix(waters, device):
    problem, fock = waters
    for max_error in (1e-8, 1e-9):
        run = purify(fock.to(device), problem.occupied, loose_then_tight(max_error))
        x = run.matrix.cpu()
        assert energy_error(x, fock, problem) < 1e-7
        assert torch.linalg.vector_norm(x @ x - x) < 1e-5
        assert 2 * x.trace().item() == pytest.approx(problem.electrons, rel=1e-7)


def test_only_the_last_iterations_need_accuracy(chain):
    """Loose then tight is far better than loose throughout, and hardly worse than tight."""
    loose, tight = Budget(1e-5), Budget(1e-8)
    error = {
        schedule: energy_error(
            purify(chain.fock, chain.occupied, schedule).matrix, chain.fock, chain
        )
        for schedule in (constant(loose), constant(tight), Schedule(loose, tight))
    }
    scheduled = error[Schedule(loose, tight)]
    assert scheduled < 0.02 * error[constant(loose)]
    assert scheduled < 10 * error[constant(tight)]


@pytest.mark.parametrize("gap", [2.0, 0.5, 0.2])
@pytest.mark.parametrize("last_iterations", [2, 4, 6])
def test_the_last_iterations_are_as_many_as_asked_for(gap, last_iterations):
    """Where they begin is predicted; a pair of steps more is what a wrong guess may cost."""
    problem = sources.chain(200, gap)
    schedule = loose_then_tight(1e-8, torch.float64, last_iterations=last_iterations)
    iterations = purify(problem.fock, problem.occupied, schedule).iterations
    budgets = [Budget(iteration.max_error, iteration.dtype) for iteration in iterations]
    last = budgets.count(schedule.last)
    assert last_iterations <= last <= last_iterations + 2
    assert budgets == [schedule.first] * (len(budgets) - last) + [schedule.last] * last


def test_iterations_tell_what_was_done(chain):
    run = purify(chain.fock, chain.occupied, constant(Budget(1e-8)))
    x = _initial_of(chain.fock)
    for iteration in run.iterations[:6]:
        assert iteration.residual == pytest.approx((x - x @ x).trace().item(), rel=1e-5)
        x = x @ x if iteration.step == "X^2" else 2 * x - x @ x
    assert run.seconds == pytest.approx(sum(iteration.seconds for iteration in run.iterations))
    assert run.iterations[-1].residual < 1e-2 < run.iterations[0].residual


def _initial_of(fock):
    """By Gershgorin's circles, of a chain: -gap/2 - 1 to gap/2 + 1."""
    edge = fock[0, 0].abs() + 1
    return (edge * torch.eye(len(fock)) - fock) / (2 * edge)


# ---- The orthogonal basis -----------------------------------------------------------------------


def test_both_ways_to_the_inverse_root(waters, device):
    overlap = waters[0].overlap.to(device)
    for z in (basis.by_eigenvectors(overlap), basis.by_products(overlap)):
        assert torch.equal(z, z.mT)
        one = torch.eye(len(z), dtype=z.dtype, device=device)
        assert torch.linalg.vector_norm(z @ overlap @ z - one) < 1e-9


def test_large_matrices_take_products(waters, monkeypatch):
    overlap = waters[0].overlap
    expected = basis.inverse_root(overlap)
    monkeypatch.setattr(basis, "_SMALL", {"cpu": len(overlap) - 1})
    monkeypatch.setattr(basis, "by_eigenvectors", None)
    torch.testing.assert_close(basis.inverse_root(overlap), expected, rtol=0, atol=1e-10)


def test_the_energy_is_that_of_the_generalised_eigenproblem(waters):
    """F C = S C e by Cholesky's factor of S: another basis, the same energies."""
    problem, fock = waters
    factor = torch.linalg.cholesky(problem.overlap)
    half = torch.linalg.solve_triangular(factor, problem.fock, upper=False)
    reduced = torch.linalg.solve_triangular(factor, half.mT, upper=False)
    _, expected = exact((reduced + reduced.mT) / 2, problem.occupied)
    assert exact(fock, problem.occupied)[1] == pytest.approx(expected, abs=1e-9)


# ---- Comparing ----------------------------------------------------------------------------------


def test_methods_are_measured_against_the_first(chain):
    compared = methods([1e-8], None, 4, without=("torch.mm",))
    said = []
    rows, projector = measure(
        chain.fock, chain, compared, repeats=2, block=32, progress=said.append
    )
    names = [(row["series"], row["max_error"]) for row in rows]
    loose = pytest.approx(math.sqrt(1e-8 / 4000))
    assert names == [
        *(("eigh", None), ("nothing skipped", None), ("constant", loose), ("constant", 1e-8)),
        *(("scheduled", 1e-8), ("float32 first", 1e-8)),
    ]
    assert len(said) == len(rows)
    right, energy = exact(chain.fock, chain.occupied)
    assert rows[0]["energy"] == pytest.approx(energy, abs=1e-9)
    for row in rows:
        assert row["energy_error"] == (row["energy"] - rows[0]["energy"]) / SITES
        assert row["seconds"] > 0
        assert all(iteration["ms"] > 0 for iteration in row["iterations"])
    assert [i["precision"] for i in rows[-1]["iterations"]][::-1][:5] == ["float64"] * 4 + [
        "float32"
    ]
    assert torch.linalg.vector_norm(projector - right) < 1e-3


# ---- Bad input ----------------------------------------------------------------------------------


def test_no_gap():
    """A ring of 8 sites, half filled, has two states of energy 0 for two electrons."""
    fock = torch.zeros(8, 8, dtype=torch.float64)
    site = torch.arange(8)
    fock[site, (site + 1) % 8] = fock[(site + 1) % 8, site] = 1
    with pytest.raises(linalg.NotConverged, match=r"a gap above the 4 occupied .* got trace"):
        purify(fock, 4, constant(Budget(1e-9)))
    ring = Problem("ring", fock, 8, 8)
    with pytest.raises(UserError, match=r"a gap above the 4 occupied states; got"):
        measure(fock, ring, methods([1e-9], None, 4), repeats=1, block=32, progress=print)


@pytest.mark.parametrize("electrons", [-2, 0, 3, 8, 10])
def test_electrons_that_do_not_fit(electrons):
    with pytest.raises(UserError) as caught:
        Problem("four", torch.eye(4, dtype=torch.float64), electrons, 4)
    assert str(caught.value) == (
        f"expected an even number of electrons from 2 to 6, for 4 functions; got {electrons}"
    )


@pytest.mark.parametrize(
    ("matrix", "words"),
    [
        (torch.ones(3, 4), "a square matrix; got 3 x 4"),
        (torch.ones(3), "a square matrix; got 3"),
        (torch.tensor([[1.0, math.nan], [0, 1]]), "finite entries"),
        (torch.tensor([[1.0, 0.5], [0.25, 1]]), "symmetric; got entries that differ by 0.25"),
    ],
)
@pytest.mark.parametrize("name", ["fock", "overlap", "density"])
def test_matrices_that_are_none(matrix, words, name):
    given = {"fock": torch.eye(4), "overlap": torch.eye(4)} | {name: matrix}
    with pytest.raises(UserError, match=words) as caught:
        Problem("bad", electrons=2, atoms=1, **given)
    assert name in str(caught.value)


def test_matrices_of_two_sizes():
    with pytest.raises(UserError, match="fock and overlap of one size; got 4 x 4 and 3 x 3"):
        Problem("two sizes", torch.eye(4), 2, 1, torch.eye(3))


def test_an_overlap_that_is_not_positive_definite():
    overlap = torch.diag(torch.tensor([1, 1, -0.1, 1], dtype=torch.float64))
    with pytest.raises(UserError, match=r"positive definite .* whose leading 3 x 3 minor"):
        basis.inverse_root(overlap)
