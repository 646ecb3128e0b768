"""mm on several devices against one, and other libraries' products.

Layouts: R, rows of A on each device and the whole of B on each; S, rows of A and of B
on each; 0, operands and result on the first device; H, in pinned host memory; ranks, as S with one
process a device. Each result must have the bits of one device's. A cell that cannot be measured is
a row that says why: on a CPU, where the parts share it, those that need GPUs.
"""

import functools
import itertools

import torch

from cases import ranks, shards
from common import options as cli
from common.measuring import cell
from common.operands import DATA
from models.files import UserError

LAYOUTS = ("R", "S", "0", "H", "ranks")
PEERS = {"R": "torch.mm", "ranks": "DTensor"}  # dense products of operands that lie so
NEED_CUDA = ("0", "H")
# The other layouts: at the largest size, with the first data set.
_EVERYWHERE = {"cpu": ("R", "S"), "cuda": ("R", "S", "0")}
TITLE = "mm on several devices against one"
STORED_PRECISIONS = ("float32", "float64")
MODE = torch.inference_mode
RATIOS = (0.05, 0.3, 1.0)
_SWEEP = (1024, 2048, 3072, 4096, 6144, 12288)  # at the smallest ratio only
DEFAULTS = {
    "cpu": {"sizes": (256, 512), "sweep": (), "data": ("decay", "normal")},
    "cuda": {"sizes": (8192, 16384, 32768), "sweep": _SWEEP, "data": DATA},
}
DEFAULTS["cpu"]["repeats"] = 3
DEFAULTS["cuda"]["repeats"] = 5
_TINY = {"data": "decay", "precision": "float16"}  # of 256 rows it takes next to no time by itself


def add_options(parser):
    cli.add_device_option(parser)
    what = "number of devices; on a CPU, of parts that share it"
    several = cli.number(int, lambda value: value >= 2, "an integer of 2 or more")
    cli.add(parser, "--parts", what, 2, type=several)
    what = "edges of the square matrices; layouts H and ranks at the largest only"
    cli.add_sizes_option(parser, DEFAULTS, what)
    what = "more sizes, in R and S at the smallest ratio, to see from where on it pays"
    cli.add_numbers(parser, "--sweep", what, DEFAULTS, "N", nargs="*")
    what = (
        "the paper's decay matrices, exponential decay, N(0, 1), N(0, 1) with heavy rows; all "
        "layouts with the first"
    )
    cli.add_choices(parser, "--data", what, DEFAULTS, DATA)
    some = {"nargs": "*"}
    cli.add_choices(parser, "--layouts", "where operands lie", LAYOUTS, LAYOUTS, **some)
    cli.add_ratios_option(parser, RATIOS)
    kind = {"metavar": "COUNT", "type": cli.natural_number, "nargs": "+"}
    what = "waters of clusters whose block-sparse S is squared by ranks; 0: none"
    cli.add(parser, "--waters", what, (0,), **kind)
    cli.add(parser, "--density", "waters of those that ranks purify; 0: none", (0,), **kind)
    cli.add_repeats_option(parser, DEFAULTS)


# ---- Measuring ----------------------------------------------------------------------------------


def cells(options):
    """The largest products first; those of one follow each other."""
    bench, found = _Bench(options.devices, options.repeats), {}
    everywhere = _EVERYWHERE[options.device.type]
    slabs = [layout for layout in options.layouts if layout in everywhere]

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
    for waters, precision in itertools.product(filter(None, options.waters), STORED_PRECISIONS):
        place = {"layout": "ranks", "data": "water", "precision": precision, "n": 7 * waters}
        call = functools.partial(bench.rows, [min(options.ratios)])
        found[f"S of {waters} waters, {precision}"] = cell("several devices", call, **place)
    for waters in filter(None, options.density):
        call = functools.partial(bench.density, waters)
        found[f"density of {waters} waters"] = cell(
            "block-sparse density, ranks", lambda n, of=call: of(), n=7 * waters
        )
    for n in sorted(set(options.sweep) - set(sizes), reverse=True):
        add(slabs, first, "float16", n, [min(options.ratios)], peers=False)
    for layout in [layout for layout in slabs if layout != "0"]:
        call = cell("several devices, overheads", bench.overhead, layout=layout, n=256)
        found[f"overhead {layout}"] = call
    return found


def same_as_one(rows):
    """The rows, whose results were compared with one device's; UserError: one has other bits."""
    rows = list(rows)
    for row in rows:
        if not row.pop("equal"):
            raise UserError(f"wrong result on several devices: expected the bits of one; got {row}")
    return rows


class _Bench:
    """Measures cells on some devices; keeps the operands of the last product."""

    def __init__(self, devices, repeats):
        self._devices, self._repeats = devices, repeats
        make = functools.partial(shards.Product, devices=devices)
        self._product = functools.lru_cache(maxsize=1)(make)
        self._bandwidth = functools.cache(lambda: shards.host_bandwidth(devices, repeats))

    def rows(self, ratios, layout, **product):
        """A row for each ratio; RuntimeError: the layout needs GPUs and there are none."""
        kind = self._devices[0].type
        if layout in NEED_CUDA and kind != "cuda":
            raise RuntimeError(f"{layout} needs CUDA devices; got {kind}")
        if layout == "ranks":
            rows = ranks.run(ranks.multiply, self._devices, product, ratios, self._repeats)
            return same_as_one(rows)
        bandwidth = self._bandwidth() if layout == "H" else None
        given = layout, self._product(**product)
        return same_as_one(
            {"ratio": ratio} | shards.measure(*given, ratio, self._repeats, bandwidth)
            for ratio in ratios
        )

    def density(self, waters):
        return ranks.run(ranks.density, self._devices, waters, 5e-8)

    def peer(self, peer, **product):
        if peer == "DTensor":
            timing = ranks.run(ranks.dtensor, self._devices, product, self._repeats)
        else:
            timing = shards.torch_mm(self._product(**product), self._repeats)
        return [{"ms": timing.median, "spread": timing.spread / timing.median}]

    def overhead(self, layout, n):
        """The host's time for a product that is next to none."""
        return [shards.overhead(layout, self._product(**_TINY, n=n))]
