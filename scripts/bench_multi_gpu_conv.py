"""conv2d of a batch on several devices against one, by layer and batch: from where on it pays.

Layers: the ten convolutions of VGG13 on 32 x 32 pictures. Each result is compared with one
device's, bit for bit. A cell that cannot be measured is a row that says why. Writes NAME.md,
NAME.json and NAME.png. If it is interrupted, the same command goes on with the cells that are
missing.

    python scripts/bench_multi_gpu_conv.py --out docs/results --name multi_gpu_conv_h200
"""

import functools
import itertools
import sys

import torch

import common  # noqa: F401  before the library, which it finds
from bench.conv_layers import GROUPS
from bench.multi_gpu import conv_report, convolutions
from bench.multi_gpu.conv_report import Row
from bench.run import attempt, measure_all
from common.console import Steps, exit_code, make_console
from common.files import require_writable
from common.journal import Journal, run_settings
from common.machine import describe_machine
from common.options import (
    add_device_option,
    add_output_options,
    add_parts_option,
    choose_devices,
    make_parser,
    positive_integer,
    show,
    valid_ratio,
)
from common.precisions import PRECISIONS, use_precision
from common.report_files import finish, run_header

LAYERS = {layer.name: layer for layer in GROUPS["vgg13"]}
RATIOS = (0.5, 1.0)
DEFAULTS = {  # batches, precision, rounds
    "cpu": ((128, 256), "float32", 3),
    "cuda": ((128, 512, 2048, 8192), "float16", 5),
}


def measure_cell(cell, dtype, devices, repeats):
    """The Row of (layer, batch, ratio) as plain data: figures, or why there are none."""
    name, batch, ratio = cell

    def measure(layer):
        return convolutions.measure(layer, batch, ratio, dtype, devices, repeats)

    return attempt(measure, LAYERS[name], Row(name, batch, ratio))


def parse(arguments):
    parser = make_parser(__doc__)
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
    parser.add_argument(
        "--ratios",
        metavar="RATIO",
        type=valid_ratio,
        nargs="+",
        default=RATIOS,
        help=f"shares of block products to keep, in (0, 1] (default: {show(RATIOS)})",
    )
    parser.add_argument(
        "--repeats",
        metavar="ROUNDS",
        type=positive_integer,
        help=f"rounds of each timing (default: {on_cuda[2]}; on the CPU {on_cpu[2]})",
    )
    add_output_options(parser, "multi_gpu_conv")
    options = parser.parse_args(arguments)
    options.devices = choose_devices(options.device, options.parts)
    batches, precision, repeats = DEFAULTS[options.devices[0].type]
    options.batches = options.batches or batches
    options.precision = options.precision or precision
    options.repeats = options.repeats or repeats
    return options


def said_of(row):
    """A line for the terminal."""
    if row["absent"] is not None:
        return f"not measured: {row['absent']}"
    different = "" if row["equal"] else ", RESULT DIFFERS"
    return f"{row['one_ms']:.4g} -> {row['all_ms']:.4g} ms, {row['speedup']:.2f}x{different}"


@torch.inference_mode()
def main(arguments=None):
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    console = make_console()
    devices = options.devices
    require_writable(options.out)
    dtype = use_precision(options.precision)
    header = run_header(describe_machine(devices[0]), "bench_multi_gpu_conv.py", arguments)
    header |= {"parts": options.parts, "type": options.precision}
    cells = list(itertools.product(options.layers, options.batches, options.ratios))
    settings = run_settings(
        header,
        parts=options.parts,
        precision=options.precision,
        cells=cells,
        repeats=options.repeats,
    )
    with (
        Journal(options.out, options.name, settings, fresh=options.fresh) as journal,
        Steps(console, "multi_gpu_conv") as steps,
    ):
        calls = {
            f"{layer} {batch} {ratio}": functools.partial(
                measure_cell, (layer, batch, ratio), dtype, devices, options.repeats
            )
            for layer, batch, ratio in cells
        }
        rows = measure_all(calls, journal, steps, said_of)
        data = {"header": header, "parts": options.parts, "rows": rows}
        finish(conv_report, data, options.out, options.name, journal, console)


if __name__ == "__main__":
    sys.exit(exit_code(main))
