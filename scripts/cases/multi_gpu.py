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
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

import spamm_torch
from cases import block_sparse, shards
from cases.block_sparse import BLOCK
from common import options as cli
from common.measuring import cell
from common.operands import DATA
from common.timing import by_clock
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
            rows = run_ranks(multiply, self._devices, product, ratios, self._repeats)
            return same_as_one(rows)
        bandwidth = self._bandwidth() if layout == "H" else None
        given = layout, self._product(**product)
        return same_as_one(
            {"ratio": ratio} | shards.measure(*given, ratio, self._repeats, bandwidth)
            for ratio in ratios
        )

    def density(self, waters):
        return run_ranks(density, self._devices, waters, 5e-8)

    def peer(self, peer, **product):
        if peer == "DTensor":
            timing = run_ranks(dtensor, self._devices, product, self._repeats)
        else:
            timing = shards.torch_mm(self._product(**product), self._repeats)
        return [{"ms": timing.median, "spread": timing.spread / timing.median}]

    def overhead(self, layout, n):
        """The host's time for a product that is next to none."""
        return [shards.overhead(layout, self._product(**_TINY, n=n))]


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
        first, last = shards.equal_cuts(len(matrix), len(self.devices))[self.rank : self.rank + 2]
        if matrix.layout == torch.strided:
            return matrix[first:last].contiguous()
        return block_sparse.block_rows(matrix, first // BLOCK, last // BLOCK)

    def slowest(self, milliseconds):
        """The largest number of all ranks in each place of a list; waits for them."""
        numbers = torch.tensor(milliseconds, dtype=torch.float64, device=self.device)
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
        return numbers.tolist()

    def time(self, candidates, repeats, product):
        """Timings of candidates that all ranks call."""
        return by_clock(candidates, repeats, product.devices, agree=self.slowest)


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
    from spamm_torch import distributed

    product, rows = shards.Product(**of_product, devices=[place.device]), []
    a = place.own(product.a)
    b = a if product.b is product.a else place.own(product.b)
    cuts = shards.equal_cuts(len(product.a), len(place.devices))
    for ratio in ratios:
        tau = product.tau(ratio)
        call = functools.partial(distributed.mm, a, b, tau=tau)
        one = functools.partial(spamm_torch.mm, product.a, product.b, tau=tau)
        differ = 0.0 if _equal(call(), place.own(one())) else 1.0
        # The other ranks do nothing while the first measures by itself.
        candidates = {"one": one if place.rank == 0 else lambda: None, "all": call}
        times = place.time(candidates, repeats, product)
        equal = place.slowest([differ]) == [0.0]
        traffic = shards.sent(product.norm_a, product.norm_b, tau, cuts)
        rows.append(
            {"ratio": ratio} | shards.figures(product.valid_ratio(ratio), times, equal, **traffic)
        )
    return rows


def _equal(x, y):
    if x.layout == torch.strided:
        return torch.equal(x, y)
    parts = torch.Tensor.crow_indices, torch.Tensor.col_indices, torch.Tensor.values
    return all(torch.equal(of(x), of(y)) for of in parts)


def density(place, waters, max_error):
    """The row of a density matrix whose block rows lie on the ranks; memory is the first's."""
    return block_sparse.density(waters, max_error, place.device, 1, dist.group.WORLD)


def dtensor(place, of_product, repeats):
    """The Timing of torch's own product of DTensors in rows, C in rows, too: the faster of what a @
    b does by itself, which may be to move A and to add partial sums, and B gathered before.
    """
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    product = shards.Product(**of_product, devices=[place.device])
    mesh = init_device_mesh(place.device.type, (len(place.devices),))
    a, b = (
        distribute_tensor(matrix, mesh, [Shard(0)], src_data_rank=None)
        for matrix in (product.a, product.b)
    )
    calls = {
        "by itself": lambda: (a @ b).redistribute(placements=[Shard(0)]),
        "gathered": lambda: a @ b.redistribute(placements=[Replicate()]),
    }
    return min(place.time(calls, repeats, product).values(), key=lambda timing: timing.median)
