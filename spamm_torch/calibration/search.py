"""The moves of a model's layers, and the search for the most of them within the accuracy drop.

Of each layer's candidates only those on the lower convex hull of (time, squared error) can be part
of a best choice. A move takes a layer from one of these to the next. All layers' moves together,
sorted by the squared error that they add for the time that they save, are a one-parameter family:
after the first n of them, no other settings save as much time for the same sum of squared errors.

A move from one valid ratio to the next changes a layer much. Between two of one shape of blocks any
ratio will do, so a move is made in three parts, with time and squared error on the straight line.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from .inputs import Loss
from .statistics import Candidate, LayerStatistics
from .times import LayerTimes

LEAST_EVALUATIONS = 5
_HELD_SHARE = 3  # one evaluation in so many is kept for the second half
_STEP_BACK = 0.7  # of the squared error, where the second half refuses
_ONE_SIDED = 2  # so many steps in a row that end on the same side are too short
_LIKELY_ERROR = 0.03  # squared, of a model's output, where some answers change; a first guess
_BEYOND = 1.2  # steps to where the loss is expected to be the limit go further, to get past it
PARTS = 3  # of a move

Point: TypeAlias = tuple[float, float, int]  # x, y, and a number to know it by


@dataclass(frozen=True)
class Move:
    """One layer to another valid ratio, by ``candidate``, whose tau is that of the candidate to
    which the move leads.

    ``time``: of the layer then, in microseconds, of which ``saved`` are saved. ``added``: squared
    relative error of the model's output.
    """

    layer: str
    candidate: Candidate
    time: float
    saved: float
    added: float


def moves_of(
    statistics: Mapping[str, LayerStatistics], times: Mapping[str, LayerTimes]
) -> list[Move]:
    """All moves of a model, in the order in which they are to be made."""
    moves = [
        move
        for name, layer in statistics.items()
        if name in times
        for move in _layer_moves(name, layer, times[name])
    ]
    return sorted(moves, key=lambda move: move.added / move.saved)  # equal ones in their order


def chosen_after(moves: Sequence[Move]) -> dict[str, Move]:
    """The last of these moves of each layer."""
    return {move.layer: move for move in moves}


def _layer_moves(name: str, layer: LayerStatistics, times: LayerTimes) -> list[Move]:
    base = times.baseline
    points = [
        (base.median - time.median, candidate.output_error**2, number)
        for number, (candidate, time) in enumerate(
            zip(layer.candidates, times.candidates, strict=True)
        )
        if time.beats(base)
    ]
    hull = lower_hull([(0.0, 0.0, -1), *sorted(points)])
    return [
        move
        for before, after in itertools.pairwise(hull)
        for move in _parts(name, layer, base.median, before, after)
    ]


def _parts(
    name: str, layer: LayerStatistics, base: float, before: Point, after: Point
) -> Iterator[Move]:
    """The move between two corners of a hull, in parts where ratios between are possible."""
    last = layer.candidates[after[2]]
    first = layer.candidates[before[2]] if before[2] >= 0 else None
    if first is None or first.setting.pixel_block != last.setting.pixel_block:
        first, parts = last, 1
    else:
        parts = PARTS
    for part in range(1, parts + 1):
        share = part / parts
        saved, error = (_between(x, y, share) for x, y in zip(before[:2], after[:2], strict=True))
        candidate = replace(
            last,
            valid_ratio=_between(first.valid_ratio, last.valid_ratio, share),
            error=_between(first.error**2, last.error**2, share) ** 0.5,
            output_error=error**0.5,
        )
        gained, added = ((y - x) / parts for x, y in zip(before[:2], after[:2], strict=True))
        yield Move(name, candidate, base - saved, gained, added)


def _between(first: float, last: float, share: float) -> float:
    return (1 - share) * first + share * last


def lower_hull(points: Sequence[Point]) -> list[Point]:
    """The corners of the lower convex hull of sorted points. (Andrew's monotone chain, 1979.)"""
    hull: list[Point] = []
    for point in points:
        if hull and point[0] == hull[-1][0]:
            continue  # straight above the last
        while len(hull) > 1 and _is_above(hull[-2], hull[-1], point):
            hull.pop()
        hull.append(point)
    return hull


def _is_above(left: Point, middle: Point, right: Point) -> bool:
    """Tells whether the middle point is on or above the line through the others."""
    rise, run = right[1] - left[1], right[0] - left[0]
    return (middle[1] - left[1]) * run >= rise * (middle[0] - left[0])


# ---- The search ---------------------------------------------------------------------------------

LossOf = Callable[[int, int], Loss]  # on a half, of the first n moves


@dataclass(frozen=True)
class Found:
    """The end of a search: how many moves, and their losses on both halves; None for no moves."""

    moves: int
    searched: Loss | None = None
    held: Loss | None = None


def search(errors: Sequence[float], max_drop: float, evaluations: int, loss: LossOf) -> Found:
    """The most moves whose loss both halves allow; ``errors``: sums of squares after each move."""
    run = _Search(errors, max_drop, evaluations, loss)
    run.narrow(max(1, (evaluations + 3) // _HELD_SHARE))
    return _held(run)


class _Search:
    """The first half's choices: it allowed ``low`` moves, not ``high`` (first: more than all)."""

    def __init__(
        self, errors: Sequence[float], max_drop: float, evaluations: int, loss: LossOf
    ) -> None:
        self.errors, self.max_drop, self.left, self._loss = errors, max_drop, evaluations, loss
        self.low, self.high = 0, len(errors) + 1
        self.losses: dict[int, Loss] = {}
        self._side, self._in_a_row = True, 0  # on which side steps ended, and how many in a row

    def loss(self, half: int, moves: int) -> Loss:
        self.left -= 1
        return self._loss(half, moves)

    def moves_within(self, error: float, below: int) -> int:
        """The most moves whose error is at most this, and fewer than so many."""
        return sum(each <= error for each in self.errors[: below - 1])

    def narrow(self, left: int) -> None:
        """Tries numbers between the two, until there is none or so many evaluations are left."""
        while self.high - self.low > 1 and self.left > left:
            self._try(self._next())

    def _try(self, moves: int) -> None:
        """Evaluates so many moves on the first half."""
        self.losses[moves] = self.loss(0, moves)
        is_allowed = self.losses[moves].is_within(self.max_drop)
        self._in_a_row = self._in_a_row + 1 if is_allowed == self._side else 1
        self._side = is_allowed
        if is_allowed:
            self.low = moves
        else:
            self.high = moves

    def _next(self) -> int:
        """The place where the loss is likely to reach the limit; halfway where nothing tells or it
        misled.
        """
        halfway = (self.low + self.high) // 2
        error = self._likely_error()
        if error is None:
            return halfway
        return max(self.low + 1, self.moves_within(error, self.high))

    def _likely_error(self) -> float | None:
        """The sum of squared errors at which the loss may reach the limit, if anything tells."""
        if not self.losses:
            return _LIKELY_ERROR
        known = [
            (math.log(self.errors[moves - 1]), math.log(share))
            for moves in (self.low, self.high)
            if (loss := self.losses.get(moves)) is not None
            and 0 < (share := loss.share(self.max_drop)) < math.inf
            and self.errors[moves - 1] > 0
        ]
        if len(known) == 2 and self._in_a_row < _ONE_SIDED:
            (least, below), (most, above) = known
            return math.exp(least - below * (most - least) / (above - below))
        if len(known) == 1 and (not self.low or self.high > len(self.errors)):
            ((error, share),) = known
            beyond = self._in_a_row if share <= 0 else -self._in_a_row
            return math.exp(error - share) * _BEYOND**beyond
        return None


def _held(run: _Search) -> Found:
    """The most moves that the second half allows, of those that the first does."""
    errors, found, moves, refused = run.errors, Found(0), run.low, None
    while run.left and moves > found.moves:
        held = run.loss(1, moves)
        if held.is_within(run.max_drop):
            found = Found(moves, run.losses.get(moves), held)
        else:
            refused = moves
        if refused is None:
            run.narrow(1)
            moves = run.low
        elif found.moves:
            middle = (errors[found.moves - 1] + errors[refused - 1]) / 2
            moves = run.moves_within(middle, refused)
        else:
            moves = run.moves_within(_STEP_BACK * errors[refused - 1], refused)
    return found
