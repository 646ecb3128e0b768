"""Draws the picture of the README, docs/results/summary.png, from docs/results/*.json.

Left: speedup of products over cuBLAS by the share of block products kept. Right: accuracy of VGG13
against speedup over cuDNN. Measures nothing, and needs neither the library nor a GPU.

    python scripts/plot_summary.py
"""

import json
import sys
from pathlib import Path

from bench import mm_report
from common import REPOSITORY, plots
from common.console import exit_code
from common.errors import UserError
from common.options import make_parser
from common.report_files import write_bytes
from study import report as study_report

_FOLDER = REPOSITORY / "docs" / "results"
_SIZE = 8192
_PRECISIONS = ("float32", "float64", "float16")
_TEXT = 15
_LINE = {"marker": "o", "linewidth": 3, "markersize": 8}


def products(axis, rows):
    """Decay matrices of one size, a line for each type."""
    curves = {}
    for precision in _PRECISIONS:
        chosen = [r for r in rows if (r.data, r.n, r.precision) == ("decay", _SIZE, precision)]
        chosen.sort(key=lambda row: -row.valid_ratio)
        curves[precision] = [(100 * row.valid_ratio, row.speedup) for row in chosen]
    points = [point for curve in curves.values() for point in curve]
    plots.ratio_axis(axis, min(kept for kept, _ in points), "block products kept")
    plots.factor_axis(axis, [speedup for _, speedup in points])
    ends = []
    for index, (precision, curve) in enumerate(curves.items()):
        axis.plot(*zip(*curve, strict=True), color=plots.color(index), **_LINE)
        ends.append((*curve[-1], f"{precision}: {curve[-1][1]:.0f}x", plots.color(index)))
    axis.set_title(f"Decay matrices, N = {_SIZE}:\nspeedup over cuBLAS", fontsize=_TEXT + 2)
    plots.name_lines(axis, ends, size=_TEXT)


def convolutions(axis, study, network):
    """Accuracy against speedup: VGG13's convolutions but the first, and the network as served."""
    ends = []
    axis.axvline(1, color="grey", linewidth=1)
    axis.axhline(0, color="grey", linewidth=1)
    for group in study.groups:
        if len(group.gemms) == 1:
            continue
        index = _PRECISIONS.index(group.precision)
        chosen = [s for s in group.settings if s.layout == "by position"]
        chosen.sort(key=lambda s: -s.asked_ratio)
        curve = [(s.over_conv, s.accuracy_change) for s in chosen]
        axis.plot(*zip(*curve, strict=True), color=plots.color(index), **_LINE)
        for setting, type_ in zip(chosen[-2:], ("", f"{group.precision}, "), strict=True):
            name = f"{type_}{setting.asked_ratio:.0%} kept"
            below = setting.accuracy_change - 0.5
            ends.append((setting.over_conv, below, name, plots.color(index)))
    times = network["times_ms"]["CUDA graph"]
    speedup = times["dense"] / times["SpAMM"]
    change = network["accuracy"] - network["dense_accuracy"]
    axis.plot(speedup, change, marker="*", markersize=19, color="black", zorder=3)
    axis.annotate(
        f"whole network, float16: {speedup:.2f}x",
        (speedup, change),
        xytext=(-2, 14),
        textcoords="offset points",
        fontsize=_TEXT - 1,
        fontweight="bold",
    )
    axis.set_xlim(0.8, 7.5)
    axis.set_xticks(range(1, 7), [f"{factor}x" for factor in range(1, 7)])
    axis.set_ylim(-12, 2)
    axis.set_yticks([0, -5, -10], ["0", "-5", "-10"])
    axis.set_xlabel("speedup over cuDNN")
    title = "VGG13 on MNIST, its convolutions:\naccuracy change (points)"
    axis.set_title(title, fontsize=_TEXT + 2)
    for end in ends:  # one by one: each has room
        plots.name_lines(axis, [end], size=_TEXT - 1)


def summary(folder):
    """The picture as bytes, from the JSON files in a folder.

    Raises:
        UserError: a file cannot be read, or lacks what the picture shows.
    """
    found = {}
    for name in ("mm_h200", "study_h200", "vgg13_h200"):
        path = folder / f"{name}.json"
        try:
            found[name] = json.loads(path.read_text())
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from error
        except ValueError as error:
            raise UserError(f"expected results as JSON; got {path}: {error}") from error
    header, rows, _ = mm_report.from_data(found["mm_h200"])
    figure, [[left, right]] = plots.panels(1, 2, 5.4, width=12)
    products(left, rows)
    convolutions(right, study_report.from_data(found["study_h200"]), found["vgg13_h200"])
    for axis in (left, right):
        axis.tick_params(labelsize=_TEXT)
        axis.xaxis.label.set_size(_TEXT)
    return plots.png(figure, header, device_size=_TEXT - 3)


def main(arguments=None):
    parser = make_parser(__doc__)
    parser.add_argument(
        "--results",
        type=Path,
        metavar="FOLDER",
        default=_FOLDER,
        help="folder of the JSON files and of the picture (default: docs/results)",
    )
    folder = parser.parse_args(arguments).results
    write_bytes(folder / "summary.png", summary(folder))
    print(f"wrote {folder / 'summary.png'}")


if __name__ == "__main__":
    sys.exit(exit_code(main))
