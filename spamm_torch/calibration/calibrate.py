"""calibrate: each layer's setting, to save the most time within an accuracy drop."""

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from torch import nn

from .._arguments import check_module, check_number
from .._output import Progress, table, write_text
from .._timing import MUST_WIN, Timing
from ..networks.config import SpAMMConfig
from ..networks.convert import device_name, is_converted
from ..networks.report import ConvertReport, Row, geometry_of, shape_of
from ..nn import reason_not_to_skip
from .inputs import Evaluator, halves_of, inputs_of, isolated
from .options import Bench, Options, Settings, Trial
from .search import Allocation, Option, search

_EVALUATIONS = 12
_LEAST_SHARE = 0.05  # of the products: skipping fewer does not make a model 3% faster


def calibrate(
    model: nn.Module,
    loader: Iterable[Any],
    evaluate: Callable[[nn.Module, Iterable[Any]], Any],
    max_drop: float,
) -> "CalibrationReport":
    """Picks each convolution's setting, to save the most time within an accuracy drop.

    One budget of error at the model's output is dealt to the layers, by the time that each saves
    for the error that it adds. ``evaluate`` says on one half of the data how large it may be, the
    other half must agree, and the whole model's time decides. Where skipping a twentieth of the
    products is too much already, it ends at once. docs/calibration.md has each step.

    Args:
        model: an ``nn.Module`` that is not converted, in any mode; it stays as it is.
        loader: batches with labels, the same in each pass: a ``DataLoader`` or a list. The batches
            of even number are one half, those of odd number the other. A batch is the model's
            input, a tuple or list that begins with it, or a dict of its arguments by name. Times
            are of the first, in the model's dtype: it should be as large as those to be served.
        evaluate: ``evaluate(model, loader)`` gets the model, in eval mode, and half of the loader,
            which can be iterated over and has a length in batches. It gives a score, higher is
            better. It is called at most twelve times: thrice with the model as it is, once of
            these to see that it repeats itself.
        max_drop: the most that the score may drop, in its units; at least 0.

    Returns:
        A :class:`CalibrationReport`: a row for each convolution, and what the whole model gains.
        ``print`` shows a table; ``report.save(path)`` writes what ``convert_(model, path)`` takes.
        The same times give the same report.

    Raises:
        TypeError: arguments of another type, an ``evaluate`` that returns something else.
        ValueError: a model that is converted or has nothing to skip; a loader without two batches,
            or one that is used up; an ``evaluate`` that gives no finite number, or two for the same
            model, or moves it; a ``max_drop`` below 0.

    After any error the model is as it was. How far it is stands on standard error, if a terminal.

    Example:
        >>> report = calibrate(model, loader, evaluate, max_drop=0.5)
        >>> report.save("net.json")  # convert_(model, "net.json") makes the network skip so much
        >>> [row.name for row in report]
        ['0']
    """
    check_module(model, "calibrate")
    for name, module in model.named_modules():
        if is_converted(module):
            raise ValueError(
                "calibrate expects a model that is not converted; got one whose "
                f"{name or type(model).__name__} is (call revert_ first)"
            )
    bench = Bench(model)
    if all(map(reason_not_to_skip, bench.layers.values())):
        raise ValueError(
            "calibrate expects a model with convolutions that can skip; got "
            f"{type(model).__name__}, which has none ({len(bench.layers)} others)"
        )
    check_number(max_drop, "max_drop")
    if not 0 <= max_drop < math.inf:
        raise ValueError(f"max_drop must be a finite number of at least 0; got {max_drop}")
    with isolated(model):
        halves = halves_of(loader)
        evaluator = Evaluator(model, evaluate, halves)
        bench.set_inputs(inputs_of(model, halves[0]), Progress("calibrate", None))
        return _Calibration(bench, evaluator, float(max_drop)).run()


