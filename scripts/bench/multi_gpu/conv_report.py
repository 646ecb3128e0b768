"""What bench_multi_gpu_conv.py found, as a page and a picture."""

from dataclasses import dataclass

from bench.multi_gpu.report import break_even, rounded
from common import plots
from common.report_files import page, table


@dataclass(frozen=True)
class Row:
    layer: str
    batch: int
    ratio: float  # asked for
    valid_ratio: float | None = None  # of the products that reach a pixel of the input
    one_ms: float | None = None  # one device
    all_ms: float | None = None  # all of them
    spread: float | None = None  # of all_ms, quartile distance over median
    speedup: float | None = None
    equal: bool | None = None  # bit for bit with one device
    absent: str | None = None  # why there are no figures


_NOTES = """\
Images lie on the devices in equal parts, the weight on each. Times are medians by the clock,
launches and waiting included, one device and all in turns; norms included, tau held. A column for
each batch: the speedup over one device. Beneath, in us: one device, then all. Pays: from which
batch on all devices beat one, between two measured ones on a log scale."""


def report(data, name):
    """The page, the picture (None if something is missing in it) and the conclusion."""
    header, parts = data["header"], data["parts"]
    rows = [Row(**row) for row in data["rows"]]
    said, picture = conclusion(rows, parts), _picture(header, rows, parts)
    shown = [] if picture is None else [f"![speedup by layer and batch]({name}.png)", ""]
    body = [*shown, *_NOTES.splitlines(), "", *_speedups(rows), *_not_measured(rows)]
    return page(f"conv2d on {parts} devices", said, header, body), picture, said


def conclusion(rows, parts):
    """From which batches on it pays, in one line, at the smallest ratio."""
    ratio = min(row.ratio for row in rows)
    found = {}
    for (layer, of), points in _points(rows).items():
        if of == ratio:
            found[layer] = break_even(points)[0]
    paying = {layer: batch for layer, batch in found.items() if batch is not None}
    text = f"{parts} devices against one, {ratio:.0%} of the block products kept: "
    if not paying:
        return text + "they pay for no layer and batch measured."
    first, last = min(paying, key=paying.get), max(paying, key=paying.get)
    text += (
        f"they pay for {len(paying)} of {len(found)} layers, from a batch of about "
        f"{rounded(paying[first])} ({first}) to {rounded(paying[last])} ({last}) on"
    )
    different = sum(row.equal is False for row in rows)
    return text + (f"; {different} RESULTS DIFFER from one device's." if different else ".")


def _points(rows):
    """{(layer, ratio): {batch: speedup}} of what was measured."""
    points = {}
    for row in rows:
        if row.absent is None:
            points.setdefault((row.layer, row.ratio), {})[row.batch] = row.speedup
    return points


def _speedups(rows):
    batches = sorted({row.batch for row in rows})
    times = {(row.layer, row.ratio, row.batch): row for row in rows if row.absent is None}
    cells = []
    for (layer, ratio), points in _points(rows).items():
        size, between = break_even(points)
        pays = "-" if size is None else f"{'' if between else '<= '}{rounded(size)}"
        of_batches = [times.get((layer, ratio, batch)) for batch in batches]
        cells.append((layer, f"{ratio:.0%}", *map(_cell, of_batches), pays))
    head = ("layer", "kept", *(f"batch {batch}" for batch in batches), "pays")
    return table(head, cells)


def _cell(row):
    if row is None:
        return ""
    different = "" if row.equal else " NOT EQUAL"
    return f"{row.speedup:.2f}x<br>{1e3 * row.one_ms:.4g}, {1e3 * row.all_ms:.4g}{different}"


def _not_measured(rows):
    absent = [(f"{r.layer}, batch {r.batch}", r.absent) for r in rows if r.absent is not None]
    if not absent:
        return []
    cells = [(what, why.replace("|", "/")) for what, why in absent]
    return ["", "## Not measured", "", *table(("what", "why"), cells, left=(0, 1))]


def _picture(header, rows, parts):
    """Layer by batch, coloured by speedup, at the smallest ratio; None if a cell is missing."""
    ratio = min(row.ratio for row in rows)
    shown = [row for row in rows if row.ratio == ratio]
    if any(row.absent is not None for row in shown):
        return None
    layers = list(dict.fromkeys(row.layer for row in shown))
    batches = sorted({row.batch for row in shown})
    speedups = {(row.layer, row.batch): row.speedup for row in shown}
    figure, axes = plots.panels(1, 1, 1.5 + 0.25 * len(layers))
    axis = axes[0][0]
    plots.speedup_map(axis, [[speedups[layer, b] for b in batches] for layer in layers])
    axis.set_xticks(range(len(batches)), batches)
    axis.set_yticks(range(len(layers)), layers)
    axis.set(xlabel="batch", title=f"{ratio:.0%} of the block products kept")
    return plots.png(figure, header, f"conv2d on {parts} devices over one (blue: faster)")
