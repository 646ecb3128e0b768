"""The study's results as Markdown, JSON, a picture, and tables on the terminal."""

import io

from rich.table import Table

from scripts._report_files import write_results

# title -> what stands in it for a Setting; columns that are empty throughout a table are left out.
_COLUMNS = {
    "asked": lambda s: f"{100 * s.asked_ratio:.2f}%",
    "layout": lambda s: s.layout,
    "valid": lambda s: f"{100 * s.valid_ratio:.2f}%",
    "tau": lambda s: _range(s.taus.values()),
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

_EXPLANATION = """\
Valid is the share of block products that are multiplied, asked what it should be. Tau is found for
each batch so that the share is held; the table gives the mean over the batches (where several
layers are replaced, from the lowest to the highest of the layers). Blocks that lie wholly in the
zeros around the pictures count as products; by position they are so many (a sixth of conv31's) that
no threshold gives a share just below 100%, and the nearest is taken. Change is the accuracy against
the dense network, in percentage points.

Layouts: *paper* is blocks of 32 on an explicit im2col matrix, image after image, K as (ci, kh, kw);
*image by image* is pixel blocks (1, 8, 8), *by position* (64, 1, 1), the default from a batch of 64
on, both with blocks of 64 and K as (kh, kw, ci).

Times are medians for one batch of real activations, all candidates in turns: the layer with norms,
bias and a held tau, without the search for tau. Speedups (x): over the dense convolution of the
device; over im2col and a dense GEMM; and, for the paper's layout, product alone (norms included)
over GEMM alone, which is what the paper reports. The last columns are the paper's (Tesla V100,
FP32, weights of its own).
"""


def write_report(results, folder, name):
    """Writes name.md, name.json and name.png into the folder; gives their paths."""
    return write_results(
        folder,
        name,
        data=results.as_dict(),
        markdown=_markdown(results, f"{name}.png"),
        picture=_picture(results),
    )


def print_tables(results, console):
    for group in results.groups:
        table = Table(title=_title(group), caption=_dense_line(group), title_justify="left")
        titles, rows = _cells(group)
        for title in titles:
            justify = "left" if title in _LEFT else "right"
            table.add_column(title, justify=justify, no_wrap=title in _LEFT)
        for row, following in zip(rows, [*rows[1:], None], strict=True):
            table.add_row(*row, end_section=following is not None and following[0] != row[0])
        console.print(table)


def _markdown(results, picture):
    lines = ["# VGG13 on MNIST, convolutions replaced by SpAMM", ""]
    lines += ["| | |", "| --- | --- |"]
    lines += [f"| {key} | {value} |" for key, value in results.header.items()]
    lines += ["", _EXPLANATION, f"![accuracy and speedup against valid ratio]({picture})"]
    for group in results.groups:
        titles, rows = _cells(group)
        lines += ["", f"## {_title(group)}", "", _dense_line(group), ""]
        lines += _markdown_row(titles)
        lines += _markdown_row(":---" if title in _LEFT else "---:" for title in titles)
        for row in rows:
            lines += _markdown_row(row)
    return "\n".join(lines) + "\n"


def _markdown_row(cells):
    return [f"| {' | '.join(cells)} |"]


def _cells(group):
    """Titles and rows of a group's table, as text, without empty columns."""
    columns = {title: [cell(s) for s in group.settings] for title, cell in _COLUMNS.items()}
    kept = {title: column for title, column in columns.items() if any(column)}
    return list(kept), list(zip(*kept.values(), strict=True))


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


def _range(values):
    low, high = min(values), max(values)
    return f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"


def _picture(results):
    """Two panels a precision: accuracy, and speedup over the dense convolution, by valid ratio."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    timed = [group for group in results.groups if group.conv_ms is not None]
    precisions = list(dict.fromkeys(group.precision for group in timed))
    titles = list(dict.fromkeys(group.title for group in timed))
    layouts = list(dict.fromkeys(s.layout for group in timed for s in group.settings))
    figure, rows = pyplot.subplots(
        len(precisions), 2, figsize=(12, 4.8 * len(precisions)), squeeze=False, layout="constrained"
    )
    for group in timed:
        left, right = rows[precisions.index(group.precision)]
        for layout in layouts:
            chosen = sorted(
                (s for s in group.settings if s.layout == layout), key=lambda s: s.valid_ratio
            )
            ratios = [100 * s.valid_ratio for s in chosen]
            style = {
                "color": f"C{layouts.index(layout)}",
                "linestyle": ("-", "--", ":")[titles.index(group.title) % 3],
                "marker": "os^"[titles.index(group.title) % 3],
                "markersize": 4,
                "label": f"{group.title}, {layout}",
            }
            left.plot(ratios, [s.accuracy for s in chosen], **style)
            right.plot(ratios, [s.over_conv for s in chosen], **style)
    for precision, (left, right) in zip(precisions, rows, strict=True):
        left.set(title=f"{precision}: validation accuracy", ylabel="%")
        right.set(title=f"{precision}: speedup over the dense convolution", ylabel="times")
        right.axhline(1, color="grey", linewidth=0.8)
        for axes in (left, right):
            axes.set_xlabel("valid ratio (%)")
            axes.invert_xaxis()
            axes.grid(alpha=0.3)
    figure.legend(*rows[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.suptitle(f"VGG13 on MNIST with SpAMM, {results.header['device']}")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    pyplot.close(figure)
    return buffer.getvalue()
