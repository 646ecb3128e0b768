"""mm on several devices against one, by where the operands lie, and other libraries' products.

Layouts: R, rows of A on each device and the whole of B on each; S, rows of A and of B on each; 0,
operands and result on the first device; H, in pinned host memory; ranks, as S with one process a
device. Each result is compared with one device's, bit for bit. A cell that cannot be measured is a
row that says why: on a CPU, where the parts share it, those that need GPUs.
"""

import functools
from dataclasses import dataclass

import torch

from cases import shards
from cases.ranks import Ranks
from common.measuring import attempt, not_measured
from common.operands import DATA
from common.options import (
    add,
    add_choices,
    add_device_option,
    add_numbers,
    add_parts_option,
    add_ratios_option,
    add_repeats_option,
    add_sizes_option,
    fill_in,
)
from models.errors import UserError

LAYOUTS = {
    "R": "rows of A on each device, the whole of B on each",
    "S": "rows of A and rows of B on each device",
    "0": "A and B on the first device, C too",
    "H": "A and B in pinned host memory, C too",
    "ranks": "as S, one process a device, with torch.distributed",
}
PEERS = {"R": "torch.mm", "ranks": "DTensor"}  # dense products of operands that lie so
NEED_CUDA = ("0", "H")
_EVERYWHERE = ("R", "S")  # the other layouts: at the largest size, with the first data set
TITLE = "mm on several devices against one"
NOTES = "Layouts: " + "; ".join(f"{name}: {what}" for name, what in LAYOUTS.items()) + "."
MODE = torch.inference_mode
RATIOS = (0.05, 0.3, 1.0)
DEFAULTS = {
    "cpu": {"sizes": (256, 512), "sweep": (), "data": ("decay", "normal"), "repeats": 3},
    "cuda": {
        "sizes": (8192, 16384, 32768),
        "sweep": (2048, 3072, 4096, 6144, 12288),  # at the smallest ratio only
        "data": DATA,
        "repeats": 5,
    },
}
_TINY = ("decay", "float16", 256)  # a product that takes next to no time by itself


def add_options(parser):
    add_device_option(parser)
    add_parts_option(parser)
    what = "edges of the square matrices; layouts 0, H and ranks at the largest only"
    add_sizes_option(parser, DEFAULTS, what)
    what = "more sizes, in R and S at the smallest ratio, to see from where on it pays"
    add_numbers(parser, "--sweep", what, DEFAULTS, "N", nargs="*")
    what = (
        "the paper's decay matrices, exponential decay, N(0, 1), N(0, 1) with heavy rows; all "
        "layouts with the first"
    )
    add_choices(parser, "--data", what, DEFAULTS, DATA)
    add_choices(parser, "--layouts", "where the operands lie", tuple(LAYOUTS), LAYOUTS)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="the smallest size, the first data set, no sweep, no other types (default: all)",
    )
    what = "cells whose name has all these words, as in: S decay 16384 5%"
    add(parser, "--only", what, (), "all cells", metavar="WORD", nargs="+")
    add_ratios_option(parser, RATIOS)
    add_repeats_option(parser, DEFAULTS)


def choose(options):
    fill_in(options, DEFAULTS)
    sizes, sweep, data = options.sizes, options.sweep, options.data
    extras = options.device.type == "cuda" and not options.quick
    if options.quick:
        sizes, sweep, data = [min(sizes)], [], data[:1]
    cells = all_cells(sizes, sweep, data, options.ratios, options.layouts, extras)
    options.cells = [cell for cell in cells if set(options.only) <= set(cell.name.split())]
    if not options.cells:
        raise UserError(
            f"expected words of the name of a cell, such as {cells[0].name!r}, for --only; got "
            f"{' '.join(options.only)}"
        )


def header(options):
    return {"parts": options.parts}


def settings(options):
    names = [cell.name for cell in options.cells]
    return {"parts": options.parts, "cells": names, "repeats": options.repeats}


# ---- Which cells --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """One product to measure. That of a peer has no ratio, for a peer skips nothing."""

    what: str  # a layout or a peer
    data: str
    precision: str
    n: int
    ratio: float | None = None

    @property
    def name(self):
        words = [self.what, self.data, self.precision, str(self.n)]
        return " ".join(words if self.is_peer else [*words, f"{self.ratio:.0%}"])

    @property
    def is_peer(self):
        return self.ratio is None

    @property
    def product(self):
        """What decides the operands."""
        return self.data, self.precision, self.n


