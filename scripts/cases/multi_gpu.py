"""mm on several devices against one.

Layouts: R, rows of A on each device and the whole of B on each, beside torch.mm of the same; S,
rows of A and of B on each; 0, operands and result on the first device; H, in pinned host memory.
Each result must have the bits of one device's. A cell that cannot be measured is a row that says
why: on a CPU, where the parts share it, those that need GPUs. Several processes:
examples/distributed_mm.py.
"""

import functools
import itertools
from functools import partial

import torch

import spamm_torch
from common import options as cli
from common.measuring import PRECISIONS, cell, use_precision
from common.operands import DATA, operands
from common.timing import by_clock, medians
from models.files import UserError

LAYOUTS = ("R", "S", "0", "H")
NEED_CUDA = ("0", "H")
TITLE = "mm on several devices against one"
RATIOS = (0.05, 0.3, 1.0)
DEFAULTS = {
    "cpu": {"sizes": (256, 512), "data": ("decay", "normal"), "repeats": 3},
    "cuda": {"sizes": (8192, 16384, 32768), "data": DATA, "repeats": 5},
}


def add_options(parser):
    cli.add_device_option(parser)
    what = "number of devices; on a CPU, of parts that share it"
    several = cli.number(int, lambda value: value >= 2, "an integer of 2 or more")
    cli.add(parser, "--parts", what, 2, type=several)
    cli.add_numbers(parser, "--sizes", "edges of the square matrices", DEFAULTS, "N")
    cli.add_choices(parser, "--data", "as of common/operands.py", DEFAULTS, DATA)
    cli.add_choices(parser, "--precisions", "number formats", ["float16"], PRECISIONS)
    cli.add_choices(parser, "--layouts", "where operands lie", LAYOUTS, LAYOUTS)
    cli.add_ratios_option(parser, RATIOS)
    cli.add_repeats_option(parser, DEFAULTS)


def cells(options):
    """The largest products first; those of one follow each other."""
    product_of = functools.lru_cache(maxsize=1)(partial(Product, devices=options.devices))
    call, found = partial(rows, product_of, options), {}
    sizes = sorted(options.sizes, reverse=True)
    products = itertools.product(sizes, options.data, options.precisions)
    for (n, data, precision), layout in itertools.product(products, options.layouts):
        place = {"layout": layout, "data": data, "precision": precision, "n": n}
        found[" ".join(map(str, place.values()))] = cell("several devices", call, **place)
    return found


def rows(product_of, options, layout, **place):
    """A row for each ratio; RuntimeError: the layout needs GPUs and there are none; UserError: a
    result has other bits than one device's.
    """
    if layout in NEED_CUDA and options.device.type != "cuda":
        raise RuntimeError(f"{layout} needs CUDA devices; got {options.device.type}")
    product, found = product_of(**place), []
    for ratio in options.ratios:
        calls = product.calls(layout, ratio)
        product.require_same(ratio, layout, calls["all"]())
        times = by_clock(calls, options.repeats, options.devices)
        norms = product.norm_a, product.norm_b
        valid_ratio = spamm_torch.valid_ratio(*norms, product.tau(ratio)).item()
        row = {"ratio": ratio, "valid_ratio": valid_ratio}
        row |= {f"{name}_ms": ms for name, ms in medians(times).items()}
        row["spread"] = times["all"].spread / row["all_ms"]
        found.append(row | {"speedup": row["one_ms"] / row["all_ms"]})
    return found


def split(matrix, cuts, devices):
    """The rows between the cuts, each on its part's device."""
    pairs = zip(itertools.pairwise(cuts), devices, strict=True)
    return [matrix[first:last].to(device) for (first, last), device in pairs]


class Product:
    """A @ B of operands on the first device."""

    def __init__(self, data, precision, n, devices):
        self.devices = devices
        self.a, self.b = operands(data, n, use_precision(precision), devices[0])
        self.norm_a, self.norm_b = map(spamm_torch.norm_map, (self.a, self.b))
        self.tau = functools.cache(self._tau)

    def _tau(self, ratio):
        """The threshold of a valid ratio as a number, which calls take on any device."""
        return spamm_torch.find_tau(self.norm_a, self.norm_b, ratio).item() if ratio < 1 else 0.0

    def calls(self, layout, ratio):
        """The product on one device and on all, as C or its rows: {"one": call, "all": call}, and
        torch's where the whole of B lies on each.
        """
        tau, devices = self.tau(ratio), self.devices
        mm = partial(spamm_torch.mm, tau=tau)
        one = partial(mm, self.a, self.b)
        if layout in ("R", "S"):  # A is cut by work, B at the same rows
            cuts = spamm_torch.row_cuts(self.norm_a, self.norm_b, tau, len(devices))
            of_a = split(self.a, cuts, devices)
            if layout == "R":
                of_b = [self.b.to(device) for device in devices]
            else:
                of_b = split(self.b, cuts, devices)
            calls = {"one": one, "all": partial(spamm_torch.mm_shards, of_a, of_b, tau=tau)}
            dense = {"torch": lambda: list(map(torch.mm, of_a, of_b))} if layout == "R" else {}
            return calls | dense
        if layout == "0":
            return {"one": one, "all": partial(one, devices=devices)}
        pinned = {"device": "cpu", "pin_memory": True}
        from_host = partial(mm, *(torch.empty_like(x, **pinned).copy_(x) for x in (self.a, self.b)))
        counts = {"one": devices[:1], "all": devices}
        return {name: partial(from_host, devices=some) for name, some in counts.items()}

    def require_same(self, ratio, layout, result):
        """Raises UserError where C, or its rows in shards, lack the bits that one device gives."""
        shards = result if isinstance(result, (list, tuple)) else [result]
        expected = spamm_torch.mm(self.a, self.b, tau=self.tau(ratio))
        expected = expected.split([len(shard) for shard in shards])
        pairs = zip(shards, expected, strict=True)
        if not all(torch.equal(shard.to(rows.device), rows) for shard, rows in pairs):
            raise UserError(
                "wrong result on several devices: expected the bits of one; got others at ratio "
                f"{ratio}, layout {layout}"
            )
