"""Products of processes that own a part each, and what they measure together.

Processes live as long as one job. Each makes the same operands on its device, and keeps its rows.
"""

import datetime
import functools
import multiprocessing
import tempfile
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

import spamm_torch
from cases import block_sparse, shards
from cases.block_sparse import BLOCK
from common.timing import by_clock

_FAILURES = ProcessRaisedException, ProcessExitedException
_TIMEOUT = datetime.timedelta(seconds=180)  # of a collective that a rank does not enter


def run(job, devices, *arguments):
    """Returns what the first rank returns from a job, a function of this module, that all do, one
    on each device; RuntimeError: a rank failed or ended.
    """
    answers = multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        given = (job, [*map(str, devices)], f"{folder}/store", answers, arguments)
        try:
            # As daemons they end with this process, also where Ctrl-C ends it.
            torch.multiprocessing.spawn(_rank, given, nprocs=len(devices), daemon=True)
        except _FAILURES as error:
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
