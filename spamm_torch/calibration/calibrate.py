"""calibrate: each layer's setting, to save the most time within an accuracy drop."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from .._arguments import check_bool, check_integer, check_number
from ..networks.config import SpAMMConfig
from ..networks.conversion import _device_name
from ..networks.example import Example
from ..networks.leaves import Band
from ..networks.plan import LEFT, Engine
from ..networks.state import in_eval_mode
from .form import Form, check_model
from .inputs import Randomness, halves_of, statistics_inputs
from .journal import Journal, check_journal, journal_settings
from .moves import Move, chosen_after, moves_of
from .outcome import CalibrationReport, CalibrationRow, Outcome
from .output_errors import with_output_errors
from .progress import Progress
from .search import LEAST_EVALUATIONS, Evaluator, Found, Loss, search
from .statistics import Candidate, LayerStatistics, measure_layers
from .stats import record_stats
from .thresholds import thresholds_for
from .times import LayerTimes, smoothed, time_layers, time_models

_BAND_MARGIN = 0.02  # the least that a band is wider than what was seen, on either side

_AS_IT_WAS, _EXACT, _CHOSEN = "as it was", "nothing skipped", "as chosen"


def calibrate(
    model: nn.Module,
    loader: Iterable[Any],
    evaluate: Callable[[nn.Module, Iterable[Any]], Any],
    max_drop: float,
    *,
    example_input: Any = None,
    evaluations: int = 12,
    journal: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> CalibrationReport:
    """Picks each convolution's setting, to save the most time within an accuracy drop.

    1. Statistics of some 512 inputs of the loader: for each convolution 8 valid ratios, in blocks
       of images at one position and in blocks of one image; the thresholds by :func:`find_tau` on
       the pooled norm maps; the relative error of its output after its activation, and what that
       comes to at the model's output. No labels, no gradients; the time of 9 to 18 forwards, and of
       two forwards of 128 inputs for each layer.
    2. Each layer's time with each of these, on the example input; a line by valid ratio through
       them, for each shape of blocks.
    3. The lower convex hull of (time, squared error of the model's output) of each layer, and one
       list of all moves along them, by the time that they save for the squared error that they add.
    4. Bisection along the list with ``evaluate`` on one half of the data. Each time the thresholds
       are found anew, front to back: with those layers skipping that come before.
    5. The other half must agree: a drop of at most ``max_drop``, and at most 2 * ``max_drop``
       percent of the answers changed. Otherwise fewer moves are made; evaluations that are left
       over go between what it refused and what it allowed.
    6. The whole model's time. Where it is not less, nothing is skipped; where converting alone
       saves nothing either, the settings leave every layer as it is.

    Source: layer errors and times on a convex hull are the allocation of rate-distortion theory
    (Shoham and Gersho, "Efficient bit allocation for an arbitrary set of quantizers", 1988), as for
    mixed precision in HAWQ-V3 (Yao et al., 2021).

    Args:
        model: an ``nn.Module`` that is not converted; it stays as it is: weights, hooks, modes,
            random states. It is evaluated in eval mode without gradients.
        loader: batches with labels, the same in each pass: a ``DataLoader`` or a list. The batches
            of even number are one half, those of odd number the other. Of a batch that is a tuple
            or a list, the first element is the model's input.
        evaluate: ``evaluate(model, loader)`` is called with the model and half of the loader, which
            can be iterated over and has a length in batches. It gives a score, higher is better, as
            accuracy in percentage points; or a pair of the score and the answers: a tensor or list
            with one entry for each input, such as the class that the model says, in the same order
            each time. With answers the score should be in percentage points, as what changes is.
        max_drop: the most that the score may drop, in its units; at least 0.
        example_input: what is timed, as :func:`convert_` takes it; its batch size and dtype should
            be those that will be served. None: the input of the first batch.
        evaluations: the most calls of ``evaluate``, each on half of the loader; at least 5. Three
            are of the model as it is, one of them to see that ``evaluate`` repeats itself.
        journal: a file in which finished parts are kept. After an interruption the same call goes
            on from there; a call with another ``max_drop`` uses what it can. None keeps nothing.
        progress: whether to say on standard error how far it is, and about how long it takes.

    Returns:
        A :class:`CalibrationReport`: a row for each convolution, and what the whole model gains.
        ``print`` shows a table; ``report.save(path)`` writes what ``convert_(model, path)`` takes.
        The same times give the same report.

    Raises:
        TypeError: arguments of another type, an ``evaluate`` that takes or returns something else.
        ValueError: a model that is converted or has nothing to skip; a loader without two batches,
            or one that is used up; an ``evaluate`` that gives no finite number, or two for the same
            model; a ``max_drop`` below 0; a journal of something else.

    After any error the model is as it was.
    """
    _check_arguments(model, max_drop, evaluations, journal, progress)
    randomness = Randomness(next(model.parameters()).device)
    with randomness.again(), in_eval_mode(model), torch.no_grad():
        halves = halves_of(loader)
        evaluator = Evaluator(model, evaluate, halves, randomness)
        with randomness.again():
            inputs = statistics_inputs(model, halves[0], example_input)
        example = inputs[0] if example_input is None else Example(example_input)
        form = Form(model, example)
        device = _device_name(model)
        settings = {} if journal is None else journal_settings(model, inputs, example, device)
        run = _Calibration(
            *(model, form, evaluator, inputs, example), Journal(journal, settings), progress
        )
        return run.run(float(max_drop), evaluations)


def _check_arguments(
    model: Any, max_drop: Any, evaluations: Any, journal: Any, progress: Any
) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"calibrate expects an nn.Module; got {type(model).__name__}")
    check_model(model)
    check_number(max_drop, "max_drop")
    if not 0 <= max_drop < math.inf:
        raise ValueError(
            "max_drop must be a finite number of at least 0, since the dense model itself drops by "
            f"0; got {max_drop}"
        )
    check_integer(evaluations, "evaluations")
    if evaluations < LEAST_EVALUATIONS:
        raise ValueError(f"evaluations must be at least {LEAST_EVALUATIONS}; got {evaluations}")
    check_journal(journal)
    check_bool(progress, "progress")


class _Calibration:
    """The steps, in order."""

    def __init__(
        self,
        model: nn.Module,
        form: Form,
        evaluator: Evaluator,
        inputs: list[Example],
        example: Example,
        journal: Journal,
        shows_progress: bool,
    ) -> None:
        self._model, self._form, self._evaluator = model, form, evaluator
        self._inputs, self._example, self._journal = inputs, example, journal
        self._progress = Progress(shows_progress)
        self._tried: set[tuple[int, int]] = set()  # halves and numbers of moves, also those kept

    def run(self, max_drop: float, evaluations: int) -> CalibrationReport:
        self._check_evaluate()
        self._statistics = self._measure_statistics()
        self._times = self._measure_times()
        times_on_lines = {
            name: smoothed(times, self._statistics[name]) for name, times in self._times.items()
        }
        moves = moves_of(self._statistics, times_on_lines)
        found = self._search(moves, max_drop, evaluations)
        chosen = chosen_after(moves[: found.moves])
        times = self._whole_model(chosen)
        note = ""
        if chosen and times[_CHOSEN] >= times[_EXACT]:
            chosen, note = {}, "nothing is skipped: the whole model is not faster with it"
        elif not chosen:
            note = _reason_for_nothing(moves)
        if not chosen:
            found, times[_CHOSEN] = Found(0), times[_EXACT]
        engines = self._engines(chosen)
        if not chosen and times[_EXACT] >= times[_AS_IT_WAS]:
            engines = dict.fromkeys(self._form.layers, LEFT)
            times[_CHOSEN] = times[_AS_IT_WAS]
            note += "; nothing is installed: the model as it was is as fast"
        bands, ratios = self._ratios(engines, chosen)
        outcome = self._outcome(max_drop, found, ratios, times, note)
        return self._report(chosen, engines, bands, ratios, outcome)

    # ---- Measuring ------------------------------------------------------------------------------

    def _check_evaluate(self) -> None:
        self._progress.at("evaluations of the model as it is", 0, 2, each=True)
        self._evaluator.check_repeats()
        score = self._evaluator.dense(0).value
        kept = self._journal.measured("score", lambda: score, float)
        if kept != score:
            raise ValueError(
                "journal must be of the same evaluate and loader; got one where the model as it "
                f"was scores {kept:g}, not {score:g} (remove it, or name another file)"
            )

    def _measure_statistics(self) -> dict[str, LayerStatistics]:
        count = len(self._inputs)

        def on_batch(pass_number: int, batch: int) -> None:
            stage = ("norms", "errors")[pass_number] + " of batches"
            self._progress.at(stage, batch, count)

        def measure() -> Any:
            given = self._model, self._form, self._inputs
            found = measure_layers(*given, on_batch)
            names = list(found)

            def on_layer(name: str) -> None:
                self._progress.at("errors at the output", names.index(name), len(names))

            found = with_output_errors(*given, found, on_layer)
            return {name: asdict(layer) for name, layer in found.items()}

        def read(kept: Any) -> dict[str, LayerStatistics]:
            if not kept.keys() <= self._form.layers.keys():
                raise ValueError
            return {name: _read_layer(layer) for name, layer in kept.items()}

        return self._journal.measured("statistics", measure, read)

    def _measure_times(self) -> dict[str, LayerTimes]:
        names = list(self._statistics)

        def on_layer(name: str) -> None:
            self._progress.at("times of layers", names.index(name), len(names))

        def measure() -> Any:
            found = time_layers(self._model, self._form, self._statistics, self._example, on_layer)
            return {name: asdict(times) for name, times in found.items()}

        def read(kept: Any) -> dict[str, LayerTimes]:
            found = {name: _read_times(times) for name, times in kept.items()}
            if any(len(found[n].candidates) != len(self._statistics[n].candidates) for n in names):
                raise ValueError
            return found

        return self._journal.measured("times", measure, read)

    def _search(self, moves: list[Move], max_drop: float, evaluations: int) -> Found:
        errors, total = [], 0.0
        for move in moves:
            total += move.added
            errors.append(total)

        def loss(half: int, count: int) -> Loss:
            self._progress.at("evaluations", self._evaluations(), evaluations, each=True)
            self._tried.add((half, count))
            chosen = chosen_after(moves[:count])
            installed = self._form.installed(self._engines(chosen))
            key = f"half {half}, {count} moves"
            return self._journal.measured(
                key, lambda: asdict(self._evaluator.loss(half, installed)), _read_loss
            )

        return search(errors, max_drop, evaluations - 3, loss)

    def _evaluations(self) -> int:
        """How many evaluations there are so far, with those that the journal kept."""
        of_model = 2 + any(half for half, _ in self._tried)
        return of_model + len(self._tried)

    def _whole_model(self, chosen: Mapping[str, int]) -> dict[str, float]:
        self._progress.at("times of the whole model", 0, 1, each=True)
        installed = self._form.installed
        forms: dict[str, tuple[Callable[[], AbstractContextManager[Any]], float]] = {
            _AS_IT_WAS: (nullcontext, 1.0),
            _EXACT: (functools.partial(installed, self._engines({})), 1.0),
        }
        if chosen:
            candidates = {n: self._statistics[n].candidates[chosen[n]] for n in chosen}
            ratio = self._weighted({n: found.valid_ratio for n, found in candidates.items()})
            forms[_CHOSEN] = (functools.partial(installed, self._engines(chosen)), ratio)
        key = f"whole model, {sorted(chosen.items())}"
        return self._journal.measured(
            key,
            lambda: time_models(self._model, forms, self._example),
            lambda kept: {name: float(kept[name]) for name in forms},
        )

    def _engines(
        self, chosen: Mapping[str, int], bands: Mapping[str, Band] = {}
    ) -> dict[str, Engine]:
        """The engine of each layer with these candidates, exact where there is none."""
        engines = {name: times.exact_engine for name, times in self._times.items()}
        for name, setting in self._settings(chosen).items():
            engines[name] = Engine("spamm", setting, bands.get(name))
        return engines

    def _settings(self, chosen: Mapping[str, int]) -> dict[str, SpAMMConfig]:
        """What each layer skips with these candidates: their shares, by thresholds of their own."""
        if not chosen:
            return {}
        wanted = {n: self._statistics[n].candidates[number] for n, number in chosen.items()}
        exact = {name: times.exact_engine for name, times in self._times.items()}

        def measure() -> Any:
            found = thresholds_for(self._model, self._form, self._inputs, exact, wanted)
            return {name: asdict(setting) for name, setting in found.items()}

        return self._journal.measured(
            f"thresholds, {sorted(chosen.items())}",
            measure,
            lambda kept: {name: SpAMMConfig(**kept[name]) for name in wanted},
        )

    # ---- What came of it ------------------------------------------------------------------------

    def _ratios(
        self, engines: Mapping[str, Engine], chosen: Mapping[str, int]
    ) -> tuple[dict[str, Band], dict[str, float]]:
        """The bands of valid ratios by batch, and the ratios of all batches, with all settings."""
        by_batch: dict[str, list[float]] = {name: [] for name in chosen}
        ratios: dict[str, float] = {}
        if not chosen:
            return {}, ratios
        with self._form.installed(engines), record_stats(self._model) as whole:
            for example in self._inputs:
                with record_stats(self._model) as stats:
                    example.call(self._model)
                for name, found in by_batch.items():
                    found.append(stats[name].valid_ratio)
        ratios = {name: whole[name].valid_ratio for name in chosen}
        return {name: _band(found) for name, found in by_batch.items()}, ratios

    def _weighted(self, ratios: Mapping[str, float]) -> float:
        """The mean valid ratio by multiplications, over the layers that can skip."""
        weights = {
            name: layer.multiplications
            for name, layer in self._statistics.items()
            if name not in self._form.reasons
        }
        valid = sum(weight * ratios.get(name, 1.0) for name, weight in weights.items())
        return valid / sum(weights.values()) if weights else 1.0

    def _outcome(
        self,
        max_drop: float,
        found: Found,
        ratios: Mapping[str, float],
        times: Mapping[str, float],
        note: str,
    ) -> Outcome:
        return Outcome(
            max_drop=max_drop,
            drop=found.held.drop if found.held else 0.0,
            searched_drop=found.searched.drop if found.searched else 0.0,
            changed=found.held.changed if found.held else None,
            resolution=self._evaluator.resolution(1) if found.held else None,
            valid_ratio=self._weighted(ratios),
            evaluations=self._evaluations(),
            before_us=times[_AS_IT_WAS],
            exact_us=times[_EXACT],
            after_us=times[_CHOSEN],
            note=note,
        )

    def _report(
        self,
        chosen: Mapping[str, int],
        engines: Mapping[str, Engine],
        bands: Mapping[str, Band],
        ratios: Mapping[str, float],
        outcome: Outcome,
    ) -> CalibrationReport:
        if chosen:
            engines = self._engines(chosen, bands)
        with self._form.installed(engines) as converted:
            settings = converted.to_dict()
        rows = [
            self._row(name, engines[name].setting, chosen.get(name), ratios.get(name, 1.0))
            for name in self._times
        ]
        return CalibrationReport(rows, outcome, settings)

    def _row(
        self, name: str, setting: SpAMMConfig | None, number: int | None, ratio: float
    ) -> CalibrationRow:
        times, shape = self._times[name], self._form.shape(name)
        if number is not None:
            candidate = self._statistics[name].candidates[number]
            return CalibrationRow(
                *(name, shape, setting, ratio, candidate.error),
                *(times.baseline, times.candidates[number]),
            )
        reason = self._form.reasons.get(name, "it would cost too much error for the time")
        if name not in self._form.reasons and min(times.candidates, default=math.inf) >= (
            times.baseline
        ):
            reason = "not faster at any ratio"
        return CalibrationRow(name, shape, None, 1.0, 0.0, times.baseline, times.baseline, reason)


def _reason_for_nothing(moves: list[Move]) -> str:
    if not moves:
        return "nothing is skipped: no layer is faster with it"
    return "nothing is skipped: no choice that was tried held on both halves"


def _read_layer(kept: Any) -> LayerStatistics:
    candidates = [
        Candidate(
            SpAMMConfig(**each["setting"]),
            *(float(each[number]) for number in ("valid_ratio", "error", "output_error")),
        )
        for each in kept["candidates"]
    ]
    return LayerStatistics(float(kept["multiplications"]), tuple(candidates))


def _read_times(kept: Any) -> LayerTimes:
    candidates = tuple(map(float, kept["candidates"]))
    return LayerTimes(float(kept["dense"]), float(kept["spamm"]), candidates)


def _read_loss(kept: Any) -> Loss:
    changed = kept["changed"]
    return Loss(float(kept["drop"]), None if changed is None else float(changed))


def _band(ratios: list[float]) -> Band:
    """What was seen, and half of its width or two percent more on either side."""
    low, high = min(ratios), max(ratios)
    margin = max(_BAND_MARGIN, (high - low) / 2)
    return max(0.0, low - margin), min(1.0, high + margin)
