"""The report of calibrate: rows, a table, and a settings file."""

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from .._output import table, write_text
from ..networks.config import SpAMMConfig


@dataclass(frozen=True)
class CalibrationRow:
    """The choice for one convolution.

    Attributes:
        name: fully qualified. shape: as in "64 > 128, 3x3".
        setting: what it skips; None where nothing is.
        valid_ratio: the share of block products that it computes, measured with all settings in
            place; 1 where nothing is skipped.
        error: of its output after the activation, relative, with the layers before it exact.
        dense_us, chosen_us: microseconds: the faster engine that loses nothing, measured, and what
            was chosen, on a straight line by valid ratio through what was measured. The former is
            dense.
        reason: why nothing is skipped; "" where something is.
    """

    name: str
    shape: str
    setting: SpAMMConfig | None
    valid_ratio: float
    error: float
    dense_us: float
    chosen_us: float
    reason: str = ""


@dataclass(frozen=True)
class Outcome:
    """The findings of a calibration for the whole model.

    Attributes:
        max_drop: what was allowed, in the units of ``evaluate``.
        drop: of the score on the half of the data that the search did not see, against the model
            as it was. searched_drop: on the other half; None where it was not tried there.
        changed: the percentage of answers that changed on the unseen half; None without answers.
        resolution: what one answer is worth there, in percent; None without answers.
        valid_ratio: of all convolutions that can skip, weighted by their multiplications.
        evaluations: how often ``evaluate`` was called.
        before_us, exact_us, after_us: measured microseconds of the whole model: as it was,
            converted with nothing lost, and as chosen. spread: how much the most varying of these
            varies, as a multiple; what gains less is not chosen.
        note: why nothing is skipped or installed, and that times vary much, where that is so.
    """

    max_drop: float
    drop: float
    searched_drop: float | None
    changed: float | None
    resolution: float | None
    valid_ratio: float
    evaluations: int
    before_us: float
    exact_us: float
    after_us: float
    spread: float = 1.0
    note: str = ""


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
        if not isinstance(outcome, Outcome):
            kind = type(outcome).__name__
            raise TypeError(f"outcome must be an Outcome, as calibrate gives it; got {kind}")
        report = super().__new__(cls, rows)
        report.outcome = outcome
        report.settings = {**settings, "calibration": asdict(outcome)}
        return report

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the settings as JSON; ``convert_(model, path)`` installs them."""
        write_text(path, json.dumps(self.settings, indent=1) + "\n")

    def __str__(self) -> str:
        lines = [[text(row) for text in _COLUMNS.values()] for row in self]
        return "\n".join([table([list(_COLUMNS), *lines]), *_footer(self.outcome)])


_COLUMNS: dict[str, Callable[[CalibrationRow], str]] = {
    "layer": lambda row: row.name or "(root)",
    "shape": lambda row: row.shape,
    "valid": lambda row: f"{row.valid_ratio:.1%}",
    "tau": lambda row: f"{row.setting.tau:.4g}" if row.setting else "",
    "pixel block": lambda row: "x".join(map(str, getattr(row.setting, "pixel_block", None) or ())),
    "dense us": lambda row: f"{row.dense_us:.0f}",
    "chosen us": lambda row: f"{row.chosen_us:.0f}",
    "error": lambda row: f"{row.error:.2%}" if row.setting else "",
    "why nothing is skipped": lambda row: row.reason,
}


def _footer(outcome: Outcome) -> list[str]:
    resolution = ""
    if outcome.resolution is not None:
        resolution = f" (one answer is {outcome.resolution:.2g}%)"
    changed = "" if outcome.changed is None else f", {outcome.changed:.2f}% of the answers changed"
    searched = "not tried"
    if outcome.searched_drop is not None:
        searched = f"{outcome.searched_drop:.3g}"
    lines = [
        f"valid: {outcome.valid_ratio:.1%} of the products, weighted by multiplications",
        f"drop: {outcome.drop:.3g} of {outcome.max_drop:g} allowed on unseen data{resolution}"
        f"{changed}; {searched} where it was searched; "
        f"{outcome.evaluations} evaluations",
        f"whole model, measured: {outcome.before_us:.0f} us as it was, {outcome.exact_us:.0f} us "
        f"with nothing skipped, {outcome.after_us:.0f} us as chosen; "
        f"times vary by {outcome.spread - 1:.0%}",
    ]
    return [*lines, *filter(None, (outcome.note,))]
