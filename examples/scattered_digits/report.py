"""The page and the picture of the scattered digits."""

import io

from common.plots import panels
from common.report_files import page, table

_SPARSE = "8 digits"  # the row that the conclusion tells


def report(data, name):
    """What was measured.

    Args:
        data: of the demo, as its JSON file has it. name: of its files.

    Returns:
        The page, no picture (its pixels are not in the data), and the conclusion.
    """
    rows = data["rows"]
    forms = list(next(iter(rows.values()))["ms"])
    over = [form for form in ("dense", "compiled") if form in forms]
    head = ["on the canvas", *(f"{form}, ms" for form in forms)]
    head += [*(f"speedup over {form}" for form in over), "pixels changed"]
    if "calibrated" in forms:
        head += [*(f"calibrated over {form}" for form in over), "pixels changed, calibrated"]
    lines = [_cells(name, row, forms, over) for name, row in rows.items()]
    qualities = [
        (name, f"{found['mean_iou']:.3f}", f"{100 * found['found']:.1f}%")
        for name, found in data["quality"].items()
    ]
    body = [
        "Speedup: of the reference form. Pixels changed: whose label differs from dense's; in "
        "half types that is rounding of both.",
        *_on_calibration(data),
        "",
        *table(head, lines),
        "",
        *table(("form", "mean IoU", "digits found"), qualities),
        "",
        *(f"- {note}" for note in data["notes"]),
        "",
        f"![A canvas, and the labels of its pixels]({name}.png)",
    ]
    conclusion = (
        f"With {_SPARSE} on a canvas the reference form is {speedup(rows[_SPARSE], over[-1]):.2f} "
        f"times as fast as {over[-1]}, and {rows[_SPARSE]['changed pixels']} of "
        f"{rows[_SPARSE]['pixels']} pixels change their label."
    )
    return page("Scattered digits", conclusion, data["header"], body), None, conclusion


def _cells(name, row, forms, over):
    cells = [name, *(f"{row['ms'][form]:.3g}" for form in forms)]
    cells += [f"{speedup(row, form):.2f}x" for form in over]
    cells.append(f"{row['changed pixels']} of {row['pixels']}")
    if "calibrated" in forms:
        cells += [f"{speedup(row, form, 'calibrated'):.2f}x" for form in over]
        cells.append(f"{row['changed by calibration']} of {row['pixels']}")
    return cells


def _on_calibration(data):
    """Lines on it; records of earlier versions have none."""
    if "calibration" not in data:
        return []
    found = data["calibration"]
    return [
        "Calibrated: small deviations are skipped, too, for at most "
        f"{found['max_drop']:g} points of mean IoU. Of the products {found['valid_ratio']:.1%} are "
        f"left, weighted by multiplications, and {found['drop']:.2f} points were lost where it was "
        "not searched.",
    ]


def speedup(row, over, form="reference form"):
    """How many times as fast as another form one is."""
    return row["ms"][over] / row["ms"][form]


def picture(canvas, labels):
    """A canvas and its labels, as the bytes of a PNG."""
    figure, axes = panels(1, 2, 4.2)
    axes[0][0].imshow(canvas.numpy(), cmap="gray")
    axes[0][1].imshow(labels.numpy(), cmap="tab20", vmin=0, vmax=19, interpolation="nearest")
    for axis, title in zip(axes[0], ("canvas", "labels"), strict=True):
        axis.set_title(title)
        axis.set_axis_off()
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=100)
    return file.getvalue()
