"""Time of a layer, dense and by SpAMM, on its real activations."""

import torch

import spamm_torch
from common.timing import interleaved
from study.layouts import Im2colConv2d, ImageMajor, im2col_operands


@torch.inference_mode()
def time_layer(conv, x, settings, repeats):
    """Times one convolution.

    Args:
        conv: the dense layer.
        x: its input, one batch.
        settings: (layout, valid ratio) pairs; each is timed with a held tau that gives this ratio
            on x. Norms are included, the search is not, as in the paper.
        repeats: number of rounds.

    Returns:
        Milliseconds: under "conv" (oneDNN or cuDNN), "im2col+gemm", "gemm" (the product alone, its
        matrices at hand), and for each setting under its candidate_name; for the paper's layout
        also under candidate_name(..., part="product") for the product alone.
    """
    a, b = im2col_operands(conv, x)
    im2col_gemm = Im2colConv2d(conv, torch.mm)
    candidates = {
        "conv": lambda: conv(x),
        "im2col+gemm": lambda: im2col_gemm(x),
        "gemm": lambda: torch.mm(a, b),
    }
    for layout, ratio in settings:
        tau = spamm_torch.find_tau(*layout.norm_maps(conv, x), ratio).item()
        module = layout.module(conv, tau)
        candidates[candidate_name(layout, ratio)] = lambda module=module: module(x)
        if isinstance(layout, ImageMajor):
            candidates[candidate_name(layout, ratio, part="product")] = (
                lambda product=module.product: product(a, b)
            )
    times = interleaved(candidates, x.device, repeats)
    return {name: timing.median for name, timing in times.items()}


def candidate_name(layout, ratio, part="layer"):
    return f"{layout.label}, {100 * ratio:.2f}%, {part}"


@torch.inference_mode()
def layer_inputs(model, names, pictures):
    """The inputs of the named layers in the dense model: {name: activation}."""
    inputs = {}
    x = pictures
    for name, layer in model.named_children():
        if name in names:
            inputs[name] = x
        x = layer(x)
    return inputs
