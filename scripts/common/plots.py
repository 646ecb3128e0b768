"""Pictures of rows of results: lines in panels, bars, and a line about the device.

A page shows a picture 850 pixels wide. matplotlib, which takes a second, is imported late.
"""

import io
import textwrap

from common.results import text

_WIDTH, _HEIGHT, _DPI = 8.5, 3.9, 160
_MOST_PANELS = 3
_COLORS = 10  # that matplotlib has; lines behind these are dashed


def draw(picture, rows, device):
    """The picture of rows as the bytes of a PNG. Axes are by factors where all values allow it."""
    pyplot = _pyplot()
    for name, wanted in (picture.prefer or {}).items():
        kept = [row for row in rows if row[name] in wanted]
        rows = kept or [row for row in rows if row[name] == rows[-1][name]]
    panels = list(dict.fromkeys(row.get(picture.panel) for row in rows))[:_MOST_PANELS]
    names = list(dict.fromkeys(row[picture.line] for row in rows))
    rest = {"layout": "constrained", "squeeze": False, "sharey": True}
    figure, (axes,) = pyplot.subplots(1, len(panels), figsize=(_WIDTH, _HEIGHT), **rest)
    for axis, panel in zip(axes, panels, strict=True):
        for place, name in enumerate(names):
            points = sorted(
                (row[picture.x], row[picture.drawn])
                for row in rows
                if (row[picture.line], row.get(picture.panel)) == (name, panel)
            )
            style = {"color": f"C{place % _COLORS}", "ls": "--" if place >= _COLORS else "-"}
            axis.plot(*zip(*points, strict=True) if points else ([], []), marker="o", ms=4, **style)
        axis.set_title(textwrap.fill(text(panel), 48 // len(panels)), fontsize=10)
        axis.set_xlabel(picture.x.replace("_", " "))
        axis.spines[["top", "right"]].set_visible(False)
        _scale(axis.xaxis, [row[picture.x] for row in rows])
        _scale(axis.yaxis, [row[picture.drawn] for row in rows])
    axes[0].set_ylabel(picture.drawn.replace("_", " "))
    labels = [textwrap.fill(text(name, picture.line), 30) for name in names]
    figure.legend(axes[0].lines[: len(names)], labels, loc="outside right", fontsize=9)
    figure.suptitle(textwrap.fill(picture.title, 95), fontsize=11, fontweight="bold")
    figure.supxlabel(device, fontsize=8.5, color="#444444")
    return _png(figure)


def _scale(along, values):
    """Sets the scale and the ticks of an axis of a picture."""
    from matplotlib import ticker

    along.axes.grid(alpha=0.25)
    by_factors = min(values) > 0
    scale = {"value": "log"} if by_factors else {"value": "symlog", "linthresh": 1}
    getattr(along.axes, f"set_{along.axis_name}scale")(**scale)
    if by_factors and max(values) < 1000 * min(values):
        along.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    along.set_minor_formatter(ticker.NullFormatter())
    along.set_major_formatter("{x:g}")


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
