"""mm on several devices against one, by where the operands lie, and other libraries' products.

Layouts: R, rows of A on each device and the whole of B on each; S, rows of A and of B on each; 0,
operands and result on the first device; H, in pinned host memory; ranks, as S with one process a
device. Each result is compared with one device's, bit for bit. A cell that cannot be measured is a
row that says why: on a CPU, where the parts share it, those that need GPUs.
"""

import functools
import itertools

import torch

from cases import ranks, shards
from common import options as cli
from common.measuring import cell, not_measured
from common.operands import DATA

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
_TINY = {"data": "decay", "precision": "float16"}  # of 256 rows it takes next to no time by itself


def add_options(parser):
    cli.add_device_option(parser)
    cli.add_parts_option(parser)
    what = "edges of the square matrices; layouts 0, H and ranks at the largest only"
    cli.add_sizes_option(parser, DEFAULTS, what)
    what = "more sizes, in R and S at the smallest ratio, to see from where on it pays"
    cli.add_numbers(parser, "--sweep", what, DEFAULTS, "N", nargs="*")
    what = (
        "the paper's decay matrices, exponential decay, N(0, 1), N(0, 1) with heavy rows; all "
        "layouts with the first"
    )
    cli.add_choices(parser, "--data", what, DEFAULTS, DATA)
    cli.add_choices(parser, "--layouts", "where the operands lie", tuple(LAYOUTS), LAYOUTS)
    cli.add_ratios_option(parser, RATIOS)
    cli.add_repeats_option(parser, DEFAULTS)


# ---- Measuring ----------------------------------------------------------------------------------


def measure(measuring, options):
    return measuring.tables(cells_of(options), said_of)


def cells_of(options):
    """{name: call that measures it}, the largest products first; those of one follow each other."""
    bench, found = _Bench(options.devices, options.repeats), {}
    slabs = [layout for layout in options.layouts if layout in _EVERYWHERE]

    def add(layouts, data, precision, n, ratios=options.ratios, peers=True):
        place = {"data": data, "precision": precision, "n": n}
        name = f"{data} {precision} {n}"
        for layout in layouts:
            rows = functools.partial(bench.rows, ratios)
            found[f"{layout} {name}"] = cell("several devices", rows, layout=layout, **place)
        for layout in layouts if peers else ():
            if peer := PEERS.get(layout):
                found[f"{peer} {name}"] = cell(
                    "several devices, peers", bench.peer, peer=peer, **place
                )

    first, sizes = options.data[0], sorted(options.sizes, reverse=True)
    for n, data in itertools.product(sizes, options.data):
        add(options.layouts if (n, data) == (sizes[0], first) else slabs, data, "float16", n)
    if options.device.type == "cuda":
        n = sizes[:2][-1]
        add(slabs, first, "float32", n)
        add([layout for layout in options.layouts if layout == "H"], first, "float64", n)
    for n in sorted(set(options.sweep) - set(sizes), reverse=True):
        add(slabs, first, "float16", n, [min(options.ratios)], peers=False)
    for layout in slabs:
        call = cell("several devices, overheads", bench.overhead, layout=layout, n=256)
        found[f"overhead {layout}"] = call
    return found


class _Bench:
    """Measures cells on some devices; keeps the operands of the last product."""

    def __init__(self, devices, repeats):
        self._devices, self._repeats = devices, repeats
        make = functools.partial(shards.Product, devices=devices)
        self._product = functools.lru_cache(maxsize=1)(make)
        self._bandwidth = functools.cache(lambda: shards.host_bandwidth(devices, repeats))

    def rows(self, ratios, layout, **product):
        """A row for each ratio.

        Raises:
            RuntimeError: the layout needs GPUs and there are none. Other errors come from what is
                measured.
        """
        kind = self._devices[0].type
        if layout in NEED_CUDA and kind != "cuda":
            raise RuntimeError(f"{layout} needs CUDA devices; got {kind}")
        if layout == "ranks":
            return ranks.run(ranks.multiply, self._devices, product, ratios, self._repeats)
        bandwidth = self._bandwidth() if layout == "H" else None
        given = layout, self._product(**product)
        return [
            {"ratio": ratio} | shards.measure(*given, ratio, self._repeats, bandwidth)
            for ratio in ratios
        ]

    def peer(self, peer, **product):
        if peer == "DTensor":
            timing = ranks.run(ranks.dtensor, self._devices, product, self._repeats)
        else:
            timing = shards.torch_mm(self._product(**product), self._repeats)
        return [{"ms": timing.median, "spread": timing.spread / timing.median}]

    def overhead(self, layout, n):
        """The host's time for a product that is next to none."""
        return [shards.overhead(layout, self._product(**_TINY, n=n))]


# ---- What was found -----------------------------------------------------------------------------


def said_of(found):
    """A line for the terminal."""
    [rows] = found.values()
    row = rows[0]
    if "absent" in row:
        return not_measured(row)
    if "peer" in row:
        return f"{row['ms']:.4g} ms"
    if "one_us" in row:
        return f"{row['one_us']:.3g} -> {row['all_us']:.3g} us"
    speedups = ", ".join(f"{row['ratio']:.0%}: {row['speedup']:.2f}x" for row in rows)
    return speedups + different(rows)


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
