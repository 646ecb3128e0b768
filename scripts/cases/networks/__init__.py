"""Whole networks converted with nothing skipped, against the dense and the compiled network.

Networks: torchvision's, VGG13 on 32 x 32 pictures and a U-Net. Candidates: the network as it is,
under torch.compile (its default, max-autotune, and that with freezing), and converted by
spamm_torch.convert_: by itself, compiled, and with a held tau. Each is timed as one CUDA graph and
as Python launches it. With --layers: ResNet-50's convolutions one by one, with bias, residual and
ReLU in the same kernel.
"""

import functools
import os

import torch

from cases.networks.candidates import CANDIDATES
from cases.networks.layer_case import LAYER_CANDIDATES, measure_layer
from cases.networks.layers import LAYERS, MODEL_BATCH
from cases.networks.measure import measure_network
from cases.networks.zoo import NETWORKS
from common.options import add_device_option, choose_device, positive_integer, show
from common.precisions import use_precision
from models.errors import UserError
from models.files import require_writable

TITLE = "networks converted, nothing skipped, against torch.compile"
NOTES = (
    "Times are medians for one batch, all candidates in turns in one process; compilation, "
    "conversion and first calls are not in them. Weights are drawn from a seed, pictures are "
    "noise. "
    + "; ".join(f"{name}: {what}" for name, what in (CANDIDATES | LAYER_CANDIDATES).items())
    + ". Errors are of the output, relative, against float32's (networks) or float64's (layers)."
)
MODE = torch.no_grad  # not inference mode, whose tensors count no versions
MODES = ("CUDA graph", "eager")
DEFAULTS = {  # networks, batches (None: each network's own), candidates, modes, precision, rounds
    "cpu": (
        ("resnet18", "vgg11"),
        (1, 8, 16),
        tuple(name for name in CANDIDATES if name != "max-autotune"),
        ("eager",),
        "float32",
        7,
    ),
    "cuda": (tuple(NETWORKS), None, tuple(CANDIDATES), MODES, "float16", 9),
}
LAYER_BATCHES = {"cpu": (16,), "cuda": (MODEL_BATCH,)}
_SAID_BATCH = 64  # in the conclusion, where it was measured


def add_options(parser):
    add_device_option(parser)
    on_cpu, on_cuda = DEFAULTS["cpu"], DEFAULTS["cuda"]
    parser.add_argument(
        "--networks",
        metavar="NETWORK",
        nargs="+",
        choices=NETWORKS,
        help=f"some of {', '.join(NETWORKS)} (default: all; on the CPU {show(on_cpu[0])})",
    )
    parser.add_argument(
        "--batches",
        metavar="IMAGES",
        type=positive_integer,
        nargs="+",
        help="images a batch (default: each network's own, 1 to 128; on the CPU "
        f"{show(on_cpu[1])}; with --layers {show(LAYER_BATCHES['cuda'])}, on the CPU "
        f"{show(LAYER_BATCHES['cpu'])})",
    )
    parser.add_argument(
        "--candidates",
        metavar="CANDIDATE",
        nargs="+",
        choices=CANDIDATES,
        help=f"some of {', '.join(CANDIDATES)} (default: all; on the CPU without max-autotune)",
    )
    parser.add_argument(
        "--modes",
        metavar="MODE",
        nargs="+",
        choices=MODES,
        help=f"some of {', '.join(map(repr, MODES))} (default: both; on the CPU {on_cpu[3][0]})",
    )
    parser.add_argument(
        "--layers",
        metavar="LAYER",
        nargs="*",
        choices=LAYERS,
        help="instead of networks ResNet-50's fused convolutions, all or some (default: networks). "
        f"They are: {', '.join(LAYERS)}",
    )
    parser.add_argument(
        "--repeats",
        metavar="ROUNDS",
        type=positive_integer,
        help=f"rounds of each timing (default: {on_cuda[5]}; on the CPU {on_cpu[5]})",
    )
    parser.add_argument(
        "--cold", action="store_true", help="with --layers: empty the L2 cache before each call"
    )
    parser.add_argument(
        "--cache",
        metavar="FOLDER",
        help="keeps what torch.compile compiles and tunes for the next run (default: torch's own "
        "temporary folder)",
    )


