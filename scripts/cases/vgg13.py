"""VGG13 calibrated and served with SpAMM convolutions, against the dense network.

Trains VGG13 on MNIST, or uses the checkpoint of another run. spamm_torch.calibrate finds the
settings that save the most time within an accuracy drop; they go to calibrated_DEVICE.json. Then
the network so converted is timed beside the dense one.

Thresholds are found and chosen on one half of the validation images; the change of accuracy is
that on the other, the dense accuracy that on all. Valid: the share of block products multiplied,
weighted by multiplications. Times are medians for one batch, networks in turns. Dense: batch norm
folded, on CUDA one call of cuDNN a layer. Nothing skipped: what the backend's fusing alone brings,
without a compiler (inner eager); SpAMM: converted, and fused likewise. A layer's: in the model.
"""

import copy
import functools
from collections import OrderedDict
from dataclasses import asdict

import torch
from torch import nn

import spamm_torch
from common import options as cli
from common.measuring import PRECISIONS, use_precision
from common.timing import interleaved
from common.training import add_training_options, train_or_load
from models.files import UserError, first_line
from models.training import accuracy, validation_pictures
from models.vgg13 import CONVOLUTIONS, fold_batch_norm

TITLE = "VGG13 as served against the dense network"
DEFAULTS = {"cpu": {"dtype": "float32"}, "cuda": {"dtype": "float16"}}
_points = cli.number(float, lambda value: 0 <= value < 100, "points from 0 to below 100")


def add_options(parser):
    add_training_options(parser)
    what = "images in a batch, in the calibration and in times"
    cli.add_numbers(parser, "--images", what, 128, "COUNT", nargs=None)
    dtypes = [name for name in PRECISIONS if name not in ("tf32", "float64")]
    cli.add_choices(parser, "--dtype", "number format of the network", DEFAULTS, dtypes, nargs=None)
    what = "percentage points of accuracy that may be lost"
    cli.add(parser, "--max-drop", what, 0.5, metavar="POINTS", type=_points)
    cli.add_repeats_option(parser, 15)


def prepare(options):
    """Trains, or loads what was trained."""
    options.trained, options.config, options.digits = train_or_load(options)


def header(options):
    return {
        "data": options.digits.description,
        "model": f"{options.config.model}, {options.config.epochs} epochs",
        "inference": f"{options.dtype}, batch {options.images}, channels last",
    }


def cells(options):
    return {"VGG13": functools.partial(measure, options)}


def measure(options):
    """The tables of the network as calibrated, and as served."""
    dtype = use_precision(options.dtype)
    model = copy.deepcopy(options.trained).to(dtype)
    _, validation = options.digits.split(options.config.seed)
    pictures = validation_pictures(validation.to(options.device), options.images)
    batches = [(batch.to(dtype), labels) for batch, labels in pictures]
    path = options.out / f"calibrated_{options.device.type}.json"
    try:
        report = spamm_torch.calibrate(model, batches, accuracy, options.max_drop)
    except ValueError as error:
        raise UserError(first_line(error)) from error
    report.save(path)
    print(f"{report}\nsettings: {path}")

    found, place = report.outcome, {"model": options.config.model}
    dense_accuracy = accuracy(model, batches)
    quality = {"dense_accuracy": dense_accuracy, "accuracy": dense_accuracy - found.drop}
    quality |= {name: getattr(found, name) for name in ("valid_ratio", "max_drop")}
    case = f"{options.config.model}, {options.dtype}, batch {options.images}"
    layers = [{"case": case} | (row.pop("setting") or {}) | row for row in map(asdict, report)]
    networks, served = networks_of(model, dtype, path, options), []
    calls = {name: functools.partial(net, batches[0][0]) for name, net in networks.items()}
    on_gpu = options.device.type == "cuda"
    for mode in ("eager", "CUDA graph") if on_gpu else ("eager",):
        times = interleaved(calls, options.device, options.repeats, eager=mode == "eager")
        served += [
            place | {"mode": mode, "network": name} | of.over(times["dense"])
            for name, of in times.items()
        ]
    return {
        "served": served,
        "served, quality": [place | quality],
        "calibrated layers": layers,
    }


class CudnnConvReLU(nn.Module):
    """Convolution, bias and ReLU in one call of cuDNN."""

    def __init__(self, conv):
        super().__init__()
        self.weight, self.bias = conv.weight, conv.bias
        self.geometry = conv.stride, conv.padding, conv.dilation, conv.groups

    def forward(self, input):
        return torch.cudnn_convolution_relu(input, self.weight, self.bias, *self.geometry)


def dense_network(model, cudnn):
    """The network as a sequence, batch norm folded; with ``cudnn`` fused by cuDNN."""
    layers = OrderedDict()
    for name, layer in fold_batch_norm(model).named_children():
        if not cudnn or name.replace("relu", "conv") not in CONVOLUTIONS:
            layers[name] = layer
        elif name in CONVOLUTIONS:
            layers[name] = CudnnConvReLU(layer)
    return nn.Sequential(layers).eval()


def networks_of(model, dtype, settings, options):
    """{name: network} to be timed."""
    skipping = copy.deepcopy(model)
    spamm_torch.convert_(skipping, settings)
    dense = dense_network(options.trained, options.device.type == "cuda")
    backend = {"backend": "spamm_torch", "options": {"inner": "eager"}}
    return {
        "dense": dense.to(dtype),
        "torch.compile": compiled(model),
        "nothing skipped": compiled(model, **backend),
        "SpAMM": compiled(skipping, **backend),
    }


def compiled(model, **how):
    return torch.compile(copy.deepcopy(model), dynamic=False, **how)
