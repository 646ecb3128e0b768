"""SP2 purification: from a matrix to the projector on its lowest states, by products alone.

Its error has a proven bound (prove), of which docs/error_bound.md has the proof.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._arguments import check_integer, check_max_error
from .matrices import Callback, Matrices, NotConverged, Operand, Result, norm_of, smaller

_TINY = 1e-14  # more than the numbers from 0 to 1 are rounded by here, in a step


def prove(
    steps: Sequence[tuple[bool, float]],
    start: tuple[float, float],
    end: tuple[float, float, float],
    size: int,
    occupied: int,
) -> tuple[float, list[float]]:
    """The bound of norm(X - projector), and the gaps behind products: the spectrum is
    followed forwards, the gap backwards.

    ``steps``: is each a square, its error. ``start``: the first matrix's error, a Frobenius norm,
    and how far eigenvalues may lie outside [0, 1]. ``end``: the last matrix's trace and
    trace(X - X^2), and how far both may be wrong.
    """
    nothing: tuple[float, list[float]] = (math.inf, [])
    if not all(math.isfinite(x) for x in (*(error for _, error in steps), *start, *end)):
        return nothing
    (start_error, out_of_range), (trace, residual, unsure) = start, end
    # Frobenius norms of the parts below 0 and above 1.
    below = above = math.sqrt(size) * out_of_range + start_error
    outside = []
    for squares, error in steps:
        outside.append((below, above))
        if squares:
            below, above = error, (2 + above) * above + error
        else:
            below, above = (2 + below) * below + error, error
    wrong = 2 * math.sqrt(size) * ((1 + below) * below + (1 + above) * above)
    spread = max(residual + unsure, 0.0) + wrong + _TINY  # of all |x (1 - x)|
    if not spread < 0.25:
        return nothing
    away = 2 * spread / (1 + math.sqrt(1 - 4 * spread))  # of all eigenvalues from 0 or 1
    if not abs(trace - occupied) + unsure + away < 1:
        return nothing
    low, high, turned, gaps = away, 1 - away, 0.0, []
    for (squares, error), (below, above) in zip(reversed(steps), reversed(outside), strict=True):
        gap = high - low - error - _TINY
        low, high = low + error + _TINY, high - error - _TINY
        if gap <= 0 or (below >= math.sqrt(high) if squares else above >= math.sqrt(1 - low)):
            return nothing
        gaps.append(gap)
        turned += error / gap
        low, high = _before(squares, low), _before(squares, high)
    gap = high - low - start_error - _TINY
    if gap <= 0:
        return nothing
    turned += start_error / gap
    return (away + math.sqrt(2) * turned) * (1 + 1e-9), gaps[::-1]


def gap_before(squares: Sequence[bool], away: float) -> float:
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


# Below this trace of X - X^2 every eigenvalue is within 0.011 of 0 or 1.
_DECIDED = 0.01
# Hartree an atom for the square of the max_error of the first iterations, and the number of
# occupied states from which on both kinds of iterations cost more; see loose_then_tight.
_SECOND_ORDER, _MANY = 4000, 1540
# The runs for a max_error, and the part of it that a product may lose at first.
_RUNS, _PART = 4, 8
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
    error: float | None = None,
    block: int = 64,
    size: int | None = None,
    tolerance: float = 0.0,
    most_iterations: int = 120,
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
        error: instead of both: what ``total_bound`` of the result is to be at most, absolute. It is
            dealt out over products in float64, by the gaps that a run before has proven: so there
            are two runs or more, and what is returned tells of the last.
        tolerance: done where trace(X - X^2) is at most this share of the occupied states. The last
            budget counts where it is larger: products that lose so much leave no less.
        most_iterations: a gap of 1e-9 of the spectrum's width needs no more.
        block, size, callback, group: see above.

    Returns:
        A :class:`Result` with the projector, float64. The density matrix is twice it. ``residual``
        is norm(X H - H X) with what its product may have skipped, of the matrix that is returned.

    Raises:
        NotConverged: no gap that the budget resolves, a trace that is not the number of states, or
            an ``error`` that cannot be proven.

    Example:
        >>> found = purify(fock, 256, max_error=1e-9)
        >>> density = 2 * found.matrix
        >>> print(f"{density.trace():.4f} electrons")
        256.0000 electrons
    """

    def check(of: Matrices) -> None:
        check_integer(electrons, "electrons")
        used = _schedule(max_error, schedule, error, electrons)
        if electrons % 2 or not 2 <= electrons <= 2 * of.size - 2:
            raise ValueError(
                f"electrons must be even and from 2 to {2 * of.size - 2} for {of.size} functions; "
                f"got {electrons}"
            )
        if of.are_shards and None in (used.first.max_error, used.last.max_error):
            raise ValueError("purify over ranks has no torch.mm: expected a max_error; got None")

    alike: dict[str, Any] = {"electrons": electrons, "max_error": max_error, "schedule": schedule}
    alike |= {} if error is None else {"error": error}
    alike |= {"tolerance": tolerance, "most_iterations": most_iterations}

    def opened() -> tuple[Matrices, Tensor]:
        given = ("purify", hamiltonian, block, size, callback)
        return Matrices.opened(*given, group=group, alike=alike, check=check)

    if error is not None:
        return _within(error, opened, electrons // 2, most_iterations)
    if max_error is None:
        begun, used = opened(), _schedule(max_error, schedule, error, electrons)
        return _sp2(*begun, used, electrons // 2, tolerance, most_iterations)
    share = max_error / _PART
    for _ in range(_RUNS):
        begun, trail = opened(), _Trail()
        used = constant(Budget(share / math.sqrt(electrons // 2)))
        found = _sp2(*begun, used, electrons // 2, tolerance, most_iterations, trail)
        if trail.off <= max(max_error, trail.rounding if not max_error else 0.0):
            return found
        share = smaller(share, max_error / trail.off / 2)
    raise NotConverged(
        f"expected an error of the projector that rounding and the gap allow; got {max_error:.2g}, "
        f"where {trail.off:.2g} is left (norm(X H - H X) = {found.residual:.2g})"
    )


def _schedule(
    max_error: float | None, schedule: Schedule | None, error: float | None, electrons: int
) -> Schedule:
    given = {"max_error": max_error, "schedule": schedule, "error": error}
    if len(got := [name for name, value in given.items() if value is not None]) != 1:
        raise ValueError(
            f"exactly one of max_error and schedule, or error, must be given; got "
            f"{' and '.join(got) or 'neither'}"
        )
    if error is not None:
        check_max_error(error)
        return constant(Budget(0.0))
    if schedule is None:
        check_max_error(max_error)
        return constant(Budget(max_error))
    return schedule


# The runs for an error, the share of it for the last matrix's eigenvalues, and the number of the
# last products that decide about these.
_TRIES, _AT_THE_END, _LAST = 6, 0.125, 6


def _within(
    error: float,
    opened: Callable[[], tuple[Matrices, Tensor]],
    occupied: int,
    most_iterations: int,
) -> Result:
    """The projector, with a total bound of at most ``error``."""
    shares: list[float] = []  # what each product may lose, relative to norm(X)^2
    tolerance = error * _AT_THE_END / _NOISE / occupied
    for _ in range(_TRIES):
        of, hamiltonian = opened()
        trail = _Trail(shares or [error / max(1, of.size)])
        budget = constant(Budget(0.0))
        result = _sp2(of, hamiltonian, budget, occupied, tolerance, most_iterations, trail)
        bound, _ = trail.proof
        if bound <= error:
            return result
        shares = _shares(error, result, trail, of.size)
    raise NotConverged(
        f"expected an error that rounding and the gap allow; got {error:.2g}, where {bound:.2g} "
        "is proven"
    )


def _shares(error: float, result: Result, trail: "_Trail", size: int) -> list[float]:
    """The error of each product with which all stays within the whole one, as far as is known."""
    (_, gaps), products = trail.proof, result.iterations
    if not gaps:
        return [min(trail.shares or [error]) / 100]
    rounded = sum(
        (x.total_bound - x.error_bound) / gap for x, gap in zip(products, gaps, strict=True)
    )
    left = error * (1 - 2 * _AT_THE_END) - math.sqrt(2) * rounded
    each = max(left, 0.0) / math.sqrt(2) / len(gaps)
    most = [each * gap for gap in gaps]
    at_the_end = error * _AT_THE_END / (32 * math.sqrt(size))
    most[-_LAST:] = [min(x, at_the_end) for x in most[-_LAST:]]
    return [x / square for x, square in zip(most, trail.squares, strict=False)]


@dataclass
class _Trail:
    """The errors that a run may have in each product, the last one's behind these too, and its
    findings: norm(X)^2 before each product and of the last matrix, and the proof of the result.
    """

    shares: list[float] | None = None
    squares: list[float] = field(default_factory=list)
    proof: tuple[float, list[float]] = (math.inf, [])
    off: float = math.inf  # norm(X - P) / norm(P), estimated, and what rounding makes of it
    rounding: float = math.inf

    def share(self, number: int, budget: Budget) -> float | None:
        if self.shares is None:
            return budget.max_error
        return self.shares[min(number, len(self.shares) - 1)]


def _sp2(
    of: Matrices,
    hamiltonian: Tensor,
    schedule: Schedule,
    occupied: int,
    tolerance: float,
    most_iterations: int,
    trail: _Trail | None = None,
) -> Result:
    trail = trail or _Trail()
    budget, last_done = schedule.first, 0
    tolerance = occupied * max(
        tolerance, schedule.last.max_error or 0, 4 * torch.finfo(schedule.last.dtype).eps
    )
    lowest, highest = of.gershgorin(hamiltonian)
    width = highest - lowest or 1.0
    x = _operand(of, of.shifted(hamiltonian, -1 / width, highest / width), budget)
    spare: Tensor | None = None  # memory for a dense product
    residuals: list[float] = []
    start = _start(of, x.norms, (lowest, highest), budget.dtype)
    while True:
        # X is symmetric, so that tr(X^2) = norm(X)^2: the branch is known before the product.
        trace, norm = of.trace_and_norm(x)
        trace_of_square = norm**2
        trail.squares.append(trace_of_square)
        residuals.append(trace - trace_of_square)
        decay = [abs(residual) for residual in residuals]
        if budget == schedule.last:
            enough = schedule.is_constant or last_done >= schedule.last_iterations
            at_end = decay[-1] <= _NOISE * tolerance
            if enough and (at_end or _has_stalled(decay, budget, occupied)):
                if abs(trace - occupied) < 0.5:
                    ends = start, (trace, trace_of_square), (lowest, highest)
                    return _judge(of, hamiltonian, x.matrix, budget, occupied, ends, trail)
                break
        elif (  # only the last iterations remain, or the first can do no more
            _predicted(decay, schedule.last_iterations) <= tolerance
            or _has_stalled(decay, budget, occupied)
        ):
            budget, spare = schedule.last, None
            x = _operand(of, x.matrix, budget)
        if len(of.steps) == most_iterations:
            break
        last_done += budget == schedule.last
        squared = abs(trace_of_square - occupied) < abs(2 * trace - trace_of_square - occupied)
        step = _SQUARED if squared else "2X - X^2"
        options: dict[str, Any] = {"residual": residuals[-1], "out": spare}
        options |= {} if squared else {"added": x.matrix, "beta": 2, "alpha": -1}
        product = of.product(step, x, x, trail.share(len(of.steps), budget), **options)
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
    ends: tuple[tuple[float, float], ...],
    trail: _Trail,
) -> Result:
    """The result, its proof and its residual; NotConverged where its gap is but rounding.

    ``ends``: of the start, as of :func:`_start`, both traces of the end, and the spectrum's bounds.
    """
    start, (trace, trace_of_square), (lowest, highest) = ends
    x, precision = x.double(), budget.dtype
    result = of.result(x)
    exact = math.fsum(of.diagonal(x).tolist())
    unsure = 2.0**-16 if precision == torch.float32 else 2.0**-42  # of norms
    end = exact, exact - trace_of_square, trace_of_square * unsure
    steps = [(each.step == _SQUARED, each.total_bound) for each in result.iterations]
    trail.proof = prove(steps, start, end, of.size, occupied)
    left, width = abs(trace - trace_of_square), highest - lowest or 1.0
    away = min(max(left, occupied * 2.0**-50), 0.25)  # the trace is rounded
    gap = gap_before([square for square, _ in steps], away)
    share = budget.max_error and budget.max_error * occupied * max(gap, 0.0) * width / 2
    residual = of.commutator(hamiltonian, x, share)
    noise = torch.finfo(hamiltonian.dtype).eps * math.sqrt(of.size)
    if not (gap > 64 * noise and residual < 0.25 * gap * width * math.sqrt(occupied)):
        raise NotConverged(
            f"expected a gap above the {occupied} occupied states that the budget resolves; got "
            f"about {max(gap, 0.0) * width:.2g}, and norm(X H - H X) = {residual:.2g}"
        )
    whole = math.sqrt(occupied)
    trail.off = (residual / (gap * width) + left) / whole
    trail.rounding = 64 * noise * (1 / gap + 4) / whole
    return replace(result, residual=residual, total_bound=trail.proof[0])


def _start(
    of: Matrices, norms: Tensor, spectrum: tuple[float, float], dtype: torch.dtype
) -> tuple[float, float]:
    """The distance of the first matrix from the Hamiltonian's image, whose rounding is an error."""
    lowest, highest = spectrum
    width, eps = highest - lowest or 1.0, 2.0**-52
    size, shift = norm_of(norms).item() * (1 + 2.0**-16), abs(highest) / width * math.sqrt(of.size)
    rounded = (2 * size + shift) * eps + (2.0**-24 * size if dtype == torch.float32 else 0.0)
    rounded += of.asymmetry / width
    return rounded, (of.size + 8) * eps * max(abs(lowest), abs(highest)) / width


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
