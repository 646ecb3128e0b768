"""The family of settings that is searched: one list of moves, the cheapest first.

Of each layer's candidates only those on the lower convex hull of (time, squared error) can be part
of a best choice. A move takes a layer from one of these to the next. All layers' moves together,
sorted by the squared error that they add for the time that they save, are a one-parameter family:
after the first n of them, no other settings save as much time for the same sum of squared errors.

A move from one valid ratio to the next changes a layer much. Between two of one shape of blocks any
ratio will do, so a move is made in three parts, with time and squared error on the straight line.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from .statistics import Candidate, LayerStatistics
from .times import LayerTimes

PARTS = 3  # of a move

Point: TypeAlias = tuple[float, float, int]  # x, y, and a number to know it by


@dataclass(frozen=True)
class Move:
    """One layer to another valid ratio.

    Attributes:
        layer: its name.
        candidate: what it gets. The tau is that of the candidate to which the move leads.
        time: of the layer then, in microseconds.
        saved: microseconds. added: squared relative error of the model's output.
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
    """The corners of the lower convex hull of points (x, y, number) that are sorted.

    The first point is a corner whose y none is below. (Andrew's monotone chain, 1979.)
    """
    hull: list[Point] = []
    for point in points:
        if hull and point[0] == hull[-1][0]:
            continue  # straight above the last
        while len(hull) > 1 and _is_above(hull[-2], hull[-1], point):
            hull.pop()
        hull.append(point)
    return hull


def _is_above(left: Point, middle: Point, right: Point) -> bool:
    """Whether the middle point is on or above the line through the others."""
    rise, run = right[1] - left[1], right[0] - left[0]
    return (middle[1] - left[1]) * run >= rise * (middle[0] - left[0])
