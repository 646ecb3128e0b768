"""What convert_ did to each layer, as rows and as a table."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from .._table import table
from .channel_groups import Order
from .config import SpAMMConfig
from .leaves import Band

FORMAT = 2  # of settings files


@dataclass(frozen=True)
class Row:
    """What :func:`convert_` did to one layer, or why it left it.

    Attributes:
        name: fully qualified; further calls of the same layer have "#2" and so on behind it.
        shape: the layer's, as in "64 > 128, 3x3, /2".
        action: "spamm" (a :class:`SpAMMConv2d` now; in the reference form what it was), "dense"
            (dense, with what follows computed in the same call) or "left" (as it was).
        absorbed: what the layer's call computes beside the convolution, as in ("bn", "add",
            "relu", "pool").
        reason: why this action was chosen.
        setting: what is skipped; None where nothing can be.
        times: measured microseconds of the candidates, by name; empty where none were measured.
        band: the lowest and highest valid ratio of a batch when the setting was calibrated.
        order: which channel the generated forward computes first, second, ...; None for the
            model's own order.
    """

    name: str
    shape: str
    action: str
    absorbed: tuple[str, ...] = ()
    reason: str = ""
    setting: SpAMMConfig | None = None
    times: tuple[tuple[str, float], ...] = ()
    band: Band | None = None
    order: Order | None = None


class ConvertReport(tuple[Row, ...]):
    """The :class:`Row` of every convolution and linear layer; prints as a table with a footer.

    Attributes:
        notes: what concerns the whole model: parts that could not be traced or differed, and what
            was measured.
        device: on which the model was converted; a GPU's name.
        order_batch: whether batches are put in order of likeness.
        reference: the shape of the picture of the reference form; None: no such form.
    """

    notes: tuple[str, ...]
    device: str
    order_batch: bool = False
    reference: tuple[int, ...] | None = None

    def __new__(
        cls, rows: Iterable[Row], notes: Iterable[str] = (), device: str = ""
    ) -> ConvertReport:
        report = super().__new__(cls, rows)
        report.notes, report.device = tuple(notes), device
        return report

    def __str__(self) -> str:
        head = ("layer", "shape", "action", "absorbed", "setting", "reason")
        return "\n".join([table([head, *map(_cells, self)]), self._footer(), *self.notes])

    def _footer(self) -> str:
        counts = [
            f"{sum(row.action == action for row in self)} {action}"
            for action in ("spamm", "dense", "left")
        ]
        return f"{len(self)} layers: {', '.join(counts)}"

    def to_dict(self) -> dict[str, Any]:
        """The settings of all layers, as :func:`convert_` takes them from a file."""
        from .. import __version__

        return {
            "format": FORMAT,
            "device": self.device,
            "versions": {"spamm_torch": __version__, "torch": torch.__version__},
            "order_batch": self.order_batch,
            "reference": self.reference,
            "layers": {row.name: _layer_to_dict(row) for row in self},
            "notes": list(self.notes),
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the settings as JSON; ``convert_(model, path)`` makes the same choices again."""
        with open(path, "w") as file:
            json.dump(self.to_dict(), file, indent=1)
            file.write("\n")


def _layer_to_dict(row: Row) -> dict[str, Any]:
    setting = None if row.setting is None else row.setting.to_dict()
    layer: dict[str, Any] = {"shape": row.shape, "engine": row.action, "setting": setting}
    if "pool" in row.absorbed:
        layer["pool"] = True
    if row.band is not None:
        layer["band"] = list(row.band)
    if row.order is not None:
        layer["order"] = list(row.order)
    return layer


def _cells(row: Row) -> tuple[str, ...]:
    times = ", ".join(f"{name} {time:.1f} us" for name, time in row.times)
    reason = "; ".join(filter(None, (row.reason, times)))
    setting = "" if row.setting is None else str(row.setting)
    return row.name or "(root)", row.shape, row.action, " ".join(row.absorbed), setting, reason
