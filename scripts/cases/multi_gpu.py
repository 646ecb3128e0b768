"""mm on several devices against one, and other libraries' products.

Layouts: R, rows of A on each device and the whole of B on each; S, rows of A and of B
on each; 0, operands and result on the first device; H, in pinned host memory; ranks, as S with one
process a device. Each result must have the bits of one device's. A cell that cannot be measured is
a row that says why: on a CPU, where the parts share it, those that need GPUs.
"""

import datetime
import functools
import itertools
import multiprocessing
import tempfile
from functools import cached_property, partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

import spamm_torch
from cases import block_sparse
from cases.block_sparse import BLOCK
from common import options as cli
from common.machine import use_precision
from common.measuring import cell
from common.operands import DATA, operands
from common.timing import by_clock, host_time
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
    "cpu": {"sizes": (256, 512), "sweep": (), "data": ("decay", "normal"), "repeats": 3},
    "cuda": {"sizes": (8192, 16384, 32768), "sweep": _SWEEP, "data": DATA, "repeats": 5},
}
_OVERHEAD_ROUNDS = 51


def add_options(parser):
    cli.add_device_option(parser)
    what = "number of devices; on a CPU, of parts that share it"
    several = cli.number(int, lambda value: value >= 2, "an integer of 2 or more")
    cli.add(parser, "--parts", what, 2, type=several)
    what = "edges of the square matrices; layouts H and ranks at the largest only"
    cli.add_numbers(parser, "--sizes", what, DEFAULTS, "N")
    what = "more sizes, in R and S at the smallest ratio, to see from where on it pays"
    cli.add_numbers(parser, "--sweep", what, DEFAULTS, "N", nargs="*")
    what = "as of common/operands.py; all layouts with the first"
    cli.add_choices(parser, "--data", what, DEFAULTS, DATA)
    cli.add_choices(parser, "--layouts", "where operands lie", LAYOUTS, LAYOUTS, nargs="*")
    cli.add_ratios_option(parser, RATIOS)
    kind = {"metavar": "COUNT", "type": cli.natural_number, "nargs": "+"}
    what = "waters of clusters whose block-sparse S is squared by ranks; 0: none"
    cli.add(parser, "--waters", what, (0,), **kind)
    cli.add(parser, "--density", "waters of those that ranks purify; 0: none", (0,), **kind)
    cli.add_repeats_option(parser, DEFAULTS)


# ---- Cells --------------------------------------------------------------------------------------


def cells(options):
    """The largest products first; those of one follow each other."""
    devices, repeats, found = options.devices, options.repeats, {}
    product_of = functools.lru_cache(maxsize=1)(partial(Product, devices=devices))
    everywhere = _EVERYWHERE[devices[0].type]
    slabs = [layout for layout in options.layouts if layout in everywhere]

    def add(layouts, data, precision, n, ratios=options.ratios, peers=True):
        place = {"data": data, "precision": precision, "n": n}
        name = f"{data} {precision} {n}"
        for layout in layouts:
            call = partial(rows, product_of, devices, ratios, repeats)
            found[f"{layout} {name}"] = cell("several devices", call, layout=layout, **place)
        for other in [PEERS[layout] for layout in layouts if layout in PEERS and peers]:
            call = partial(dense_peer, product_of, devices, repeats)
            found[f"{other} {name}"] = cell("several devices, peers", call, peer=other, **place)

    first, sizes = options.data[0], sorted(options.sizes, reverse=True)
    for n, data in itertools.product(sizes, options.data):
        add(options.layouts if (n, data) == (sizes[0], first) else slabs, data, "float16", n)
    if devices[0].type == "cuda":
        n = sizes[:2][-1]
        add(slabs, first, "float32", n)
        add([layout for layout in options.layouts if layout == "H"], first, "float64", n)
    for waters, precision in itertools.product(filter(None, options.waters), STORED_PRECISIONS):
        add(["ranks"], "water", precision, 7 * waters, [min(options.ratios)], peers=False)
    for waters in filter(None, options.density):
        call = partial(run_ranks, density, devices, waters)
        kind = "block-sparse density, ranks"
        found[f"density of {waters} waters"] = cell(kind, lambda n, of=call: of(), n=7 * waters)
    for n in sorted(set(options.sweep) - set(sizes), reverse=True):
        add(slabs, first, "float16", n, [min(options.ratios)], peers=False)
    for layout in [layout for layout in slabs if layout != "0"]:
        call = cell("several devices, overheads", partial(overhead, devices), layout=layout, n=256)
        found[f"overhead {layout}"] = call
    return found


