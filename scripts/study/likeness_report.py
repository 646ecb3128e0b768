"""What study_likeness.py found, as a page."""

from common.report_files import page, table

ONE_IMAGE = "blocks of one image's pixels"
_FIRST, _OURS = "as they come", "centres, to and fro (likeness_order)"
_NOTES = """\
Nine convolutions multiply {ratio:.0%} of their block products. Windows of {window} images are put
in order, and each has one tau a layer. Of each pair of numbers the first is the percentage of
answers that are not the dense network's, the second the change of accuracy in percentage points.
The network learnt digits in the centre and shifted ones alone, so for other arrangements the first
number says more."""


def report(data, name):
    """The page, no picture, and the conclusion."""
    return _markdown(data), None, conclusion(data)


def conclusion(data):
    """Answers changed as images come, in likeness_order, and in blocks of one image."""
    names = {_FIRST: "as they come", _OURS: "in likeness_order", ONE_IMAGE: f"in {ONE_IMAGE}"}
    parts = []
    for arrangement, case in data["cases"].items():
        known = {order: text for order, text in names.items() if order in case}
        said = (f"{case[order]['changed']:.1f}% {text}" for order, text in known.items())
        parts.append(f"{arrangement}, {', '.join(said)}")
    return (
        f"Answers changed with {data['ratio']:.0%} of nine convolutions' block products kept, "
        f"windows of {data['window']} images: {'; '.join(parts)}."
    )


def _markdown(data):
    cases = data["cases"]
    dense = (f"{next(iter(case.values()))['dense']:.2f}%" for case in cases.values())
    rows = [*_rows(cases, _cell), ("accuracy, dense", *dense)]
    body = _NOTES.format(ratio=data["ratio"], window=data["window"]).splitlines()
    body += [
        "",
        *table(("order", *cases), rows),
        "",
        "Relative error of the network's outputs:",
        "",
    ]
    body += table(("order", *cases), _rows(cases, lambda found: f"{found['error']:.3f}"))
    return page("Answers by order of the images", conclusion(data), data["header"], body)


def _rows(cases, cell):
    """A row for each order, with a cell for each arrangement."""
    orders = next(iter(cases.values()))
    return [(order, *(cell(case[order]) for case in cases.values())) for order in orders]


def _cell(found):
    return f"{found['changed']:.2f} / {found['accuracy'] - found['dense']:+.2f}"