class _Calibration:
    """The steps, in order."""

    def __init__(self, bench: Bench, evaluator: Evaluator, max_drop: float) -> None:
        self._bench, self._evaluator, self._max_drop = bench, evaluator, max_drop
        self._sizes: dict[str, float] = {}
        self._times: dict[str, tuple[float, list[Option]]] = {}

    def run(self) -> "CalibrationReport":
        bench, evaluator = self._bench, self._evaluator
        bench.progress.at("evaluations of the model as it is", 0, 2, each=True)
        evaluator.check_repeats()
        found = bench.errors()
        self._sizes = {name: size for name, (size, _) in found.items()}
        if why := self._first_bound(Allocation(found)):
            return self._report({}, {}, 0.0, why)
        self._times = bench.times({name: options for name, (_, options) in found.items()})
        faster = bench.with_output_errors({name: of[1] for name, of in self._times.items()})
        times = {name: time for name, (time, _) in self._times.items()}
        allocation = Allocation({name: (times[name], options) for name, options in faster.items()})
        least = allocation.least((1 - 1 / MUST_WIN) * math.fsum(times.values()))
        if least is None:
            whole = "layers are not faster, or not enough"
            return self._report({}, {}, 0.0, whole, "all layers together save too little")
        settings: dict[float, dict[str, SpAMMConfig]] = {}

        def drop(half: int, budget: float) -> float:
            bench.progress.at("evaluations", evaluator.calls, _EVALUATIONS, each=True)
            evaluator.see(half)
            if budget not in settings:
                settings[budget] = bench.thresholds(allocation.within(budget))
            with bench.installed(settings[budget]):
                return evaluator.drop(half)

        left = _EVALUATIONS - evaluator.calls - 1  # one of the model on the other half
        budget, lost = search(least, allocation.most, self._max_drop, left, drop)
        if not budget:
            return self._report({}, {}, lost, "no choice that was tried held on both halves")
        return self._report(allocation.within(budget), settings[budget], lost)

    def _first_bound(self, allocation: Allocation) -> str:
        """The reason why there is nothing to be had, if the least that could pay is too much: by
        products in place of times, by errors of layers, and with a threshold for each call.
        """
        total = math.fsum(self._sizes.values())
        if (budget := allocation.least(_LEAST_SHARE * total)) is None:
            return f"less than {_LEAST_SHARE:.0%} of the products can be skipped at all"
        chosen = allocation.within(budget)
        skipped = math.fsum(self._sizes[name] - each.time for name, each in chosen.items()) / total
        self._bench.progress.at("evaluation of the least that pays")
        with self._bench.installed({name: each.searching for name, each in chosen.items()}):
            drop = self._evaluator.drop(0)
        where = f"to skip {skipped:.0%} of the products, where it costs least,"
        return "" if drop <= self._max_drop else f"{where} drops the score by {drop:.3g}"

    # ---- Results --------------------------------------------------------------------------------

    def _report(
        self,
        chosen: Options,
        settings: Settings,
        drop: float,
        why: str = "",
        of_layers: str = "it would cost too much error for the time",
    ) -> "CalibrationReport":
        """``why`` nothing is skipped, and the reason of layers that could be faster and are not."""
        ratio = self._weighted({name: option.valid_ratio for name, option in chosen.items()})
        forms: dict[Trial, Settings] = {Trial("", "as it was"): {}}
        forms |= {Trial("", "as chosen", ratio): settings} if settings else {}
        times = self._bench.model_times(forms) if self._times else [Timing(math.nan)]
        before, after = times[0], times[-1]
        spread = max(before.spread, after.spread)
        if settings and not after.beats(before):
            why = f"the whole model takes {after.median:.0f} us with it and {before.median:.0f} as "
            why += f"it was, and a gain counts from {max(MUST_WIN, spread):.2f}x on"
            chosen, settings, drop, after = {}, {}, 0.0, before
            of_layers = "the whole model is not faster with it"
        notes = [f"nothing is skipped, the model stays as it is: {why}"] if why else []
        if not Timing(1.0, spread).is_steady:
            notes.append(f"times vary by {spread:.2g}x here: other programs run")
        by_batch = self._bench.statistics(settings)
        ratios = {name: fmean(stats[name].valid_ratio for stats in by_batch) for name in settings}
        rows = []
        for name in self._sizes:
            layer, (time, faster) = self._bench.layers[name], self._times.get(name, (None, [()]))
            option, reason = chosen.get(name), of_layers if faster else "not faster at any ratio"
            error, after_us = (math.sqrt(option.error), option.time) if option else (0.0, time)
            reason = "" if option else reason_not_to_skip(layer) or reason
            given = shape_of(layer), settings.get(name), ratios.get(name, 1.0), error, time
            rows.append(CalibrationRow(name, *given, after_us, reason))
        before_us, after_us = (x.median if self._times else None for x in (before, after))
        valid, calls, note = self._weighted(ratios), self._evaluator.calls, "; ".join(notes)
        outcome = Outcome(self._max_drop, drop, valid, calls, before_us, after_us, spread, note)
        return CalibrationReport(rows, outcome, self._file(settings))

    def _weighted(self, ratios: Mapping[str, float]) -> float:
        """The mean valid ratio by multiplications, over the layers that can skip."""
        layers = self._bench.layers
        sizes = {n: size for n, size in self._sizes.items() if not reason_not_to_skip(layers[n])}
        valid = math.fsum(size * ratios.get(name, 1.0) for name, size in sizes.items())
        return valid / (math.fsum(sizes.values()) or 1.0)

    def _file(self, settings: Settings) -> dict[str, Any]:
        """The settings as :func:`convert_` takes them from a file; SpAMM layers keep their own."""
        rows = []
        for name, layer in self._bench.model.named_modules():
            if isinstance(layer, nn.Conv2d):
                given: Any = {"setting": settings.get(name), "geometry": geometry_of(layer)}
                action = "spamm" if name in settings else "left"
                rows.append(Row(name, shape_of(layer), action, **given))
        return ConvertReport(rows, device=device_name(self._bench.model)).to_dict()


