"""SP2 purification: from a matrix to the projector on its lowest states, by products alone."""

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .._arguments import check_integer, check_max_error, check_number
from .expansion import Expansion
from .matrices import Callback, Matrices, NotConverged, Result, smaller

# Below this trace of X - X^2 every eigenvalue is within 0.011 of 0 or 1.
_DECIDED = 0.01
# Errors of products before the last few enter the energy squared: on water clusters of up to 500
# they cost about 1000 to 6000 max_error^2 hartree an atom. Of more than 1,540 occupied states an
# atom's share of all errors grows with the root of their number.
_SECOND_ORDER, _LAST_FEW, _MANY = 4000, 4, 1540
# The runs for a max_error, and the part of it that a product may lose at first.
_RUNS, _PART = 4, 8
_MOST_ITERATIONS = 120  # a gap of 1e-9 of the spectrum's width needs no more
# Products leave up to about twice what they may lose in this trace.
_NOISE = 4
_SQUARED = "X^2"


class _Budget(NamedTuple):
    """The error that one product may have, and the type that it is computed in.

    ``max_error``: as of ``spamm_torch.mm``: the norm of what is lost, relative to norm(X)^2.
    """

    max_error: float
    dtype: torch.dtype = torch.float64


def purify(
    hamiltonian: Tensor,
    electrons: int,
    *,
    max_error: float | None = None,
    energy_error: float | None = None,
    block: int = 64,
    size: int | None = None,
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
        energy_error: instead of max_error: about what the energy of a molecule may be off, in
            hartree an atom. Only the last four products are so accurate, and the others in float32:
            less work, for a projector that is right in its energy alone. Above 0.
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
        if (max_error is None) == (energy_error is None):
            got = "both" if energy_error is not None else "neither"
            raise ValueError(f"exactly one of max_error and energy_error must be given; got {got}")
        if electrons % 2 or not 2 <= electrons <= 2 * of.size - 2:
            raise ValueError(
                f"electrons must be even and from 2 to {2 * of.size - 2} for {of.size} functions; "
                f"got {electrons}"
            )
        if energy_error is None:
            check_max_error(max_error)
            return
        check_number(energy_error, "energy_error")
        if not 0 < energy_error < math.inf:
            raise ValueError(f"energy_error must be above 0 and finite; got {energy_error}")

    alike = {"electrons": electrons, "max_error": max_error, "energy_error": energy_error}

    def run() -> _Projector:
        given = ("purify", hamiltonian, block, size, callback)
        of, h = Matrices.opened(*given, group=group, alike=alike, check=check)
        occupied = electrons // 2
        first = last = _Budget(share / math.sqrt(occupied))
        if energy_error is not None:
            many = math.sqrt(max(1.0, occupied / _MANY))
            first = _Budget(math.sqrt(energy_error / _SECOND_ORDER) / many, torch.float32)
            last = _Budget(energy_error / many)
        return _sp2(of, h, first, last, occupied)

    share = (max_error or 0.0) / _PART
    if max_error is None:
        return run().result
    for _ in range(_RUNS):
        projector = run()
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
    of: Matrices, hamiltonian: Tensor, first: _Budget, last: _Budget, occupied: int
) -> _Projector:
    budget, last_done = first, 0
    # Products that lose so much leave no less of trace(X - X^2).
    tolerance = occupied * max(last.max_error, 4 * torch.finfo(last.dtype).eps)
    lowest, highest = of.gershgorin(hamiltonian)
    width = highest - lowest or 1.0
    x = of.operand(of.shifted(hamiltonian, -1 / width, highest / width).to(budget.dtype))
    spare: Tensor | None = None  # memory for a dense product
    residuals: list[float] = []
    while True:
        # X is symmetric, so that tr(X^2) = norm(X)^2: the branch is known before the product.
        trace, norm = of.trace_and_norm(x)
        trace_of_square = norm**2
        residuals.append(trace - trace_of_square)
        decay = [abs(residual) for residual in residuals]
        if budget == last:
            enough = first == last or last_done >= _LAST_FEW
            at_end = decay[-1] <= _NOISE * tolerance
            if enough and (at_end or _has_stalled(decay, budget, occupied)):
                if abs(trace - occupied) < 0.5:
                    return _judge(of, hamiltonian, x.matrix, budget, occupied, decay[-1], width)
                break
        elif (  # only the last iterations remain, or the first can do no more
            _predicted(decay, _LAST_FEW) <= tolerance or _has_stalled(decay, budget, occupied)
        ):
            budget, spare = last, None
            x = of.operand(x.matrix.to(budget.dtype))
        if len(of.steps) == _MOST_ITERATIONS:
            break
        last_done += budget == last
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
    budget: _Budget,
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
    steps = Expansion(0.0, 1.0)
    for each in result.iterations:
        steps.append(each.step == _SQUARED)
    # The gap of eigenvalues that are ``away`` from 0 and 1 now, as far as steps made no errors.
    gap = steps.energy(away, len(steps.steps)) - steps.energy(1 - away, len(steps.steps))
    share = budget.max_error * occupied * max(gap, 0.0) * width / 2
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


def _has_stalled(decay: list[float], budget: _Budget, occupied: int) -> bool:
    """Tells whether errors of the products, and no longer the steps, decide about the trace.

    Once all eigenvalues are decided, two steps divide it by more than 25. That a lower order of
    convergence tells numerical errors: Kruchinina, Rudberg and Rubensson, J. Chem. Theory Comput.
    12, 5788 (2016).
    """
    decided = max(_DECIDED, occupied * budget.max_error)
    return len(decay) > 2 and decay[-3] < decided and decay[-1] > decay[-3] / 4
