"""Pictures of rows of results, and what all pictures share: size, ticks, the line about the device.

A page shows a picture 850 pixels wide. matplotlib is imported where it is used, for it takes a
second.
"""

import io
import textwrap

from common.tables import text

WIDTH = 8.5  # inches, of a picture that is shown 850 pixels wide
_DPI = 160
_COLORS = ("#1f5fa8", "#d1495b", "#2e8b57", "#8a5cb8", "#c98a1b", "#555555")
_NAMES = (  # of a colour each; the first are ours
    ("float32", "scheduled", "by position", "SP2"),
    ("float64", "constant", "image by image", "S^(-1/2)"),
    ("float16", "float32 first", "paper", "S"),
    ("tf32", "nothing skipped", "all"),
    ("bfloat16", "eigh"),
    ("torch.mm", "SP2, dense storage"),
)
_MOST_PANELS = 3
_RATIO_TICKS = (100, 50, 20, 10, 5)
_FACTOR_TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)


def panels(rows, columns, height, *, width=WIDTH, **rest):
    """A figure and its axes, as an array of rows; ``height`` is that of the whole, in inches."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update({"font.size": 10, "axes.titlesize": 11, "axes.spines.top": False})
    pyplot.rcParams.update({"axes.spines.right": False})
    return pyplot.subplots(
        rows, columns, figsize=(width, height), layout="constrained", squeeze=False, **rest
    )


def color(name, names=()):
    """The colour of a name, everywhere the same; of one that is new, by its place in ``names``."""
    plain = name.partition(": ")[0]  # behind it is a growth, say
    known = [color for color, of in zip(_COLORS, _NAMES, strict=True) if plain in of]
    return known[0] if known else _COLORS[list(names).index(name) % len(_COLORS)]


def ratio_axis(axis, low, label="block products kept"):
    """Valid ratios in percent from 100 down to ``low``, spaced by factors."""
    ticks = [tick for tick in _RATIO_TICKS if tick >= 0.9 * low]
    axis.set_xscale("log")
    axis.set_xticks(ticks, [f"{tick}%" for tick in ticks])
    axis.set_xticks([], minor=True)
    axis.set_xlim(108, 0.93 * low)
    axis.set_xlabel(label)


def factor_axis(axis, values, label=None):
    """Speedups, spaced by factors, and a line at 1."""
    low, high = 0.9 * min(*values, 0.95), 1.2 * max(*values, 1.05)
    ticks = [tick for tick in _FACTOR_TICKS if low <= tick <= high]
    axis.set_yscale("log")
    axis.set_ylim(low, high)
    axis.set_yticks(ticks, [f"{tick:g}x" for tick in ticks])
    axis.set_yticks([], minor=True)
    axis.axhline(1, color="grey", linewidth=1)
    axis.grid(axis="y", alpha=0.25)
    if label:
        axis.set_ylabel(label)


def png(figure, header, title=None, caption="", *, device_size=8.5):
    """The picture as bytes, with its title, and a line of what it shows and the device."""
    from matplotlib import pyplot

    if title:
        figure.suptitle(title, fontsize=13, fontweight="bold")
    lines = "\n".join((*textwrap.wrap(caption, 115), header["device"]))
    figure.supxlabel(lines, fontsize=device_size, color="#444444")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DPI)
    pyplot.close(figure)
    return buffer.getvalue()


# ---- Pictures of rows ---------------------------------------------------------------------------


def draw(picture, rows, title, header):
    """The picture of rows as the bytes of a PNG. ``header``: of the run with the device."""
    for name, wanted in picture.prefer.items():
        known = [row[name] for row in rows]
        if isinstance(wanted, tuple):
            rows = [row for row in rows if row[name] in wanted] or rows
            continue
        numbers = [value for value in known if isinstance(value, (int, float))]
        chosen = wanted if wanted in known else max(numbers or known[:1])
        rows = [row for row in rows if row[name] == chosen]
    groups = {}
    for row in rows:
        groups.setdefault(row.get(picture.panel), []).append(row)
    shown = dict(list(groups.items())[:_MOST_PANELS])
    has_lines = bool(picture.labels)
    bars = None if picture.x else _bars(rows, picture)
    names = list(dict.fromkeys(name for group in shown.values() for name in _lines(group, picture)))
    height = 3.9 if has_lines else 1.5 + 0.25 * len(bars or names)
    figure, (axes,) = panels(1, len(shown), height, sharey=True)
    for axis, (name, group) in zip(axes, shown.items(), strict=True):
        if bars:
            _draw_bars(axis, bars)
        elif has_lines:
            _draw_lines(axis, picture, group, names)
        else:
            _draw_map(axis, picture, group, _sorted(shown.values(), picture))
        words = textwrap.fill(text(name, picture.panel), 48 // len(shown))
        axis.set_title(words, fontsize=11 if len(shown) < 3 else 10)
    if has_lines:
        axes[0].set_ylabel(picture.labels[1])
        axes[0].set_ylim(bottom=picture.least)
        if picture.drawn == "speedup":
            drawn = [row["speedup"] for group in shown.values() for row in group]
            for axis in axes:
                factor_axis(axis, drawn)
            axes[0].set_ylabel(picture.labels[1])
        found = {}
        for axis in axes:
            found |= dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
        ordered = sorted(found, key=names.index)
        figure.legend([found[name] for name in ordered], ordered, loc="outside right", fontsize=9)
    return png(figure, header, picture.title or title, picture.caption)


def _sorted(groups, picture):
    """The names of lines: those of most panels first, then by what they reach in the last column of
    the first one.
    """
    lasts = {}
    for group in groups:
        for name, line in _lines(group, picture).items():
            lasts.setdefault(name, []).append(line[-1][picture.drawn])
    return sorted(lasts, key=lambda name: (-len(lasts[name]), -lasts[name][0]))


def _bars(rows, picture):
    """{name: length}, the longest first: the ends of the second column for each of the first."""
    outer, inner = picture.line.split()
    best = {}
    for row in rows:
        of = best.setdefault(row[outer], {})
        of[row[inner]] = max(row[picture.drawn], of.get(row[inner], 0))
    lengths = {
        f"{name}, {inner} {end}": of[end] for name, of in best.items() for end in {min(of), max(of)}
    }
    return dict(sorted(lengths.items(), key=lambda item: -item[1]))


def _draw_bars(axis, bars):
    for place, length in enumerate(bars.values()):
        axis.barh(place, length, color=_COLORS[0] if length >= 1 else "#b0b0b0", height=0.7)
        axis.text(length, place, f" {length:.2f}x", va="center", fontsize=9)
    axis.set_yticks(range(len(bars)), list(bars))
    axis.set_ylim(len(bars) - 0.4, -0.6)
    axis.set_xlim(0, 1.1 * max(bars.values()))
    axis.axvline(1, color="black", linewidth=1)
    axis.xaxis.set_major_formatter("{x:g}x")


def _lines(rows, picture):
    """{name: rows} of the values of the picture's lines."""
    found = {}
    for row in rows:
        name = ", ".join(text(row[column], column) for column in picture.line.split())
        found.setdefault(name, []).append(row)
    return found


