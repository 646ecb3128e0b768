"""What bench_mm.py found, as a page and a picture."""

from dataclasses import dataclass

from common import plots
from common.report_files import page, table

_README_SIZE = 8192  # the size that the conclusion names, where it was measured
_MOST_ROWS = 3  # of panels


@dataclass(frozen=True)
class Row:
    data: str
    precision: str
    block: int | tuple  # an edge for all three, or (m, k, n)
    n: int
    valid_ratio: float
    backend: str
    dense_ms: float
    multiply_ms: float | None  # the multiply alone; None where it was not timed
    mm_ms: float  # norms and multiply, tau held
    spread: float  # of mm_ms, quartile distance over median
    speedup: float  # of mm over dense
    speedup_multiply: float | None
    share_of_floor: float
    error: float  # relative Frobenius error against float64
    dense_error: float | None = None  # that of torch.mm, nothing skipped; not in old results


@dataclass(frozen=True)
class StageRow:
    data: str
    precision: str
    block: int | tuple
    n: int
    norms_ms: float
    norms_share_of_copy: float  # of the bandwidth of a copy in the same run
    search_ms: float
    error_search_ms: float | None = None  # None: measured before it was a column


SEARCHED_ERROR = 1e-6  # the max_error of the second search

_NOTES = """\
Times are medians in ms, all candidates in turns. mm includes the norm maps of both operands; tau is
held. Speedups are over torch.mm. Floor: the operands read once at copy bandwidth, plus the larger
of valid ratio x torch.mm and all three matrices at copy bandwidth. Errors are relative, in the
Frobenius norm, against float64 with the same block products skipped; that of torch.mm is with
nothing skipped. x valid is speedup times valid ratio: 1 would be no overhead at all."""


def from_data(data):
    """The header, the rows and the stages in the JSON file."""
    return data["header"], _typed(Row, data["rows"]), _typed(StageRow, data["stages"])


def _typed(kind, rows):
    """Rows from JSON, in which a tuple is a list."""
    block = lambda edges: tuple(edges) if isinstance(edges, list) else edges  # noqa: E731
    return [kind(**row | {"block": block(row["block"])}) for row in rows]


def report(data, name):
    """The page, the picture and the conclusion."""
    header, rows, stages = from_data(data)
    return _markdown(header, rows, stages, f"{name}.png"), _picture(header, rows), conclusion(rows)


def conclusion(rows):
    """What the rows say in one line: speedups of the first data set at one size."""
    rows = [row for row in rows if row.data == rows[0].data]
    sizes = {row.n for row in rows}
    n = _README_SIZE if _README_SIZE in sizes else max(sizes)
    names = _series(rows)
    fewest, most = {}, {}
    for series, name in names.items():
        of_series = [row for row in rows if row.n == n and _series_of(row) == series]
        fewest[name] = min(of_series, key=lambda row: row.valid_ratio)
        most[name] = max(of_series, key=lambda row: row.valid_ratio)
    text = (
        f"{_kind(rows[0].data)}, N = {n}, {_kept(fewest.values())}: mm is "
        f"{_speedups(fewest)} as fast as torch.mm, norms included"
    )
    if fewest != most:
        text += f"; {_kept(most.values())}: {_speedups(most)}"
    return text + "."


def _kept(rows):
    kept = min(row.valid_ratio for row in rows)
    return "nothing skipped" if kept == 1 else f"{kept:.0%} of the block products kept"


def _speedups(rows):
    """As in "6.8x (float16), 13x (float64)"."""
    return ", ".join(f"{_times(row)} ({name})" for name, row in rows.items())


def _times(row):
    return f"{row.speedup:.1f}x" if row.speedup >= 1.05 else f"{row.speedup:.2f}x"


def _kind(data):
    kinds = {"decay": "Decay", "normal": "Random", "scaled": "Scaled", "overlap": "Overlap"}
    return f"{kinds[data]} matrices"


