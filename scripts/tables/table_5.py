"""Table 5: VGG13 on MNIST, its convolutions replaced, by layer, layout and valid ratio.

Layouts are the paper's, blocks of 32 on an explicit im2col matrix, and pixel blocks of 64, image by
image (1, 8, 8) or by position (64, 1, 1); tau is found for each batch, and held for its time.
"""

from collections import Counter, OrderedDict
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.functional import pad

import spamm_torch
import tables
from common import options as cli
from common.measuring import cell, use_precision
from common.timing import interleaved, medians
from common.training import add_training_options, train_or_load
from models.data import draw_shifts
from models.training import accuracy, validation_pictures
from models.vgg13 import CONVOLUTIONS, fold_batch_norm
from tables import paper


class Layout(NamedTuple):
    """Blocks of an explicit im2col matrix, or pixel blocks of (images, rows, columns)."""

    label: str
    block: int
    pixel_block: tuple[int, int, int] | None = None

    def run(self, conv, x, **knob):
        """A convolution by SpAMM: ``knob`` is tau or valid_ratio."""
        setting = {"block": self.block} | knob
        if self.pixel_block is None:
            return im2col_conv(conv, x, partial(spamm_torch.mm, **setting))
        setting |= {"padding": 1, "pixel_block": self.pixel_block}
        return spamm_torch.conv2d(x, conv.weight, conv.bias, **setting)

    def held(self, conv, x, ratio):
        """The convolution at a valid ratio, and its SkipInfo."""
        return self.run(conv, x, valid_ratio=ratio, return_info=True)


# The paper's: image after image, K as (ci, kh, kw). This library's: K as (kh, kw, ci).
LAYOUTS = (
    Layout("paper", 32),
    Layout("image by image", 64, (1, 8, 8)),
    Layout("by position", 64, (64, 1, 1)),
)


def im2col_conv(conv, x, product=torch.mm):
    """A 3 x 3 convolution as one product of its weight with an explicit im2col matrix, and what
    the product gives beside its result.
    """
    found = product(*im2col_operands(conv, x))
    out, *more = found if isinstance(found, tuple) else (found,)
    out = out.add_(conv.bias[:, None]).unflatten(1, (x.shape[0], *x.shape[2:])).transpose(0, 1)
    return (out, *more) if more else out


def im2col_operands(conv, x):
    """Weights (Co, Ci * 9) and im2col matrix (Ci * 9, images * H * W), K as in torch's unfold."""
    assert conv.kernel_size == (3, 3)
    assert conv.padding == conv.stride == conv.dilation == (1, 1)
    x = pad(x.transpose(0, 1).contiguous(), (1, 1, 1, 1))
    windows = x.unfold(-2, 3, 1).unfold(-2, 3, 1)  # (Ci, images, H, W, kh, kw)
    return conv.weight.flatten(1), windows.permute(0, 4, 5, 1, 2, 3).flatten(3).flatten(0, 2)


DEFAULTS = tables.DEFAULTS
TITLE = "Table 5: VGG13 on MNIST"
PRECISIONS = {"cpu": ("float32",), "cuda": ("float32", "float16")}
_ALL = "conv12 to conv52"  # the group of the conclusion
_MOST_LOST = 0.5  # points: the accuracy that the conclusion is ready to lose
_SHIFT_SEED = 1


@dataclass(frozen=True)
class Group:
    """Convolutions that are replaced together, and the valid ratios they are studied at, from the
    layer ``start`` on, on cached activations. ``shifted`` moves every image at random; speed, the
    same, is then not measured.
    """

    title: str
    layers: tuple[str, ...]
    start: str
    ratios: tuple[float, ...]
    shifted: bool = False


def _papers(layer):
    return tuple(ratio for name, ratio in paper.CONVOLUTION if name == layer)


def _groups():
    groups = [
        Group("conv21", ("conv21",), "conv21", (*_papers("conv21"), 0.45, 0.30)),
        Group("conv31", ("conv31",), "conv31", (*_papers("conv31"), 0.30)),
        Group(_ALL, CONVOLUTIONS[1:], "conv11", (0.85, 0.70, 0.50, 0.30)),
    ]
    shifted = ((0.85, 0.6341), (0.7436, 0.4338, 0.30), (0.85, 0.50))
    groups += [
        Group(f"{of.title}, images shifted", of.layers, of.start, ratios, shifted=True)
        for of, ratios in zip(groups, shifted, strict=True)
    ]
    return {group.title: group for group in groups}


GROUPS = _groups()


# ---- The table ----------------------------------------------------------------------------------


def add_options(parser):
    add_training_options(parser)
    cli.add_repeats_option(parser, DEFAULTS)


def prepare(run):
    run.trained = train_or_load(run)


def cells(run):
    trained, config, digits = run.trained
    validation = digits.split(config.seed)[1].to(run.device)
    images = digits.description.partition(" (")[0]

    def group(title, precision, images):
        dtype = use_precision(precision)
        torch.backends.cudnn.benchmark = True
        model = fold_batch_norm(trained).to(dtype)
        return study_group(GROUPS[title], model, validation, config.batch, run.repeats)

    found = {}
    for precision in PRECISIONS[run.device.type]:
        at = {"precision": precision, "images": images}
        for title in GROUPS:
            found[f"{title}, {precision}"] = cell("study", group, title=title, **at)
    return found