def rows(product_of, devices, ratios, repeats, layout, **product):
    """A row for each ratio; RuntimeError: the layout needs GPUs and there are none; UserError: a
    result has other bits than one device's.
    """
    if layout in NEED_CUDA and devices[0].type != "cuda":
        raise RuntimeError(f"{layout} needs CUDA devices; got {devices[0].type}")
    if layout == "ranks":
        found = run_ranks(multiply, devices, product, ratios, repeats)
    else:
        of = product_of(**product)
        found = [measure(of, layout, ratio, repeats) for ratio in ratios]
    for row in found:
        if not row.pop("equal"):
            raise UserError(f"wrong result on several devices: expected the bits of one; got {row}")
    return found


def measure(product, layout, ratio, repeats):
    """The row of a layout at a ratio."""
    calls = product.calls(layout, ratio)
    equal = product.is_same(ratio, calls["all"]())
    return figures(product, ratio, by_clock(calls, repeats, product.devices), equal)


def figures(product, ratio, times, equal):
    """A row from the Timings "one" and "all"."""
    one, every = times["one"], times["all"]
    return {
        "ratio": ratio,
        "valid_ratio": product.valid_ratio(ratio),
        "one_ms": one.median,
        "all_ms": every.median,
        "spread": every.spread / every.median,
        "speedup": one.median / every.median,
        "equal": equal,
    }


def dense_peer(product_of, devices, repeats, peer, **product):
    """The row of another library's dense product on all devices."""
    if peer == "DTensor":
        timing = run_ranks(dtensor, devices, product, repeats)
    else:
        of = product_of(**product)
        cuts = equal_cuts(len(of.a), len(devices))
        pairs = list(zip(split(of.a, cuts, devices), of.b_everywhere, strict=True))
        calls = {"call": lambda: [torch.mm(*pair) for pair in pairs]}
        timing = by_clock(calls, repeats, devices)["call"]
    return [{"ms": timing.median, "spread": timing.spread / timing.median}]


def overhead(devices, layout, n):
    """The host's microseconds for a product that is next to none."""
    calls = Product("decay", "float16", n, devices).calls(layout, 1.0)
    times = {name: host_time(call, _OVERHEAD_ROUNDS, devices) for name, call in calls.items()}
    return [{f"{name}_us": 1e3 * ms for name, ms in times.items()}]


# ---- Products with operands on several devices --------------------------------------------------


