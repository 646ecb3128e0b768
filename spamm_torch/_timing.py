"""Times of calls, for choosing between them: medians of interleaved rounds, and how they vary."""

import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, TypeAlias

import torch

MUST_WIN = 1.03  # how many times as fast another engine than dense has to be

_ATTEMPTS = 3  # at rounds that vary little
_STEADY = 1.25  # the largest spread of times that are not measured again
_CUDA_REPEATS = 15
_CPU_REPEATS = (3, 50)  # the least and the most; short calls are repeated more often
_CPU_SECONDS = 0.1  # for each call
_L2_BYTES = 1 << 27  # more than the L2 of any GPU that is served
_MOST_CYCLES = 1 << 30  # of a wait on the device: about half a second

Call: TypeAlias = Callable[[], Any]
Mark: TypeAlias = Callable[[Any], None]  # gets what tells a part from others
Marking: TypeAlias = Callable[[Mark], Any]
Run: TypeAlias = Callable[[], dict[Any, float]]  # microseconds of one round, by part


@dataclass(frozen=True)
class Timing:
    """The median in microseconds over rounds, and the upper quartile as a multiple of the lower."""

    median: float
    spread: float = 1.0

    @property
    def is_steady(self) -> bool:
        """Tells whether the rounds agree well enough to choose by them."""
        return self.spread <= _STEADY

    def beats(self, other: "Timing", least: float = MUST_WIN) -> bool:
        """Tells whether it is ``least`` times as fast, and faster by more than either varies."""
        return self.median * max(least, self.spread, other.spread) < other.median

    def __str__(self) -> str:
        return f"{self.median:.0f} us ±{50 * (self.spread - 1):.0f}%"


def times_of(calls: Sequence[Call], device: torch.device) -> list[Timing]:
    """The time of each call, in turns; on CUDA as a graph if it can be, with a cold L2 cache."""
    if device.type != "cuda":
        runs = [_cpu_run(lambda _, call=call: call()) for call in calls]  # type: ignore[misc]
        return [found[""] for found in _steadiest(runs, device)]
    with torch.cuda.device(device):
        flushed = torch.empty(_L2_BYTES, dtype=torch.int8, device="cuda")
        runs = [_cold_run(call, flushed) for call in calls]
        return [found[""] for found in _steadiest(runs, device)]


def times_of_parts(call: Marking, device: torch.device) -> dict[Any, Timing]:
    """The times of the parts of a call, which names each part to the function it gets, where that
    begins; a part ends where the next begins, and the first one is "". On CUDA the device waits
    until the host is ahead, so that the host does not count.
    """
    if device.type != "cuda":
        return _steadiest([_cpu_run(call)], device)[0]
    with torch.cuda.device(device):
        return _steadiest([_queued_run(call)], device)[0]


def _steadiest(runs: Sequence[Run], device: torch.device) -> list[dict[Any, Timing]]:
    """The times by part of each run, from the rounds whose totals vary least."""
    best, least = [], float("inf")
    for _ in range(_ATTEMPTS):
        rounds = [[run() for run in runs] for _ in _rounds(device, len(runs))]
        of_each = list(zip(*rounds, strict=True))
        spread = max(_timing([sum(parts.values()) for parts in of]).spread for of in of_each)
        if spread < least:
            best, least = of_each, spread
        if spread <= _STEADY:
            break
    return [
        {name: _timing([parts[name] for parts in of if name in parts]) for name in of[0]}
        for of in best
    ]


def _timing(times: Sequence[float]) -> Timing:
    low, median, high = statistics.quantiles(times, n=4, method="inclusive")
    return Timing(median, high / low if low > 0 else 1.0)


def _rounds(device: torch.device, count: int) -> Iterator[int]:
    if device.type == "cuda":
        yield from range(_CUDA_REPEATS)
        return
    least, most = _CPU_REPEATS
    end = perf_counter() + count * _CPU_SECONDS
    for repeat in range(most):
        if repeat >= least and perf_counter() > end:
            return
        yield repeat


def _by_part(marks: Sequence[Any], between: Callable[[Any, Any], float]) -> dict[str, float]:
    """The time between each mark and the next one; the last mark ends the last part."""
    found: dict[str, float] = {}
    for (name, start), (_, end) in itertools.pairwise(marks):
        found[name] = found.get(name, 0.0) + between(start, end)
    return found


def _cpu_run(call: Marking) -> Run:
    def run() -> dict[str, float]:
        marks = [("", perf_counter())]
        call(lambda name: marks.append((name, perf_counter())))
        marks.append(("", perf_counter()))
        return _by_part(marks, lambda start, end: 1e6 * (end - start))

    run()  # warms up
    return run


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _microseconds(start: torch.cuda.Event, end: torch.cuda.Event) -> float:
    return 1e3 * start.elapsed_time(end)


def _cold_run(call: Call, flushed: torch.Tensor) -> Run:
    graph = _capture(call)

    def run() -> dict[str, float]:
        flushed.zero_()
        start = _event()
        (graph.replay if graph is not None else call)()
        end = _event()
        end.synchronize()
        return {"": _microseconds(start, end)}

    return run


def _queued_run(call: Marking) -> Run:
    """A run on CUDA whose calls are all in the stream before the device begins with them."""
    call(lambda _: None)
    torch.cuda.synchronize()
    began = perf_counter()
    marks: list[tuple[str, torch.cuda.Event]] = []
    call(lambda name: marks.append((name, _event())))
    cycles = min(_MOST_CYCLES, int(4e9 * (perf_counter() - began)))  # twice as long, at 2 GHz
    torch.cuda.synchronize()

    def run() -> dict[str, float]:
        torch.cuda._sleep(cycles)
        marks = [("", _event())]
        call(lambda name: marks.append((name, _event())))
        marks.append(("", _event()))
        torch.cuda.synchronize()
        return _by_part(marks, _microseconds)

    return run


def _capture(call: Call) -> torch.cuda.CUDAGraph | None:
    """The call as a graph; None where it cannot be one."""
    call()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.stream(stream):
            for _ in range(2):
                call()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph):
            call()
    except RuntimeError:  # it waits for the device, say
        torch.cuda.synchronize()
        return None
    return graph
