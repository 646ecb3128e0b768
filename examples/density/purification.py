"""SP2 purification: from a matrix to the projector on its lowest states, by products alone.

The method: A. M. N. Niklasson, "Expansion algorithm for the density matrix", Phys. Rev. B 66,
155115 (2002). The spectrum of F is mapped to [0, 1] and turned over, so that occupied states are
near 1. Each step then replaces X by X^2, which pushes eigenvalues down, or by 2 X - X^2, which
pushes them up, whichever brings the trace closer to the number of occupied states.
"""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import spamm_torch
from models.errors import UserError

# Below this trace of X - X^2 every eigenvalue is within 0.011 of 0 or 1.
_DECIDED = 0.01
# Hartree an atom for the square of the max_error of the first iterations; see loose_then_tight.
_SECOND_ORDER = 4000
# Products leave up to about twice what they may lose in this trace.
_NOISE = 4


@dataclass(frozen=True)
class Budget:
    """What one product may lose by skipping, and the type that it is computed in.

    Attributes:
        max_error: as of ``spamm_torch.mm``: the norm of what is lost, relative to norm(X)^2. 0
            skips nothing; None takes ``torch.mm`` and its kin instead.
        dtype: torch.float32 or torch.float64.
    """

    max_error: float | None
    dtype: torch.dtype = torch.float64


@dataclass(frozen=True)
class Schedule:
    """How the budget changes over the iterations: ``first``, then ``last`` for the last few."""

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
) -> Schedule:
    """What costs the energy about ``max_error`` hartree an atom.

    Args:
        max_error: of the last iterations, which are in float64.
        first_dtype: of the iterations before.
        loose: how many times more these may lose. None: so much that they cost the energy about as
            much as the last. Their errors enter it squared: on water clusters they cost about
            1000 to 6000 max_error^2 hartree an atom.
        last_iterations: how many are the last.
    """
    first = math.sqrt(max_error / _SECOND_ORDER) if loose is None else loose * max_error
    return Schedule(Budget(first, first_dtype), Budget(max_error), last_iterations)


@dataclass(frozen=True)
class Iteration:
    """One step as it was done.

    Attributes:
        squared: whether it was X^2, else 2 X - X^2.
        budget: of its product.
        idempotency: trace(X - X^2) before it; the sum of x (1 - x) over X's eigenvalues x.
        seconds: of the whole step, norms and traces included.
        valid_ratio: share of the block products that were computed.
    """

    squared: bool
    budget: Budget
    idempotency: float
    seconds: float
    valid_ratio: float


@dataclass(frozen=True)
class Purification:
    """The projector, float64, and how it came about. ``seconds`` covers all but valid ratios."""

    projector: Tensor
    iterations: list[Iteration]
    seconds: float


def purify(
    fock: Tensor,
    occupied: int,
    schedule: Schedule,
    *,
    block: int = 32,
    tolerance: float = 0.0,
    most_iterations: int = 120,
) -> Purification:
    """The projector on the ``occupied`` lowest eigenvectors of ``fock``.

    Args:
        fock: (N, N), symmetric, float64, in an orthogonal basis, on the CPU or a CUDA device.
        occupied: number of states, from 1 to N - 1, with a gap above them.
        schedule: what the products may lose.
        block: edge of the blocks: 32, 64 or 128.
        tolerance: done where trace(X - X^2) is at most this share of ``occupied``. The last
            budget counts where it is larger: products that lose so much leave no less.
        most_iterations: a gap of 1e-9 of the spectrum's width needs no more.

    Raises:
        UserError: no convergence, as where there is no gap.
    """
    clock = [time.perf_counter()]
    steps: list[_Step] = []
    budget, last_done = schedule.first, 0
    tolerance = occupied * max(
        tolerance, schedule.last.max_error or 0, 4 * torch.finfo(schedule.last.dtype).eps
    )
    x = _initial(fock).to(budget.dtype)
    spare, norms = torch.empty_like(x), _norms(x, budget, block)
    while True:
        trace, trace_of_square = _traces(x, norms)
        if steps:
            clock.append(time.perf_counter())
        idempotency = trace - trace_of_square
        decay = [abs(error) for error in (*(step.idempotency for step in steps), idempotency)]
        if budget == schedule.last:
            enough = schedule.is_constant or last_done >= schedule.last_iterations
            if enough and _has_converged(decay, tolerance, budget, occupied):
                break
        elif _is_time_for_last(decay, tolerance, schedule, occupied):
            budget = schedule.last
            x = x.to(budget.dtype)
            spare, norms = torch.empty_like(x), _norms(x, budget, block)
        if len(steps) == most_iterations:
            raise UserError(
                f"expected a gap above the {occupied} occupied states that the budget resolves; "
                f"got trace(X - X^2) = {idempotency:.2g} after {most_iterations} iterations"
            )
        last_done += budget == schedule.last
        squared = abs(trace_of_square - occupied) < abs(2 * trace - trace_of_square - occupied)
        steps.append(_Step(squared, budget, idempotency, norms))
        (x, norms), spare = _product(x, spare, norms, squared, budget, block), x
    seconds = [end - start for start, end in itertools.pairwise(clock)]
    iterations = [step.measured(took) for step, took in zip(steps, seconds, strict=True)]
    return Purification(x.double(), iterations, clock[-1] - clock[0])


