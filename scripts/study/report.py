"""The study's results as a page, a picture, and tables on the terminal."""

from rich.table import Table

from common import plots
from common.report_files import page, table
from study.results import GroupResult, Results, Setting

_MOST_LOST = 0.5  # points: the accuracy that the conclusion is ready to lose
_LITTLE = 2  # points: how far the panels by layer go
_ALL = "all but the first"

# title -> what stands in it for a Setting; columns that are empty throughout a table are left out.
_COLUMNS = {
    "asked": lambda s: f"{100 * s.asked_ratio:.2f}%",
    "layout": lambda s: s.layout,
    "valid": lambda s: f"{100 * s.valid_ratio:.2f}%" + _nothing_skipped(s),
    "tau": lambda s: tau_range(s),
    "accuracy": lambda s: f"{s.accuracy:.2f}%",
    "change": lambda s: f"{s.accuracy_change:+.2f}",
    "ms": lambda s: _number(s.ms),
    "x conv": lambda s: _number(s.over_conv),
    "x im2col+GEMM": lambda s: _number(s.over_im2col_gemm),
    "x GEMM": lambda s: _number(s.over_gemm),
    "paper: change": lambda s: f"{s.paper['accuracy_change']:+.1f}" if s.paper else "",
    "paper: x GEMM": lambda s: f"{s.paper['speedup']:.1f}" if s.paper else "",
}
_LEFT = ("layout",)

EXPLANATION = """\
Asked is the share of block products to multiply, valid the nearest share that a threshold gives.
Blocks that lie wholly in the zeros around the pictures count as products and all have the norm 0;
by position they are so many (a sixth of conv31's) that no threshold gives a share just below 100%:
the nearest is then all of them, which the table marks as "nothing skipped". Tau is found for each
batch so that the share is held; the table gives the mean over the batches (where several layers are
replaced, from the lowest to the highest of the layers). Change is the accuracy against the dense
network, in percentage points.

Layouts: *paper* is blocks of 32 on an explicit im2col matrix, image after image, K as (ci, kh, kw);
*image by image* is pixel blocks (1, 8, 8), *by position* (64, 1, 1), the default from a batch of 64
on, both with blocks of 64 and K as (kh, kw, ci).

Times are medians for one batch of real activations, all candidates in turns: the layer with norms,
bias and a held tau, without the search for tau. Speedups (x): over the dense convolution of the
device; over im2col and a dense GEMM; and, for the paper's layout, product alone (norms included)
over GEMM alone, which is what the paper reports. The last columns are the paper's (Tesla V100,
FP32, weights of its own)."""


def report(data, name):
    """The page, the picture and the conclusion."""
    results = from_data(data)
    return _markdown(results, f"{name}.png"), picture(results), conclusion(results)


def from_data(data):
    """The Results in the JSON file."""
    return Results(data["header"], [group_from_data(group) for group in data["groups"]])


def group_from_data(group):
    return GroupResult(**group | {"settings": [Setting(**s) for s in group["settings"]]})


def conclusion(results):
    """The fastest setting of all layers but the first that loses little, for each type."""
    parts = []
    for group in results.groups:
        if len(group.gemms) == 1 or group.conv_ms is None:
            continue
        fit = [s for s in group.settings if s.accuracy_change >= -_MOST_LOST - 1e-9]
        best = max(fit, key=lambda s: s.over_conv, default=None)
        parts.append(f"in {group.precision} {_best(best)}")
    return (
        f"At most {_MOST_LOST} points of accuracy lost, all layers but the first against the dense "
        f"convolutions: {'; '.join(parts)}."
    )


def _best(setting):
    if setting is None:
        return "no setting"
    return (
        f"{setting.over_conv:.2f}x as fast ({setting.layout}, {setting.valid_ratio:.0%} of the "
        f"block products kept, {setting.accuracy_change:+.2f} points)"
    )


def print_tables(results, console):
    for group in results.groups:
        shown = Table(title=_title(group), caption=_dense_line(group), title_justify="left")
        titles, rows = _cells(group)
        for title in titles:
            justify = "left" if title in _LEFT else "right"
            shown.add_column(title, justify=justify, no_wrap=title in _LEFT)
        for row, following in zip(rows, [*rows[1:], None], strict=True):
            shown.add_row(*row, end_section=following is not None and following[0] != row[0])
        console.print(shown)


