"""mm on several devices against one, by where the operands lie, and other libraries' products.

Layouts: R, rows of A on each device and the whole of B on each; S, rows of A and of B on each; 0,
operands and result on the first device; H, in pinned host memory; ranks, as S with one process a
device. Each result is compared with one device's, bit for bit. A cell that cannot be measured is a
row that says why: on a CPU, where the parts share it, those that need GPUs.
"""

import functools

import torch

from cases.multi_gpu import layouts, peers
from cases.multi_gpu.cells import LAYOUTS, NEED_CUDA, all_cells
from cases.multi_gpu.product import Product
from cases.multi_gpu.ranks import Ranks
from common.measuring import attempt, not_measured
from common.operands import DATA
from common.options import (
    add_device_option,
    add_parts_option,
    add_timing_options,
    choose_devices,
    positive_integer,
    show,
)
from models.errors import UserError

TITLE = "mm on several devices against one"
NOTES = "Layouts: " + "; ".join(f"{name}: {what}" for name, what in LAYOUTS.items()) + "."
MODE = torch.inference_mode
RATIOS = (0.05, 0.3, 1.0)
DEFAULTS = {  # sizes, sizes at the smallest ratio only, data sets, rounds
    "cpu": ((256, 512), (), ("decay", "normal"), 3),
    "cuda": ((8192, 16384, 32768), (2048, 3072, 4096, 6144, 12288), DATA, 5),
}
_TINY = ("decay", "float16", 256)  # a product that takes next to no time by itself


def add_options(parser):
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
    add_timing_options(parser, RATIOS, {device: of[3] for device, of in DEFAULTS.items()})


def choose(options):
    options.devices = choose_devices(options.device, options.parts)
    options.device = options.devices[0]
    sizes, sweep, data, repeats = DEFAULTS[options.device.type]
    options.sizes = options.sizes or sizes
    options.sweep = sweep if options.sweep is None else options.sweep
    options.data = options.data or data
    options.repeats = options.repeats or repeats
    options.cells = chosen_cells(options)


def chosen_cells(options):
    """The cells that the options ask for.

    Raises:
        UserError: there are none.
    """
    sizes, sweep, data = options.sizes, options.sweep, options.data
    extras = options.device.type == "cuda" and not options.quick
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


def header(options):
    return {"parts": options.parts}


def settings(options):
    names = [cell.name for cell in options.cells]
    return {"parts": options.parts, "cells": names, "repeats": options.repeats}


def measure(measuring, options):
    with Ranks(options.devices) as ranks:
        bandwidth = lambda: measuring.journal.measured(  # noqa: E731
            "host bandwidth", lambda: layouts.host_bandwidth(options.devices, options.repeats)
        )
        bench = Bench(options.devices, options.repeats, ranks, bandwidth)
        calls = {cell.name: functools.partial(measure_cell, cell, bench) for cell in options.cells}
        for layout in dict.fromkeys(cell.what for cell in options.cells if cell.what in "RS"):
            calls[f"overhead {layout}"] = functools.partial(measure_overhead, layout, bench)
        return measuring.tables(calls, said_of)


def said_of(found):
    """A line for the terminal."""
    [[row]] = found.values()
    if "absent" in row:
        return not_measured(row)
    if "peer" in row:
        return f"{row['ms']:.4g} ms"
    if "one_us" in row:
        return f"{row['one_us']:.3g} -> {row['all_us']:.3g} us"
    different = "" if row["equal"] else ", RESULT DIFFERS"
    return f"{row['one_ms']:.4g} -> {row['all_ms']:.4g} ms, {row['speedup']:.2f}x{different}"


def said(tables, options):
    """Speedups at the largest size, with the first data set, of each layout."""
    rows = [row for row in tables.get("several devices", ()) if row.get("speedup")]
    if not rows:
        return "No product could be measured on several devices."
    n, data = max(row["n"] for row in rows), rows[0]["data"]
    at = [row for row in rows if (row["n"], row["data"]) == (n, data)]
    speedups = ", ".join(
        f"{row['speedup']:.2f}x ({row['layout']}, {row['ratio']:.0%})" for row in at
    )
    wrong = sum(not row["equal"] for row in rows)
    differ = f"; {wrong} RESULTS DIFFER from one device's" if wrong else ""
    return f"{options.parts} devices against one, {data}, N = {n}: {speedups}{differ}."


class Bench:
    """Measures cells on some devices; keeps the operands of the last product."""

    def __init__(self, devices, repeats, ranks, bandwidth):
        """
        Args:
            ranks: Ranks on the same devices. bandwidth: gives that of the host, as of
                layouts.host_bandwidth.
        """
        self._kind = devices[0].type
        self._repeats, self._ranks, self._bandwidth = repeats, ranks, bandwidth
        self._product = functools.lru_cache(maxsize=1)(lambda *product: Product(*product, devices))

    def measure(self, cell):
        """The figures of a cell.

        Raises:
            RuntimeError: it needs GPUs and there are none. Other errors come from what is measured.
        """
        if cell.what in NEED_CUDA and self._kind != "cuda":
            raise RuntimeError(f"{cell.what} needs CUDA devices; got {self._kind}")
        return self._peer(cell) if cell.is_peer else self._row(cell)

    def _row(self, cell):
        if cell.what == "ranks":
            return self._ranks.do("multiply", cell, self._repeats)
        bandwidth = self._bandwidth() if cell.what == "H" else None
        return layouts.measure(cell, self._product(*cell.product), self._repeats, bandwidth)

    def _peer(self, cell):
        if cell.what in ("symm_mem", "DTensor"):
            timing = self._ranks.do(cell.what.lower(), cell, self._repeats)
        else:
            measure = {"torch.mm": peers.torch_mm, "cublasXt": peers.cublas_xt}[cell.what]
            timing = measure(self._product(*cell.product), self._repeats)
        return {"ms": timing.median, "spread": timing.spread / timing.median}

    def overhead(self, layout):
        """Figures of a layout: the host's time for a product that is next to none."""
        return layouts.overhead(layout, self._product(*_TINY))


def measure_cell(cell, bench):
    """The row of a cell: figures, or why there are none."""
    data, precision, n = cell.product
    place = {"data": data, "precision": precision, "n": n}
    place |= {"peer": cell.what} if cell.is_peer else {"layout": cell.what, "ratio": cell.ratio}
    kind = "several devices, peers" if cell.is_peer else "several devices"
    return attempt(kind, lambda: [bench.measure(cell)], **place)


def measure_overhead(layout, bench):
    """That of a layout, in the same way."""
    kind = "several devices, overheads"
    return attempt(kind, lambda: [bench.overhead(layout)], layout=layout, n=_TINY[-1])
