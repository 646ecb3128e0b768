"""The report of convert_ and of explain: a row for each layer, and a table."""

import collections
import difflib
import json
import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .._library import VERSION
from .._output import table, write_text
from .._timing import Timing
from .config import SpAMMConfig

FORMAT = 4  # of settings files

_COLUMNS = ("layer", "action", "shape", "setting", "absorbed", "dense / spamm us")


@dataclass(frozen=True)
class Row:
    """The change of one layer, or the reason why there is none.

    Attributes:
        name: fully qualified.
        shape: the layer's, as in "64 > 128, 3x3, /2"; geometry: with padding and bias, by which a
            settings file knows the layer.
        action: by :func:`convert_`, "spamm" (a :class:`SpAMMConv2d` now) or "left" (as it was). By
            the backend, its engine, or "left". reason: why.
        absorbed: what the layer's call computes beside the convolution, as in ("bn", "add", "relu",
            "pool").
        setting: what is skipped, if anything.
        times: measured microseconds of the engines, by name; empty where none were measured.
    """

    name: str
    shape: str
    action: str
    absorbed: tuple[str, ...] = ()
    reason: str = ""
    setting: SpAMMConfig | None = None
    times: tuple[tuple[str, Timing], ...] = ()
    geometry: str = ""


class ConvertReport(tuple[Row, ...]):
    """The :class:`Row` of every convolution; prints as a table and a summary.

    ``report[3]`` is a row by number, ``report["layer1.0.conv1"]`` by name. Rows are dataclasses:
    ``pandas.DataFrame(report)`` has a column for each of their attributes.

    Attributes:
        device: of the model; a GPU's name.
    """

    device: str

    def __new__(cls, rows: Iterable[Row], device: str = "") -> "ConvertReport":
        report = super().__new__(cls, rows)
        report.device = device
        return report

    def __getitem__(self, key: Any) -> Any:
        """A row by number or by name, rows by slice; KeyError for a name that none has."""
        if not isinstance(key, str):
            return super().__getitem__(key)
        for row in self:
            if row.name == key:
                return row
        raise KeyError(f"no row is named {key!r}{close_names(key, [row.name for row in self])}")

    def __str__(self) -> str:
        if not self:
            return "no convolutions"
        columns = list(zip(_COLUMNS, *map(_cells, self), strict=True))
        columns = [column for column in columns if any(column[1:])]
        return "\n".join([table(list(zip(*columns, strict=True))), *self._summary()])

    def _summary(self) -> list[str]:
        """The number of rows of each action, and of each reason for it."""
        actions = collections.Counter(row.action for row in self)
        counts = ", ".join(f"{count} {action}" for action, count in actions.most_common())
        reasons = collections.Counter((row.action, row.reason) for row in self)
        return [
            f"{len(self)} layers: {counts}",
            *(
                f"{count} of {actions[action]} {action}: {reason}"
                for (action, reason), count in reasons.most_common()
            ),
        ]

    def to_dict(self) -> dict[str, Any]:
        """The settings of all layers, as :func:`convert_` takes them from a file."""
        return {
            "format": FORMAT,
            "device": self.device,
            "versions": {"spamm_torch": VERSION, "torch": torch.__version__},
            "layers": {row.name: _layer_to_dict(row) for row in self},
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the settings as JSON; ``convert_(model, path)`` converts the same layers.

        Raises ValueError for a report of :func:`explain`, which has engines and no settings.
        """
        if self and not any(row.geometry for row in self):
            raise ValueError(
                "the report must be convert_'s or calibrate's, which have settings to save; got "
                "engines of the backend"
            )
        write_text(path, json.dumps(self.to_dict(), indent=1) + "\n")


def close_names(key: str, names: Collection[str]) -> str:
    """The names that a wrong one may stand for, or some of all, in words."""
    inside = [name for name in names if name.startswith(f"{key}.")]
    if close := inside[:3] or difflib.get_close_matches(key, names, 3, 0.4):
        return f" (close: {', '.join(close)})"
    more = f", ... ({len(names)} in all)" if len(names) > 5 else ""
    return f" (it has {', '.join(list(names)[:5])}{more})"


def _layer_to_dict(row: Row) -> dict[str, Any]:
    setting = None if row.setting is None else row.setting.to_dict()
    return {"shape": row.geometry, "setting": setting}


def _cells(row: Row) -> tuple[str, ...]:
    times = dict(row.times)
    dense = times.pop("dense", None)
    spamm = min(times.values(), key=lambda time: time.median, default=None)
    us = " / ".join(str(time).replace(" us", "") for time in (dense, spamm) if time is not None)
    return (
        *(row.name or "(root)", row.action, row.shape, _short(row.setting)),
        *(" ".join(row.absorbed), us),
    )


def _short(setting: SpAMMConfig | None) -> str:
    """The knob, and blocks as in "64x1x1"."""
    if setting is None:
        return ""
    knob, *blocks = setting.to_dict().items()
    sizes = ["x".join(map(str, size)) if type(size) is tuple else str(size) for _, size in blocks]
    return " ".join([f"{knob[0]}={knob[1]:.4g}", *sizes])


def shape_of(layer: nn.Module) -> str:
    """A layer's shape in a few characters, as in "64 > 128, 3x3, /2"."""
    if isinstance(layer, nn.Linear):
        return f"{layer.in_features} > {layer.out_features}"
    if not isinstance(layer, nn.modules.conv._ConvNd):
        return ""
    channels = layer.in_channels, layer.out_channels
    edges = layer.kernel_size, layer.stride, layer.dilation
    return shape_text(*channels, *edges, layer.groups)


def shape_text(
    inputs: int, outputs: int, kernel: Any, stride: Any, dilation: Any, groups: int
) -> str:
    """The shape of a convolution, as of :func:`shape_of`."""
    parts = [f"{inputs} > {outputs}", "x".join(map(str, kernel))]
    for word, edges in (("/", stride), ("dilation ", dilation)):
        if set(edges) != {1}:
            parts.append(word + "x".join(map(str, dict.fromkeys(edges))))
    if groups > 1:
        parts.append(f"groups {groups}")
    return ", ".join(parts)


def geometry_of(conv: nn.modules.conv._ConvNd) -> str:
    """The shape with padding and bias, as in "64 > 128, 3x3, /2, padding 1x1, bias"."""
    padding = conv.padding if isinstance(conv.padding, str) else "x".join(map(str, conv.padding))
    mode = "" if conv.padding_mode == "zeros" else f" {conv.padding_mode}"
    bias = "" if conv.bias is None else ", bias"
    return f"{shape_of(conv)}, padding {padding}{mode}{bias}"
