"""One problem by several methods: times, errors, and the rows of the tables."""

import statistics
import time
from collections.abc import Callable, Container
from dataclasses import dataclass

import torch
from torch import Tensor

from density.ranks import group, products, whole
from density.sources import Problem
from models.files import UserError
from spamm_torch import linalg, sparse
from spamm_torch.linalg import Budget, Result, Schedule, constant, loose_then_tight
from spamm_torch.linalg.matrices import norm_of
from spamm_torch.sparse.blocks import is_sparse

DENSE, UNSKIPPED, EIGH = "torch.mm", "nothing skipped", "eigh"
STORED = "dense storage"
_OVER = {"eigh": EIGH, "dense": DENSE, "stored": STORED}  # peers, and the columns over them
CONSTANT, SCHEDULED, FLOAT32 = "constant", "scheduled", "float32 first"
_DIGITS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_GOAL = 1e-7  # hartree an atom, which the conclusion speaks of
_ROUNDING = 1e-15  # errors below it are drawn there
_GAPLESS = 1e-9  # of the spectrum's width


def exponent(number: float) -> str:
    """A number as in "1e-8" or "3.2e-6"."""
    mantissa, _, power = f"{number:.1e}".partition("e")
    return f"{mantissa.removesuffix('.0')}e{int(power)}"


def name_of(method: dict) -> str:
    """As a table calls it: "constant 1e-8", "float32 1e-5, last four float64 1e-8"."""
    series, error = method["series"], method["max_error"]
    if error is None:
        return series
    if series == CONSTANT:
        return f"constant {exponent(error)}"
    few = method["last_iterations"]
    few = _DIGITS[few] if few < len(_DIGITS) else few
    first = exponent(method["first_max_error"])
    if series == SCHEDULED:
        return f"{first}, last {few} {exponent(error)}"
    name = f"float32 {first}, last {few} float64 {exponent(error)}"
    return f"{series}, {name}" if series == STORED else name


@dataclass(frozen=True)
class Method:
    """A line of the picture, by one of the names above, and a point on it; eigenvectors need no
    schedule.
    """

    series: str
    schedule: Schedule | None

    @property
    def max_error(self) -> float | None:
        """The error of the last iterations; None where nothing is skipped."""
        return self.schedule.last.max_error or None if self.schedule else None

    def described(self) -> dict:
        row = {"series": self.series, "max_error": self.max_error}
        if self.max_error is not None:
            row["first_max_error"] = self.schedule.first.max_error
            row["last_iterations"] = self.schedule.last_iterations
        return row


def methods(
    max_errors: list[float],
    loose: float | None,
    last_iterations: int,
    without: Container[str] = (),
    blocks: bool = False,
    states: int = 0,
) -> list[Method]:
    """All that are compared, ``without`` some series, peers first and the most accurate schedule
    last; with ``blocks`` that schedule in dense storage is a peer. The rest: as of
    ``loose_then_tight``.
    """
    errors = sorted(max_errors, reverse=True)
    options = {"loose": loose, "last_iterations": last_iterations, "states": states}
    scheduled = {
        series: [loose_then_tight(error, dtype, **options) for error in errors]
        for series, dtype in ((SCHEDULED, torch.float64), (FLOAT32, torch.float32))
    }
    firsts = {schedule.first.max_error for schedule in scheduled[SCHEDULED]}
    budgets = [Budget(error) for error in sorted(firsts | set(errors), reverse=True)]
    found = [
        Method(EIGH, None),
        Method(DENSE, constant(Budget(None))),
        Method(STORED, scheduled[FLOAT32][-1])
        if blocks
        else Method(UNSKIPPED, constant(Budget(0))),
        *(Method(CONSTANT, constant(budget)) for budget in budgets),
        *(Method(series, schedule) for series, them in scheduled.items() for schedule in them),
    ]
    return [method for method in found if method.series not in without]


