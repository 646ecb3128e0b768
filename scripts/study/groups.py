"""One group of the study: its convolutions replaced, in each layout, at each valid ratio."""

from dataclasses import asdict, replace

import torch

from models.data import draw_shifts
from models.training import validation_pictures
from study.accuracy import cached_inputs, dense_accuracy, spamm_accuracy
from study.layouts import LAYOUTS
from study.plan import PAPER
from study.results import GroupResult, Setting
from study.timing import candidate_name, layer_inputs, time_layer

_SHIFT_SEED = 1


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
        precision: name of that dtype, for the report.
        validation: Digits on the model's device.
        batch: images a batch.
        repeats: rounds of timing.
        progress: called with what was done, once for each setting and each layer timed.

    Returns:
        GroupResult.
    """
    dtype = model.conv11.weight.dtype
    shifts = None
    if group.shifted:
        shifts = draw_shifts(len(validation), torch.Generator().manual_seed(_SHIFT_SEED))
    pictures = validation_pictures(validation, batch, shifts)
    inputs = cached_inputs(model, group.start, pictures, dtype)
    dense = dense_accuracy(model, group, inputs)
    settings = []
    for layout, ratio in settings_of(group):
        found = spamm_accuracy(model, group, layout, ratio, inputs)
        paper = PAPER.get((group.title, ratio))
        settings.append(
            Setting(
                layout=layout.label,
                asked_ratio=ratio,
                valid_ratio=found.valid_ratio,
                taus=found.taus,
                accuracy=found.percent,
                accuracy_change=found.percent - dense,
                paper=asdict(paper) if paper else None,
            )
        )
        progress(f"{group.title}, {layout.label}, {100 * ratio:.2f}%")

    first, _ = next(validation_pictures(validation[:batch], batch, shifts))
    activations = layer_inputs(model, group.layers, first.to(dtype))
    result = GroupResult(
        title=group.title,
        precision=precision,
        gemms={name: _gemm(getattr(model, name), x) for name, x in activations.items()},
        dense_accuracy=dense,
        settings=settings,
    )
    return result if group.shifted else _timed(result, group, model, activations, repeats, progress)


def _gemm(conv, x):
    """(M, K, N) of the convolution as a product."""
    return conv.out_channels, conv.weight[0].numel(), x[:, 0].numel()


def _timed(result, group, model, activations, repeats, progress):
    """The result with times and speedups, summed over the layers."""
    pairs = settings_of(group)
    layers = {}
    for name, x in activations.items():
        layers[name] = time_layer(getattr(model, name), x, pairs, repeats)
        progress(f"timing {name}")
    ms = {candidate: sum(t[candidate] for t in layers.values()) for candidate in layers[name]}
    settings = []
    for setting, pair in zip(result.settings, pairs, strict=True):
        layer, product = ms[candidate_name(*pair)], ms.get(candidate_name(*pair, part="product"))
        settings.append(
            replace(
                setting,
                ms=layer,
                over_conv=ms["conv"] / layer,
                over_im2col_gemm=ms["im2col+gemm"] / layer,
                over_gemm=product and ms["gemm"] / product,
            )
        )
    return replace(
        result,
        settings=settings,
        conv_ms=ms["conv"],
        im2col_gemm_ms=ms["im2col+gemm"],
        gemm_ms=ms["gemm"],
        layers_ms=layers,
    )
