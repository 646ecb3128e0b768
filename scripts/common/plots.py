"""Pictures of rows of results, and what all pictures share: size, ticks, the line about the device.

A page shows a picture 850 pixels wide. matplotlib is imported where it is used, for it takes a
second.
"""

import io

from common.tables import text

WIDTH = 8.5  # inches, of a picture that is shown 850 pixels wide
_DPI = 160
_COLORS = ("#1f5fa8", "#d1495b", "#2e8b57", "#8a5cb8", "#c98a1b", "#555555")
_MOST_PANELS = 3
_RATIO_TICKS = (100, 60, 30, 10, 5)
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


def color(index):
    return _COLORS[index]


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


def png(figure, header, title=None, *, device_size=8.5):
    """The picture as bytes, with its title and a line that names the device."""
    from matplotlib import pyplot

    if title:
        figure.suptitle(title, fontsize=13, fontweight="bold")
    figure.supxlabel(header["device"], fontsize=device_size, color="grey")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DPI)
    pyplot.close(figure)
    return buffer.getvalue()


# ---- Pictures of rows ---------------------------------------------------------------------------


def draw(picture, rows, title, header):
    """The picture of rows as the bytes of a PNG. ``header``: of the run with the device."""
    for name, wanted in picture.prefer.items():
        known = [row[name] for row in rows]
        numbers = [value for value in known if isinstance(value, (int, float))]
        chosen = wanted if wanted in known else max(numbers or known[:1])
        rows = [row for row in rows if row[name] == chosen]
        if not isinstance(chosen, bool):
            title += f", {name} {text(chosen)}"
    groups = {}
    for row in rows:
        groups.setdefault(row.get(picture.panel), []).append(row)
    shown = dict(list(groups.items())[:_MOST_PANELS])
    height, is_map = 3.6, not picture.labels
    if is_map:
        height = 1.3 + 0.25 * max(len(_lines(group, picture)) for group in shown.values())
    figure, (axes,) = panels(1, len(shown), height, sharey=not is_map)
    for axis, (name, group) in zip(axes, shown.items(), strict=True):
        (_draw_map if is_map else _draw_lines)(axis, picture, group)
        axis.set_title(text(name, picture.panel))
    if not is_map:
        axes[0].set_ylabel(picture.labels[1])
        if picture.drawn == "speedup":
            factor_axis(axes[0], [row["speedup"] for row in rows], picture.labels[1])
    return png(figure, header, title)


def _lines(rows, picture):
    """{name: rows} of the values of the picture's lines."""
    found = {}
    for row in rows:
        name = ", ".join(text(row[column], column) for column in picture.line.split())
        found.setdefault(name, []).append(row)
    return found


def _draw_lines(axis, picture, rows):
    for index, (name, line) in enumerate(list(_lines(rows, picture).items())[: len(_COLORS)]):
        scale = 100 if picture.x == "valid_ratio" else 1
        points = sorted((scale * row[picture.x], row[picture.drawn]) for row in line)
        axis.plot(*zip(*points, strict=True), marker="o", ms=4, color=color(index), label=name)
    axis.grid(alpha=0.25)
    axis.set_xlabel(picture.labels[0])
    for name in picture.log:
        getattr(axis, f"set_{name}scale")("log")
    if picture.x == "n":
        sizes = sorted({row["n"] for row in rows})
        axis.set_xticks(sizes, [f"{size / 1024:g}k" for size in sizes], fontsize=8)
        axis.set_xticks([], minor=True)
    if picture.x == "valid_ratio":
        ratio_axis(axis, 100 * min(row["valid_ratio"] for row in rows))
    axis.legend(fontsize=8)


def _draw_map(axis, picture, rows):
    """Cells with their speedups, blue above 1 and red below, white where they are equal."""
    import numpy as np

    lines = _lines(rows, picture)
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
