"""Times of calls, for choosing between them: medians of interleaved rounds, and how they vary."""

import contextlib
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
_L2_FLOATS = 1 << 25  # floats: more than the L2 of any GPU that is served
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
    """The time of each call, in turns; on CUDA with a cold L2 cache."""
    flushed = torch.empty(_L2_FLOATS if device.type == "cuda" else 0, device=device)

    def run(mark: Mark) -> None:
        for number, call in enumerate(calls):
            flushed.zero_()
            mark(number)
            call()
            mark("")

    found = times_of_parts(run, device, len(calls))
    return [found[number] for number in range(len(calls))]


def times_of_parts(call: Marking, device: torch.device, count: int = 0) -> dict[Any, Timing]:
    """The times of the parts of a call, which names each part to the function it gets, where that
    begins; a part ends where the next begins, and the first one is "". From the rounds that vary
    least, by their totals, or by that of a ``count`` of numbered parts that varies most. On CUDA
    the device waits until the host is ahead, so that the host does not count.
    """
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        run = (_queued_run if device.type == "cuda" else _cpu_run)(call)
        best: list[dict[Any, float]] = []
        least = float("inf")
        for _ in range(_ATTEMPTS):
            rounds = [run() for _ in _rounds(device, max(1, count))]
            judged = [[parts[number] for parts in rounds] for number in range(count)]
            judged = judged or [[sum(parts.values()) for parts in rounds]]
            spread = max(_timing(times).spread for times in judged)
            if spread < least:
                best, least = rounds, spread
            if spread <= _STEADY:
                break
    return {name: _timing([parts[name] for parts in best if name in parts]) for name in best[0]}


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
        return _by_part(marks, lambda start, end: 1e3 * start.elapsed_time(end))

    return run