def _markdown(results, picture_name):
    body = [
        f"![speedup against accuracy lost]({picture_name})",
        "",
        "A line of the picture goes from much kept to little; its end names the share kept there.",
        "",
        *EXPLANATION.splitlines(),
    ]
    for group in results.groups:
        body += group_lines(group)
    title = "VGG13 on MNIST, convolutions replaced by SpAMM"
    return page(title, conclusion(results), results.header, body)


def group_lines(group):
    """A group's part of a page, as Markdown."""
    titles, rows = _cells(group)
    left = [titles.index(title) for title in _LEFT]
    return ["", f"## {_title(group)}", "", _dense_line(group), "", *table(titles, rows, left)]


def _cells(group):
    """Titles and rows of a group's table, as text, without empty columns."""
    columns = {title: [cell(s) for s in group.settings] for title, cell in _COLUMNS.items()}
    kept = {title: column for title, column in columns.items() if any(column)}
    return list(kept), list(zip(*kept.values(), strict=True))


def _nothing_skipped(setting):
    """A mark where less than all was asked for, and nothing can be skipped."""
    return ", nothing skipped" if setting.valid_ratio == 1 > setting.asked_ratio else ""


def _title(group):
    if len(group.gemms) > 1:
        return f"{group.title}, {group.precision}"
    (shape,) = group.gemms.values()
    return f"{group.title} ({' x '.join(map(str, shape))}), {group.precision}"


def _dense_line(group):
    text = f"Dense: accuracy {group.dense_accuracy:.2f}%"
    if group.conv_ms is None:
        return text + "."
    return (
        f"{text}; convolution {_number(group.conv_ms)} ms, im2col + GEMM "
        f"{_number(group.im2col_gemm_ms)} ms (GEMM alone {_number(group.gemm_ms)} ms)."
    )


def _number(value):
    """Three digits, or nothing for None."""
    if value is None:
        return ""
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2 if value >= 0.1 else 4}f}"


def tau_range(setting):
    """A Setting's thresholds, from the lowest to the highest of its layers."""
    low, high = min(setting.taus.values()), max(setting.taus.values())
    return f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"


def picture(results):
    """Speedup against points lost: by layout for all layers, by layer where little is lost."""
    timed = [group for group in results.groups if group.conv_ms is not None]
    precisions = list(dict.fromkeys(group.precision for group in timed))
    figure, axes = plots.panels(len(precisions), 2, 0.9 + 3.1 * len(precisions))
    for precision, (left, right) in zip(precisions, axes, strict=True):
        groups = [group for group in timed if group.precision == precision]
        whole = max(groups, key=lambda group: len(group.gemms))
        layouts = list(dict.fromkeys(s.layout for s in whole.settings))
        left.set_xscale("symlog", linthresh=1, linscale=0.6)
        left.set_xticks([0, 1, 3, 10, 30], ["0", "1", "3", "10", "30"])
        left.set_xticks([], minor=True)
        plots.factor_axis(left, [s.over_conv for s in whole.settings])
        _trade(left, 100, {layout: _curve(whole, layout) for layout in layouts})
        left.set_title(f"{precision}: {_ALL}, by layout")
        left.set_ylabel("speedup over dense")
        names = {(_ALL if group is whole else group.title): group for group in groups}
        right.yaxis.set_major_formatter("{x:g}x")
        right.grid(axis="y", alpha=0.25)
        _trade(right, _LITTLE, {name: _curve(group, layouts[-1]) for name, group in names.items()})
        right.set_title(f"{precision}: {layouts[-1]}, by layer")
    for axis in axes[-1]:
        axis.set_xlabel("accuracy lost (points)")
    title = "VGG13 on MNIST: speed against accuracy; upper left is best"
    return plots.png(figure, results.header, title)


def _curve(group, layout):
    """(points lost, speedup, valid ratio) of a group's settings, most kept first."""
    chosen = [s for s in group.settings if s.layout == layout]
    chosen.sort(key=lambda s: -s.asked_ratio)
    return [(-s.accuracy_change, s.over_conv, s.asked_ratio) for s in chosen]


def _trade(axis, most_lost, curves):
    """Lines {name: curve} up to ``most_lost`` points, each with the share kept at its end."""
    ends = []
    for index, (name, curve) in enumerate(curves.items()):
        shown = [point for point in curve if point[0] <= most_lost]
        if shown:
            lost, speedups, kept = zip(*shown, strict=True)
            axis.plot(lost, speedups, marker="o", color=plots.color(index))
            ends.append((lost[-1], speedups[-1], f"{name}, {kept[-1]:.0%}", plots.color(index)))
    axis.set_xlim(-0.1 * min(5, most_lost), most_lost)
    plots.name_lines(axis, ends, size=9)