def said(tables):
    """The fastest setting of all layers but the first that loses little, for each type."""
    parts = []
    rows = [row for row in tables["study"] if not row.get("absent")]
    for precision in dict.fromkeys(row["precision"] for row in rows):
        fit = [
            row
            for row in rows
            if (row["title"], row["precision"]) == (_ALL, precision)
            and row.get("over_conv")
            and row["accuracy_change"] >= -_MOST_LOST - 1e-9
        ]
        best = max(fit, key=lambda row: row["over_conv"], default=None)
        found = best and (
            f"{best['over_conv']:.2f}x as fast ({best['layout']}, {best['valid_ratio']:.0%} of the "
            f"block products kept, {best['accuracy_change']:+.2f} points)"
        )
        parts.append(f"in {precision} {found or 'no setting'}")
    return (
        f"At most {_MOST_LOST} points of accuracy lost, all layers but the first against the dense "
        f"convolutions: {'; '.join(parts)}."
    )


# ---- A group of convolutions --------------------------------------------------------------------


def study_group(group, model, validation, batch, repeats):
    """Studies one group: a plain VGG13 in eval mode, in the dtype to study, batch by batch. "study"
    has a row for each layout and valid ratio, "study, dense" one for the dense layers. Times of a
    group are sums over its layers.
    """
    dtype = model.conv11.weight.dtype
    shifts = None
    if group.shifted:
        shifts = draw_shifts(len(validation), torch.Generator().manual_seed(_SHIFT_SEED))
    inputs = cached_inputs(model, group.start, validation_pictures(validation, batch, shifts))
    dense = accuracy(_rest_of(model, group.start), inputs)
    pairs, ms = [(layout, ratio) for ratio in group.ratios for layout in LAYOUTS], Counter()
    if not group.shifted:
        first, _ = next(validation_pictures(validation[:batch], batch))
        for name, x in layer_inputs(model, group.layers, first.to(dtype)).items():
            ms.update(time_layer(getattr(model, name), x, pairs, repeats))
    rows = []
    for layout, ratio in pairs:
        percent, replaced = spamm_accuracy(model, group, layout, ratio, inputs)
        row = {
            "ratio": ratio,
            "layout": layout.label,
            "valid_ratio": valid_share(replaced.values()),
        }
        row |= {"accuracy": percent, "accuracy_change": percent - dense}
        if of_paper := paper.CONVOLUTION.get((group.title, ratio)):
            row["paper_change"], row["paper_speedup"] = of_paper
        if ms:
            own, product = ms[layout, ratio], ms.get((layout, ratio, "product"))
            row |= {"ms": own, "over_conv": ms["conv"] / own}
            row |= {"over_im2col_gemm": ms["im2col_gemm"] / own}
            row["over_gemm"] = product and ms["gemm"] / product
        rows.append(row)
    of_dense = {f"{name}_ms": ms.get(name) for name in ("conv", "im2col_gemm", "gemm")}
    return {"study": rows, "study, dense": [of_dense | {"dense_accuracy": dense}]}


class HeldRatio(nn.Module):
    """A convolution at a valid ratio, whose thresholds and ratios of each batch are kept."""

    def __init__(self, layout, conv, ratio):
        super().__init__()
        self._layout, self._conv, self._ratio = layout, conv, ratio
        self.taus = []
        self.valid = self.total = 0

    def forward(self, x):
        output, info = self._layout.held(self._conv, x, self._ratio)
        self.taus.append(info.tau)
        multiplications = self._conv.weight[0].numel() * output.numel()
        self.valid += info.valid_ratio.double() * multiplications
        self.total += multiplications
        return output


def valid_share(layers):
    """The valid share of all multiplications of all HeldRatios and batches."""
    return float(sum(of.valid for of in layers)) / sum(of.total for of in layers)


@torch.inference_mode()
def cached_inputs(model, start, batches):
    """The inputs of the layer ``start`` for all batches, with the labels: computed once."""
    before, _ = model.split(start)
    dtype = model.conv11.weight.dtype
    return [(before(pictures.to(dtype)), labels) for pictures, labels in batches]


def spamm_accuracy(model, group, layout, ratio, inputs):
    """Accuracy with the group's convolutions replaced, and what replaced them by name."""
    replaced = {name: HeldRatio(layout, getattr(model, name), ratio) for name in group.layers}
    return accuracy(_rest_of(model, group.start, replaced), inputs), replaced


def _rest_of(model, start, replaced=()):
    """The model from the layer ``start`` on, with some layers replaced."""
    layers = dict(model.named_children()) | dict(replaced)
    names = list(layers)
    rest = OrderedDict((name, layers[name]) for name in names[names.index(start) :])
    return nn.Sequential(rest).eval()


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


@torch.inference_mode()
def time_layer(conv, x, settings, repeats):
    """Milliseconds of one convolution on a batch: "conv" (oneDNN or cuDNN), "im2col_gemm", "gemm"
    (the product alone), and the layer for each (layout, valid ratio) of ``settings``, by a held tau
    that gives this ratio on x; for the paper's layout also the product alone. Norms are included,
    the search is not, as in the paper.
    """
    a, b = im2col_operands(conv, x)
    candidates = {
        "conv": partial(conv, x),
        "im2col_gemm": partial(im2col_conv, conv, x),
        "gemm": partial(torch.mm, a, b),
    }
    for layout, ratio in settings:
        tau = layout.held(conv, x, ratio)[1].tau.item()
        candidates[layout, ratio] = partial(layout.run, conv, x, tau=tau)
        if layout.pixel_block is None:
            product = partial(spamm_torch.mm, a, b, tau=tau, block=layout.block)
            candidates[layout, ratio, "product"] = product
    return medians(interleaved(candidates, x.device, repeats))
