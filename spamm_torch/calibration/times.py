"""How long each layer takes by each of its settings, and the whole model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import linear_regression
from typing import Any

import torch
from torch import nn

from ..networks.config import SpAMMConfig
from ..networks.example import Example
from ..networks.timing import times_of
from .calls import Call, ConvCall, watch
from .form import Form
from .statistics import LayerStatistics

_ops = torch.ops.spamm_torch

MUST_WIN = 1.03  # how many times as fast another engine than dense has to be


@dataclass(frozen=True)
class Trial:
    """What is timed: a layer by an engine, or the whole model (layer "") in a form that is named.

    Attributes:
        valid_ratio: the share of block products that are computed; 1 where nothing is skipped.
    """

    layer: str
    what: str
    setting: SpAMMConfig | None = None
    valid_ratio: float = 1.0


def measure(calls: Mapping[Trial, Callable[[], Any]], device: torch.device) -> dict[Trial, float]:
    """Microseconds of each call. All times of a calibration come from here."""
    return dict(zip(calls, times_of(list(calls.values()), device), strict=True))


@dataclass(frozen=True)
class LayerTimes:
    """Microseconds of a layer by its engines without a loss, dense and of the op ``conv2d``, and
    by each of its candidates.
    """

    dense: float
    spamm: float
    candidates: tuple[float, ...] = ()

    @property
    def baseline(self) -> float:
        """The time of the faster engine without a loss."""
        return self.spamm if self.is_spamm_faster else self.dense

    @property
    def is_spamm_faster(self) -> bool:
        return self.spamm * MUST_WIN < self.dense

    def __add__(self, other: LayerTimes) -> LayerTimes:
        candidates = map(sum, zip(self.candidates, other.candidates, strict=True))
        return LayerTimes(
            self.dense + other.dense, self.spamm + other.spamm, tuple(map(float, candidates))
        )


def smoothed(times: LayerTimes, statistics: LayerStatistics) -> LayerTimes:
    """The times with those of candidates on a line by valid ratio, one for each pixel block.

    A call costs something, and so much for each block product: what leaves that line is noise, or a
    last wave of thread blocks. A hull of raw times would keep the few candidates that were lucky,
    and its moves would be leaps.
    """
    found = list(times.candidates)
    for block in {candidate.setting.pixel_block for candidate in statistics.candidates}:
        places = [
            number
            for number, candidate in enumerate(statistics.candidates)
            if candidate.setting.pixel_block == block
        ]
        ratios = [statistics.candidates[place].valid_ratio for place in places]
        values = [times.candidates[place] for place in places]
        if len(set(ratios)) > 1:
            slope, intercept = linear_regression(ratios, values)
            for place, ratio in zip(places, ratios, strict=True):
                found[place] = intercept + slope * ratio
    return replace(times, candidates=tuple(found))


def time_layers(
    model: nn.Module,
    form: Form,
    statistics: Mapping[str, LayerStatistics],
    example: Example,
    on_layer: Callable[[str], None],
) -> dict[str, LayerTimes]:
    """The times of all layers on an example's activations, in the form in which they will run.

    Layers that are called several times: of all calls together.
    """
    times: dict[str, LayerTimes] = {}
    shapes: dict[str, torch.Size] = {}  # of weights
    exact = form.exact.setting
    assert exact is not None

    def time(name: str, call: Call) -> None:
        if name in statistics and isinstance(call, ConvCall):
            on_layer(name)
            shapes[name] = call.weight.shape
            found = _layer_times(name, call, exact, statistics[name])
            times[name] = times[name] + found if name in times else found

    with form.installed(dict.fromkeys(form.layers, form.observed)), watch(model, time):
        example.call(model)
    if form.exact == form.observed:
        return times
    return _with_layouts(model, form, example, times, shapes)


def _layer_times(
    name: str, call: ConvCall, exact: SpAMMConfig, statistics: LayerStatistics
) -> LayerTimes:
    calls: dict[Trial, Callable[[], Any]] = {
        Trial(name, "dense"): call.dense,
        Trial(name, "spamm", exact): _skipping(call, exact),
    }
    for candidate in statistics.candidates:
        trial = Trial(name, "spamm", candidate.setting, candidate.valid_ratio)
        calls[trial] = _skipping(call, candidate.setting)
    dense, spamm, *others = measure(calls, call.input.device).values()
    return LayerTimes(dense, spamm, tuple(others))


def _with_layouts(
    model: nn.Module,
    form: Form,
    example: Example,
    times: Mapping[str, LayerTimes],
    shapes: Mapping[str, torch.Size],
) -> dict[str, LayerTimes]:
    """The times with those of layers that the form's exact engine computes in another layout.

    Such a layer has another weight there; ``shapes`` are those of the weights that were timed. All
    of its calls are timed anew, also those without a layout.
    """
    in_layouts: dict[str, float] = {}

    def find(name: str, call: Call) -> None:
        if name in times and isinstance(call, ConvCall) and call.weight.shape != shapes[name]:
            in_layouts[name] = 0.0

    def time(name: str, call: Call) -> None:
        if name in in_layouts and isinstance(call, ConvCall):
            trial = Trial(name, "spamm", form.exact.setting)
            found = measure({trial: call.again}, call.input.device)[trial]
            in_layouts[name] += found

    with form.installed(dict.fromkeys(form.layers, form.exact)):
        for on_call in (find, time):
            with watch(model, on_call):
                example.call(model)
    return {
        name: replace(found, spamm=in_layouts.get(name, found.spamm))
        for name, found in times.items()
    }


def _skipping(call: ConvCall, setting: SpAMMConfig) -> Callable[[], Any]:
    options = setting.op_arguments()
    blocks = {name: options.get(name) for name in ("block", "pixel_block")}
    norms = _ops.conv2d_weight_norm(call.weight, call.geometry[-1], **blocks)
    return lambda: call.skipping(norm_weight=norms, **options)


def time_models(
    model: nn.Module,
    forms: Mapping[str, tuple[Any, float]],
    example: Example,
    rounds: Sequence[int] = (0, 1),
) -> dict[str, float]:
    """Microseconds of the whole model in several forms, the least of two rounds.

    Args:
        forms: by name, a function that gives a context manager in which the model has that form,
            and the valid ratio there.
    """
    device = next(model.parameters()).device
    times: dict[str, float] = {}
    for _ in rounds:
        for name, (installed, ratio) in forms.items():
            trial = Trial("", name, None, ratio)
            with installed():
                found = measure({trial: lambda: example.call(model)}, device)[trial]
            times[name] = min(found, times.get(name, found))
    return times
