"""One budget of output error, dealt to the layers, and the search for the largest that is allowed.

Each layer goes from option to option along the lower convex hull of time and squared error. The
steps of all layers, by the error that they add for the time that they save, are one list: no other
choice saves as much for the same sum of squared errors as a beginning of it. What is left of a
budget goes into a part of the next step: in blocks of one shape any ratio will do.

Source: the allocation of rate-distortion theory (Shoham and Gersho, "Efficient bit allocation for
an arbitrary set of quantizers", 1988).
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from ..networks.config import NOTHING_SKIPPED, SpAMMConfig

_FIRST_BUDGET = 0.03  # the squared error of a model's output where some answers change
_STRIDE = 4.0  # from a budget to the next, until one is allowed and one refused
_LEAST_BUDGET = 1e-12  # of what costs nothing


class Option(NamedTuple):
    """A share of the block products that a layer may compute, and its cost.

    Attributes:
        pixel_block, tau: the setting that computes it where nothing is skipped before the layer.
        valid_ratio: the share. time: of the layer then.
        error, output_error: the squared relative error of the layer's output and of the model's.
    """

    pixel_block: tuple[int, int, int] | None
    tau: float
    valid_ratio: float
    error: float
    output_error: float
    time: float

    @property
    def setting(self) -> SpAMMConfig:
        """The setting with its tau."""
        return SpAMMConfig(tau=self.tau, pixel_block=self.pixel_block)

    @property
    def searching(self) -> SpAMMConfig:
        """The setting by which each call finds a threshold of its own, if it skips anything."""
        setting = SpAMMConfig(valid_ratio=self.valid_ratio, pixel_block=self.pixel_block)
        return setting if self.tau else NOTHING_SKIPPED


# A layer from one option (None: dense) to the next, the time saved, and the error added.
Step: TypeAlias = tuple[str, Option | None, Option, float, float]


class Allocation:
    """The best choices of options for all layers, by the budget of squared output error."""

    def __init__(self, layers: Mapping[str, tuple[float, Sequence[Option]]]) -> None:
        """``layers``: the time of each as it is, and its options."""
        steps = (step for name, given in layers.items() for step in _steps(name, *given))
        self.steps = sorted(steps, key=lambda step: step[4] / step[3])
        self.most = math.fsum(step[4] for step in self.steps)

    def least(self, saved: float) -> float | None:
        """The budget of the first steps that save so much time; None where all save less."""
        error = 0.0
        for *_, time, added in self.steps:
            saved, error = saved - time, error + added
            if saved <= 0:
                return error
        return None

    def within(self, budget: float) -> dict[str, Option]:
        """The option of each layer that has one, by a budget."""
        chosen: dict[str, Option] = {}
        left = budget * (1 + 1e-9)  # sums round
        for layer, before, after, _, added in self.steps:
            if added > left:
                if before is not None and before.pixel_block == after.pixel_block:
                    pairs = zip(before[1:], after[1:], strict=True)
                    numbers = (x + left / added * (y - x) for x, y in pairs)
                    chosen[layer] = Option(after.pixel_block, *numbers)
                break
            left -= added
            chosen[layer] = after
        return chosen


def _steps(layer: str, base: float, options: Sequence[Option]) -> Iterator[Step]:
    before, time, error = None, base, 0.0
    while faster := [option for option in options if option.time < time]:
        price = min((x.output_error - error) / (time - x.time) for x in faster)
        best = (x for x in faster if (x.output_error - error) / (time - x.time) == price)
        after = min(best, key=lambda option: option.time)
        yield layer, before, after, time - after.time, after.output_error - error
        before, time, error = after, after.time, after.output_error


def search(
    least: float, most: float, max_drop: float, evaluations: int, drop: Callable[..., float]
) -> tuple[float, float]:
    """The largest budget between two whose drop both halves allow, and the drop on the second half;
    0 where none is. ``drop`` is on a half, within a budget. Each half brackets its limit, the
    second one below what the first allowed and by a third of the evaluations.
    """

    def bracket(half: int, budget: float, most: float, count: int) -> tuple[float, float]:
        low, high, allowed = 0.0, math.inf, 0.0
        for _ in range(count):
            if (found := drop(half, budget)) <= max_drop:
                low, allowed = budget, found
            else:
                high = budget
            if low == most or high == least:
                break
            middle = math.sqrt(low * high) if low else max(high / _STRIDE, least)
            budget = min(low * _STRIDE, most) if high == math.inf else middle
        return low, allowed

    least, most = max(least, _LEAST_BUDGET), max(most, _LEAST_BUDGET)
    for_second = max(1, (evaluations + 1) // 3)
    start = min(max(_FIRST_BUDGET, least), most)
    low, _ = bracket(0, start, most, evaluations - for_second)
    return bracket(1, low, low, for_second) if low else (0.0, 0.0)
