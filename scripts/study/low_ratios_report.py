"""What study_low_ratios.py found, as a page."""

from common.report_files import page, table

AS_IT_IS = "as it is"
ORDERED = "channels in order"
TUNED = "fine-tuned"
TUNED_OWN = "fine-tuned, batch norm apart"
_NOTES = """\
Change of accuracy in percentage points against the dense network, on the validation images, where
all convolutions but the first keep the same share of their block products, searched for in each
batch, in pixel blocks (64, 1, 1). In brackets the share of multiplications kept, measured on a
batch. "Channels in order" is convert_(reorder=True). "Fine-tuned" is one epoch with skipping on at
that share, on centred images."""


def report(data, name):
    """The page, no picture, and the conclusion."""
    return _markdown(data), None, conclusion(data)


def conclusion(data):
    """The change at the lowest share that keeps half a point, of each form."""
    parts = []
    for title, case in data["cases"].items():
        held = [row for row in case if row["accuracy"] - data["dense"] >= -0.5]
        if held:
            best = min(held, key=lambda row: row["asked_ratio"])
            change = best["accuracy"] - data["dense"]
            parts.append(f"{title} {best['asked_ratio']:.0%} ({change:+.2f})")
        else:
            parts.append(f"{title} none of those studied")
    return (
        f"Lowest valid ratio within half a point of {data['dense']:.2f}%, nine convolutions: "
        f"{'; '.join(parts)}."
    )


def _markdown(data):
    cases, dense = data["cases"], data["dense"]
    ratios = sorted({row["asked_ratio"] for case in cases.values() for row in case}, reverse=True)
    rows = []
    for title, case in cases.items():
        by_ratio = {row["asked_ratio"]: row for row in case}
        rows.append((title, *(_cell(by_ratio.get(ratio), dense) for ratio in ratios)))
    if TUNED_OWN in cases:
        notes = (
            f'{_NOTES}\n"{TUNED_OWN}" skips by the weights without the batch norm, as in training.'
        )
    else:
        notes = _NOTES
    body = [*notes.splitlines(), "", *table(("", *(f"{r:.0%}" for r in ratios)), rows)]
    return page("Accuracy at low valid ratios", conclusion(data), data["header"], body)


def _cell(row, dense):
    return "" if row is None else f"{row['accuracy'] - dense:+.2f} ({row['valid']:.1%})"
