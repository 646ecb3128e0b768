"""The family of settings that is searched: one list of moves, the cheapest first.

Of each layer's candidates only those on the lower convex hull of (time, squared error) can be part
of a best choice. A move takes a layer from one of these to the next. All layers' moves together,
sorted by the squared error that they add for the time that they save, are a one-parameter family:
after the first n of them, no other settings save as much time for the same sum of squared errors.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from .statistics import LayerStatistics
from .times import MUST_WIN, LayerTimes

Point: TypeAlias = tuple[float, float, int]  # x, y, and a number to know it by


@dataclass(frozen=True)
class Move:
    """One layer to another candidate.

    Attributes:
        layer: its name. candidate: the number of the candidate that it gets.
        saved: microseconds. added: squared relative error of the model's output.
    """

    layer: str
    candidate: int
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


def chosen_after(moves: Sequence[Move]) -> dict[str, int]:
    """The number of each layer's candidate after these moves."""
    return {move.layer: move.candidate for move in moves}


def _layer_moves(name: str, layer: LayerStatistics, times: LayerTimes) -> list[Move]:
    base = times.baseline
    points = [
        (base - time, candidate.output_error**2, number)
        for number, (candidate, time) in enumerate(
            zip(layer.candidates, times.candidates, strict=True)
        )
        if time * MUST_WIN < base
    ]
    hull = lower_hull([(0.0, 0.0, -1), *sorted(points)])
    return [
        Move(name, number, saved - before[0], error - before[1])
        for before, (saved, error, number) in itertools.pairwise(hull)
    ]


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


def _is_above(
    left: Point,
    middle: Point,
    right: Point,
) -> bool:
    """Whether the middle point is on or above the line through the others."""
    rise, run = right[1] - left[1], right[0] - left[0]
    return (middle[1] - left[1]) * run >= rise * (middle[0] - left[0])
