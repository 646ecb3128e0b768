"""mm against torch.mm (cuBLAS, oneDNN or MKL) by size, valid ratio, dtype and block.

Verifies every case against float64 before it is timed. Writes NAME.md, NAME.json and NAME.png. If
it is interrupted, the same command goes on with the cases that are missing.

    python scripts/bench_mm.py --out docs/results --name mm_h200
"""

import argparse
import itertools
import sys

import torch

import common  # noqa: F401  before the library, which it finds
from bench import mm_report
from bench.mm_case import bench_operands, copy_bandwidth
from common.console import Steps, exit_code, make_console
from common.files import require_writable
from common.journal import Journal, run_settings
from common.machine import describe_machine
from common.options import (
    add_device_option,
    add_output_options,
    add_timing_options,
    choose_device,
    make_parser,
    positive_integer,
    show,
)
from common.precisions import PRECISIONS
from common.report_files import finish, run_header

RATIOS = (1.0, 0.9, 0.5, 0.3, 0.2, 0.1, 0.05)
DEFAULTS = {  # sizes, precisions, rounds
    "cpu": ((2048, 4096), ("float32", "bfloat16"), 7),
    "cuda": ((1024, 2048, 4096, 8192, 16384), tuple(PRECISIONS), 15),
}


def block_edges(text):
    """An edge, or (m, k, n)."""
    edges = tuple(int(edge) if edge.isdecimal() else 0 for edge in text.split("x"))
    if len(edges) not in (1, 3) or not set(edges) <= {32, 64, 128}:
        raise argparse.ArgumentTypeError(
            f"expected 32, 64 or 128, or three of these as in 128x64x128; got {text!r}"
        )
    return edges if len(edges) == 3 else edges[0]


def parse(arguments):
    parser = make_parser(__doc__)
    add_device_option(parser)
    on_cpu, on_cuda = DEFAULTS["cpu"], DEFAULTS["cuda"]
    parser.add_argument(
        "--sizes",
        metavar="N",
        type=positive_integer,
        nargs="+",
        help=f"edges of the square matrices (default: {show(on_cuda[0])}; "
        f"on the CPU {show(on_cpu[0])})",
    )
    parser.add_argument(
        "--precisions",
        nargs="+",
        choices=PRECISIONS,
        help=f"number formats (default: all; on the CPU {show(on_cpu[1])})",
    )
    parser.add_argument(
        "--blocks",
        metavar="BLOCK",
        type=block_edges,
        nargs="+",
        default=[64],
        help="edges of the blocks: 32, 64, 128, or three of these as in 128x64x128 (default: 64)",
    )
    parser.add_argument(
        "--data",
        nargs="+",
        default=["decay"],
        choices=("decay", "normal", "scaled", "overlap"),
        help="decay: the paper's decay matrix; normal: random ones of N(0, 1); scaled: these with "
        "rows and columns scaled by 1e-12 to 1; overlap: a water cluster's (default: decay)",
    )
    add_timing_options(parser, RATIOS, {device: of[2] for device, of in DEFAULTS.items()})
    add_output_options(parser, "mm")
    options = parser.parse_args(arguments)
    options.device = choose_device(options.device)
    sizes, precisions, repeats = DEFAULTS[options.device.type]
    options.sizes = options.sizes or sizes
    options.precisions = options.precisions or precisions
    options.repeats = options.repeats or repeats
    return options


@torch.inference_mode()
def main(arguments=None):
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    console = make_console()
    device = options.device
    require_writable(options.out)
    header = run_header(describe_machine(device), "bench_mm.py", arguments)
    settings = run_settings(
        header,
        sizes=options.sizes,
        precisions=options.precisions,
        blocks=options.blocks,
        ratios=options.ratios,
        data=options.data,
        repeats=options.repeats,
        cold=options.cold,
    )
    cases = list(itertools.product(options.data, options.precisions, options.blocks, options.sizes))
    with (
        Journal(options.out, options.name, settings, fresh=options.fresh) as journal,
        Steps(console, "mm") as steps,
    ):
        bandwidth = journal.measured(
            "copy bandwidth", lambda: copy_bandwidth(device, options.repeats)
        )
        header["copy bandwidth"] = f"{bandwidth / 1e6:.0f} GB/s"
        header["L2 cache"] = "emptied before each call" if options.cold else "warm"
        names = {case: " ".join(map(str, case)) for case in cases}
        finished = sum(name in journal for name in names.values())
        steps.at(finished, len(cases), journal.resumed(finished, len(cases)))
        found = []
        for done, case in enumerate(cases, start=1):
            new = names[case] not in journal
            found.append(
                journal.measured(
                    names[case],
                    lambda case=case: bench_operands(
                        case, options.ratios, bandwidth, device, options.repeats, options.cold
                    ),
                )
            )
            if new:
                best = ", ".join(
                    f"{r['valid_ratio']:.0%}: {r['speedup']:.2f}x" for r in found[-1]["rows"]
                )
                steps.at(done, len(cases), f"{names[case]}: {best}")
        data = {
            "header": header,
            "rows": [row for case in found for row in case["rows"]],
            "stages": [case["stage"] for case in found],
        }
        finish(mm_report, data, options.out, options.name, journal, console)


if __name__ == "__main__":
    sys.exit(exit_code(main))
