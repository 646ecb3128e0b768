"""calibrate: each layer's setting, to save the most time within an accuracy drop."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .._arguments import check_bool, check_integer, check_number
from ..networks.conversion import _device_name
from ..networks.example import Example
from ..networks.leaves import Band
from ..networks.plan import LEFT, Engine
from ..networks.reference import check_reference
from ..networks.state import in_eval_mode
from .family import Family
from .form import IMAGES_FIRST, Form, check_model
from .inputs import Randomness, halves_of, statistics_inputs
from .journal import Journal, check_journal, journal_settings
from .moves import Move
from .ordering import is_worth_a_trial, reason_not_to_order
from .outcome import CalibrationReport, CalibrationRow, Outcome
from .progress import Progress
from .search import LEAST_EVALUATIONS, Evaluator, Found, Loss, search
from .stats import record_stats
from .times import time_models

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
    order_batch: bool | None = None,
    reorder: bool = False,
    reference: Tensor | None = None,
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
       A move from one ratio to the next is made in three parts.
    4. Bisection along the list with ``evaluate`` on one half of the data. Each time the thresholds
       are found anew, front to back: with those layers skipping that come before.
    5. The other half must agree: a drop of at most ``max_drop``, and at most 2 * ``max_drop``
       percent of the answers changed. Otherwise fewer moves are made. Evaluations that are left
       over go between what it refused and what it allowed; where it allowed the first choice, to
       more moves within the first half's limit.
    6. The whole model's time, with the layers that lose nothing each by its faster engine, and all
       by :func:`conv2d`, max pools in the call; the faster counts. Where skipping does not make it
       less, nothing is skipped; where converting alone saves nothing either, the settings leave
       every layer as it is.

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
        order_batch: whether the settings are for batches in order of likeness, as
            ``convert_(..., order_batch=True)`` makes them; a settings file says it. None: where
            layers lose less in that order at half of their products (where pictures are centred
            they do not), settings for it are measured and searched too. They are taken if they save
            more within the same drop, what the order itself takes included. Never for models to
            which it cannot be done: those without a generated forward as a whole, and those that
            compute something else for a batch in another order.
        reorder: whether channels are put in the order of their norms in the loader's first batch,
            as ``convert_(..., reorder=True)`` does. A settings file holds the order.
        reference: a picture (1, C, H, W), as :func:`convert_` takes it: the settings are for the
            reference form, in which zeros are skipped anyway. They say which small deviations are
            skipped, too, in blocks (1, 8, 8); ratios are shares of the products that are not zero.
            All pictures that the model is called with must be of its size. A settings file goes
            into ``convert_(model, path, reference=picture)``, with a reference of this shape.
        journal: a file in which finished parts are kept. After an interruption the same call goes
            on from there; a call with another ``max_drop`` uses what it can. None keeps nothing.
        progress: whether to say on standard error how far it is, and about how long it takes.

    Returns:
        A :class:`CalibrationReport`: a row for each convolution, and what the whole model gains.
        ``print`` shows a table; ``report.save(path)`` writes what ``convert_(model, path)`` takes.
        The same times give the same report.

    Raises:
        TypeError: arguments of another type, an ``evaluate`` that takes or returns something else.
        ValueError: a model that is converted or has nothing to skip, or with ``order_batch=True``
            one whose batches cannot be ordered; a loader without two batches, or one that is used
            up; an ``evaluate`` that gives no finite number, or two for the same
            model; a ``max_drop`` below 0; a journal of something else; a reference as
            :func:`convert_` refuses it, of another size than the loader's pictures, or together
            with ``order_batch=True`` or ``reorder=True``; with a reference, an ``evaluate`` that
            calls the model with pictures of another size or type, in training mode, under autocast
            or with hooks on its layers: the reference form does not serve such calls.

    After any error the model is as it was.
    """
    _check_arguments(model, max_drop, evaluations, journal, reference is not None)
    for name, value in (("reorder", reorder), ("progress", progress)):
        check_bool(value, name)
    check_bool(False if order_batch is None else order_batch, "order_batch")
    picture = None
    if reference is not None:
        _check_alone(order_batch, reorder)
        picture, order_batch = check_reference(reference, model, None, fuse=True), False
    randomness = Randomness(next(model.parameters()).device)
    with randomness.again(), in_eval_mode(model), torch.no_grad():
        halves = halves_of(loader)
        evaluator = Evaluator(model, evaluate, halves, randomness)
        with randomness.again():
            inputs = statistics_inputs(model, halves[0], example_input)
        example = inputs[0] if example_input is None else Example(example_input)
        if picture is not None:
            _check_sizes(picture, [*inputs, example])
        form = Form(model, example, inputs[0] if reorder else None, picture)
        device = _device_name(model)
        settings = {}
        if journal is not None:
            settings = journal_settings(model, inputs, example, device, reorder, picture)
        run = _Calibration(
            *(model, form, evaluator, inputs, example), Journal(journal, settings), progress
        )
        return run.run(float(max_drop), evaluations, order_batch)


