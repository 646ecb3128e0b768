"""conv2d of a batch on several devices against one, by layer and batch: from where on it pays.

Layers: the ten convolutions of VGG13 on 32 x 32 pictures. Each result is compared with one
device's, bit for bit. A cell that cannot be measured is a row that says why.
"""

import itertools
from functools import partial

import torch

import spamm_torch
from cases.conv import GROUPS, Case
from cases.multi_gpu import said_of
from cases.multi_gpu.layouts import figures
from common.clock import by_clock
from common.measuring import cell
from common.options import (
    add_device_option,
    add_parts_option,
    add_timing_options,
    choose_devices,
    positive_integer,
    show,
)
from common.precisions import PRECISIONS, use_precision

TITLE = "conv2d of a batch on several devices against one"
NOTES = ""
MODE = torch.inference_mode
LAYERS = {layer.name: layer for layer in GROUPS["vgg13"]}
RATIOS = (0.5, 1.0)
DEFAULTS = {  # batches, precision, rounds
    "cpu": ((128, 256), "float32", 3),
    "cuda": ((128, 512, 2048, 8192), "float16", 5),
}
_BLOCK = (64, 64, 64)  # the last is the images of a pixel block, too


def add_options(parser):
    add_device_option(parser)
    on_cpu, on_cuda = DEFAULTS["cpu"], DEFAULTS["cuda"]
    add_parts_option(parser)
    parser.add_argument(
        "--layers",
        metavar="LAYER",
        nargs="+",
        choices=LAYERS,
        default=tuple(LAYERS),
        help=f"some of {', '.join(LAYERS)} (default: all)",
    )
    parser.add_argument(
        "--batches",
        metavar="IMAGES",
        type=positive_integer,
        nargs="+",
        help=f"images a batch (default: {show(on_cuda[0])}; on the CPU {show(on_cpu[0])})",
    )
    parser.add_argument(
        "--precision",
        choices=PRECISIONS,
        help=f"number format (default: {on_cuda[1]}; on the CPU {on_cpu[1]})",
    )
    add_timing_options(parser, RATIOS, {device: of[2] for device, of in DEFAULTS.items()})


def choose(options):
    options.devices = choose_devices(options.device, options.parts)
    options.device = options.devices[0]
    batches, precision, repeats = DEFAULTS[options.device.type]
    options.batches = options.batches or batches
    options.precision = options.precision or precision
    options.repeats = options.repeats or repeats


def header(options):
    return {"parts": options.parts, "type": options.precision}


def settings(options):
    names = ("parts", "precision", "layers", "batches", "ratios", "repeats")
    return {name: getattr(options, name) for name in names}


def measure(measuring, options):
    dtype = use_precision(options.precision)

    rest = dtype, options.devices, options.repeats
    kind = "several devices, layers"
    cells = itertools.product(options.layers, options.batches, options.ratios)
    calls = {
        f"{layer} {batch} {ratio}": cell(
            kind, partial(measure_layer, *rest), layer=layer, batch=batch, ratio=ratio
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
    wrong = sum(not row["equal"] for row in rows)
    differ = f"; {wrong} RESULTS DIFFER from one device's" if wrong else ""
    return (
        f"{options.parts} devices against one, batch {batch}: faster in "
        f"{sum(speedup > 1 for speedup in speedups)} of {len(speedups)} cells, at most "
        f"{max(speedups):.2f}x{differ}."
    )


def measure_layer(dtype, devices, repeats, layer, batch, ratio):
    """The row of a layer, by name."""
    layer = LAYERS[layer]
    case = Case(layer, batch, dtype, "even", _BLOCK, devices[0])
    tau, valid = case.threshold(ratio)
    setting = case.shape | case.setting | {"tau": float(tau)}
    weights = [case.weight.to(device) for device in devices]
    cuts = image_cuts(batch, len(devices))
    shards = [
        case.input[first:last].to(device)
        for (first, last), device in zip(itertools.pairwise(cuts), devices, strict=True)
    ]
    calls = {
        "one": partial(spamm_torch.conv2d, case.input, case.weight, **setting),
        "all": partial(spamm_torch.conv2d, shards, weights, **setting),
    }
    expected, results = calls["one"](), calls["all"]()
    equal = torch.equal(torch.cat([result.to(devices[0]) for result in results]), expected)

    def synchronize():
        for device in devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    times = by_clock(calls, repeats, synchronize)
    return [figures(valid, times, equal)]


def image_cuts(batch, parts):
    """parts + 1 numbers of images, of parts equal to a pixel block."""
    images = _BLOCK[2]
    blocks = -(-batch // images)
    return [min(batch, images * (blocks * part // parts)) for part in range(parts + 1)]
