"""conv2d of a batch on several devices against one, by layer and batch: from where on it pays.

Layers: the ten convolutions of VGG13 on 32 x 32 pictures. Each result is compared with one
device's, bit for bit. A cell that cannot be measured is a row that says why.
"""

import itertools
from functools import partial

import torch

import spamm_torch
from cases.conv import GROUPS, Case
from cases.multi_gpu import different, said_of
from cases.shards import equal_cuts, figures, split, synchronize
from common import options as cli
from common.machine import PRECISIONS, use_precision
from common.measuring import cell
from common.timing import by_clock

TITLE = "conv2d of a batch on several devices against one"
NOTES = ""
MODE = torch.inference_mode
LAYERS = {layer.name: layer for layer in GROUPS["vgg13"]}
RATIOS = (0.5, 1.0)
DEFAULTS = {
    "cpu": {"batches": (128, 256), "precision": "float32", "repeats": 3},
    "cuda": {"batches": (128, 512, 2048, 8192), "precision": "float16", "repeats": 5},
}
_BLOCK = (64, 64, 64)  # the last is the images of a pixel block, too


def add_options(parser):
    cli.add_device_option(parser)
    cli.add_parts_option(parser)
    cli.add_choices(
        parser, "--layers", "some of the layers", tuple(LAYERS), LAYERS, metavar="LAYER"
    )
    cli.add_numbers(parser, "--batches", "images a batch", DEFAULTS, "IMAGES")
    cli.add_choices(parser, "--precision", "number format", DEFAULTS, PRECISIONS, nargs=None)
    cli.add_ratios_option(parser, RATIOS)
    cli.add_repeats_option(parser, DEFAULTS)


def header(options):
    return {"type": options.precision}


def measure(measuring, options):
    dtype = use_precision(options.precision)
    one = partial(measure_layer, dtype, options.devices, options.repeats)
    cells = itertools.product(options.layers, options.batches, options.ratios)
    calls = {
        f"{layer} {batch} {ratio}": cell(
            "several devices, layers", one, layer=layer, batch=batch, ratio=ratio
        )
        for layer, batch, ratio in cells
    }
    return measuring.tables(calls, said_of)


def said(tables, options):
    """How many layers gain at the largest batch, and the largest gain."""
    rows = [row for row in tables["several devices, layers"] if row.get("speedup")]
    if not rows:
        return "No layer could be measured on several devices."
    batch = max(row["batch"] for row in rows)
    speedups = [row["speedup"] for row in rows if row["batch"] == batch]
    return (
        f"{options.parts} devices against one, batch {batch}: faster in "
        f"{sum(speedup > 1 for speedup in speedups)} of {len(speedups)} cells, at most "
        f"{max(speedups):.2f}x{different(rows)}."
    )


def measure_layer(dtype, devices, repeats, layer, batch, ratio):
    """The row of a layer, by name."""
    case = Case(LAYERS[layer], batch, dtype, "even", _BLOCK, devices[0])
    tau, valid = case.threshold(ratio)
    setting = case.shape | case.setting | {"tau": float(tau)}
    weights = [case.weight.to(device) for device in devices]
    shards = split(case.input, equal_cuts(batch, len(devices), _BLOCK[2]), devices)
    calls = {
        "one": partial(spamm_torch.conv2d, case.input, case.weight, **setting),
        "all": partial(spamm_torch.conv2d, shards, weights, **setting),
    }
    expected, results = calls["one"](), calls["all"]()
    equal = torch.equal(torch.cat([result.to(devices[0]) for result in results]), expected)
    times = by_clock(calls, repeats, partial(synchronize, devices))
    return [figures(valid, times, equal)]
