"""SP2 purification: from a matrix to the projector on its lowest states, by products alone."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .._arguments import check_integer, check_max_error
from .matrices import Callback, Matrices, NotConverged, Operand, Result, norm_of, smaller

# Below this trace of X - X^2 every eigenvalue is within 0.011 of 0 or 1.
_DECIDED = 0.01
# Hartree an atom for the square of the max_error of the first iterations, and the number of
# occupied states from which on both kinds of iterations cost more; see loose_then_tight.
_SECOND_ORDER, _MANY = 4000, 1540
# The runs for a max_error, and the part of it that a product may lose at first.
_RUNS, _PART = 4, 8
_MOST_ITERATIONS = 120  # a gap of 1e-9 of the spectrum's width needs no more
# Products leave up to about twice what they may lose in this trace.
_NOISE = 4
_SQUARED = "X^2"


@dataclass(frozen=True)
class Budget:
    """The error that one product may have, and the type that it is computed in.

    Attributes:
        max_error: as of ``spamm_torch.mm``: the norm of what is lost, relative to norm(X)^2. 0
            loses nothing; None takes ``torch.mm`` itself, to compare with.
        dtype: torch.float32 or torch.float64.
    """

    max_error: float | None
    dtype: torch.dtype = torch.float64


@dataclass(frozen=True)
class Schedule:
    """The budgets of the iterations: ``first``, then ``last`` for the last few."""

    first: Budget
    last: Budget
    last_iterations: int = 4

    @property
    def is_constant(self) -> bool:
        return self.first == self.last


def constant(budget: Budget) -> Schedule:
    """The same budget in every iteration."""
    return Schedule(budget, budget)


def loose_then_tight(
    max_error: float,
    first_dtype: torch.dtype = torch.float32,
    *,
    loose: float | None = None,
    last_iterations: int = 4,
    states: int = 0,
) -> Schedule:
    """The accuracy that costs the energy of a molecule about ``max_error`` hartree an atom.

    Args:
        max_error: of the last iterations, which are in float64.
        first_dtype: of the iterations before.
        loose: how many times more these may lose. None: so much that they cost the energy about as
            much as the last. Their errors enter it squared: on water clusters of up to 500 they
            cost about 1000 to 6000 max_error^2 hartree an atom.
        last_iterations: how many are the last.
        states: how many are occupied. Of more than 1,540 an atom's share of both errors grows with
            the root of their number, and all iterations may lose less by it.
    """
    many = math.sqrt(max(1.0, states / _MANY))
    first, last = math.sqrt(max_error / _SECOND_ORDER) / many, max_error / many
    first = first if loose is None else loose * last
    return Schedule(Budget(first, first_dtype), Budget(last), last_iterations)


def purify(
    hamiltonian: Tensor,
    electrons: int,
    *,
    max_error: float | None = None,
    schedule: Schedule | None = None,
    block: int = 64,
    size: int | None = None,
    tolerance: float = 0.0,
    callback: Callback | None = None,
    group: dist.ProcessGroup | None = None,
) -> Result:
    """The projector on the lowest states of a Hamiltonian, two electrons in each.

    Method: SP2, A. M. N. Niklasson, "Expansion algorithm for the density matrix", Phys. Rev. B 66,
    155115 (2002), from the spectrum mapped to [0, 1] and turned over: each step replaces X by X^2
    or by 2 X - X^2, whichever brings the trace closer to the number of occupied states.

    Args:
        hamiltonian: (N, N), symmetric, float64, in an orthogonal basis.
        electrons: even, from 2 to 2 N - 2; there is a gap above the occupied states.
        max_error: the error of the projector P, norm(X - P) / norm(P), all products in float64. It
            is judged by norm(X H - H X) over the gap, which is estimated, and trace(X - X^2); where
            that is more, products may lose less in another run. 0: what rounding allows.
        schedule: instead of max_error: what each product may lose. :func:`loose_then_tight` is
            right to its error in the energy alone, for less work.
        tolerance: done where trace(X - X^2) is at most this share of the occupied states. The last
            budget counts where it is larger: products that lose so much leave no less.
        block, size, callback, group: see above.

    Returns:
        A :class:`Result` with the projector, float64. The density matrix is twice it. ``residual``
        is norm(X H - H X) with what its product may have skipped, of the matrix that is returned.

    Raises:
        NotConverged: no gap that the budget resolves, or a trace that is not the number of states.

    Example:
        >>> found = purify(fock, 256, max_error=1e-9)
        >>> density = 2 * found.matrix
        >>> print(f"{density.trace():.4f} electrons")
        256.0000 electrons
    """

    def check(of: Matrices) -> None:
        check_integer(electrons, "electrons")
        if (max_error is None) == (schedule is None):
            got = "both" if schedule else "neither"
            raise ValueError(f"exactly one of max_error and schedule must be given; got {got}")
        if electrons % 2 or not 2 <= electrons <= 2 * of.size - 2:
            raise ValueError(
                f"electrons must be even and from 2 to {2 * of.size - 2} for {of.size} functions; "
                f"got {electrons}"
            )
        if schedule is None:
            check_max_error(max_error)
        elif of.are_shards and None in (schedule.first.max_error, schedule.last.max_error):
            raise ValueError("purify over ranks has no torch.mm: expected a max_error; got None")

    alike: dict[str, Any] = {"electrons": electrons, "max_error": max_error}
    alike |= {"schedule": schedule, "tolerance": tolerance}

    def run(by: Schedule | None) -> _Projector:
        given = ("purify", hamiltonian, block, size, callback)
        of, h = Matrices.opened(*given, group=group, alike=alike, check=check)
        by = by or constant(Budget(share / math.sqrt(electrons // 2)))
        return _sp2(of, h, by, electrons // 2, tolerance)

    share = (max_error or 0.0) / _PART
    if max_error is None:
        return run(schedule).result
    for _ in range(_RUNS):
        projector = run(None)
        if projector.off <= max(max_error, 0.0 if max_error else projector.rounding):
            return projector.result
        share = smaller(share, max_error / projector.off / 2)
    raise NotConverged(
        f"expected an error of the projector that rounding and the gap allow; got {max_error:.2g}, "
        f"where {projector.off:.2g} is left (norm(X H - H X) = {projector.result.residual:.2g})"
    )


class _Projector(NamedTuple):
    """A projector; norm(X - P) / norm(P), estimated; and what rounding makes of that."""

    result: Result
    off: float
    rounding: float


def _sp2(
    of: Matrices, hamiltonian: Tensor, schedule: Schedule, occupied: int, tolerance: float
) -> _Projector:
    budget, last_done = schedule.first, 0
    tolerance = occupied * max(
        tolerance, schedule.last.max_error or 0, 4 * torch.finfo(schedule.last.dtype).eps
    )
    lowest, highest = of.gershgorin(hamiltonian)
    width = highest - lowest or 1.0
    x = _operand(of, of.shifted(hamiltonian, -1 / width, highest / width), budget)
    spare: Tensor | None = None  # memory for a dense product
    residuals: list[float] = []
    while True:
        # X is symmetric, so that tr(X^2) = norm(X)^2: the branch is known before the product.
        trace, norm = of.trace_and_norm(x)
        trace_of_square = norm**2
        residuals.append(trace - trace_of_square)
        decay = [abs(residual) for residual in residuals]
        if budget == schedule.last:
            enough = schedule.is_constant or last_done >= schedule.last_iterations
            at_end = decay[-1] <= _NOISE * tolerance
            if enough and (at_end or _has_stalled(decay, budget, occupied)):
                if abs(trace - occupied) < 0.5:
                    return _judge(of, hamiltonian, x.matrix, budget, occupied, decay[-1], width)
                break
        elif (  # only the last iterations remain, or the first can do no more
            _predicted(decay, schedule.last_iterations) <= tolerance
            or _has_stalled(decay, budget, occupied)
        ):
            budget, spare = schedule.last, None
            x = _operand(of, x.matrix, budget)
        if len(of.steps) == _MOST_ITERATIONS:
            break
        last_done += budget == schedule.last
        squared = abs(trace_of_square - occupied) < abs(2 * trace - trace_of_square - occupied)
        step = _SQUARED if squared else "2X - X^2"
        options: dict[str, Any] = {"residual": residuals[-1], "out": spare}
        options |= {} if squared else {"added": x.matrix, "beta": 2, "alpha": -1}
        product = of.product(step, x, x, budget.max_error, **options)
        x, spare = product, None if of.is_sparse else x.matrix
    raise NotConverged(
        f"expected a gap above the {occupied} occupied states that the budget resolves; got "
        f"trace(X - X^2) = {residuals[-1]:.2g} after {len(of.steps)} iterations"
    )


def _judge(
    of: Matrices,
    hamiltonian: Tensor,
    x: Tensor,
    budget: Budget,
    occupied: int,
    left: float,
    width: float,
) -> _Projector:
    """The result with its residual; NotConverged where its gap is but rounding. ``left``: the
    magnitude of trace(X - X^2). ``width``: of the spectrum.
    """
    x = x.double()
    result = of.result(x)
    away = min(max(left, occupied * 2.0**-50), 0.25)  # the trace is rounded
    gap = _gap_before([each.step == _SQUARED for each in result.iterations], away)
    share = budget.max_error and budget.max_error * occupied * max(gap, 0.0) * width / 2
    residual = of.commutator(hamiltonian, x, share)
    noise = torch.finfo(hamiltonian.dtype).eps * math.sqrt(of.size)
    if not (gap > 64 * noise and residual < 0.25 * gap * width * math.sqrt(occupied)):
        raise NotConverged(
            f"expected a gap above the {occupied} occupied states that the budget resolves; got "
            f"about {max(gap, 0.0) * width:.2g}, and norm(X H - H X) = {residual:.2g}"
        )
    whole = math.sqrt(occupied)
    off, rounding = residual / (gap * width) + left, 64 * noise * (1 / gap + 4)
    return _Projector(replace(result, residual=residual), off / whole, rounding / whole)


def _gap_before(squares: Sequence[bool], away: float) -> float:
    """The gap of the first matrix whose eigenvalues are ``away`` from 0 and 1 after these steps, as
    far as these made no errors: an estimate.
    """
    low, high = away, 1 - away
    for square in reversed(squares):
        low, high = _before(square, low), _before(square, high)
    return high - low


def _before(squares: bool, image: float) -> float:
    """The number from 0 to 1 with this image behind a step."""
    return math.sqrt(image) if squares else 1 - math.sqrt(1 - image)


def _operand(of: Matrices, x: Tensor, budget: Budget) -> Operand:
    x = x.to(budget.dtype)
    return of.operand(x) if budget.max_error is not None else Operand(x, norm_of(x))


def _predicted(decay: list[float], steps: int) -> float:
    """trace(X - X^2) as it will be ``steps`` iterations from now.

    In the end the branches alternate. Two steps then turn an eigenvalue's distance e from 0 or 1
    into c e^2, c being 2 or 4, so that the ratio r of the trace to that two steps before is c e.
    The next such ratio is r^2, the one after it r^4: c need not be known.
    """
    if len(decay) < 3 or decay[-1] >= decay[-3]:
        return decay[-1]
    ratio = decay[-1] / decay[-3]
    return decay[-1] * ratio ** (2 ** (steps // 2 + 1) - 2)


def _has_stalled(decay: list[float], budget: Budget, occupied: int) -> bool:
    """Tells whether errors of the products, and no longer the steps, decide about the trace.

    Once all eigenvalues are decided, two steps divide it by more than 25. That a lower order of
    convergence tells numerical errors: Kruchinina, Rudberg and Rubensson, J. Chem. Theory Comput.
    12, 5788 (2016).
    """
    decided = max(_DECIDED, occupied * (budget.max_error or 0))
    return len(decay) > 2 and decay[-3] < decided and decay[-1] > decay[-3] / 4