@dataclass(frozen=True)
class _Step:
    """An iteration while it runs: what it skips is counted when the clock has stopped."""

    squared: bool
    budget: Budget
    idempotency: float
    norms: Tensor

    def measured(self, seconds: float) -> Iteration:
        valid_ratio = 1.0
        if self.budget.max_error:
            tau = spamm_torch.find_tau(self.norms, self.norms, max_error=self.budget.max_error)
            valid_ratio = spamm_torch.valid_ratio(self.norms, self.norms, tau).item()
        return Iteration(self.squared, self.budget, self.idempotency, seconds, valid_ratio)


def _product(
    x: Tensor, spare: Tensor, norms: Tensor, squared: bool, budget: Budget, block: int
) -> tuple[Tensor, Tensor]:
    """X^2 or 2 X - X^2 in ``spare``, and its norms: the one place where products are computed."""
    if budget.max_error is None:
        if squared:
            torch.mm(x, x, out=spare)
        else:
            torch.addmm(x, x, x, beta=2, alpha=-1, out=spare)
        return spare, _norms(spare, budget, block)
    options: dict[str, Any] = {"norm_a": norms, "norm_b": norms, "return_norms": True}
    options |= {"symmetric": True, "out": spare, "block": block}
    options |= {"max_error": budget.max_error} if budget.max_error else {"tau": 0.0}
    if squared:
        return spamm_torch.mm(x, x, **options)
    return spamm_torch.addmm(x, x, x, beta=2, alpha=-1, **options)


def _norms(x: Tensor, budget: Budget, block: int) -> Tensor:
    """The norm map; for torch.mm the norm, which is that of one large block."""
    if budget.max_error is None:
        return torch.linalg.vector_norm(x)
    return spamm_torch.norm_map(x, block)


def _traces(x: Tensor, norms: Tensor) -> tuple[float, float]:
    """tr(X) and, since X is symmetric, tr(X^2) = norm(X)^2: the branch is known before the product.

    Waits for the device.
    """
    trace = x.diagonal().sum(dtype=torch.float64)
    norm = torch.linalg.vector_norm(norms, dtype=torch.float64)
    trace, norm = torch.stack((trace, norm)).tolist()
    return trace, norm**2


# ---- Where it starts, where the last iterations begin, where it ends ----------------------------


def _initial(fock: Tensor) -> Tensor:
    """(highest - F) / (highest - lowest), whose eigenvalues are in [0, 1] and occupied near 1."""
    lowest, highest = gershgorin(fock)
    x = fock * (-1 / (highest - lowest))
    x.diagonal().add_(highest / (highest - lowest))
    return x


def gershgorin(a: Tensor) -> tuple[float, float]:
    """Proven bounds of the eigenvalues of a symmetric matrix (Gershgorin's circles)."""
    centre = a.diagonal()
    radius = a.abs().sum(1) - centre.abs()
    lowest, highest = torch.stack(((centre - radius).min(), (centre + radius).max())).tolist()
    return lowest, highest


def _predicted(decay: list[float], steps: int) -> float:
    """trace(X - X^2) as it will be ``steps`` iterations from now.

    In the end the branches alternate. Two steps then turn an eigenvalue's distance e from 0 or 1
    into c e^2, where c is 2 or 4, so that the ratio r of the trace to that two steps before is c e.
    The next such ratio is c (c e^2) = r^2, the one after it r^4: c need not be known.
    """
    if len(decay) < 3 or decay[-1] >= decay[-3]:
        return decay[-1]
    ratio = decay[-1] / decay[-3]
    return decay[-1] * ratio ** (2 ** (steps // 2 + 1) - 2)


def _has_stalled(decay: list[float], budget: Budget, occupied: int) -> bool:
    """Whether errors of the products, and no longer the steps, decide about the trace.

    Once all eigenvalues are decided, two steps divide the trace by more than 25. That a lower order
    of convergence tells numerical errors: Kruchinina, Rudberg and Rubensson, J. Chem. Theory
    Comput. 12, 5788 (2016).
    """
    decided = max(_DECIDED, occupied * (budget.max_error or 0))
    return len(decay) > 2 and decay[-3] < decided and decay[-1] > decay[-3] / 4


def _is_time_for_last(
    decay: list[float], tolerance: float, schedule: Schedule, occupied: int
) -> bool:
    """True where only the schedule's last iterations remain, or the first can do no more."""
    enough = _predicted(decay, schedule.last_iterations) <= tolerance
    return enough or _has_stalled(decay, schedule.first, occupied)


def _has_converged(decay: list[float], tolerance: float, budget: Budget, occupied: int) -> bool:
    return decay[-1] <= _NOISE * tolerance or _has_stalled(decay, budget, occupied)
