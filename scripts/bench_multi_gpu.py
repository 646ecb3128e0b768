"""mm on several devices against one, by where the operands lie, and other libraries' products.

Layouts: R, S, 0, H and ranks, as the page of results says. Each result is compared with one
device's, bit for bit. A cell that cannot be measured is a row that says why: on a CPU, where the
parts share it, those that need GPUs. Writes NAME.md, NAME.json and NAME.png. If it is interrupted,
the same command goes on with the cells that are missing.

    python scripts/bench_multi_gpu.py --out docs/results --name multi_gpu_h200
"""

import functools
import sys

import torch

import common  # noqa: F401  before the library, which it finds
from bench.multi_gpu import report as multi_gpu_report
from bench.multi_gpu.cells import LAYOUTS, all_cells
from bench.multi_gpu.layouts import host_bandwidth
from bench.multi_gpu.measure import Bench, measure_cell, measure_overhead
from bench.multi_gpu.ranks import Ranks
from bench.operands import DATA
from bench.run import measure_all
from common.console import Steps, exit_code, make_console
from common.errors import UserError
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
from common.report_files import finish, run_header

RATIOS = (0.05, 0.3, 1.0)
DEFAULTS = {  # sizes, sizes at the smallest ratio only, data sets, rounds
    "cpu": ((256, 512), (), ("decay", "normal"), 3),
    "cuda": ((8192, 16384, 32768), (2048, 3072, 4096, 6144, 12288), DATA, 5),
}


def parse(arguments):
    parser = make_parser(__doc__)
    add_device_option(parser)
    on_cpu, on_cuda = DEFAULTS["cpu"], DEFAULTS["cuda"]
    add_parts_option(parser)
    parser.add_argument(
        "--sizes",
        metavar="N",
        type=positive_integer,
        nargs="+",
        help="edges of the square matrices; layouts 0, H and ranks at the largest only "
        f"(default: {show(on_cuda[0])}; on the CPU {show(on_cpu[0])})",
    )
    parser.add_argument(
        "--sweep",
        metavar="N",
        type=positive_integer,
        nargs="*",
        help="more sizes, in R and S at the smallest ratio, to see from where on it pays "
        f"(default: {show(on_cuda[1])}; on the CPU none)",
    )
    parser.add_argument(
        "--data",
        nargs="+",
        choices=DATA,
        help="the paper's decay matrices, exponential decay, N(0, 1), N(0, 1) with heavy rows; all "
        f"layouts with the first (default: {show(on_cuda[2])}; on the CPU {show(on_cpu[2])})",
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
        "--layouts",
        nargs="+",
        choices=LAYOUTS,
        default=tuple(LAYOUTS),
        help=f"where the operands lie (default: {show(LAYOUTS)})",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="the smallest size, the first data set, no sweep, no other types (default: all)",
    )
    parser.add_argument(
        "--only",
        metavar="WORD",
        nargs="+",
        default=(),
        help="cells whose name has all these words, as in: S decay 16384 5%% (default: all cells)",
    )
    parser.add_argument(
        "--repeats",
        metavar="ROUNDS",
        type=positive_integer,
        help=f"rounds of each timing (default: {on_cuda[3]}; on the CPU {on_cpu[3]})",
    )
    add_output_options(parser, "multi_gpu")
    options = parser.parse_args(arguments)
    options.devices = choose_devices(options.device, options.parts)
    sizes, sweep, data, repeats = DEFAULTS[options.devices[0].type]
    options.sizes = options.sizes or sizes
    options.sweep = sweep if options.sweep is None else options.sweep
    options.data = options.data or data
    options.repeats = options.repeats or repeats
    options.cells = chosen_cells(options)
    return options


def chosen_cells(options):
    """The cells that the options ask for.

    Raises:
        UserError: there are none.
    """
    sizes, sweep, data = options.sizes, options.sweep, options.data
    extras = options.devices[0].type == "cuda" and not options.quick
    if options.quick:
        sizes, sweep, data = [min(sizes)], [], data[:1]
    cells = all_cells(sizes, sweep, data, options.ratios, options.layouts, extras)
    chosen = [cell for cell in cells if set(options.only) <= set(cell.name.split())]
    if not chosen:
        raise UserError(
            f"expected words of the name of a cell, such as {cells[0].name!r}, for --only; got "
            f"{' '.join(options.only)}"
        )
    return chosen


def said_of(found):
    """A line for the terminal."""
    if found["absent"] is not None:
        return f"not measured: {found['absent']}"
    if "peer" in found:
        return f"{found['ms']:.4g} ms"
    different = "" if found["equal"] else ", RESULT DIFFERS"
    return f"{found['one_ms']:.4g} -> {found['all_ms']:.4g} ms, {found['speedup']:.2f}x{different}"


@torch.inference_mode()
def main(arguments=None):
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    console = make_console()
    devices, cells = options.devices, options.cells
    require_writable(options.out)
    header = run_header(describe_machine(devices[0]), "bench_multi_gpu.py", arguments)
    settings = run_settings(
        header,
        parts=options.parts,
        cells=[cell.name for cell in cells],
        repeats=options.repeats,
    )
    with (
        Journal(options.out, options.name, settings, fresh=options.fresh) as journal,
        Steps(console, "multi_gpu") as steps,
        Ranks(devices) as ranks,
    ):
        key = "host bandwidth"
        bandwidth = lambda: journal.measured(  # noqa: E731
            key, lambda: host_bandwidth(devices, options.repeats)
        )
        bench = Bench(devices, options.repeats, ranks, bandwidth)
        calls = {cell.name: functools.partial(measure_cell, cell, bench) for cell in cells}
        found = measure_all(calls, journal, steps, said_of)
        overheads = [
            journal.measured(
                f"overhead {layout}", functools.partial(measure_overhead, layout, bench)
            )
            for layout in dict.fromkeys(cell.what for cell in cells if cell.what in ("R", "S"))
        ]
        header["parts"] = options.parts
        if key in journal:
            header[key] = f"{bandwidth() / 1e6:.1f} GB/s into all devices at once"
        data = {
            "header": header,
            "parts": options.parts,
            "rows": [row for row in found if "layout" in row],
            "peers": [row for row in found if "peer" in row],
            "overheads": overheads,
        }
        finish(multi_gpu_report, data, options.out, options.name, journal, console)


if __name__ == "__main__":
    sys.exit(exit_code(main))
