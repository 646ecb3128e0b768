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
from spamm_torch.linalg import Iteration, Result
from spamm_torch.linalg.matrices import norm_of
from spamm_torch.sparse.blocks import is_sparse

DENSE, EIGH, STORED = "torch.mm", "eigh", "dense storage"
_OVER = {"eigh": EIGH, "dense": DENSE, "stored": STORED}  # peers, and the columns over them
FLOAT32 = "float32 first"
_GOAL = 1e-7  # hartree an atom, which the conclusion speaks of
_ROUNDING = 1e-15  # errors below it are drawn there
_GAPLESS = 1e-9  # of the spectrum's width
_MOST = 120  # products by torch.mm


def exponent(number: float) -> str:
    """A number as in "1e-8" or "3.2e-6"."""
    mantissa, _, power = f"{number:.1e}".partition("e")
    return f"{mantissa.removesuffix('.0')}e{int(power)}"


def name_of(method: dict) -> str:
    """As a table calls it: "float32 1e-5, last four float64 1e-8"."""
    series, error = method["series"], method["max_error"]
    if error is None:
        return series
    first = exponent(method["first_max_error"])
    name = f"float32 {first}, last four float64 {exponent(error)}"
    return f"{series}, {name}" if series == STORED else name


@dataclass(frozen=True)
class Method:
    """A line of the picture, by one of the names above, and a point on it: ``energy_error`` of
    ``linalg.purify``.
    """

    series: str
    energy_error: float | None = None


def methods(
    errors: list[float], without: Container[str] = (), blocks: bool = False
) -> list[Method]:
    """All that are compared, ``without`` some series, peers first and the most accurate last; with
    ``blocks`` that one in dense storage is a peer.
    """
    found = [Method(EIGH), Method(DENSE)]
    found += [Method(STORED, min(errors))] if blocks else []
    found += [Method(FLOAT32, error) for error in sorted(errors, reverse=True)]
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
    # torch.mm's iteration converges as far as the most accurate one, and no further.
    tolerance = min((x.energy_error for x in compared if x.energy_error), default=1e-15)
    rows: list[dict] = []
    peers = _OVER.values()
    dense = fock
    if is_sparse(fock) and any(method.series in peers for method in compared):
        dense = sparse.to_dense(whole(fock), (problem.functions,) * 2)
    options = {"block": block, "size": problem.functions}
    clocks: list[list[list[float]]] = [[] for _ in compared]
    for turn in range(repeats):
        for method, clock in zip(compared, clocks, strict=True):
            f = dense if method.series in peers else fock
            if method.series == EIGH:
                run = _by_eigenvectors(f, problem.occupied)
            elif method.series == DENSE:
                run = _by_torch(f, problem.occupied, tolerance)
            else:
                options |= {"energy_error": method.energy_error, "group": group(f)}
                run = linalg.purify(f, problem.electrons, **options)
            clock.append([run.seconds, *(iteration.seconds for iteration in run.iterations)])
            if turn == 0:
                rows.append(_described(method, run) | _result(run, f, problem))
                progress(f"{name_of(rows[-1])}: {run.seconds:.3g} s")
    right = rows[0 if compared[0].series in peers else -1]["energy"]
    for row, clock in zip(rows, clocks, strict=True):
        row["energy_error"] = (row["energy"] - right) / problem.atoms
        row["seconds"], *each = (statistics.median(turns) for turns in zip(*clock, strict=True))
        for iteration, seconds in zip(row["iterations"], each, strict=True):
            iteration["ms"] = 1e3 * seconds
    return rows, run.matrix


def _described(method: Method, run: Result) -> dict:
    errors = [each.max_error for each in run.iterations] if method.energy_error else [None]
    row = {"series": method.series, "max_error": errors[-1]}
    return row | ({"first_max_error": errors[0]} if method.energy_error else {})


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


def _by_torch(fock: Tensor, occupied: int, tolerance: float) -> Result:
    """The same iteration by torch's own products."""
    clock, iterations, residuals = [time.perf_counter()], [], []
    lowest, highest = linalg.gershgorin(fock)
    x = fock / -((highest - lowest) or 1.0)
    x.diagonal().add_(highest / ((highest - lowest) or 1.0))
    while True:
        trace, square = x.trace().item(), x.norm().item() ** 2  # tr(X^2)
        residuals.append(trace - square)
        decay = [abs(residual) for residual in residuals[-3:]]
        has_stalled = len(decay) == 3 and decay[0] < 0.01 and decay[2] > decay[0] / 4
        if decay[-1] <= tolerance * occupied or has_stalled:
            break
        if len(iterations) == _MOST:
            raise UserError(f"expected a gap above the {occupied} occupied states; got none")
        squares = abs(square - occupied) < abs(2 * trace - square - occupied)
        x = x @ x if squares else torch.addmm(x, x, x, beta=2, alpha=-1)
        clock.append(time.perf_counter())
        facts = ("X^2" if squares else "2X - X^2", x.dtype, None, residuals[-1])
        iterations.append(Iteration(*facts, clock[-1] - clock[-2], 1.0, 0.0))
    return Result(x, iterations, time.perf_counter() - clock[0], 0.0, residuals[-1])


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
