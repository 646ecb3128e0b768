"""Pictures of rows of results: lines in panels, bars, and a line about the device.

A page shows a picture 850 pixels wide. matplotlib is imported where it is used, for it takes a
second.
"""

import io
import textwrap

from common.results import text

_WIDTH, _HEIGHT, _DPI = 8.5, 3.9, 160
_MOST_PANELS = 3
_FEW = 70  # times, within which an axis has room for ticks at 1, 2 and 5
_COLORS = 10  # that matplotlib has; lines behind these are dashed


def draw(picture, rows, device):
    """The picture of rows as the bytes of a PNG."""
    pyplot = _pyplot()
    for name, wanted in picture.prefer.items():
        kept = [row for row in rows if row[name] in wanted]
        rows = kept or [row for row in rows if row[name] == rows[-1][name]]
    panels = {}
    for row in rows:
        line = panels.setdefault(row.get(picture.panel), {})
        line.setdefault(text(row[picture.line], picture.line), []).append(row)
    panels = dict(list(panels.items())[:_MOST_PANELS])
    names = list(dict.fromkeys(name for lines in panels.values() for name in lines))
    pyplot.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})
    rest = {"layout": "constrained", "squeeze": False, "sharey": True}
    figure, (axes,) = pyplot.subplots(1, len(panels), figsize=(_WIDTH, _HEIGHT), **rest)
    for axis, (name, lines) in zip(axes, panels.items(), strict=True):
        axis.set_title(textwrap.fill(text(name), 48 // len(panels)), fontsize=10)
        for line, of_line in lines.items():
            points = sorted((row[picture.x], row[picture.drawn]) for row in of_line)
            place = names.index(line)
            style = {"color": f"C{place % _COLORS}", "ls": "--" if place >= _COLORS else "-"}
            axis.plot(*zip(*points, strict=True), marker="o", ms=4, label=line, **style)
        _scale(axis, picture)
    axes[0].set_ylabel(picture.labels[1])
    axes[0].set_ylim(bottom=picture.least)
    found = {}
    for axis in axes:
        found |= dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    figure.legend(found.values(), found, loc="outside right", fontsize=9)
    figure.suptitle(picture.title, fontsize=13, fontweight="bold")
    lines = "\n".join((*textwrap.wrap(picture.caption, 115), device))
    figure.supxlabel(lines, fontsize=8.5, color="#444444")
    return _png(figure)


def bars(groups, caption):
    """The PNG of bars of speeds on a logarithmic axis, longest first: {name of a colour: (name,
    speed, said of it) of each bar}.
    """
    from matplotlib.patches import Patch

    pyplot = _pyplot()
    rows = [(*row, f"C{i}") for i, of_group in enumerate(groups.values()) for row in of_group]
    names, speeds, words, colors = zip(*sorted(rows, key=lambda row: row[1]), strict=True)
    figure, axis = pyplot.subplots(figsize=(_WIDTH, 0.3 * len(rows) + 1.4), layout="constrained")
    axis.barh(names, speeds, color=colors, height=0.65)
    for place, speed in enumerate(speeds):
        axis.text(speed, place, f" {words[place]}", va="center", fontweight="bold")
    axis.set_xscale("log")
    axis.set_xlim(0.9, speeds[-1] * (speeds[-1] / 0.9) ** 0.25)
    axis.xaxis.set_minor_formatter("")
    ticks = [tick for tick in (1, 1.5, 2, 5, 10, 20) if tick <= speeds[-1]]
    axis.set_xticks(ticks, [f"{tick}x" for tick in ticks])
    axis.axvline(1, color="black", linewidth=1)
    axis.spines[["top", "right"]].set_visible(False)
    patches = [Patch(color=f"C{i}") for i in range(len(groups))]
    axis.legend(patches, groups, loc="lower right")
    axis.set_xlabel(caption, fontsize=8.5, color="#444444")
    return _png(figure)


def _pyplot():
    """pyplot that needs no display."""
    import matplotlib.pyplot

    matplotlib.use("Agg")
    return matplotlib.pyplot


def _png(figure):
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DPI)
    _pyplot().close(figure)
    return buffer.getvalue()


def _scale(axis, picture):
    """Sets scales and ticks: shares run from the whole down, speeds have a line at 1."""
    from matplotlib import ticker

    axis.grid(alpha=0.25)
    axis.set_xlabel(picture.labels[0])
    for along, column in ((axis.xaxis, picture.x), (axis.yaxis, picture.drawn)):
        name = along.axis_name
        if name in picture.log:
            getattr(axis, f"set_{name}scale")("log")
            low, high = along.get_view_interval()
            subs = (1, 2, 5) if high < _FEW * low else (1,)
            along.set_major_locator(ticker.LogLocator(subs=subs))
            along.set_minor_formatter(ticker.NullFormatter())
            along.set_major_formatter("{x:g}")
        if column.endswith("ratio"):
            along.set_major_formatter(ticker.PercentFormatter(1, decimals=0))
        elif column.startswith(("speedup", "over_")):
            along.set_major_formatter("{x:g}x")
            (axis.axhline if name == "y" else axis.axvline)(1, color="grey", linewidth=1)
    if picture.x.endswith("ratio"):
        axis.invert_xaxis()
