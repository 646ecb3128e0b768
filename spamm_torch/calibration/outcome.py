"""The report of calibrate: rows, a table, and a settings file."""

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from .._output import table, write_text
from ..networks.config import SpAMMConfig

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
            not see; changed: the percentage of answers that changed there, None without answers.
        valid_ratio: of all convolutions that can skip, weighted by their multiplications.
        evaluations: how often ``evaluate`` was called.
        before_us, after_us: measured microseconds of the whole model, as it was and as chosen;
            None where none were. spread: how much they vary, as a multiple; a gain must be larger.
        note: why nothing is skipped, and that times vary much, where that is so.
    """

    max_drop: float
    drop: float
    changed: float | None
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
        changed = "" if of.changed is None else f", {of.changed:.2f}% of the answers changed"
        times = ""
        if of.before_us is not None:
            times = f"whole model: {of.before_us:.0f} us as it was, {of.after_us:.0f} us as chosen"
            times += f"; times vary by {of.spread - 1:.0%}"
        lines = [
            table([(*_HEAD, "why nothing is skipped"), *(row.cells() for row in self)]),
            f"valid: {of.valid_ratio:.1%} of the products, weighted by multiplications",
            f"drop: {of.drop:.3g} of {of.max_drop:g} allowed on unseen data{changed}; "
            f"{of.evaluations} evaluations",
        ]
        return "\n".join([*lines, *filter(None, (times, of.note))])