def equal_cuts(rows, parts, block=BLOCK):
    """parts + 1 numbers of rows, or of images, of parts equal to a block."""
    blocks = -(-rows // block)
    return [min(rows, block * (blocks * part // parts)) for part in range(parts + 1)]


def split(matrix, cuts, devices):
    """The rows between the cuts, each on its part's device."""
    pairs = zip(itertools.pairwise(cuts), devices, strict=True)
    return [matrix[first:last].to(device) for (first, last), device in pairs]


class Product:
    """A @ B of operands, or S S for "water"; a layout makes what it needs at its first use."""

    def __init__(self, data, precision, n, devices):
        self.devices = devices
        dtype = use_precision(precision)
        if data == "water":  # block-sparse
            self.a = self.b = block_sparse.overlap_of(n, dtype, devices[0])
        else:
            self.a, self.b = operands(data, n, dtype, devices[0])
        self.norm_a = self.norm_b = spamm_torch.norm_map(self.a)
        if self.b is not self.a:
            self.norm_b = spamm_torch.norm_map(self.b)
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

    def is_same(self, ratio, result):
        """Tells whether C, or its rows in shards, are what one device gives, bit for bit."""
        shards = result if isinstance(result, (list, tuple)) else [result]
        expected = spamm_torch.mm(self.a, self.b, tau=self.tau(ratio))
        expected = expected.split([len(shard) for shard in shards])
        pairs = zip(shards, expected, strict=True)
        return all(torch.equal(shard.to(rows.device), rows) for shard, rows in pairs)


# ---- Processes that own a part each -------------------------------------------------------------

# They live as long as one job. Each makes the same operands on its device, and keeps its rows.

_TIMEOUT = datetime.timedelta(seconds=180)  # of a collective that a rank does not enter


def run_ranks(job, devices, *arguments):
    """Returns what the first rank returns from a job, a function of this module, that all do, one
    on each device; RuntimeError: a rank failed or ended.
    """
    answers = multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        given = (job, [*map(str, devices)], f"{folder}/store", answers, arguments)
        try:
            # As daemons they end with this process, also where Ctrl-C ends it.
            torch.multiprocessing.spawn(_rank, given, nprocs=len(devices), daemon=True)
        except (ProcessRaisedException, ProcessExitedException) as error:
            last = str(error).strip().splitlines()[-1]
            raise RuntimeError(f"rank {error.error_index}: {last}") from None
    return answers.get()


class _Place(NamedTuple):
    """A rank among ranks."""

    rank: int
    devices: list

    @property
    def device(self):
        return torch.device(self.devices[self.rank])

    def own(self, matrix):
        """This rank's rows of a matrix, in memory of their own."""
        first, last = equal_cuts(len(matrix), len(self.devices))[self.rank : self.rank + 2]
        if matrix.layout == torch.strided:
            return matrix[first:last].contiguous()
        return block_sparse.block_rows(matrix, first // BLOCK, last // BLOCK)

    def slowest(self, milliseconds):
        """The largest number of all ranks in each place of a list; waits for them."""
        numbers = torch.tensor(milliseconds, dtype=torch.float64, device=self.device)
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
        return numbers.tolist()

    def time(self, candidates, repeats):
        """Timings of candidates that all ranks call."""
        return by_clock(candidates, repeats, [self.device], agree=self.slowest)


def _rank(rank, job, devices, store, answers, arguments):
    """A process: joins those that meet in the file ``store``, and does the job."""
    place = _Place(rank, devices)
    on_gpu = place.device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(place.device)
    else:
        torch.set_num_threads(max(1, torch.get_num_threads() // len(devices)))
    met = {"init_method": f"file://{store}", "rank": rank, "world_size": len(devices)}
    met |= {"timeout": _TIMEOUT, "device_id": place.device if on_gpu else None}
    dist.init_process_group("nccl" if on_gpu else "gloo", **met)
    with torch.no_grad():
        found = job(place, *arguments)
    if rank == 0:
        answers.put(found)
    dist.destroy_process_group()


def multiply(place, of_product, ratios, repeats):
    """Rows of spamm_torch.distributed.mm; one device is the first rank's."""
    product, found = Product(**of_product, devices=[place.device]), []
    a = place.own(product.a)
    b = a if product.b is product.a else place.own(product.b)
    for ratio in ratios:
        tau = product.tau(ratio)
        call = partial(spamm_torch.distributed.mm, a, b, tau=tau)
        one = partial(spamm_torch.mm, product.a, product.b, tau=tau)
        differ = 0.0 if _equal(call(), place.own(one())) else 1.0
        # The other ranks do nothing while the first measures by itself.
        candidates = {"one": one if place.rank == 0 else lambda: None, "all": call}
        times = place.time(candidates, repeats)
        found.append(figures(product, ratio, times, place.slowest([differ]) == [0.0]))
    return found


def _equal(x, y):
    if x.layout == torch.strided:
        return torch.equal(x, y)
    parts = torch.Tensor.crow_indices, torch.Tensor.col_indices, torch.Tensor.values
    return all(torch.equal(of(x), of(y)) for of in parts)


def density(place, waters):
    """The row of a density matrix whose block rows lie on the ranks; memory is the first's."""
    return block_sparse.density(waters, place.device, 1, dist.group.WORLD)


def dtensor(place, of_product, repeats):
    """The Timing of torch's own product of DTensors in rows, C in rows, too: the faster of what a @
    b does by itself, which may be to move A and to add partial sums, and B gathered before.
    """
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    product = Product(**of_product, devices=[place.device])
    mesh = init_device_mesh(place.device.type, (len(place.devices),))
    a, b = (
        distribute_tensor(matrix, mesh, [Shard(0)], src_data_rank=None)
        for matrix in (product.a, product.b)
    )
    calls = {
        "by itself": lambda: (a @ b).redistribute(placements=[Shard(0)]),
        "gathered": lambda: a @ b.redistribute(placements=[Replicate()]),
    }
    return min(place.time(calls, repeats).values(), key=lambda timing: timing.median)
