"""What bench_multi_gpu.py found, as a page and a picture."""

import itertools

from bench.multi_gpu.cells import LAYOUTS, PEERS
from bench.multi_gpu.rows import Overhead, PeerRow, Row
from common import plots
from common.report_files import page, table

_MOST_NAMES = 3  # of cells that were not measured for the same reason

_NOTES = """\
Times are medians in ms by the clock, launches and waiting included, one device and all in turns;
norms included, tau held: it was found once for each data set, size and ratio, on one device. From
host memory (H) a valid ratio instead of a tau would read the operands twice. L2 caches are warm,
which counts for little: from N = 8192 on the operands are larger. Equal: bit for bit what one
device gives. Sent: bytes of B that travel between devices, over what would travel without skipping,
by the library's plan from the true norm maps. Imbalance: the slowest device's time over the mean,
B being at hand; of ranks, its work over the mean. Exposed: the time less that of the slowest
device. Of the bound: the time to bring A and B from the host at the bandwidth in the table above,
each once, over the time measured."""

_PEER_NOTES = """\
Dense products of the same operands: nothing is skipped, nor are norms computed. torch.mm: one
product a device, its part of A and all of B at hand (R). symm_mem: fused_all_gather_matmul of
torch's symmetric memory, A in rows, B in columns: as many bytes travel as in S; it would use
multicast up to N = 2048 only. DTensor: a @ b of operands in rows (as ranks), the faster of what it
does by itself and of gathering B before. cublasXt: cublasXtDgemm from pinned host memory, the best
of three block sizes (as H)."""


def report(data, name):
    """The page, the picture and the conclusion."""
    header, parts = data["header"], data["parts"]
    rows = [Row(**row) for row in data["rows"]]
    peers = [PeerRow(**row) for row in data["peers"]]
    overheads = [Overhead(**row) for row in data["overheads"]]
    said = conclusion(rows, parts)
    body = [f"![speedup over one device]({name}.png)", "", *_NOTES.splitlines(), ""]
    body += _legend() + _products(rows, peers) + _break_even(rows, parts)
    body += _peers(peers) + _overheads(overheads) + _absent([*rows, *peers, *overheads])
    return page(f"mm on {parts} devices", said, header, body), _picture(header, rows, parts), said


def conclusion(rows, parts):
    """What the rows say in one line: speedups at the largest size, by layout."""
    measured = [row for row in rows if row.absent is None]
    if not measured:
        return "Nothing could be measured."
    first = max(measured, key=lambda row: row.n)
    same = [row for row in measured if (row.data, row.n) == (first.data, first.n)]
    same = [row for row in same if row.precision == first.precision]
    ratios = sorted({row.ratio for row in same})
    speeds = []
    for layout in LAYOUTS:
        of_layout = {row.ratio: row.speedup for row in same if row.layout == layout}
        if of_layout:
            shown = [f"{of_layout[r]:.2f}x" if r in of_layout else "-" for r in ratios]
            speeds.append(f"{' / '.join(shown)} ({layout})")
    kept = " / ".join(f"{ratio:.0%}" for ratio in ratios)
    different = sum(row.equal is False for row in measured)
    text = (
        f"{parts} devices against one, {first.data}, {first.precision}, N = {first.n}, {kept} of "
        f"the block products kept: {', '.join(speeds)}"
    )
    return text + (f"; {different} RESULTS DIFFER from one device's." if different else ".")


def break_even(points):
    """The size from which on all devices beat one, between two measured sizes on a log scale.

    Args:
        points: {N: speedup}.

    Returns:
        (the size, whether it lies between two measured ones): the smallest size where every larger
        one gains, too; (None, False) if the largest does not.
    """
    sizes = sorted(points, reverse=True)
    if points[sizes[0]] <= 1:
        return None, False
    for larger, smaller in itertools.pairwise(sizes):
        if points[smaller] <= 1:
            share = (1 - points[smaller]) / (points[larger] - points[smaller])
            return smaller * (larger / smaller) ** share, True
    return sizes[-1], False


def _distinct(values):
    return list(dict.fromkeys(values))


def _legend():
    return [*(f"- **{layout}**: {what}" for layout, what in LAYOUTS.items()), ""]


def _number(value, form):
    return "" if value is None else form.format(value)


def _products(rows, peers):
    peer_ms = {(p.peer, p.data, p.precision, p.n): p.ms for p in peers if p.absent is None}
    head = ("layout", "data", "type", "N", "valid", "one", "all", "speedup", "over the peer")
    head += ("sent", "imbalance", "exposed", "of the bound", "spread", "equal")
    cells = []
    for r in rows:
        if r.absent is not None:
            continue
        peer = peer_ms.get((PEERS.get(r.layout), r.data, r.precision, r.n))
        imbalance = r.work_imbalance if r.imbalance is None else r.imbalance
        cells.append(
            (
                *(r.layout, r.data, r.precision, r.n, f"{r.valid_ratio:.1%}"),
                *(f"{r.one_ms:.4g}", f"{r.all_ms:.4g}", f"{r.speedup:.2f}"),
                _number(peer and peer / r.all_ms, "{:.2f}"),
                *(_number(r.sent, "{:.1%}"), _number(imbalance, "{:.3f}")),
                *(_number(r.exposed_ms, "{:.3g}"), _number(r.of_bound, "{:.0%}")),
                *(f"{r.spread:.0%}", "yes" if r.equal else "NO"),
            )
        )
    return ["## Products", "", *table(head, cells, left=(0, 1, 2)), ""]


