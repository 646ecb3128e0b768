"""Processes that own a part each, and what they measure together.

They live as long as jobs succeed. A job that fails, or does not end in time, ends them, for they
may be waiting for each other; the next job starts new ones. Each process makes the same operands on
its own device, and keeps its rows of them.
"""

import contextlib
import datetime
import functools
import itertools
import multiprocessing
import signal
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path

import torch
import torch.distributed as dist

import spamm_torch
from cases import shards
from common.timing import by_clock
from models.errors import first_line

_START_S = 180  # a cold machine reads torch from disk
_JOB_S = 60
_MOST_FAILURES = 2  # of one job: then it is not tried again, for each takes up to _JOB_S
_TIMEOUT = datetime.timedelta(seconds=60)  # of a collective that a rank does not enter


class Ranks:
    """As a context manager: the processes, which start with the first job."""

    def __init__(self, devices):
        self._devices = devices
        self._running = None  # [(process, pipe)]
        self._folder = None
        self._failures = {}  # job -> [what it said]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._stop()

    def do(self, job, *arguments):
        """What the first rank returns from a job that all do.

        Args:
            job: a name in JOBS. arguments: what it takes, beside its place.

        Raises:
            RuntimeError: a rank failed, ended or did not answer in time; or the job has failed so
                before.
        """
        failures = self._failures.setdefault(job, [])
        if len(failures) >= _MOST_FAILURES:
            raise RuntimeError(f"not tried again after: {failures[-1]}")
        try:
            if self._running is None:
                self._start()
            return self._answers((job, arguments), _JOB_S)[0]
        except RuntimeError as error:
            failures.append(first_line(error))
            self._stop()
            raise
        except BaseException:
            self._stop()
            raise

    def _start(self):
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        store = Path(self._folder.name, "store")
        self._running = []
        for rank in range(len(self._devices)):
            here, there = context.Pipe()
            place = (rank, [str(device) for device in self._devices], str(store))
            process = context.Process(target=_serve, args=(there, *place), daemon=True)
            process.start()
            there.close()
            self._running.append((process, here))
        self._answers(None, _START_S)

    def _answers(self, request, seconds):
        """Asks all ranks, and gives what they say in their order."""
        pipes = {pipe: rank for rank, (_, pipe) in enumerate(self._running)}
        for pipe, rank in pipes.items():
            if request is not None:
                with _alive(rank):
                    pipe.send(request)
        answers = {}
        deadline = time.monotonic() + seconds
        while len(answers) < len(pipes):
            waiting = [pipe for pipe, rank in pipes.items() if rank not in answers]
            ready = wait(waiting, max(0, deadline - time.monotonic()))
            if not ready:
                raise RuntimeError(f"the ranks did not answer in {seconds} s")
            for pipe in ready:
                rank = pipes[pipe]
                with _alive(rank):
                    succeeded, answers[rank] = pipe.recv()
                if not succeeded:
                    raise RuntimeError(f"rank {rank}: {answers[rank]}")
        return [answers[rank] for rank in range(len(pipes))]

    def _stop(self):
        for process, pipe in self._running or ():
            pipe.close()
            process.kill()
            process.join()
        self._running = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


@contextlib.contextmanager
def _alive(rank):
    """A RuntimeError where a rank's pipe has no other end any more."""
    try:
        yield
    except (EOFError, ConnectionError):
        raise RuntimeError(f"rank {rank} ended") from None


# ---- In the processes ---------------------------------------------------------------------------


def _serve(pipe, rank, devices, store):
    """A rank: joins the others, says so, then does jobs until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started it ends it
    with contextlib.suppress(EOFError, ConnectionError):
        place, error = _tried(_join, rank, devices, store)
        pipe.send((error is None, error))
        while error is None:
            job, arguments = pipe.recv()
            answer, failure = _tried(JOBS[job], place, *arguments)
            pipe.send((failure is None, failure or answer))


def _tried(call, *arguments):
    """What a call returns, and what it says where it fails."""
    try:
        return call(*arguments), None
    except Exception as error:
        return None, first_line(error)


@dataclass(frozen=True)
class _Place:
    """A rank among ranks."""

    rank: int
    devices: tuple

    @property
    def device(self):
        return self.devices[self.rank]

    def own(self, matrix):
        """This rank's rows of a matrix, in memory of their own."""
        cuts = shards.equal_cuts(len(matrix), len(self.devices))
        first, last = list(itertools.pairwise(cuts))[self.rank]
        return matrix[first:last].contiguous()

    def slowest(self, milliseconds):
        """The largest number of all ranks in each place of a list; waits for them."""
        numbers = torch.tensor(milliseconds, dtype=torch.float64, device=self.device)
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
        return numbers.tolist()

    def time(self, candidates, repeats, product):
        """Timings of candidates that all ranks call."""
        return by_clock(candidates, repeats, product.synchronize, agree=self.slowest)


def _join(rank, devices, store):
    """Joins the ranks that meet in the file ``store``; gives the place among them."""
    place = _Place(rank, tuple(map(torch.device, devices)))
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
    return shards.Product(data, precision, n, [device])


@torch.no_grad()
def _multiply(place, cell, repeats):
    """The figures of spamm_torch.distributed.mm; one device is the first rank's."""
    from spamm_torch import distributed

    product = _product(place.device, *cell.product)
    tau = product.tau(cell.ratio)
    a, b = place.own(product.a), place.own(product.b)
    call = functools.partial(distributed.mm, a, b, tau=tau)
    expected = place.own(spamm_torch.mm(product.a, product.b, tau=tau))
    differ = 0.0 if torch.equal(call(), expected) else 1.0
    one = functools.partial(spamm_torch.mm, product.a, product.b, tau=tau)
    # The other ranks do nothing while the first measures by itself.
    candidates = {"one": one if place.rank == 0 else lambda: None, "all": call}
    times = place.time(candidates, repeats, product)
    cuts = shards.equal_cuts(len(product.a), len(place.devices))
    traffic = shards.sent(product, cell.ratio, cuts)
    equal = place.slowest([differ]) == [0.0]
    return shards.figures(product.valid_ratio(cell.ratio), times, equal, **traffic)


@torch.no_grad()
def _dtensor(place, cell, repeats):
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


JOBS = {"ranks": _multiply, "DTensor": _dtensor}