def measure(
    fock: Tensor,
    problem: Problem,
    compared: list[Method],
    *,
    repeats: int,
    block: int,
    progress: Callable[[str], None],
) -> tuple[list[dict], Tensor]:
    """Measures the methods in turns, ``repeats`` times; the median of each time counts. The energy
    of the first peer counts as right, else that of the last method. UserError: there is no gap.

    Returns a row a method with its "iterations", and the projector of the last method.
    """
    # Peers converge as far as the most accurate schedule, and no further.
    tolerance = min((method.max_error for method in compared if method.max_error), default=0.0)
    rows: list[dict] = []
    peers = _OVER.values()
    dense = fock
    if is_sparse(fock) and any(method.series in peers for method in compared):
        dense = sparse.to_dense(whole(fock), (problem.functions,) * 2)
    options = {"block": block, "tolerance": tolerance, "size": problem.functions}
    clocks: list[list[list[float]]] = [[] for _ in compared]
    for turn in range(repeats):
        for method, clock in zip(compared, clocks, strict=True):
            f = dense if method.series in peers else fock
            if method.schedule is None:
                run = _by_eigenvectors(f, problem.occupied)
            else:
                options |= {"schedule": method.schedule, "group": group(f)}
                run = linalg.purify(f, problem.electrons, **options)
            clock.append([run.seconds, *(iteration.seconds for iteration in run.iterations)])
            if turn == 0:
                rows.append(method.described() | _result(run, f, problem))
                progress(f"{name_of(rows[-1])}: {run.seconds:.3g} s")
    right = rows[0 if compared[0].series in (*peers, UNSKIPPED) else -1]["energy"]
    for row, clock in zip(rows, clocks, strict=True):
        row["energy_error"] = (row["energy"] - right) / problem.atoms
        row["seconds"], *each = (statistics.median(turns) for turns in zip(*clock, strict=True))
        for iteration, seconds in zip(row["iterations"], each, strict=True):
            iteration["ms"] = 1e3 * seconds
    return rows, run.matrix


def _result(run: Result, fock: Tensor, problem: Problem) -> dict:
    """The figures of a run, in float64. The energy is that of independent electrons, 2 tr(X F)."""
    of, x = products(run.matrix, problem.functions)
    f, operand = of.kept(fock, "fock", symmetric=False), of.operand(x)
    inner = of.whole(sparse.inner(x, f)) if of.is_sparse else (x * f).sum()
    share = 1e-12 if of.is_sparse else None
    left = of.product("X - X^2", operand, operand, share, added=x, alpha=-1)
    last = [(each.dtype, each.max_error) for each in run.iterations[-1:]]
    return {
        "energy": 2 * inner.item(),
        "idempotency": norm_of(left.norms).item(),
        "electron_error": 2 * of.diagonal(x).sum().item() - problem.electrons,
        "iterations": [
            {
                "step": iteration.step,
                "precision": str(iteration.dtype).removeprefix("torch."),
                "max_error": iteration.max_error,
                "last": (iteration.dtype, iteration.max_error) in last,
                "idempotency": iteration.residual,
                "valid_ratio": iteration.valid_ratio,
            }
            for iteration in run.iterations
        ],
    }


def _by_eigenvectors(fock: Tensor, occupied: int) -> Result:
    """The same projector: the occupied eigenvectors times their transposes; UserError: no gap."""
    start = time.perf_counter()
    energies, vectors = torch.linalg.eigh(fock)
    projector = vectors[:, :occupied] @ vectors[:, :occupied].mT
    width = (energies[-1] - energies[0]).item()
    gap = (energies[occupied] - energies[occupied - 1] + 0 * projector[0, 0]).item()  # waits
    seconds = time.perf_counter() - start
    if gap <= _GAPLESS * width:
        raise UserError(
            f"expected a gap above the {occupied} occupied states; got {gap:.2g} hartree"
        )
    return Result(projector, [], seconds, 0.0, 0.0)


def tables(problem: str, rows: list[dict]) -> dict[str, list[dict]]:
    """The rows of measure as tables of results."""
    seconds = {row["series"]: row["seconds"] for row in rows}
    methods, iterations = [], []
    for row in rows:
        place = {"problem": problem, "method": name_of(row)}
        steps = row["iterations"]
        over = {
            f"over_{name}": seconds[peer] / row["seconds"]
            for name, peer in _OVER.items()
            if peer in seconds
        }
        figures = {
            "iterations": len(steps),
            "most_valid": max((step["valid_ratio"] for step in steps), default=None),
            "distance": max(abs(row["energy_error"]), _ROUNDING),
        }
        methods.append(place | row | over | figures)
        iterations += [place | {"iteration": i} | step for i, step in enumerate(steps, 1)]
    return {"density matrix": methods, "density matrix, iterations": iterations}


def said(rows: list[dict]) -> str:
    """The tables in one line: the fastest method that is accurate enough."""
    ours = [row for row in rows if row["series"] not in _OVER.values()]
    enough = [row for row in ours if abs(row["energy_error"]) <= _GOAL] or ours[:1]
    best = min(enough, key=lambda row: row["seconds"])
    peers = ((best.get(f"over_{name}"), peer) for name, peer in _OVER.items())
    times = "".join(f", {value:.2g}x as fast as {peer}" for value, peer in peers if value)
    return (
        f"{best['problem']}: {best['method']}: energy error {abs(best['energy_error']):.1e} "
        f"hartree an atom in {best['seconds']:.3g} s{times}."
    )
