"""What bench_conv.py found, as a page and a picture."""

import itertools
import statistics
from dataclasses import dataclass

from bench.conv_layers import GROUPS
from common import plots
from common.report_files import page, table


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
    chained_ms: float | None  # input norms precomputed, output norms computed for the next layer
    spread: float  # of conv2d_ms, quartile distance over median
    speedup: float
    speedup_chained: float | None
    extra_memory: float | None  # peak above input, weight and output, over these
    error: float  # relative Frobenius error against float64


_NOTES = """\
Times are medians in us, all candidates in turns. A column for each valid ratio: the share of block
products kept, of those that reach a pixel of the input. tau is held and the weight's norms are
pinned, as in serving. Memory: the peak above input, weight and output, over the size of these.
Error: relative, against float64 with the same products skipped; the largest. On Hopper, in half
types, a first layer of few channels has a kernel of its own where nothing is skipped: it is slower
at 97% than at 100%."""


def report(data, name):
    """The page, the picture and the conclusion."""
    header = data["header"]
    rows = [Row(**row | {"block": tuple(row["block"])}) for row in data["rows"]]
    return _markdown(header, rows, f"{name}.png"), _picture(header, rows), conclusion(rows)


def _distinct(values):
    return list(dict.fromkeys(values))


def conclusion(rows):
    """What the rows say in one line: how many layers gain, and by how much, in each type."""
    parts = []
    ratios = sorted({row.asked_ratio for row in rows})
    for title, shown, speedup_of in _maps(rows):
        gains = []
        for ratio in dict.fromkeys((ratios[0], ratios[-1])):
            speedups = [speedup_of(row) for row in shown if row.asked_ratio == ratio]
            gains.append(_gain(speedups, ratio))
        parts.append(f"{title}: {', '.join(gains)}")
    return f"Layers faster than the dense convolution, in {'; '.join(parts)}."


def _maps(rows):
    """(title, rows, what gives a row's speedup) of each map in the picture.

    One map a type; of a single type a second one for layers in a chain.
    """
    shown = _largest_batches(rows)
    precisions = _distinct(row.precision for row in shown)
    if len(precisions) == 1 and shown[0].speedup_chained is not None:
        return [
            (f"{precisions[0]}, norms in a pass of its own", shown, lambda row: row.speedup),
            (f"{precisions[0]}, norms from the layer before", shown, lambda r: r.speedup_chained),
        ]
    return [
        (name, [row for row in shown if row.precision == name], lambda row: row.speedup)
        for name in precisions
    ]


def _gain(speedups, ratio):
    faster = sum(speedup > 1 for speedup in speedups)
    median = statistics.median(speedups)
    return f"{faster} of {len(speedups)} at {ratio:.0%} kept (median {median:.2f}x)"


def _largest_batches(rows):
    """The rows of the first data set, each layer at its largest batch only."""
    largest = {}
    for row in rows:
        largest[row.layer] = max(row.batch, largest.get(row.layer, 0))
    return [row for row in rows if row.batch == largest[row.layer] and row.data == rows[0].data]


def _cases(rows):
    """Rows by ratio, of each layer, batch, precision and data set."""
    key = lambda r: (r.layer, r.batch, r.precision, r.data)  # noqa: E731
    return [list(group) for _, group in itertools.groupby(rows, key=key)]


def _table(rows, times_of, speedup_of):
    """Speedups, and the times of the first ratio."""
    ratios = _distinct(row.asked_ratio for row in rows)
    head = ["layer", "batch", "type", "data", "dense", f"at {ratios[0]:.0%}"]
    head += [f"{ratio:.0%}" for ratio in ratios] + ["memory", "error"]
    lines = []
    for case in _cases(rows):
        first = case[0]
        memory = max((r.extra_memory for r in case if r.extra_memory is not None), default=None)
        cells = [first.layer, first.batch, first.precision, first.data]
        cells += [f"{1e3 * first.dense_ms:.4g}", f"{1e3 * times_of(first):.4g}"]
        cells += [f"{speedup_of(row):.2f}x" for row in case]
        cells += ["" if memory is None else f"{memory:.1%}"]
        cells += [f"{max(row.error for row in case):.1e}"]
        lines.append(cells)
    return table(head, lines, left=(0, 2, 3))


def _markdown(header, rows, picture):
    body = [f"![speedup by layer and share of block products kept]({picture})", ""]
    body += [*_NOTES.splitlines(), ""]
    body += ["## Speedup, the pass over the input for its norms included", ""]
    body += _table(rows, lambda row: row.conv2d_ms, lambda row: row.speedup)
    chained = [row for row in rows if row.chained_ms is not None]
    if chained:
        body += ["", "## Speedup in a chain: input norms precomputed, output norms computed", ""]
        body += _table(chained, lambda row: row.chained_ms, lambda row: row.speedup_chained)
    return page("conv2d against torch.nn.functional.conv2d", conclusion(rows), header, body)


def _picture(header, rows):
    """Maps of layer by valid ratio, coloured by speedup: break-even is where blue turns to red."""
    maps, shown = _maps(rows), _largest_batches(rows)
    order = [layer.name for layers in GROUPS.values() for layer in layers]
    layers = sorted({row.layer for row in shown}, key=order.index)
    batches = {row.layer: row.batch for row in shown}
    ratios = sorted({row.asked_ratio for row in shown}, reverse=True)
    figure, axes = plots.panels(1, len(maps), 1.5 + 0.25 * len(layers), sharey=True)
    for axis, (title, of_map, speedup_of) in zip(axes[0], maps, strict=True):
        values = {(row.layer, row.asked_ratio): speedup_of(row) for row in of_map}
        plots.speedup_map(axis, [[values[layer, r] for r in ratios] for layer in layers])
        axis.set_xticks(range(len(ratios)), [f"{ratio:.0%}" for ratio in ratios])
        axis.set(title=title, xlabel="block products kept")
        axis.set_yticks(
            range(len(layers)), [f"{layer}, batch {batches[layer]}" for layer in layers]
        )
    return plots.png(figure, header, "Speedup over the dense convolution (blue: faster)")
