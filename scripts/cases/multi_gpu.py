"""mm on several devices against one, and torch.mm of as many parts.

Layouts: R, rows of A on each device and the whole of B on each; S, rows of A and of B on each; 0,
operands and result on the first device; H, in pinned host memory. Each result must have the bits of
one device's. A cell that cannot be measured is a row that says why: on a CPU, where the parts share
it, those that need GPUs. Several processes: examples/distributed_mm.py.
"""

import functools
import itertools
from functools import cached_property, partial

import torch

import spamm_torch
from common import options as cli
from common.machine import use_precision
from common.measuring import cell
from common.operands import DATA, operands
from common.timing import by_clock
from models.files import UserError

LAYOUTS = ("R", "S", "0", "H")
PEER = "torch.mm"  # of rows of A and of the whole of B on each device
NEED_CUDA = ("0", "H")
# The other layouts: at the largest size, with the first data set.
_EVERYWHERE = {"cpu": ("R", "S"), "cuda": ("R", "S", "0")}
TITLE = "mm on several devices against one"
MODE = torch.inference_mode
RATIOS = (0.05, 0.3, 1.0)
_SWEEP = (1024, 2048, 3072, 4096, 6144, 12288)  # at the smallest ratio only
DEFAULTS = {
    "cpu": {"sizes": (256, 512), "sweep": (), "data": ("decay", "normal"), "repeats": 3},
    "cuda": {"sizes": (8192, 16384, 32768), "sweep": _SWEEP, "data": DATA, "repeats": 5},
}


def add_options(parser):
    cli.add_device_option(parser)
    what = "number of devices; on a CPU, of parts that share it"
    several = cli.number(int, lambda value: value >= 2, "an integer of 2 or more")
    cli.add(parser, "--parts", what, 2, type=several)
    what = "edges of the square matrices; layout H at the largest only"
    cli.add_numbers(parser, "--sizes", what, DEFAULTS, "N")
    what = "more sizes, in R and S at the smallest ratio, to see from where on it pays"
    cli.add_numbers(parser, "--sweep", what, DEFAULTS, "N", nargs="*")
    what = "as of common/operands.py; all layouts with the first"
    cli.add_choices(parser, "--data", what, DEFAULTS, DATA)
    cli.add_choices(parser, "--layouts", "where operands lie", LAYOUTS, LAYOUTS, nargs="*")
    cli.add_ratios_option(parser, RATIOS)
    cli.add_repeats_option(parser, DEFAULTS)


# ---- Cells --------------------------------------------------------------------------------------


def cells(options):
    """The largest products first; those of one follow each other."""
    devices, repeats, found = options.devices, options.repeats, {}
    product_of = functools.lru_cache(maxsize=1)(partial(Product, devices=devices))
    everywhere = _EVERYWHERE[devices[0].type]
    slabs = [layout for layout in options.layouts if layout in everywhere]

    def add(layouts, data, precision, n, ratios=options.ratios, has_peer=True):
        place = {"data": data, "precision": precision, "n": n}
        name = f"{data} {precision} {n}"
        for layout in layouts:
            call = partial(rows, product_of, devices, ratios, repeats)
            found[f"{layout} {name}"] = cell("several devices", call, layout=layout, **place)
        if "R" in layouts and has_peer:
            call = partial(dense_peer, product_of, devices, repeats)
            found[f"{PEER} {name}"] = cell("several devices, peers", call, peer=PEER, **place)

    first, sizes = options.data[0], sorted(options.sizes, reverse=True)
    for n, data in itertools.product(sizes, options.data):
        add(options.layouts if (n, data) == (sizes[0], first) else slabs, data, "float16", n)
    if devices[0].type == "cuda":
        n = sizes[:2][-1]
        add(slabs, first, "float32", n)
        add([layout for layout in options.layouts if layout == "H"], first, "float64", n)
    for n in sorted(set(options.sweep) - set(sizes), reverse=True):
        add(slabs, first, "float16", n, [min(options.ratios)], has_peer=False)
    return found


