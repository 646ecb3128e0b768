"""A proven bound of the error of a whole purification: docs/error_bound.md has the proof."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class Start(NamedTuple):
    """The first matrix, which stands for the Hamiltonian's image with its spectrum in [0, 1].

    Attributes:
        error: of the matrix, as a Frobenius norm.
        outside: how far an eigenvalue of the image may lie outside of [0, 1] by rounding.
    """

    error: float
    outside: float


class End(NamedTuple):
    """The last matrix X: its trace and trace(X - X^2), and how far both may be wrong."""

    trace: float
    residual: float
    unsure: float


class Proof(NamedTuple):
    """The proven numbers: the bound of norm(X - projector), and a gap for each product.

    Attributes:
        bound: inf where nothing is proven.
        gaps: at least the distance of occupied and empty eigenvalues behind each product.
        end: what of the bound the last matrix's own eigenvalues make up.
    """

    bound: float
    gaps: list[float]
    end: float


_TINY = 1e-14  # more than the numbers from 0 to 1 are rounded by here, in a step


def prove(
    steps: Sequence[tuple[bool, float]], start: Start, end: End, size: int, occupied: int
) -> Proof:
    """Follows the spectrum forwards, then the gap backwards from the last matrix, where it shows.

    Args:
        steps: of each product, whether it squares, and the Frobenius norm of its error.
        size, occupied: the numbers of states.
    """
    nothing = Proof(math.inf, [], math.inf)
    if not all(math.isfinite(x) for x in (*(error for _, error in steps), *start, *end)):
        return nothing
    # Frobenius norms of the parts below 0 and above 1.
    below = above = math.sqrt(size) * start.outside + start.error
    outside = []
    for squares, error in steps:
        outside.append((below, above))
        if squares:
            below, above = error, (2 + above) * above + error
        else:
            below, above = (2 + below) * below + error, error
    wrong = 2 * math.sqrt(size) * ((1 + below) * below + (1 + above) * above)
    spread = max(end.residual + end.unsure, 0.0) + wrong + _TINY  # of all |x (1 - x)|
    if not spread < 0.25:
        return nothing
    away = 2 * spread / (1 + math.sqrt(1 - 4 * spread))  # of all eigenvalues from 0 or 1
    if not abs(end.trace - occupied) + end.unsure + away < 1:
        return nothing
    low, high, turned, gaps = away, 1 - away, 0.0, []
    for (squares, error), (below, above) in zip(reversed(steps), reversed(outside), strict=True):
        gap = high - low - error - _TINY
        low, high = low + error + _TINY, high - error - _TINY
        if gap <= 0 or (below >= math.sqrt(high) if squares else above >= math.sqrt(1 - low)):
            return nothing
        gaps.append(gap)
        turned += error / gap
        if squares:
            low, high = math.sqrt(low), math.sqrt(high)
        else:
            low, high = 1 - math.sqrt(1 - low), 1 - math.sqrt(1 - high)
    gap = high - low - start.error - _TINY
    if gap <= 0:
        return nothing
    turned += start.error / gap
    return Proof((away + math.sqrt(2) * turned) * (1 + 1e-9), gaps[::-1], away)
