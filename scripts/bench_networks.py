"""Whole networks converted with nothing skipped, against the dense and the compiled network.

Networks: torchvision's, VGG13 on 32 x 32 pictures and a U-Net. Candidates: the network as it is,
under torch.compile (its default, max-autotune, and that with freezing), and converted by
spamm_torch.convert_: by itself, compiled, and with a held tau. Each is timed as one CUDA graph and
as Python launches it. With --layers: ResNet-50's convolutions one by one, with bias, residual and
ReLU in the same kernel. Writes NAME.md, NAME.json and NAME.png. If it is interrupted, the same
command goes on with the networks and batches that are missing.

    python scripts/bench_networks.py --out docs/results --name networks_h200
"""

import functools
import os
import sys

import torch

import common  # noqa: F401  before the library, which it finds
from bench.networks import report
from bench.networks.candidates import CANDIDATES
from bench.networks.layer_case import LAYER_CANDIDATES, measure_layer
from bench.networks.layers import LAYERS, MODEL_BATCH
from bench.networks.measure import measure_network
from bench.networks.zoo import NETWORKS
from bench.run import measure_all
from common.console import Steps, exit_code, make_console
from common.files import require_writable
from common.journal import Journal, run_settings
from common.machine import describe_machine
from common.options import (
    add_device_option,
    add_output_options,
    choose_device,
    make_parser,
    positive_integer,
    show,
)
from common.precisions import use_precision
from common.report_files import finish, run_header

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
_PATHS = ("--out", "--cache")  # options whose values belong to one machine


def parse(arguments):
    # Abbreviated options would hide from recorded() what names a path.
    parser = make_parser(__doc__, allow_abbrev=False)
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
    add_output_options(parser, "networks")
    options = parser.parse_args(arguments)
    _check(options, parser)
    options.device = choose_device(options.device)
    networks, batches, candidates, modes, precision, repeats = DEFAULTS[options.device.type]
    options.networks = options.networks or networks
    options.batches = options.batches or batches
    options.candidates = [name for name in CANDIDATES if name in (options.candidates or candidates)]
    options.modes = [mode for mode in MODES if mode in (options.modes or modes)]
    options.repeats = options.repeats or repeats
    options.precision = precision
    if options.device.type == "cpu" and options.modes != ["eager"]:
        parser.error("argument --modes: expected eager on a CPU; got CUDA graph")
    return options


def _check(options, parser):
    """Refuses options of the one kind of run with the other."""
    if options.layers is None:
        if options.cold:
            parser.error("argument --cold: expected --layers with it; got none")
        return
    for name in ("networks", "candidates", "modes"):
        if getattr(options, name) is not None:
            parser.error(f"argument --{name}: expected no --layers with it; got both")
    options.layers = options.layers or list(LAYERS)


def recorded(arguments):
    """The command line without what belongs to one machine: absolute paths."""
    kept, rest = [], iter(arguments)
    for argument in rest:
        words = [argument]
        name, _, value = argument.partition("=")
        if name in _PATHS and not value:
            value = next(rest)
            words.append(value)
        if name not in _PATHS or not os.path.isabs(value):
            kept += words
    return kept


def network_cells(options, dtype):
    """{name: call that measures it}, in the order of the tables."""
    return {
        f"{name}, batch {batch}": functools.partial(
            measure_network, name, batch, options, dtype, options.device
        )
        for name in options.networks
        for batch in options.batches or NETWORKS[name].batches
    }


def layer_cells(options, dtype):
    """As network_cells, of layers."""
    return {
        f"{name}, batch {batch}": functools.partial(
            measure_layer, LAYERS[name], batch, options, options.precision, dtype, options.device
        )
        for batch in options.batches or LAYER_BATCHES[options.device.type]
        for name in options.layers
    }


def said_of_network(rows):
    """A line for the terminal: the first mode's times."""
    shown = []
    for row in rows:
        ms = None if row["ms"] is None else next(iter(row["ms"].values()))
        shown.append(f"{row['candidate']} " + (row["absent"] if ms is None else f"{ms:.4g} ms"))
    return ", ".join(shown)


def said_of_layer(row):
    return ", ".join(f"{name} {1e3 * ms:.4g} us" for name, ms in row["ms"].items())


@torch.no_grad()  # not inference mode, whose tensors count no versions
def main(arguments=None):
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    console = make_console()
    device = options.device
    require_writable(options.out)
    if options.cache is not None:
        require_writable(options.cache)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.abspath(options.cache)
    torch.backends.cudnn.benchmark = True
    dtype = use_precision(options.precision)
    header = run_header(describe_machine(device), "bench_networks.py", recorded(arguments))
    header["inference"] = f"{options.precision}, channels last"
    of_layers = options.layers is not None
    cells = layer_cells(options, dtype) if of_layers else network_cells(options, dtype)
    data = {"header": header, "device_type": device.type}
    if of_layers:
        header["L2 cache"] = "emptied before each call" if options.cold else "warm"
        candidates, said_of = LAYER_CANDIDATES, said_of_layer
        data |= {"layers": True, "modelled": "H200" in header["device"]}
    else:
        candidates, said_of = (
            {name: CANDIDATES[name] for name in options.candidates},
            said_of_network,
        )
    settings = run_settings(
        header,
        cells=list(cells),
        candidates=list(candidates),
        modes=options.modes,
        repeats=options.repeats,
        cold=options.cold,
    )
    with (
        Journal(options.out, options.name, settings, fresh=options.fresh) as journal,
        Steps(console, "networks") as steps,
    ):
        found = measure_all(cells, journal, steps, said_of)
        rows = found if of_layers else [row for of_cell in found for row in of_cell]
        data |= {"candidates": candidates, "rows": rows}
        finish(report, data, options.out, options.name, journal, console)


if __name__ == "__main__":
    sys.exit(exit_code(main))