def rows(product_of, devices, ratios, repeats, layout, **place):
    """A row for each ratio; RuntimeError: the layout needs GPUs and there are none; UserError: a
    result has other bits than one device's.
    """
    if layout in NEED_CUDA and devices[0].type != "cuda":
        raise RuntimeError(f"{layout} needs CUDA devices; got {devices[0].type}")
    product, found = product_of(**place), []
    for ratio in ratios:
        calls = product.calls(layout, ratio)
        product.require_same(ratio, layout, calls["all"]())
        times = by_clock(calls, repeats, devices)
        one, every = times["one"], times["all"]
        row = {"ratio": ratio, "valid_ratio": product.valid_ratio(ratio), "one_ms": one.median}
        row |= {"all_ms": every.median, "spread": every.spread / every.median}
        found.append(row | {"speedup": one.median / every.median})
    return found


def dense_peer(product_of, devices, repeats, peer, **place):
    """The row of torch's dense products of the parts."""
    product = product_of(**place)
    rows = product.a.tensor_split(len(devices))
    parts = [part.to(device) for part, device in zip(rows, devices, strict=True)]
    pairs = list(zip(parts, product.b_everywhere, strict=True))
    calls = {"call": lambda: [torch.mm(*pair) for pair in pairs]}
    timing = by_clock(calls, repeats, devices)["call"]
    return [{"ms": timing.median, "spread": timing.spread / timing.median}]


# ---- Products with operands on several devices --------------------------------------------------


def split(matrix, cuts, devices):
    """The rows between the cuts, each on its part's device."""
    pairs = zip(itertools.pairwise(cuts), devices, strict=True)
    return [matrix[first:last].to(device) for (first, last), device in pairs]


class Product:
    """A @ B of operands; a layout makes what it needs at its first use."""

    def __init__(self, data, precision, n, devices):
        self.devices = devices
        self.a, self.b = operands(data, n, use_precision(precision), devices[0])
        self.norm_a, self.norm_b = map(spamm_torch.norm_map, (self.a, self.b))
        self.tau = functools.cache(self._tau)

    def _tau(self, ratio):
        """The threshold of a valid ratio as a number, which calls take on any device."""
        return spamm_torch.find_tau(self.norm_a, self.norm_b, ratio).item() if ratio < 1 else 0.0

    def valid_ratio(self, ratio):
        """The valid ratio that the threshold found for ``ratio`` gives."""
        return spamm_torch.valid_ratio(self.norm_a, self.norm_b, self.tau(ratio)).item()

    @cached_property
    def b_everywhere(self):
        """The whole of B on each device."""
        return [self.b.to(device) for device in self.devices]

    @cached_property
    def on_host(self):
        """A and B in pinned host memory."""
        pinned = {"device": "cpu", "pin_memory": True}
        return [torch.empty_like(x, **pinned).copy_(x) for x in (self.a, self.b)]

    def calls(self, layout, ratio):
        """The product on one device and on all, as C or its rows: {"one": call, "all": call}."""
        tau, devices = self.tau(ratio), self.devices
        mm = partial(spamm_torch.mm, tau=tau)
        one = partial(mm, self.a, self.b)
        if layout in ("R", "S"):  # A is cut by work, B at the same rows
            cuts = spamm_torch.row_cuts(self.norm_a, self.norm_b, tau, len(devices))
            of_a = split(self.a, cuts, devices)
            of_b = self.b_everywhere if layout == "R" else split(self.b, cuts, devices)
            return {"one": one, "all": partial(spamm_torch.mm_shards, of_a, of_b, tau=tau)}
        if layout == "0":
            return {"one": one, "all": partial(one, devices=devices)}
        from_host = partial(mm, *self.on_host)
        counts = {"one": devices[:1], "all": devices}
        return {name: partial(from_host, devices=some) for name, some in counts.items()}

    def require_same(self, ratio, layout, result):
        """Raises UserError where C, or its rows in shards, are not what one device gives, bit for
        bit.
        """
        shards = result if isinstance(result, (list, tuple)) else [result]
        expected = spamm_torch.mm(self.a, self.b, tau=self.tau(ratio))
        expected = expected.split([len(shard) for shard in shards])
        pairs = zip(shards, expected, strict=True)
        if not all(torch.equal(shard.to(rows.device), rows) for shard, rows in pairs):
            raise UserError(
                "wrong result on several devices: expected the bits of one; got others at ratio "
                f"{ratio}, layout {layout}"
            )