def choose(options):
    _check(options)
    options.device = choose_device(options.device)
    networks, batches, candidates, modes, precision, repeats = DEFAULTS[options.device.type]
    options.networks = options.networks or networks
    options.batches = options.batches or batches
    options.candidates = [name for name in CANDIDATES if name in (options.candidates or candidates)]
    options.modes = [mode for mode in MODES if mode in (options.modes or modes)]
    options.repeats = options.repeats or repeats
    options.precision = precision
    if options.device.type == "cpu" and options.modes != ["eager"]:
        raise UserError("expected --modes eager on a CPU; got CUDA graph")
    if options.cache is not None:
        require_writable(options.cache)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.abspath(options.cache)


def _check(options):
    """Refuses options of the one kind of run with the other."""
    if options.layers is None:
        if options.cold:
            raise UserError("expected --layers with --cold; got none")
        return
    for name in ("networks", "candidates", "modes"):
        if getattr(options, name) is not None:
            raise UserError(f"expected no --layers with --{name}; got both")
    options.layers = options.layers or list(LAYERS)


def header(options):
    found = {"inference": f"{options.precision}, channels last"}
    if options.layers is not None:
        found["L2 cache"] = "emptied before each call" if options.cold else "warm"
    return found


def settings(options):
    candidates = options.candidates if options.layers is None else list(LAYER_CANDIDATES)
    kept = {name: getattr(options, name) for name in ("modes", "repeats", "cold")}
    return {"cells": list(cells_of(options)), "candidates": candidates, **kept}


def cells_of(options):
    """{name: call that measures it}, in the order of the tables."""
    if options.layers is not None:
        return {
            f"{name}, batch {batch}": functools.partial(
                measure_layer, LAYERS[name], batch, options, options.precision
            )
            for batch in options.batches or LAYER_BATCHES[options.device.type]
            for name in options.layers
        }
    return {
        f"{name}, batch {batch}": functools.partial(measure_network, name, batch, options)
        for name in options.networks
        for batch in options.batches or NETWORKS[name].batches
    }


def measure(measuring, options):
    use_precision(options.precision)
    return measuring.tables(cells_of(options), said_of)


def said_of(found):
    """A line for the terminal: the first mode's times."""
    rows = [row for rows in found.values() for row in rows]
    return ", ".join(
        f"{row['candidate']} " + (f"{row['ms']:.4g} ms" if row.get("ms") else row["absent"])
        for row in rows
        if row.get("mode") in (None, rows[0].get("mode"))
    )


def said(tables, options):
    """What converting brings, in one line."""
    if options.layers is not None:
        rows = [
            row
            for row in tables["fused layers"]
            if row["batch"] == tables["fused layers"][0]["batch"]
        ]
        sums = {
            name: sum(1e3 * row["ms"] * row["count"] for row in rows if row["candidate"] == name)
            for name in LAYER_CANDIDATES
        }
        times = ", ".join(f"{name} {us:.4g} us" for name, us in sums.items())
        return f"ResNet-50's convolutions fused, batch {rows[0]['batch']}: {times}."
    rows = [row for row in tables["networks"] if row.get("mode") == options.modes[0]]
    parts = []
    for name in options.networks:
        ours = [
            row
            for row in rows
            if row["network"] == name
            and row["candidate"] in ("ours", "ours-compiled")
            and row.get("speedup")
        ]
        batches = {row["batch"] for row in ours}
        if batches:
            batch = _SAID_BATCH if _SAID_BATCH in batches else max(batches)
            best = max(row["speedup"] for row in ours if row["batch"] == batch)
            parts.append(f"{name} {best:.2f}x (batch {batch})")
    absent = sum("absent" in row for row in tables["networks"])
    missing = f"; {absent} candidates absent" if absent else ""
    if not parts:
        return f"No converted network was measured beside its peer{missing}."
    over = "torch.compile, in one CUDA graph" if options.modes[0] == MODES[0] else "dense, eager"
    return (
        "Networks converted with nothing skipped, by themselves or compiled, whichever is faster, "
        f"over {over}: {', '.join(parts)}{missing}."
    )
