"""What study_pixel_blocks.py found, as a page and a picture."""

from common import plots
from common.report_files import page, table

DEFAULT = (64, 1, 1)  # the pixel block that the library takes by itself
_NOTES = """\
Change of accuracy in percentage points where one convolution multiplies only this share of its
block products. Pixel blocks are (images, rows, columns), all of 64 pixels; in brackets the share
where ties move it by half a point or more."""


def report(data, name):
    """The page, the picture and the conclusion."""
    header, cases = data["header"], data["cases"]
    return _markdown(header, cases, f"{name}.png"), _picture(header, cases), conclusion(cases)


def _blocks(case):
    return list(dict.fromkeys(tuple(s["pixel_block"]) for s in case["settings"]))


def _settings(case, block):
    return [s for s in case["settings"] if tuple(s["pixel_block"]) == block]


def conclusion(cases):
    """Points lost at the lowest share, by one position in many images and by one image's pixels."""
    parts = []
    for title, case in cases.items():
        blocks = _blocks(case)
        lost = [
            f"{case['dense'] - _last(case, block)['accuracy']:.1f} by {block}"
            for block in (blocks[0], blocks[-1])
        ]
        parts.append(f"{title}, {lost[0]} and {lost[1]}")
    kept = min(s["asked_ratio"] for case in cases.values() for s in case["settings"])
    return (
        f"Points of accuracy lost with {kept:.0%} of the block products kept, by pixel block: "
        f"{'; '.join(parts)}."
    )


def _last(case, block):
    return min(_settings(case, block), key=lambda s: s["asked_ratio"])


def _markdown(header, cases, picture):
    body = [f"![accuracy by pixel block and share of block products kept]({picture})", ""]
    body += _NOTES.splitlines()
    for title, case in cases.items():
        ratios = sorted({s["asked_ratio"] for s in case["settings"]}, reverse=True)
        rows = [
            (block, *(cell(case["dense"], s) for s in _settings(case, block)))
            for block in _blocks(case)
        ]
        head = ("pixel block", *(f"{ratio:.0%}" for ratio in ratios))
        body += ["", f"## {title}: dense {case['dense']:.2f}%", "", *table(head, rows)]
    return page("Accuracy by pixel block", conclusion(cases), header, body)


def cell(dense, setting):
    """The change of accuracy, with the share where ties move it."""
    moved = abs(setting["valid_ratio"] - setting["asked_ratio"]) >= 0.005
    suffix = f" ({setting['valid_ratio']:.1%})" if moved else ""
    return f"{setting['accuracy'] - dense:+.2f}{suffix}"


def _picture(header, cases):
    """Accuracy by valid ratio: a panel for each case."""
    lines = -(-len(cases) // 2)
    figure, axes = plots.panels(lines, 2, 4.2 * lines, sharey=True)
    panels = axes.flatten()
    for axis in panels[len(cases) :]:
        axis.set_axis_off()
    low = 100 * min(s["valid_ratio"] for case in cases.values() for s in case["settings"])
    for axis, (title, case) in zip(panels, cases.items(), strict=False):
        axis.axhline(case["dense"], color="grey", linewidth=1)
        ends = []
        for index, block in enumerate(_blocks(case)):
            points = [(100 * s["valid_ratio"], s["accuracy"]) for s in _settings(case, block)]
            points.sort(reverse=True)
            axis.plot(*zip(*points, strict=True), marker="o", color=plots.color(index))
            name = f"{block}, default" if block == DEFAULT else f"{block}"
            ends.append((*points[-1], name, plots.color(index)))
        plots.ratio_axis(axis, low)
        axis.grid(axis="y", alpha=0.25)
        axis.set_title(title)
        plots.name_lines(axis, ends)
    for axis in axes[:, 0]:
        axis.set_ylabel("accuracy (%); grey: dense")
    title = "VGG13 on MNIST by pixel block (images, rows, columns)"
    return plots.png(figure, header, title)