def _sweep(rows):
    """{layout: {N: speedup}} at the smallest ratio, of the first data set and type."""
    measured = [row for row in rows if row.absent is None and row.layout in ("R", "S")]
    if not measured:
        return {}
    ratio = min(row.ratio for row in measured)
    first = measured[0]
    lines = {}
    for row in measured:
        if (row.data, row.precision, row.ratio) == (first.data, first.precision, ratio):
            lines.setdefault(row.layout, {})[row.n] = row.speedup
    return lines


def break_even_lines(rows):
    """For each layout of the sweep, from which size on all devices beat one."""
    lines = []
    for layout, points in _sweep(rows).items():
        size, between = break_even(points)
        if size is None:
            text = f"up to N = {max(points)} they do not"
        elif between:
            text = f"from about N = {rounded(size)} on"
        else:
            text = f"at every size measured, from N = {size} on"
        lines.append(f"- {layout}: {text}")
    return lines


def _break_even(rows, parts):
    lines = break_even_lines(rows)
    if not lines:
        return []
    return [f"## Where {parts} devices beat one, at the smallest ratio", "", *lines, ""]


def rounded(size):
    """To two digits, for it is interpolated."""
    return int(float(f"{size:.1e}"))


def _peers(peers):
    cells = [
        (p.peer, p.data, p.precision, p.n, f"{p.ms:.4g}", f"{p.spread:.0%}")
        for p in peers
        if p.absent is None
    ]
    if not cells:
        return []
    head = ("peer", "data", "type", "N", "ms", "spread")
    return ["## Peers", "", *_PEER_NOTES.splitlines(), "", *table(head, cells, left=(0, 1, 2)), ""]


def _overheads(overheads):
    cells = [
        (o.layout, o.n, f"{o.one_us:.0f}", f"{o.all_us:.0f}", f"{o.all_us - o.one_us:.0f}")
        for o in overheads
        if o.absent is None
    ]
    if not cells:
        return []
    head = ("layout", "N", "one, us", "all, us", "more, us")
    title = "## Time until a call returns to Python, of a product that takes next to none"
    return [title, "", *table(head, cells), ""]


def _absent(rows):
    """What could not be measured, and why."""
    said = {}
    for row in rows:
        if row.absent is not None:
            said.setdefault(row.absent, []).append(_name(row))
    if not said:
        return []
    cells = [(_summed_up(names), why.replace("|", "/")) for why, names in said.items()]
    return ["## Not measured", "", *table(("what", "why"), cells, left=(0, 1)), ""]


def _summed_up(names):
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def _name(row):
    if isinstance(row, Overhead):
        return f"time of a call, {row.layout}"
    if isinstance(row, PeerRow):
        return f"{row.peer} {row.data} {row.precision} {row.n}"
    return f"{row.layout} {row.data} {row.precision} {row.n} {row.ratio:.0%}"


def _picture(header, rows, parts):
    """Left: speedup by valid ratio at the largest size. Right: by size at the smallest ratio."""
    figure, axes = plots.panels(1, 2, 3.8)
    by_ratio, by_size = axes[0]
    measured = [row for row in rows if row.absent is None]
    if measured:
        _draw_ratios(by_ratio, measured)
    sweep = _sweep(rows)
    if sweep:
        _draw_sizes(by_size, sweep, min(row.ratio for row in measured))
    return plots.png(figure, header, f"spamm_torch.mm on {parts} devices, speedup over one")


def _draw_ratios(axis, rows):
    n = max(row.n for row in rows)
    rows = [row for row in rows if row.n == n]
    rows = [row for row in rows if row.precision == rows[0].precision]
    lines = _distinct((row.layout, row.data) for row in rows)
    lines.sort(key=lambda line: line[1] != rows[0].data)  # every layout of the first data set, then
    ends = []
    for index, (layout, data) in enumerate(lines[: plots.MOST_LINES]):
        curve = [row for row in rows if (row.layout, row.data) == (layout, data)]
        curve.sort(key=lambda row: -row.valid_ratio)
        points = [(100 * row.valid_ratio, row.speedup) for row in curve]
        axis.plot(*zip(*points, strict=True), marker="o", color=plots.color(index))
        ends.append((*points[-1], f"{layout}, {data}", plots.color(index)))
    axis.set_title(f"N = {n}")
    plots.ratio_axis(axis, 100 * min(row.valid_ratio for row in rows))
    plots.factor_axis(axis, [row.speedup for row in rows], "speedup over one device")
    plots.name_lines(axis, ends)


def _draw_sizes(axis, sweep, ratio):
    ends = []
    for index, (layout, points) in enumerate(sweep.items()):
        curve = sorted(points.items())
        axis.plot(*zip(*curve, strict=True), marker="o", color=plots.color(index))
        ends.append((*curve[-1], layout, plots.color(index)))
    sizes = sorted({n for points in sweep.values() for n in points})
    axis.set_xscale("log")
    axis.set_xticks(sizes, [str(n) if n in sizes[::2] else "" for n in sizes])
    axis.set_xticks([], minor=True)
    axis.set(title=f"{ratio:.0%} kept", xlabel="N")
    plots.factor_axis(axis, [value for points in sweep.values() for value in points.values()])
    plots.name_lines(axis, ends)