def _markdown(header, rows, stages, picture):
    cells = [
        (
            *(r.data, r.precision, r.block, r.n, f"{r.valid_ratio:.1%}"),
            *(f"{r.dense_ms:.4g}", f"{r.multiply_ms:.4g}", f"{r.mm_ms:.4g}"),
            *(f"{r.speedup:.2f}", f"{r.speedup_multiply:.2f}", f"{r.speedup * r.valid_ratio:.2f}"),
            *(f"{r.share_of_floor:.0%}", f"{r.spread:.0%}", f"{r.error:.1e}"),
            "" if r.dense_error is None else f"{r.dense_error:.1e}",
        )
        for r in rows
    ]
    head = (
        *("data", "type", "block", "N", "valid", "torch.mm", "multiply", "mm", "speedup"),
        *("multiply alone", "x valid", "of floor", "spread", "error", "of torch.mm"),
    )
    stage_cells = [
        (
            *(s.data, s.precision, s.block, s.n, f"{s.norms_ms:.4g}"),
            *(f"{s.norms_share_of_copy:.0%}", f"{s.search_ms:.4g}"),
            "" if s.error_search_ms is None else f"{s.error_search_ms:.4g}",
        )
        for s in stages
    ]
    stage_head = (
        *("data", "type", "block", "N", "norms", "of copy bandwidth", "search for 30%"),
        f"search for an error of {SEARCHED_ERROR:g}",
    )
    body = [
        f"![speedup over torch.mm by share of block products kept]({picture})",
        "",
        *_NOTES.splitlines(),
        "",
        *table(*_known(head, cells), left=(0, 1)),
        "",
        "## Norm maps (both operands) and exact threshold search",
        "",
        *table(*_known(stage_head, stage_cells), left=(0, 1)),
    ]
    return page("mm against torch.mm", conclusion(rows), header, body)


def _known(head, cells):
    """A table without its last column if that is empty: older results lack it."""
    return (head, cells) if any(row[-1] for row in cells) else (head[:-1], [r[:-1] for r in cells])


def _distinct(values):
    return list(dict.fromkeys(values))


def _series_of(row):
    return row.precision, row.block


def _series(rows):
    """{(precision, block): name} of what lines tell apart."""
    series = _distinct(map(_series_of, rows))
    blocks = _distinct(block for _, block in series)
    if len(blocks) == 1:
        return {one: one[0] for one in series}
    name = lambda block: "x".join(map(str, block)) if isinstance(block, tuple) else block  # noqa: E731
    several = len({precision for precision, _ in series}) > 1
    return {
        (precision, block): f"{precision}, {name(block)}" if several else f"block {name(block)}"
        for precision, block in series
    }


def _shown(series):
    """At most as many series as a panel has lines: bfloat16 is as fast as float16."""
    shown = series
    if len(shown) > plots.MOST_LINES:
        shown = {of: name for of, name in series.items() if of[0] != "bfloat16"}
    return dict(list(shown.items())[: plots.MOST_LINES])


def _picture(header, rows):
    """Speedup by valid ratio: types and blocks as lines, sizes and data sets as panels.

    Where there is one type and block only, its sizes are the lines.
    """
    series, sizes, kinds = (
        _series(rows),
        sorted({r.n for r in rows}),
        _distinct(r.data for r in rows),
    )
    if len(series) == 1:
        lines = [(f"N = {n}", lambda r, n=n: r.n == n) for n in sizes[-plots.MOST_LINES :]]
        grid = [[(_kind(kind), lambda r, kind=kind: r.data == kind) for kind in kinds]]
    else:
        lines = [
            (name, lambda r, of=of: _series_of(r) == of) for of, name in _shown(series).items()
        ]
        few = sizes if len(sizes) <= _MOST_ROWS else [sizes[0], sizes[len(sizes) // 2], sizes[-1]]
        grid = [
            [
                (f"{_kind(kind)}, N = {n}", lambda r, kind=kind, n=n: (r.data, r.n) == (kind, n))
                for kind in kinds
            ]
            for n in few
        ]
        if len(kinds) == 1:
            grid = [[row[0] for row in grid]]
    figure, axes = plots.panels(
        len(grid), len(grid[0]), 0.9 + 2.9 * len(grid), sharex=True, sharey=True
    )
    low = 100 * min(row.valid_ratio for row in rows)
    for panels, titles in zip(axes, grid, strict=True):
        for panel, (title, in_panel) in zip(panels, titles, strict=True):
            ends = []
            for index, (name, in_line) in enumerate(lines):
                curve = [r for r in rows if in_panel(r) and in_line(r)]
                if not curve:
                    continue
                curve.sort(key=lambda r: -r.valid_ratio)
                points = [(100 * r.valid_ratio, r.speedup) for r in curve]
                panel.plot(*zip(*points, strict=True), marker="o", color=plots.color(index))
                ends.append((*points[-1], name, plots.color(index)))
            panel.set_title(title)
            plots.ratio_axis(panel, low, label=None)
            plots.factor_axis(panel, [row.speedup for row in rows])
            plots.name_lines(panel, ends)
    for panel in axes[:, 0]:
        panel.set_ylabel("speedup over torch.mm")
    for panel in axes[-1]:
        panel.set_xlabel("block products kept")
    title = "spamm_torch.mm, norms included"
    left_out = [name for of, name in series.items() if of not in _shown(series)]
    if left_out:
        title += f" ({', '.join(left_out)}: in the table)"
    return plots.png(figure, header, title)
