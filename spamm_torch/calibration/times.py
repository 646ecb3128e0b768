"""How long the model takes, and each layer by each of its settings where it stands in the model."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import linear_regression
from typing import Any, TypeAlias

import torch

from .._output import Progress
from .._timing import Mark, Timing, times_of_parts
from ..networks.config import NOTHING_SKIPPED, Engine, SpAMMConfig
from ..networks.example import Example
from .calls import ConvCall, of_convolutions, watch
from .form import Form
from .statistics import Candidate, LayerStatistics

_LEAST_ROUNDS = 5  # of times, on a CPU


@dataclass(frozen=True)
class Trial:
    """A layer by an engine, or the whole model (layer "") in a named form: one thing to time, with
    its share of block products that are computed.
    """

    layer: str
    what: str
    setting: SpAMMConfig | None = None
    valid_ratio: float = 1.0


# A run of the model, and what its parts are trials of, by the names with which they begin.
Run: TypeAlias = tuple[Mapping[str, Trial], Callable[[Mark], Any]]


def measure(
    runs: Sequence[Run], device: torch.device, before: Sequence[Callable[[], Any]]
) -> dict[Trial, Timing]:
    """The time of each trial that takes part, each run after its own call of ``before``."""
    times = times_of_parts([run for _, run in runs], device, before)
    return {
        trials[name]: timing
        for (trials, _), parts in zip(runs, times, strict=True)
        for name, timing in parts.items()
        if name in trials
    }


@dataclass(frozen=True)
class LayerTimes:
    """The times of all calls of a layer: dense, by ``conv2d`` without a loss, by its candidates."""

    dense: Timing
    spamm: Timing
    candidates: tuple[Timing, ...] = ()

    @property
    def baseline(self) -> Timing:
        """The time of the faster engine without a loss."""
        return self.spamm if self.is_spamm_faster else self.dense

    @property
    def is_spamm_faster(self) -> bool:
        return self.spamm.beats(self.dense)


def time_layers(
    form: Form, statistics: Mapping[str, LayerStatistics], example: Example, progress: Progress
) -> dict[str, LayerTimes]:
    """The times of all layers on an example's activations, each where it stands in the model: in
    each run every layer is timed with one of its settings, and passes on what is without a loss.
    Of each shape of blocks three candidates are timed; the others are on their line.
    """
    trials = {
        name: [
            Trial(name, "dense"),
            Trial(name, "spamm", NOTHING_SKIPPED),
            *(Trial(name, "spamm", c.setting, c.valid_ratio) for c in _timed(layer.candidates)),
        ]
        for name, layer in statistics.items()
    }

    def run(of_layers: Mapping[str, Trial]) -> Run:
        def forward(mark: Mark) -> None:
            def compute(name: str, call: ConvCall) -> None:
                setting = of_layers[name].setting
                mark(name)
                call.dense() if setting is None else call.skipping(setting)
                mark("")

            progress.at("times of layers")
            with watch(form.model, before=of_convolutions(of_layers, compute)):
                example.call(form.model)

        return of_layers, forward

    if not trials:
        return {}
    columns = itertools.zip_longest(*trials.values())
    runs = [run({trial.layer: trial for trial in column if trial}) for column in columns]
    with form.observed_layers():
        before = [lambda: None] * len(runs)
        found = measure(runs, next(form.model.parameters()).device, before)
    times = {}
    for name, (dense, spamm, *others) in trials.items():
        if dense in found:
            known = {trial.setting: found[trial] for trial in others}
            candidates = _on_lines(statistics[name].candidates, known)
            times[name] = LayerTimes(found[dense], found[spamm], candidates)
    return times


def _timed(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The first, the middle and the last candidate of each shape of blocks."""
    found = []
    for block in dict.fromkeys(candidate.setting.pixel_block for candidate in candidates):
        of_block = [each for each in candidates if each.setting.pixel_block == block]
        places = sorted({0, len(of_block) // 2, len(of_block) - 1})
        found += [of_block[place] for place in places]
    return found


def _on_lines(
    candidates: Sequence[Candidate], known: Mapping[SpAMMConfig | None, Timing]
) -> tuple[Timing, ...]:
    """The times of all candidates, on a line by valid ratio for each pixel block: a distance from
    it is noise, or a last wave of thread blocks, and a hull of raw times would keep the few
    candidates that were lucky. Each time varies as much as the one that varies most.
    """
    spread = max((timing.spread for timing in known.values()), default=1.0)
    lines = {}
    for block in {candidate.setting.pixel_block for candidate in candidates}:
        points = [
            (each.valid_ratio, known[each.setting].median)
            for each in candidates
            if each.setting.pixel_block == block and each.setting in known
        ]
        ratios, times = zip(*points, strict=True)
        is_line = len(set(ratios)) > 1
        lines[block] = linear_regression(ratios, times) if is_line else (0.0, times[0])
    return tuple(
        Timing(intercept + slope * candidate.valid_ratio, spread)
        for candidate in candidates
        for slope, intercept in (lines[candidate.setting.pixel_block],)
    )


def time_models(
    form: Form,
    engines: Mapping[str, tuple[Mapping[str, Engine] | None, float]],
    example: Example,
    progress: Progress,
) -> dict[str, Timing]:
    """The time of the whole model by several engines, in turns; None: the model as it was."""
    steps = itertools.count()
    least = _LEAST_ROUNDS * len(engines)

    def run(_: Mark) -> None:
        progress.at("times of the whole model", min(next(steps), least - 1), least)
        example.call(form.model)

    trials = {name: Trial("", name, None, ratio) for name, (_, ratio) in engines.items()}
    before = [partial(form.prepare, of) for of, _ in engines.values()]
    device = next(form.model.parameters()).device
    with form.kept():
        found = measure([({"": trial}, run) for trial in trials.values()], device, before)
    return {name: found[trial] for name, trial in trials.items()}
