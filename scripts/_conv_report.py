"""What bench_conv.py found, as tables and a picture."""

import io
import itertools
from dataclasses import dataclass

from scripts._conv_layers import GROUPS, group_of


@dataclass(frozen=True)
class Row:
    layer: str
    batch: int
    precision: str
    data: str
    block: tuple
    asked_ratio: float
    valid_ratio: float  # of the products that reach a pixel of the input
    dense_ms: float
    conv2d_ms: float  # with its pass over the input for norms
    left_ms: float | None  # its input's norms left by the layer before, leaving the output's
    spread: float  # of conv2d_ms, quartile distance over median
    speedup: float
    speedup_left: float | None
    extra_memory: float | None  # peak above input, weight and output, over these
    error: float  # relative Frobenius error against float64


NOTES = """\
Times are medians in us, all candidates in turns. A column for each valid ratio: the share of block
products kept, of those that reach a pixel of the input. tau is held and the weight's norms are
pinned, as in serving. Memory: the peak above input, weight and output, over the size of these.
Error: relative, against float64 with the same products skipped; the largest."""


def _cases(rows):
    """Rows by ratio, of each layer, batch, precision and data set."""
    key = lambda r: (r.layer, r.batch, r.precision, r.data)  # noqa: E731
    return [list(group) for _, group in itertools.groupby(rows, key=key)]


def _table(rows, times_of, speedup_of):
    """Speedups, and the times of the first ratio."""
    ratios = list(dict.fromkeys(row.asked_ratio for row in rows))
    head = ["layer", "batch", "type", "data", "dense", f"at {ratios[0]:.0%}"]
    head += [f"{ratio:.0%}" for ratio in ratios] + ["memory", "error"]
    lines = [
        f"| {' | '.join(head)} |",
        "| --- | ---: | --- | --- " + "| ---: " * (len(head) - 4) + "|",
    ]
    for case in _cases(rows):
        first = case[0]
        memory = max(
            (row.extra_memory for row in case if row.extra_memory is not None), default=None
        )
        cells = [first.layer, first.batch, first.precision, first.data]
        cells += [f"{1e3 * first.dense_ms:.4g}", f"{1e3 * times_of(first):.4g}"]
        cells += [f"{speedup_of(row):.2f}x" for row in case]
        cells += [
            "" if memory is None else f"{memory:.1%}",
            f"{max(row.error for row in case):.1e}",
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def markdown(header, rows, picture):
    lines = ["# conv2d against torch.nn.functional.conv2d", "", "| | |", "| --- | --- |"]
    lines += [f"| {key} | {value} |" for key, value in header.items()]
    lines += ["", *NOTES.splitlines(), "", f"![speedup by valid ratio]({picture})", ""]
    lines += ["## Speedup, the pass over the input for norms included", ""]
    lines += _table(rows, lambda row: row.conv2d_ms, lambda row: row.speedup)
    left = [row for row in rows if row.left_ms is not None]
    if left:
        lines += ["", "## Speedup, norms left by the layer before, and left for the next", ""]
        lines += _table(left, lambda row: row.left_ms, lambda row: row.speedup_left)
    return "\n".join(lines) + "\n"


def picture(header, rows):
    """A panel for each group of layers and precision; dashed where norms were left."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups = [group for group in GROUPS if any(group_of(row.layer) == group for row in rows)]
    precisions = list(dict.fromkeys(row.precision for row in rows))
    figure, axes = pyplot.subplots(
        len(precisions),
        len(groups),
        figsize=(5.5 * len(groups), 0.6 + 4.2 * len(precisions)),
        layout="constrained",
        squeeze=False,
        sharex=True,
    )
    for (i, precision), (j, group) in itertools.product(enumerate(precisions), enumerate(groups)):
        panel = axes[i, j]
        shown = [r for r in rows if r.precision == precision and group_of(r.layer) == group]
        for color, case in enumerate(_cases(shown)):
            case.sort(key=lambda row: row.valid_ratio)
            ratios = [100 * row.valid_ratio for row in case]
            first = case[0]
            style = {"marker": ".", "color": pyplot.cm.tab20(color % 20)}
            label = f"{first.layer}, batch {first.batch}, {first.data}"
            panel.semilogy(ratios, [row.speedup for row in case], label=label, **style)
            if first.speedup_left is not None:
                panel.semilogy(ratios, [row.speedup_left for row in case], "--", **style)
        panel.axhline(1, color="grey", linewidth=0.8)
        panel.grid(alpha=0.3, which="both")
        panel.set(title=f"{group}, {precision}", xlabel="valid ratio (%)")
        panel.legend(fontsize=6, ncols=2)
    for panel in axes[:, 0]:
        panel.set(ylabel="speedup (dashed: norms left)")
    figure.suptitle(header["device"])
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()
