"""The settings that are searched in one form of a model: its statistics, times and moves."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from torch import nn

from ..networks.config import SpAMMConfig
from ..networks.example import Example
from ..networks.leaves import Band
from ..networks.plan import DENSE, Engine
from .form import Form
from .journal import Journal
from .moves import Move, chosen_after, moves_of
from .output_errors import with_output_errors
from .progress import Progress
from .search import Curve, Evaluator, Loss
from .statistics import Candidate, LayerStatistics, measure_layers
from .thresholds import thresholds_for
from .times import LayerTimes, smoothed, time_layers

Chosen = Mapping[str, Move]  # by layer; where there is none, nothing is skipped


class Family:
    """What a calibration knows of one form, measured once and kept in its journal.

    Attributes:
        form: the form.
        statistics, times: of its layers, by name.
        moves: all of them, in the order in which they are to be made.
    """

    def __init__(
        self,
        model: nn.Module,
        form: Form,
        inputs: Sequence[Example],
        example: Example,
        journal: Journal,
        progress: Progress,
    ) -> None:
        self._model, self._inputs, self._example = model, inputs, example
        self._journal, self._progress = journal, progress
        self.form = form
        self._of_form = "" if form.order_block is None else ", in order"
        self.statistics = self._measure_statistics()
        self.times = self._measure_times()
        lines = {name: smoothed(of, self.statistics[name]) for name, of in self.times.items()}
        self.moves = moves_of(self.statistics, lines)

    def _measure_statistics(self) -> dict[str, LayerStatistics]:
        count = len(self._inputs)

        def on_batch(pass_number: int, batch: int) -> None:
            stage = ("norms", "errors")[pass_number] + f" of batches{self._of_form}"
            self._progress.at(stage, batch, count)

        def measure() -> Any:
            given = self._model, self.form, self._inputs
            found = measure_layers(*given, on_batch)
            names = list(found)

            def on_layer(name: str) -> None:
                stage = f"errors at the output{self._of_form}"
                self._progress.at(stage, names.index(name), len(names))

            found = with_output_errors(*given, found, on_layer)
            return {name: asdict(layer) for name, layer in found.items()}

        def read(kept: Any) -> dict[str, LayerStatistics]:
            if not kept.keys() <= self.form.layers.keys():
                raise ValueError
            return {name: _read_layer(layer) for name, layer in kept.items()}

        return self._journal.measured(f"statistics{self._of_form}", measure, read)

    def _measure_times(self) -> dict[str, LayerTimes]:
        names = list(self.statistics)

        def on_layer(name: str) -> None:
            self._progress.at(f"times of layers{self._of_form}", names.index(name), len(names))

        def measure() -> Any:
            given = self._model, self.form, self.statistics, self._example
            return {name: asdict(of) for name, of in time_layers(*given, on_layer).items()}

        def read(kept: Any) -> dict[str, LayerTimes]:
            found = {name: _read_times(times) for name, times in kept.items()}
            if any(len(found[n].candidates) != len(self.statistics[n].candidates) for n in names):
                raise ValueError
            return found

        return self._journal.measured(f"times{self._of_form}", measure, read)

    def curve(self, cost: float) -> Curve:
        """What the moves come to; ``cost`` is what the form itself takes, in microseconds."""
        saved = itertools.accumulate((move.saved for move in self.moves), initial=-cost)
        errors = itertools.accumulate(move.added for move in self.moves)
        return Curve(tuple(errors), tuple(saved)[1:])

    def chosen_after(self, count: int) -> dict[str, Move]:
        """What each layer gets after so many moves."""
        return chosen_after(self.moves[:count])

    def loss(self, half: int, count: int, evaluator: Evaluator) -> Loss:
        """What so many moves cost on a half of the data."""
        installed = self.form.installed(self.engines(self.chosen_after(count)))
        return self._journal.measured(
            f"half {half}, {count} moves{self._of_form}",
            lambda: asdict(evaluator.loss(half, installed)),
            _read_loss,
        )

    def engines(
        self, chosen: Chosen, bands: Mapping[str, Band] = {}, base: str | None = None
    ) -> dict[str, Engine]:
        """The engine of each layer with these moves, exact where there is none.

        Args:
            base: one of ``bases``, for the layers that lose nothing; None: the first.
        """
        engines = dict(self.bases[base] if base else self._exact_engines())
        for name, setting in self._settings(chosen).items():
            engines[name] = Engine("spamm", setting, bands.get(name))
        return engines

    @property
    def bases(self) -> dict[str, Mapping[str, Engine]]:
        """The engines of layers that lose nothing, in each way that may be the fastest, by name."""
        return self.form.bases(self._exact_engines())

    def _exact_engines(self) -> dict[str, Engine]:
        """The faster engine without a loss, of each layer."""
        return {
            name: self.form.exact if times.is_spamm_faster else DENSE
            for name, times in self.times.items()
        }

    def _settings(self, chosen: Chosen) -> dict[str, SpAMMConfig]:
        """What each layer skips with these moves: their shares, by thresholds of their own."""
        if not chosen:
            return {}
        wanted = {name: move.candidate for name, move in chosen.items()}

        def measure() -> Any:
            exact = self._exact_engines()
            found = thresholds_for(self._model, self.form, self._inputs, exact, wanted)
            return {name: asdict(setting) for name, setting in found.items()}

        return self._journal.measured(
            f"thresholds, {self.key(chosen)}",
            measure,
            lambda kept: {name: SpAMMConfig(**kept[name]) for name in wanted},
        )

    def key(self, chosen: Chosen) -> str:
        """A text that tells these moves in this form from others."""
        shares = (
            f"{name} {move.candidate.valid_ratio!r} in {move.candidate.setting.pixel_block}"
            for name, move in sorted(chosen.items())
        )
        return "; ".join(shares) + self._of_form

    def exact_ratio(self, layer: str) -> float:
        """The valid ratio of a layer whose engine loses nothing."""
        is_spamm = layer in self.times and self.times[layer].is_spamm_faster
        return self.statistics[layer].exact_ratio if is_spamm else 1.0

    def weighted(self, ratios: Mapping[str, float]) -> float:
        """The mean valid ratio by multiplications, over the layers that can skip.

        Args:
            ratios: of layers by name; the others lose nothing.
        """
        weights = {
            name: layer.multiplications
            for name, layer in self.statistics.items()
            if name not in self.form.reasons
        }
        valid = sum(
            weight * (ratios[name] if name in ratios else self.exact_ratio(name))
            for name, weight in weights.items()
        )
        return valid / sum(weights.values()) if weights else 1.0


def _read_layer(kept: Any) -> LayerStatistics:
    candidates = [
        Candidate(
            SpAMMConfig(**each["setting"]),
            *(float(each[number]) for number in ("valid_ratio", "error", "output_error")),
        )
        for each in kept["candidates"]
    ]
    multiplications, exact_ratio = (float(kept[n]) for n in ("multiplications", "exact_ratio"))
    return LayerStatistics(multiplications, tuple(candidates), exact_ratio)


def _read_times(kept: Any) -> LayerTimes:
    candidates = tuple(map(float, kept["candidates"]))
    return LayerTimes(float(kept["dense"]), float(kept["spamm"]), candidates)


def _read_loss(kept: Any) -> Loss:
    changed = kept["changed"]
    return Loss(float(kept["drop"]), None if changed is None else float(changed))