def _check_arguments(
    model: Any, max_drop: Any, evaluations: Any, journal: Any, has_reference: bool
) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"calibrate expects an nn.Module; got {type(model).__name__}")
    check_model(model, has_reference)
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


def _check_alone(order_batch: Any, reorder: bool) -> None:
    """Raises for orders that the reference form does not have."""
    for name, is_asked in (("order_batch", order_batch), ("reorder", reorder)):
        if is_asked:
            raise ValueError(f"{name}=True must come without a reference; got a reference")


def _check_sizes(reference: Tensor, examples: Iterable[Example]) -> None:
    """Raises unless all inputs are pictures of the reference's size."""
    for example in examples:
        given = pytree.tree_leaves((example.args, example.kwargs))
        shapes = [tuple(value.shape) for value in given if isinstance(value, Tensor)]
        if [shape[1:] for shape in shapes] != [tuple(reference.shape[1:])]:
            raise ValueError(
                "reference must have the size of the loader's pictures and of example_input, "
                f"{', '.join(map(str, shapes))}; got {tuple(reference.shape)}"
            )


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
        # Forms, halves and numbers of moves, also those that the journal kept.
        self._tried: set[tuple[int, int, int]] = set()

    def run(self, max_drop: float, evaluations: int, order_batch: bool | None) -> CalibrationReport:
        ordered = self._form.with_ordered_batches(IMAGES_FIRST[0])
        if order_batch is not False:
            reason = reason_not_to_order(self._model, self._form, ordered, self._inputs)
            if order_batch and reason is not None:
                raise ValueError(f"order_batch=True expects {reason}")
            if reason is not None:
                order_batch = False
        self._check_evaluate()
        families = self._families(ordered, order_batch)
        found = self._search(families, max_drop, evaluations)
        family = families[found.form]
        chosen = family.chosen_after(found.moves)
        times, base = self._whole_model(family, chosen)
        note = ""
        if chosen and times[_CHOSEN] >= times[_EXACT]:
            chosen, note = {}, "the whole model is not faster with it"
        elif not chosen:
            note = _reason_for_nothing(families)
        if not chosen:
            found, times[_CHOSEN], base[_CHOSEN] = Found(0), times[_EXACT], base[_EXACT]
        engines = family.engines(chosen, base=base[_CHOSEN])
        if not chosen and times[_EXACT] >= times[_AS_IT_WAS]:
            engines = dict.fromkeys(self._form.layers, LEFT)
            times[_CHOSEN] = times[_AS_IT_WAS]
            note += "; nothing is installed: the model as it was is as fast"
        if note:
            note = f"{_nothing(engines)}: {note}"
        bands, ratios = self._ratios(family, engines, chosen)
        if chosen:
            engines = family.engines(chosen, bands, base[_CHOSEN])
        with family.form.installed(engines) as converted:
            settings = converted.to_dict()
        outcome = self._outcome(max_drop, found, family.weighted(ratios), times, note, settings)
        rows = [
            _row(name, family, engines[name], chosen.get(name), ratios.get(name, 1.0))
            for name in family.times
        ]
        return CalibrationReport(rows, outcome, settings)

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

    def _families(self, ordered: Form, order_batch: bool | None) -> list[Family]:
        """The families that are searched: batches as they come, in order of likeness, or both."""
        given = self._inputs, self._example, self._journal, self._progress
        if order_batch:
            return [Family(self._model, ordered, *given)]
        plain = Family(self._model, self._form, *given)
        if order_batch is None and self._is_worth_a_trial(ordered, plain):
            return [Family(self._model, ordered, *given), plain]
        return [plain]

    def _is_worth_a_trial(self, ordered: Form, plain: Family) -> bool:
        count = len(self._inputs)

        def on_batch(pass_number: int, batch: int) -> None:
            self._progress.at("a trial of ordered batches", batch + pass_number * count, 2 * count)

        given = self._model, ordered, self._inputs, plain.statistics, on_batch
        return self._journal.measured("order", lambda: is_worth_a_trial(*given), _read_bool)

    def _search(self, families: list[Family], max_drop: float, evaluations: int) -> Found:
        def loss(form: int, half: int, count: int) -> Loss:
            self._progress.at("evaluations", self._evaluations(), evaluations, each=True)
            self._tried.add((form, half, count))
            return families[form].loss(half, count, self._evaluator)

        curves = [family.curve(self._cost(family, families)) for family in families]
        return search(curves, max_drop, evaluations - 3, loss)

    def _evaluations(self) -> int:
        """How many evaluations there are so far, with those that the journal kept."""
        of_model = 2 + any(half for _, half, _ in self._tried)
        return of_model + len(self._tried)

    def _cost(self, family: Family, families: list[Family]) -> float:
        """Microseconds that the form of a family takes, against the last one's."""
        if family is families[-1]:
            return 0.0
        exact = family.engines({})
        both = {"as they come": self._form, "in order": family.form}
        forms = {
            name: (functools.partial(form.installed, exact), 1.0) for name, form in both.items()
        }
        times = self._journal.measured(
            "cost of the order",
            lambda: time_models(self._model, forms, self._example),
            lambda kept: {name: float(kept[name]) for name in forms},
        )
        return times["in order"] - times["as they come"]

    def _whole_model(
        self, family: Family, chosen: Mapping[str, Move]
    ) -> tuple[dict[str, float], dict[str, str]]:
        """The least times of the whole model, and the bases of layers that lose nothing with which
        they were found.
        """
        self._progress.at("times of the whole model", 0, 1, each=True)
        forms: dict[str, tuple[Callable[[], AbstractContextManager[Any]], float]] = {
            _AS_IT_WAS: (nullcontext, 1.0)
        }
        kinds: dict[str, tuple[Form, Mapping[str, Move], float]] = {_EXACT: (self._form, {}, 1.0)}
        if chosen:
            ratio = family.weighted({n: move.candidate.valid_ratio for n, move in chosen.items()})
            kinds[_CHOSEN] = (family.form, chosen, ratio)
        for kind, (form, moves, ratio) in kinds.items():
            for base in family.bases:
                engines = family.engines(moves, base=base)
                forms[f"{kind}, {base}"] = functools.partial(form.installed, engines), ratio
        found = self._journal.measured(
            f"whole model, {family.key(chosen)}",
            lambda: time_models(self._model, forms, self._example),
            lambda kept: {name: float(kept[name]) for name in forms},
        )
        times, best = {_AS_IT_WAS: found[_AS_IT_WAS]}, {}
        for kind in kinds:
            best[kind] = min(family.bases, key=lambda base: found[f"{kind}, {base}"])
            times[kind] = found[f"{kind}, {best[kind]}"]
        return times, best

    # ---- What came of it ------------------------------------------------------------------------

    def _ratios(
        self, family: Family, engines: Mapping[str, Engine], chosen: Mapping[str, Move]
    ) -> tuple[dict[str, Band], dict[str, float]]:
        """The bands of valid ratios by batch, and the ratios of all batches, with all settings."""
        by_batch: dict[str, list[float]] = {name: [] for name in chosen}
        skipping = [name for name, engine in engines.items() if engine.may_skip]
        if not skipping:
            return {}, dict.fromkeys(engines, 1.0)
        with family.form.installed(engines), record_stats(self._model) as whole:
            for example in self._inputs:
                with record_stats(self._model) as stats:
                    example.call(self._model)
                for name, found in by_batch.items():
                    found.append(stats[name].valid_ratio)
        ratios = dict.fromkeys(engines, 1.0)
        ratios |= {name: whole[name].valid_ratio for name in skipping}
        return {name: _band(found) for name, found in by_batch.items()}, ratios

    def _outcome(
        self,
        max_drop: float,
        found: Found,
        valid_ratio: float,
        times: Mapping[str, float],
        note: str,
        settings: Mapping[str, Any],
    ) -> Outcome:
        searched_drop = found.searched.drop if found.searched else None
        return Outcome(
            max_drop=max_drop,
            drop=found.held.drop if found.held else 0.0,
            searched_drop=searched_drop if found.moves else 0.0,
            changed=found.held.changed if found.held else None,
            resolution=self._evaluator.resolution(1) if found.held else None,
            valid_ratio=valid_ratio,
            evaluations=self._evaluations(),
            before_us=times[_AS_IT_WAS],
            exact_us=times[_EXACT],
            after_us=times[_CHOSEN],
            order_batch=settings["order_batch"],
            reorder=any("order" in layer for layer in settings["layers"].values()),
            reference=settings["reference"] is not None,
            note=note,
        )


