"""calibrate: each layer's setting, to save the most time within an accuracy drop."""

import itertools
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import nn

from .._arguments import check_bool, check_integer, check_module, check_number
from .._hints import with_hints
from .._output import Progress, check_path
from .._state import RandomStates, in_eval_mode
from .._timing import Timing
from ..networks.config import DENSE, LEFT, Band, Engine, SpAMMConfig
from ..networks.conversion import device_name
from ..networks.example import Example
from ..networks.report import shape_of
from .form import SPAMM, Form, check_model
from .inputs import Evaluator, Loss, halves_of, statistics_inputs
from .journal import Journal, journal_settings
from .outcome import CalibrationReport, CalibrationRow, Outcome
from .search import LEAST_EVALUATIONS, Found, Move, chosen_after, moves_of, search
from .statistics import LayerStatistics, measure_layers, thresholds_for, with_output_errors
from .stats import record_stats
from .times import LayerTimes, time_layers, time_models

_BAND_MARGIN = 0.02  # the least that a band is wider than what was seen, on either side

_AS_IT_WAS, _EXACT, _CHOSEN = "as it was", "nothing skipped", "as chosen"


@with_hints
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

    Statistics of some 512 inputs and times of layers give one list of moves: a layer to a lower
    valid ratio, by the time that it saves for the squared error that it adds. ``evaluate`` says on
    one half of the data how far to go, the other half must agree, and the whole model's time
    decides: where skipping does not make it less, nothing is skipped; where converting alone saves
    nothing either, the settings leave every layer as it is. docs/calibration.md has each step.

    Source: layer errors and times on a convex hull are the allocation of rate-distortion theory
    (Shoham and Gersho, "Efficient bit allocation for an arbitrary set of quantizers", 1988), as for
    mixed precision in HAWQ-V3 (Yao et al., 2021).

    Args:
        model: an ``nn.Module`` that is not converted; it stays as it is: weights, hooks, modes,
            random states. It is evaluated in eval mode without gradients.
        loader: batches with labels, the same in each pass: a ``DataLoader`` or a list. The batches
            of even number are one half, those of odd number the other. Of a batch that is a tuple
            or a list, the first element is the model's input; one that is a dict holds the model's
            arguments by name.
        evaluate: ``evaluate(model, loader)`` is called with the model and half of the loader, which
            can be iterated over and has a length in batches. It gives a score, higher is better; or
            a pair of the score, in percentage points, and the answers: a tensor or list with one
            entry for each input, such as the class that the model says, in the same order each
            time. Then at most 2 * ``max_drop`` percent of them may change.
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
        The same times give the same report. Its note says where times vary much, since other
        programs run: then only larger gains are chosen, and the journal keeps no times.

    Raises:
        TypeError: arguments of another type, an ``evaluate`` that takes or returns something else.
        ValueError: a model that is converted or has nothing to skip; a loader without two batches,
            or one that is used up; an ``evaluate`` that gives no finite number, or two for the same
            model; a ``max_drop`` below 0; a journal of something else.

    After any error the model is as it was.
    """
    check_module(model, "calibrate")
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
    if journal is not None:
        check_path(journal, "journal")
    check_bool(progress, "progress")
    randomness = RandomStates(next(model.parameters()).device)
    with randomness.again(), in_eval_mode(model) as before, torch.no_grad():
        halves = halves_of(loader)
        evaluator = Evaluator(model, evaluate, halves, randomness)
        with randomness.again():
            inputs = statistics_inputs(model, halves[0], example_input)
        example = inputs[0] if example_input is None else Example(example_input)
        form = Form(model, example, before)
        given = model, inputs, example, device_name(model)
        kept = Journal(journal, {} if journal is None else journal_settings(*given))
        with Progress("calibrate", progress) as shown:
            run = _Calibration(form, evaluator, inputs, example, kept, shown)
            return run.run(float(max_drop), evaluations)


Chosen: TypeAlias = Mapping[str, Move]  # by layer; where there is none, nothing is skipped


class _Calibration:
    """The steps, in order. The journal keeps each measurement."""

    def __init__(
        self,
        form: Form,
        evaluator: Evaluator,
        inputs: list[Example],
        example: Example,
        journal: Journal,
        progress: Progress,
    ) -> None:
        self._form, self._evaluator, self._inputs, self._example = form, evaluator, inputs, example
        self._journal, self._progress = journal, progress
        # Halves and numbers of moves, also those that the journal kept.
        self._tried: set[tuple[int, int]] = set()
        self._check_evaluate()
        given = form, inputs
        self._statistics = journal.measured(
            "statistics",
            lambda: with_output_errors(*given, measure_layers(*given, progress), progress),
            dict[str, LayerStatistics],
        )
        self._times = journal.measured(
            "times",
            lambda: time_layers(form, self._statistics, example, progress),
            dict[str, LayerTimes],
            self._statistics,
        )
        # The faster engine without a loss, of each layer.
        self._fastest = {
            name: SPAMM if times.is_spamm_faster else DENSE for name, times in self._times.items()
        }
        self._bases = form.bases(self._fastest)
        self._moves = moves_of(self._statistics, self._times)

    def run(self, max_drop: float, evaluations: int) -> CalibrationReport:
        found = self._search(max_drop, evaluations)
        chosen = chosen_after(self._moves[: found.moves])
        times, base = self._whole_model(chosen)
        widest = max(times.values(), key=lambda timing: timing.spread)
        notes = []
        if chosen and not all(times[_CHOSEN].beats(times[kind]) for kind in (_EXACT, _AS_IT_WAS)):
            notes = [f"the whole model is not faster with it ({times[_CHOSEN].median:.0f} us)"]
        elif not self._moves:
            notes = ["no layer is faster with it"]
        elif not chosen:
            notes = ["no choice that was tried held on both halves"]
        if notes:
            chosen, found = {}, Found(0)
            times[_CHOSEN], base[_CHOSEN] = times[_EXACT], base[_EXACT]
        engines = self._engines(chosen, base[_CHOSEN])
        if not chosen and not times[_EXACT].beats(times[_AS_IT_WAS]):
            engines = dict.fromkeys(self._form.layers, LEFT)
            times[_CHOSEN] = times[_AS_IT_WAS]
            notes.append("nothing is installed: the model as it was is as fast")
        if notes:
            notes[0] = f"nothing is skipped: {notes[0]}"
        if not widest.is_steady:
            notes.append(f"times vary by {widest.spread:.2g}x here: other programs run")
        bands, ratios = self._ratios(engines, chosen)
        engines |= {name: replace(engines[name], band=band) for name, band in bands.items()}
        searched, held = found.searched, found.held
        outcome = Outcome(
            max_drop=max_drop,
            drop=held.drop if held else 0.0,
            searched_drop=searched.drop if searched else (None if found.moves else 0.0),
            changed=held.changed if held else None,
            resolution=self._evaluator.resolution(1) if held else None,
            valid_ratio=self._weighted(ratios),
            evaluations=self._evaluations(),
            before_us=times[_AS_IT_WAS].median,
            exact_us=times[_EXACT].median,
            after_us=times[_CHOSEN].median,
            spread=widest.spread,
            note="; ".join(notes),
        )
        rows = [
            self._row(name, engines[name], chosen.get(name), ratios.get(name, 1.0))
            for name in self._times
        ]
        return CalibrationReport(rows, outcome, self._form.settings(engines))

    # ---- Measuring ------------------------------------------------------------------------------

    def _check_evaluate(self) -> None:
        self._progress.at("evaluations of the model as it is", 0, 2, each=True)
        self._evaluator.check_repeats()
        score, _ = self._evaluator.dense(0)
        kept = self._journal.measured("score", lambda: score, float)
        if kept != score:
            raise ValueError(
                "journal must be of the same evaluate and loader; got one where the model as it "
                f"was scores {kept:g}, not {score:g} (remove it, or name another file)"
            )

    def _search(self, max_drop: float, evaluations: int) -> Found:
        def loss(half: int, count: int) -> Loss:
            self._progress.at("evaluations", self._evaluations(), evaluations, each=True)
            self._tried.add((half, count))
            chosen = chosen_after(self._moves[:count])
            installed = self._form.installed(self._engines(chosen))
            return self._journal.measured(
                f"half {half}, {_key(chosen)}",
                lambda: self._evaluator.loss(half, installed),
                Loss,
            )

        errors = tuple(itertools.accumulate(move.added for move in self._moves))
        return search(errors, max_drop, evaluations - 3, loss)

    def _evaluations(self) -> int:
        """How many evaluations there are so far, with those that the journal kept."""
        of_model = 2 + any(half for half, _ in self._tried)
        return of_model + len(self._tried)

    def _engines(self, chosen: Chosen, base: str | None = None) -> dict[str, Engine]:
        """The engine of each layer with these moves, by a threshold of its own; without a loss, as
        in ``base``, where there is none (None: the first).
        """
        engines = dict(self._bases[base] if base else self._fastest)
        if not chosen:
            return engines
        wanted = {name: move.candidate for name, move in chosen.items()}
        settings = self._journal.measured(
            f"thresholds, {_key(chosen)}",
            lambda: thresholds_for(self._form, self._inputs, wanted),
            dict[str, SpAMMConfig],
            wanted,
        )
        return engines | {name: Engine("spamm", settings[name]) for name in wanted}

    def _whole_model(self, chosen: Chosen) -> tuple[dict[str, Timing], dict[str, str]]:
        """The times of the whole model, and the bases of layers that lose nothing with which they
        were found. The journal does not keep times that vary much.
        """
        forms: dict[str, tuple[dict[str, Engine] | None, float]] = {_AS_IT_WAS: (None, 1.0)}
        kinds = {_EXACT: {}, _CHOSEN: chosen} if chosen else {_EXACT: chosen}
        for kind, moves in kinds.items():
            ratios = {name: move.candidate.valid_ratio for name, move in moves.items()}
            for base in self._bases:
                engines = self._engines(moves, base)
                forms[f"{kind}, {base}"] = engines, self._weighted(ratios) if moves else 1.0
        key = f"whole model, {_key(chosen)}"
        found = self._journal.measured(
            key,
            lambda: time_models(self._form, forms, self._example, self._progress),
            dict[str, Timing],
            forms,
        )
        if not all(timing.is_steady for timing in found.values()):
            self._journal.forget(key, "times")
        times, best = {_AS_IT_WAS: found[_AS_IT_WAS]}, {}
        for kind, base in itertools.product(kinds, self._bases):
            timing = found[f"{kind}, {base}"]
            if kind not in times or timing.beats(times[kind]):
                times[kind], best[kind] = timing, base
        return times, best

    # ---- Results --------------------------------------------------------------------------------

    def _ratios(
        self, engines: Mapping[str, Engine], chosen: Chosen
    ) -> tuple[dict[str, Band], dict[str, float]]:
        """The bands of valid ratios by batch, and the ratios of all batches, with all settings."""
        by_batch: dict[str, list[float]] = {name: [] for name in chosen}
        skipping = [name for name, engine in engines.items() if engine.may_skip]
        if not skipping:
            return {}, dict.fromkeys(engines, 1.0)
        model = self._form.model
        with self._form.installed(engines), record_stats(model) as whole:
            for example in self._progress.over("valid ratios of batches", self._inputs):
                with record_stats(model) as stats:
                    example.call(model)
                for name, found in by_batch.items():
                    found.append(stats[name].valid_ratio)
        ratios = dict.fromkeys(engines, 1.0)
        ratios |= {name: whole[name].valid_ratio for name in skipping}
        return {name: _band(found) for name, found in by_batch.items()}, ratios

    def _weighted(self, ratios: Mapping[str, float]) -> float:
        """The mean valid ratio by multiplications, over the layers that can skip."""
        valid = total = 0.0
        for name, layer in self._statistics.items():
            if name not in self._form.reasons:
                valid += layer.multiplications * ratios.get(name, 1.0)
                total += layer.multiplications
        return valid / total if total else 1.0

    def _row(self, name: str, engine: Engine, move: Move | None, ratio: float) -> CalibrationRow:
        times, shape = self._times[name], shape_of(self._form.layers[name])
        base = times.baseline.median
        setting = engine.setting if engine.may_skip else None
        if move is not None:
            error = move.candidate.error
            return CalibrationRow(name, shape, setting, ratio, error, base, move.time)
        reason = "not faster at any ratio"
        if any(timing.beats(times.baseline) for timing in times.candidates):
            reason = "it would cost too much error for the time"
        reason = self._form.reasons.get(name, reason)
        return CalibrationRow(name, shape, setting, ratio, 0.0, base, base, reason)


def _band(ratios: list[float]) -> Band:
    """The range that was seen, with half of its width or two percent more on either side."""
    low, high = min(ratios), max(ratios)
    margin = max(_BAND_MARGIN, (high - low) / 2)
    return max(0.0, low - margin), min(1.0, high + margin)


def _key(chosen: Chosen) -> str:
    """A text that tells these moves from others."""
    shares = (
        f"{name} {move.candidate.valid_ratio!r} in {move.candidate.setting.pixel_block}"
        for name, move in sorted(chosen.items())
    )
    return "; ".join(shares)
