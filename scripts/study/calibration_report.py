"""What calibrate_vgg13.py found, as a page."""

from common.report_files import page, table

_NOTES = """\
Thresholds are found on some 512 images of one half of the validation images, and chosen by
accuracy on that half. The drop is that on the other half. Valid: the share of block products
multiplied, over all layers weighted by multiplications. Times are medians in us, of a layer alone
with bias and ReLU; dense is the faster of torch's convolution and the library's with nothing
skipped, chosen is on a line by valid ratio through eight of them. Error: of a layer's output,
relative, with nothing skipped before it."""

_HEAD = ("layer", "shape", "valid", "tau", "pixel block", "dense, us", "chosen, us", "error")


def report(data, name):
    """The page, no picture, and the conclusion."""
    return _markdown(data), None, conclusion(data)


def conclusion(data):
    """How much is multiplied, what it costs and what it gains."""
    found, header = data["outcome"], data["header"]
    return (
        f"At most {found['max_drop']:g} points ({header['model']}; {header['inference']}): "
        f"{found['valid_ratio']:.1%} of the products valid, {-found['drop']:+.2f} points on unseen "
        f"images, {found['changed'] or 0:.2f}% of the answers changed; "
        f"{found['before_us'] / found['after_us']:.2f}x as fast as it was "
        f"({found['before_us'] / found['exact_us']:.2f}x with nothing skipped)"
        + _over_compiled(data)
        + "."
    )


def _over_compiled(data):
    """The speedup over torch.compile, where that was measured."""
    times = data.get("ms")
    if not times:
        return ""
    calibrated, exact = (times["compiled"] / times[f] for f in ("calibrated", "converted"))
    return f", {calibrated:.2f}x as fast as torch.compile ({exact:.2f}x with nothing skipped)"


def _markdown(data):
    found = data["outcome"]
    lines = [
        *_NOTES.splitlines(),
        "",
        *table(
            ("", "validation images"),
            [
                ("accuracy, dense", f"{data['accuracy']:.2f}%"),
                ("change, half that was searched", _searched(found)),
                ("change, unseen half", f"{-found['drop']:+.2f}"),
                ("evaluations", found["evaluations"]),
                ("model as it was, us", f"{found['before_us']:.0f}"),
                ("converted, nothing skipped, us", f"{found['exact_us']:.0f}"),
                ("as chosen, us", f"{found['after_us']:.0f}"),
                *_orders(found),
            ],
        ),
        *_served(data),
        "",
        *table(_HEAD, map(_cells, data["rows"]), left=(0, 1)),
    ]
    if found["note"]:
        lines += ["", f"Note: {found['note']}."]
    return page("Calibration of VGG13", conclusion(data), data["header"], lines)


def _served(data):
    """A table of the whole model beside torch.compile, where that was measured."""
    times = data.get("ms")
    if not times:
        return []
    rows = [
        (form, f"{1e3 * time:.1f}", f"{times['compiled'] / time:.2f}x")
        for form, time in times.items()
    ]
    note = (
        "The whole model in turns, on CUDA in graphs; compiled is torch.compile of the dense one."
    )
    return ["", note, "", *table(("form", "us", "over compiled"), rows)]


def _orders(found):
    """Lines on what was put in order; records of earlier versions do not tell."""
    named = (("order_batch", "batches in order of likeness"), ("reorder", "channels in order"))
    return [(what, "yes" if found[key] else "no") for key, what in named if key in found]


def _cells(row):
    setting = row["setting"]
    tau, block, error = "", "", row["reason"]
    if setting is not None:
        tau, error = f"{setting['tau']:.4g}", f"{row['error']:.2%}"
        block = " x ".join(map(str, setting["pixel_block"]))
    times = (f"{row[key]:.1f}" for key in ("dense_us", "chosen_us"))
    return row["name"], row["shape"], f"{row['valid_ratio']:.1%}", tau, block, *times, error


def _searched(found):
    drop = found["searched_drop"]
    return "not tried" if drop is None else f"{-drop:+.2f}"
