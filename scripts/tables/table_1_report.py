"""Table 1 as a page and a picture."""

from common import plots
from common.report_files import table
from tables import paper

TITLE = "thresholds for a valid ratio"
_LINES = (0.30, 0.15, 0.05)  # ratios in the picture
PICTURED = (0.30, 0.05)

_NOTES = """\
The matrix is the paper's, a_ij = 0.1 / (|i-j|^0.1 + 1) on both sides, in float32 and blocks of 32.
Here the threshold is selected exactly among all products of norms; the paper bisects until the
ratio is within 1%, so that thresholds may differ by what this moves them. "Valid" is the share that
ours keeps, "at the paper's" the share that the paper's threshold keeps of the same products."""

_BALANCE = """\
V is the number of valid products of each block of C. Its largest value over its mean is what a
processor with the heaviest block waits for if each has one block; beside it the same with four
blocks each, at equal stride through C, which is how the paper balances its thread blocks. (This
library's blocks are dealt out to whoever is free.)"""


def conclusion(data):
    """The largest difference from the paper's thresholds."""
    off = [_difference(*at) for at in _rows(data) if _difference(*at) is not None]
    if not off:
        return f"{len(_rows(data))} thresholds, none at a size of the paper's."
    worst = max(off, key=abs)
    return (
        f"{len(off)} thresholds at the paper's sizes and ratios; the largest difference is "
        f"{worst:+.2%}."
    )


def beside(data):
    """Ours beside the paper's, a line for each ratio."""
    sizes = [found["place"]["n"] for found in data["cells"]]
    shown = {(n, row["ratio"]): row for n, row in _rows(data)}
    absent = {found["place"]["n"]: found["absent"] for found in data["cells"]}
    head = ["ratio", *(f"N = {n}: ours / paper (difference)" for n in sizes)]
    lines = [
        [f"{ratio:.0%}", *(_cell(n, shown.get((n, ratio)), absent[n]) for n in sizes)]
        for ratio in paper.RATIOS
    ]
    return [*_NOTES.splitlines(), "", *table(head, lines)]


def body(data, picture):
    """The page below its header."""
    head = ("N", "asked", "tau", "paper", "difference", "valid", "at the paper's")
    head += ("largest V / mean", "four at equal stride")
    lines = [
        (
            *(n, f"{row['ratio']:.0%}", f"{row['tau']:.6f}"),
            f"{paper.TAU[n, row['ratio']]:.6f}" if (n, row["ratio"]) in paper.TAU else "",
            "" if _difference(n, row) is None else f"{_difference(n, row):+.2%}",
            f"{row['valid_ratio']:.2%}",
            f"{row['valid_at_papers']:.2%}" if "valid_at_papers" in row else "",
            *(f"{row['imbalance']:.2f}", f"{row['imbalance_strided']:.2f}"),
        )
        for n, row in _rows(data)
    ]
    return [
        f"![thresholds by size, and valid products of each block of C]({picture})",
        "",
        *beside(data),
        "",
        "## Load balance",
        "",
        *_BALANCE.splitlines(),
        "",
        *table(head, lines, left=()),
    ]


def picture(data):
    """Thresholds by size, with the paper's as crosses, and V of the largest matrix."""
    figure, ((lines, *maps),) = plots.panels(1, 1 + len(PICTURED), 3.2)
    ends = []
    for index, ratio in enumerate(_LINES):
        points = [(n, row["tau"]) for n, row in _rows(data) if row["ratio"] == ratio]
        papers = [(n, paper.TAU[n, ratio]) for n, _ in points if (n, ratio) in paper.TAU]
        if points:
            lines.plot(*zip(*points, strict=True), color=plots.color(index), marker="o", ms=3)
            ends.append((*points[-1], f"{ratio:.0%}", plots.color(index)))
        if papers:
            lines.plot(*zip(*papers, strict=True), "x", color="black")
    sizes = sorted({n for n, _ in _rows(data)})
    lines.set_xscale("log", base=2)
    lines.set_xticks(sizes, [f"{n / 1024:g}k" for n in sizes])
    lines.set(title="tau; crosses: the paper's", xlabel="N")
    plots.name_lines(lines, ends, size=9)
    pictured = {row["ratio"]: (n, row) for n, row in _rows(data) if "counts" in row}
    for axis, ratio in zip(maps, PICTURED, strict=True):
        axis.set(title=f"V, {ratio:.0%} kept", xticks=[], yticks=[])
        if ratio in pictured:
            n, row = pictured[ratio]
            shown = axis.imshow(row["counts"], cmap="viridis", vmin=0)
            axis.set_xlabel(f"block columns of C, N = {n}")
            figure.colorbar(shown, ax=axis, shrink=0.7, format="{x:.0%}")
    return plots.png(figure, data["header"], "Thresholds, and the share of k that is valid")


def _rows(data):
    return [(found["place"]["n"], row) for found in data["cells"] for row in found["rows"]]


def _difference(n, row):
    """Relative, of our threshold from the paper's; None where the paper has none."""
    of_paper = paper.TAU.get((n, row["ratio"]))
    return None if of_paper is None else row["tau"] / of_paper - 1


def _cell(n, row, absent):
    if row is None:
        return f"not measured: {absent}"
    if _difference(n, row) is None:
        return f"{row['tau']:.6f}"
    return f"{row['tau']:.6f} / {paper.TAU[n, row['ratio']]:.6f} ({_difference(n, row):+.2%})"
