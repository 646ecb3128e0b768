"""One group of the study: its convolutions replaced, in each layout, at each valid ratio."""

import torch

from models.data import draw_shifts
from models.training import validation_pictures
from study.accuracy import cached_inputs, dense_accuracy, spamm_accuracy
from study.layouts import LAYOUTS
from study.plan import PAPER
from study.timing import candidate_name, layer_inputs, time_layer

_SHIFT_SEED = 1
_MOST_LOST = 0.5  # points: the accuracy that the conclusion is ready to lose
_ALL = "conv12 to conv52"  # the group of the conclusion
NOTES = """\
Convolutions of a trained VGG13 replaced by SpAMM. Valid is the share of block products nearest to
the one asked for; tau is found for each batch, and held for its time. Change is the accuracy
against the dense network, in percentage points. Layouts: paper is blocks of 32 on an explicit
im2col matrix, image after image, K as (ci, kh, kw); image by image is pixel blocks (1, 8, 8), by
position (64, 1, 1), both with blocks of 64 and K as (kh, kw, ci). Times are medians for one batch
of real activations, all candidates in turns: the layer with norms and bias, without the search for
tau. The paper's figures are from a Tesla V100 with weights of its own; its speed is the product
over the GEMM alone."""


def settings_of(group):
    """The (layout, valid ratio) pairs of a group, layouts side by side."""
    return [(layout, ratio) for ratio in group.ratios for layout in LAYOUTS]


def steps_of(group):
    """How often :func:`study_group` calls ``progress`` for a group."""
    return len(settings_of(group)) + (0 if group.shifted else len(group.layers))


def study_group(group, model, precision, validation, batch, repeats, progress):
    """Studies one group.

    Args:
        group: a Group of the plan.
        model: a plain VGG13 in eval mode, in the dtype to study.
        precision: name of that dtype, for the rows.
        validation: Digits on the model's device.
        batch: images a batch.
        repeats: rounds of timing.
        progress: called with what was done, once for each setting and each layer timed.

    Returns:
        Tables: "study" has a row for each layout and valid ratio, "study, dense" one for the dense
        layers, "study, layers" one for each time of a layer. Times of a group are sums over its
        layers; they and speedups are None where speed was not measured.
    """
    dtype = model.conv11.weight.dtype
    shifts = None
    if group.shifted:
        shifts = draw_shifts(len(validation), torch.Generator().manual_seed(_SHIFT_SEED))
    pictures = validation_pictures(validation, batch, shifts)
    inputs = cached_inputs(model, group.start, pictures, dtype)
    dense = dense_accuracy(model, group, inputs)
    place = {"title": group.title, "precision": precision}
    rows = []
    for layout, ratio in settings_of(group):
        found = spamm_accuracy(model, group, layout, ratio, inputs)
        paper = PAPER.get((group.title, ratio))
        rows.append(
            place
            | {
                "ratio": ratio,
                "layout": layout.label,
                "valid_ratio": found.valid_ratio,
                "taus": found.taus,
                "accuracy": found.percent,
                "accuracy_change": found.percent - dense,
                "paper_change": paper and paper.accuracy_change,
                "paper_tau": paper and paper.tau,
                "paper_speedup": paper and paper.speedup,
            }
        )
        progress(f"{group.title}, {layout.label}, {100 * ratio:.2f}%")

    first, _ = next(validation_pictures(validation[:batch], batch, shifts))
    activations = layer_inputs(model, group.layers, first.to(dtype))
    gemms = {name: _gemm(getattr(model, name), x) for name, x in activations.items()}
    of_dense = place | {"gemms": gemms, "dense_accuracy": dense}
    layers = []
    if not group.shifted:
        ms, layers = _timed(group, model, activations, repeats, progress)
        of_dense |= {
            f"{name}_ms": ms[candidate]
            for name, candidate in (
                ("conv", "conv"),
                ("im2col_gemm", "im2col+gemm"),
                ("gemm", "gemm"),
            )
        }
        rows = [row | _speeds(ms, pair) for row, pair in zip(rows, settings_of(group), strict=True)]
    return {
        "study": rows,
        "study, dense": [of_dense],
        "study, layers": [place | row for row in layers],
    }


def _gemm(conv, x):
    """(M, K, N) of the convolution as a product."""
    return conv.out_channels, conv.weight[0].numel(), x[:, 0].numel()


def _timed(group, model, activations, repeats, progress):
    """{candidate: milliseconds}, summed over the layers, and a row for each layer and candidate."""
    ms, rows = {}, []
    for name, x in activations.items():
        times = time_layer(getattr(model, name), x, settings_of(group), repeats)
        for candidate, time in times.items():
            ms[candidate] = ms.get(candidate, 0.0) + time
            rows.append({"layer": name, "candidate": candidate, "ms": time})
        progress(f"timing {name}")
    return ms, rows


def _speeds(ms, pair):
    """Time and speedups of a (layout, valid ratio)."""
    layer, product = ms[candidate_name(*pair)], ms.get(candidate_name(*pair, part="product"))
    return {
        "ms": layer,
        "over_conv": ms["conv"] / layer,
        "over_im2col_gemm": ms["im2col+gemm"] / layer,
        "over_gemm": product and ms["gemm"] / product,
    }


def said_of_study(rows):
    """The fastest setting of all layers but the first that loses little, for each type."""
    parts = []
    for precision in dict.fromkeys(row["precision"] for row in rows):
        fit = [
            row
            for row in rows
            if (row["title"], row["precision"]) == (_ALL, precision)
            and row.get("over_conv")
            and row["accuracy_change"] >= -_MOST_LOST - 1e-9
        ]
        best = max(fit, key=lambda row: row["over_conv"], default=None)
        said = best and (
            f"{best['over_conv']:.2f}x as fast ({best['layout']}, {best['valid_ratio']:.0%} of the "
            f"block products kept, {best['accuracy_change']:+.2f} points)"
        )
        parts.append(f"in {precision} {said or 'no setting'}")
    return (
        f"At most {_MOST_LOST} points of accuracy lost, all layers but the first against the dense "
        f"convolutions: {'; '.join(parts)}."
    )