def _draw_lines(axis, picture, rows, names):
    for name, line in _lines(rows, picture).items():
        scale = 100 if picture.x == "valid_ratio" else 1
        points = sorted((scale * row[picture.x], row[picture.drawn]) for row in line)
        style = {"marker": "o", "ms": 4, "color": color(name, names), "label": name}
        axis.plot(*zip(*points, strict=True), **style)
    axis.grid(alpha=0.25)
    axis.set_xlabel(picture.labels[0])
    for name in picture.log:
        getattr(axis, f"set_{name}scale")("log")
    if picture.x == "seconds":
        from matplotlib import ticker

        axis.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axis.xaxis.set_major_formatter("{x:g}")
        axis.tick_params(axis="x", labelsize=8.5)
        axis.xaxis.set_minor_formatter(ticker.NullFormatter())
    if picture.x.startswith("over_"):
        axis.axvline(1, color="grey", linewidth=1)
        axis.xaxis.set_major_formatter("{x:g}x")
    if picture.x == "valid_ratio":
        ratio_axis(axis, 100 * min(row["valid_ratio"] for row in rows))


def _draw_map(axis, picture, rows, names):
    """Cells with their speedups, blue above 1 and red below, white where they are equal."""
    import numpy as np

    found = _lines(rows, picture)
    lines = {name: found.get(name, []) for name in names}
    columns = list(dict.fromkeys(text(row[picture.x], picture.x) for row in rows))
    cells = np.full((len(lines), len(columns)), np.nan)
    for i, line in enumerate(lines.values()):
        for row in line:
            cells[i, columns.index(text(row[picture.x], picture.x))] = row[picture.drawn]
    reach = np.log(2)  # twice as fast or half: full colour
    colors = np.clip(np.log(cells), -reach, reach)
    axis.imshow(colors, cmap="RdBu", vmin=-1.3 * reach, vmax=1.3 * reach, aspect="auto")
    for i, j in np.argwhere(np.isfinite(cells)):
        words = f"{cells[i, j]:.1f}" if cells[i, j] >= 9.95 else f"{cells[i, j]:.2f}"
        ink = "white" if abs(colors[i, j]) > 0.85 * reach else "black"
        axis.text(j, i, words, ha="center", va="center", fontsize=8.5, color=ink)
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    axis.set_yticks(range(len(lines)), list(lines))
    axis.set_xticks(range(len(columns)), columns, rotation=30 if len(columns) > 4 else 0)
