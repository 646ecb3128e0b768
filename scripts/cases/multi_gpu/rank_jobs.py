"""What processes that own a part each measure together; runs in these processes.

Each makes the same operands on its own device, and keeps its rows of them.
"""

import datetime
import functools
import itertools
from dataclasses import dataclass

import torch
import torch.distributed as dist

import spamm_torch
from cases.multi_gpu import layouts
from cases.multi_gpu.product import Product, equal_cuts
from common.clock import by_clock

_TIMEOUT = datetime.timedelta(seconds=60)  # of a collective that a rank does not enter


@dataclass(frozen=True)
class Place:
    """A rank among ranks."""

    rank: int
    devices: tuple

    @property
    def device(self):
        return self.devices[self.rank]

    def own(self, matrix, dim=0):
        """This rank's share of a matrix, in memory of its own."""
        cuts = equal_cuts(matrix.shape[dim], len(self.devices))
        first, last = list(itertools.pairwise(cuts))[self.rank]
        return matrix.narrow(dim, first, last - first).contiguous()

    def slowest(self, milliseconds):
        """The largest number of all ranks in each place of a list; waits for them."""
        numbers = torch.tensor(milliseconds, dtype=torch.float64, device=self.device)
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
        return numbers.tolist()

    def time(self, candidates, repeats, product):
        """Timings of candidates that all ranks call."""
        return by_clock(candidates, repeats, product.synchronize, agree=self.slowest)


def join(rank, devices, store):
    """Joins the ranks that meet in the file ``store``; gives the Place among them."""
    place = Place(rank, tuple(map(torch.device, devices)))
    on_gpu = place.device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(place.device)
    else:
        torch.set_num_threads(max(1, torch.get_num_threads() // len(devices)))
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=len(devices),
        timeout=_TIMEOUT,
        device_id=place.device if on_gpu else None,
    )
    place.slowest([0.0])  # connects the ranks
    return place


@functools.lru_cache(maxsize=1)
def _product(device, data, precision, n):
    return Product(data, precision, n, [device])


@torch.no_grad()
def multiply(place, cell, repeats):
    """The figures of spamm_torch.distributed.mm; one device is the first rank's."""
    from spamm_torch import distributed

    product = _product(place.device, *cell.product)
    tau = product.tau(cell.ratio)
    a, b = place.own(product.a), place.own(product.b)
    call = functools.partial(distributed.mm, a, b, tau=tau)
    expected = place.own(spamm_torch.mm(product.a, product.b, tau=tau))
    differ = 0.0 if torch.equal(call(), expected) else 1.0
    one = functools.partial(spamm_torch.mm, product.a, product.b, tau=tau)
    candidates = {"one": one if place.rank == 0 else _nothing, "all": call}
    times = place.time(candidates, repeats, product)
    cuts = equal_cuts(len(product.a), len(place.devices))
    traffic = layouts.sent(product, cell.ratio, cuts)
    equal = place.slowest([differ]) == [0.0]
    return layouts.figures(product.valid_ratio(cell.ratio), times, equal, **traffic)


def _nothing():
    """What the other ranks do while one measures by itself."""


@torch.no_grad()
def dtensor(place, cell, repeats):
    """The Timing of torch's own product of DTensors in rows, C in rows, too.

    The faster of two ways: what a @ b does by itself, which may be to move A and to add partial
    sums; and B gathered on each rank before.
    """
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    product = _product(place.device, *cell.product)
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


@torch.no_grad()
def symm_mem(place, cell, repeats):
    """The Timing of torch's all-gather and product in one: A in rows, B and C in columns.

    As many bytes travel and as much is multiplied as with B in rows.
    """
    from torch.distributed import _symmetric_memory  # noqa: F401  defines the op

    group = dist.group.WORLD.group_name
    product = _product(place.device, *cell.product)
    a, b = place.own(product.a), place.own(product.b, dim=1)
    call = lambda: torch.ops.symm_mem.fused_all_gather_matmul(  # noqa: E731
        a, [b], 0, group, return_A=False
    )
    return place.time({"call": call}, repeats, product)["call"]