def _row(
    name: str, family: Family, engine: Engine, move: Move | None, ratio: float
) -> CalibrationRow:
    times, shape = family.times[name], family.form.shape(name)
    setting = engine.setting if engine.may_skip else None
    if move is not None:
        error = move.candidate.error
        return CalibrationRow(name, shape, setting, ratio, error, times.baseline, move.time)
    reasons = family.form.reasons
    reason = reasons.get(name, "it would cost too much error for the time")
    if name not in reasons and min(times.candidates, default=math.inf) >= times.baseline:
        reason = "not faster at any ratio"
    if setting is not None:
        reason = f"zeros alone; {reason}"
    return CalibrationRow(name, shape, setting, ratio, 0.0, times.baseline, times.baseline, reason)


def _nothing(engines: Mapping[str, Engine]) -> str:
    """What these engines skip where no move was made."""
    skips_zeros = any(engine.may_skip for engine in engines.values())
    return "nothing but zeros is skipped" if skips_zeros else "nothing is skipped"


def _reason_for_nothing(families: list[Family]) -> str:
    if not any(family.moves for family in families):
        return "no layer is faster with it"
    return "no choice that was tried held on both halves"


def _read_bool(kept: Any) -> bool:
    if not isinstance(kept, bool):
        raise TypeError
    return kept


def _band(ratios: list[float]) -> Band:
    """What was seen, and half of its width or two percent more on either side."""
    low, high = min(ratios), max(ratios)
    margin = max(_BAND_MARGIN, (high - low) / 2)
    return max(0.0, low - margin), min(1.0, high + margin)