def all_cells(sizes, sweep, data, ratios, layouts, extras):
    """Every cell once, the largest products first; those of one product follow each other.

    Args:
        sizes: of R and S, with every data set. sweep: of R and S at the smallest ratio only.
        data: names of data sets. ratios: valid ratios asked for. layouts: keys of LAYOUTS.
        extras: whether float32 in R and S, and float64 in H, are measured at the largest size but
            one, too.
    """
    slabs = [layout for layout in layouts if layout in _EVERYWHERE]
    cells = []
    for n in sorted(sizes, reverse=True):
        for name in data:
            whole = n == max(sizes) and name == data[0]
            cells += _of_product(layouts if whole else slabs, (name, "float16", n), ratios)
    if extras:
        n = sorted(sizes)[-2:][0]
        from_host = [layout for layout in layouts if layout == "H"]
        cells += _of_product(slabs, (data[0], "float32", n), ratios)
        cells += _of_product(from_host, (data[0], "float64", n), ratios)
    for n in sorted(set(sweep) - set(sizes), reverse=True):
        cells += [Cell(layout, data[0], "float16", n, min(ratios)) for layout in slabs]
    return cells


def _of_product(layouts, product, ratios):
    peers = [Cell(PEERS[layout], *product) for layout in layouts if layout in PEERS]
    return [Cell(layout, *product, ratio) for ratio in ratios for layout in layouts] + peers


# ---- Measuring ----------------------------------------------------------------------------------


def measure(measuring, options):
    with Ranks(options.devices) as ranks:
        bandwidth = lambda: measuring.journal.measured(  # noqa: E731
            "host bandwidth", lambda: shards.host_bandwidth(options.devices, options.repeats)
        )
        bench = Bench(options.devices, options.repeats, ranks, bandwidth)
        calls = {cell.name: functools.partial(measure_cell, cell, bench) for cell in options.cells}
        for layout in dict.fromkeys(cell.what for cell in options.cells if cell.what in "RS"):
            calls[f"overhead {layout}"] = functools.partial(measure_overhead, layout, bench)
        return measuring.tables(calls, said_of)


class Bench:
    """Measures cells on some devices; keeps the operands of the last product.

    Args:
        ranks: Ranks on the same devices. bandwidth: gives that of the host, as of host_bandwidth.
    """

    def __init__(self, devices, repeats, ranks, bandwidth):
        self._kind = devices[0].type
        self._repeats, self._ranks, self._bandwidth = repeats, ranks, bandwidth
        self._product = functools.lru_cache(maxsize=1)(
            lambda *product: shards.Product(*product, devices)
        )

    def figures(self, cell):
        """The figures of a cell.

        Raises:
            RuntimeError: it needs GPUs and there are none. Other errors come from what is measured.
        """
        if cell.what in NEED_CUDA and self._kind != "cuda":
            raise RuntimeError(f"{cell.what} needs CUDA devices; got {self._kind}")
        if cell.what == "ranks":
            return self._ranks.do("ranks", cell, self._repeats)
        if not cell.is_peer:
            bandwidth = self._bandwidth() if cell.what == "H" else None
            product = self._product(*cell.product)
            return shards.measure(cell.what, product, cell.ratio, self._repeats, bandwidth)
        if cell.what == "DTensor":
            timing = self._ranks.do("DTensor", cell, self._repeats)
        else:
            timing = shards.torch_mm(self._product(*cell.product), self._repeats)
        return {"ms": timing.median, "spread": timing.spread / timing.median}

    def overhead(self, layout):
        """Figures of a layout: the host's time for a product that is next to none."""
        return shards.overhead(layout, self._product(*_TINY))


def measure_cell(cell, bench):
    """The row of a cell: figures, or why there are none."""
    place = {"data": cell.data, "precision": cell.precision, "n": cell.n}
    place |= {"peer": cell.what} if cell.is_peer else {"layout": cell.what, "ratio": cell.ratio}
    kind = "several devices, peers" if cell.is_peer else "several devices"
    return attempt(kind, lambda: [bench.figures(cell)], **place)


def measure_overhead(layout, bench):
    """That of a layout, in the same way."""
    kind = "several devices, overheads"
    return attempt(kind, lambda: [bench.overhead(layout)], layout=layout, n=_TINY[-1])


# ---- What was found -----------------------------------------------------------------------------


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


def different(rows):
    """Words about results that have other bits than one device's."""
    wrong = sum(not row["equal"] for row in rows)
    return f"; {wrong} RESULTS DIFFER from one device's" if wrong else ""


def said(tables, options):
    """Speedups at the largest size, with the first data set, of each layout."""
    rows = [row for row in tables.get("several devices", ()) if row.get("speedup")]
    if not rows:
        return "No product could be measured on several devices."
    n, data = max(row["n"] for row in rows), rows[0]["data"]
    speedups = ", ".join(
        f"{row['speedup']:.2f}x ({row['layout']}, {row['ratio']:.0%})"
        for row in rows
        if (row["n"], row["data"]) == (n, data)
    )
    return f"{options.parts} devices against one, {data}, N = {n}: {speedups}{different(rows)}."