_HEAD = ("layer", "shape", "valid", "tau", "pixel block", "dense us", "chosen us", "error")


@dataclass(frozen=True)
class CalibrationRow:
    """The choice for one convolution.

    Attributes:
        name: fully qualified. shape: as in "64 > 128, 3x3".
        setting: what it skips; None where it stays dense, and then reason: why.
        valid_ratio: the share of block products that it computes, with all settings in place.
        error: of its output, relative, with the layers before it exact.
        dense_us, chosen_us: measured microseconds, the latter on a line; None where none were.
    """

    name: str
    shape: str
    setting: SpAMMConfig | None
    valid_ratio: float
    error: float
    dense_us: float | None
    chosen_us: float | None
    reason: str = ""

    def cells(self) -> list[str]:
        """The texts of its columns in the table."""
        times = ["" if time is None else f"{time:.0f}" for time in (self.dense_us, self.chosen_us)]
        tau, block, error = "", "", ""
        if self.setting is not None:
            tau, error = f"{self.setting.tau:.4g}", f"{self.error:.2%}"
            block = "x".join(map(str, self.setting.pixel_block or ()))
        start = [self.name or "(root)", self.shape, f"{self.valid_ratio:.1%}"]
        return [*start, tau, block, *times, error, self.reason]


@dataclass(frozen=True)
class Outcome:
    """The findings of a calibration for the whole model.

    Attributes:
        max_drop: what was allowed. drop: of the score on the half of the data that the search did
            not see.
        valid_ratio: of all convolutions that can skip, weighted by their multiplications.
        evaluations: how often ``evaluate`` was called.
        before_us, after_us: measured microseconds of the whole model, as it was and as chosen;
            None where none were. spread: how much they vary, as a multiple; a gain must be larger.
        note: why nothing is skipped, and that times vary much, where that is so.
    """

    max_drop: float
    drop: float
    valid_ratio: float
    evaluations: int
    before_us: float | None
    after_us: float | None
    spread: float
    note: str


class CalibrationReport(tuple[CalibrationRow, ...]):
    """The :class:`CalibrationRow` of each convolution that is called; prints as a table.

    Attributes:
        outcome: the :class:`Outcome`. settings: what :meth:`save` writes.
    """

    outcome: Outcome
    settings: dict[str, Any]

    def __new__(
        cls, rows: Iterable[CalibrationRow], outcome: Outcome, settings: dict[str, Any]
    ) -> "CalibrationReport":
        report = super().__new__(cls, rows)
        report.outcome = outcome
        report.settings = {**settings, "calibration": asdict(outcome)}
        return report

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the settings as JSON; ``convert_(model, path)`` installs them."""
        write_text(path, json.dumps(self.settings, indent=1) + "\n")

    def __str__(self) -> str:
        of = self.outcome
        times = ""
        if of.before_us is not None:
            times = f"whole model: {of.before_us:.0f} us as it was, {of.after_us:.0f} us as chosen"
            times += f"; times vary by {of.spread - 1:.0%}"
        lines = [
            table([(*_HEAD, "why nothing is skipped"), *(row.cells() for row in self)]),
            f"valid: {of.valid_ratio:.1%} of the products, weighted by multiplications",
            f"drop: {of.drop:.3g} of {of.max_drop:g} allowed on unseen data; {of.evaluations} "
            "evaluations",
        ]
        return "\n".join([*lines, *filter(None, (times, of.note))])
