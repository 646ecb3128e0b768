"""Times of competing calls, measured so that their ratios mean something.

All candidates take turns, round after round, so that they meet the same clocks and the same
neighbours on the machine; the median over the rounds counts. On CUDA a candidate is a CUDA graph,
timed with events: the time of the device, not of Python's launches. Eager calls, and those on a CPU
or on several devices or processes, are no graphs: by_clock times several in a row.
"""

import math
import time
from dataclasses import dataclass

import numpy as np
import torch

_MOST_CALLS_A_GRAPH = 10
_GRAPH_MS = 3.0  # a graph of this length hides its launch
_MOST_IN_A_ROW = 50
_ROW_MS = 10.0  # a row of this length hides what the clock and waiting for a device add
_LONG_S = 0.1  # a call of this length warms up by itself


@dataclass(frozen=True)
class Timing:
    """Milliseconds a call: the median over the rounds, and the quartiles' distance."""

    median: float
    spread: float

    def over(self, peer):
        """The figures of a row: the time, the speed over a peer's, if any, and the spread."""
        speedup = None if peer is None else peer.median / self.median
        return {"ms": self.median, "speedup": speedup, "spread": self.spread / self.median}


def interleaved(candidates, device, repeats, *, eager=False):
    """Times {name: call} in turns on a device; gives {name: Timing}. ``eager``: calls as Python
    makes them instead of CUDA graphs.
    """
    if eager or device.type == "cpu":
        return by_clock(candidates, repeats, [device])
    timers = _events(candidates.values())
    return _timings(candidates, [[timer() for timer in timers] for _ in range(repeats)])


def medians(times):
    """{name: milliseconds} of what interleaved and by_clock give."""
    return {name: timing.median for name, timing in times.items()}


def by_clock(candidates, repeats, devices):
    """Times {name: call} in turns; gives {name: Timing} of one call, launches included.
    ``devices``: those that are waited for.
    """

    def in_a_row(counts):
        measured = []
        for call, count in zip(candidates.values(), counts, strict=True):
            synchronize(devices)
            start = time.perf_counter()
            for _ in range(count):
                call()
            synchronize(devices)
            measured.append(1e3 * (time.perf_counter() - start) / count)
        return measured

    once = [1] * len(candidates)
    in_a_row(once)  # warms up
    counts = [min(_MOST_IN_A_ROW, math.ceil(_ROW_MS / single)) for single in in_a_row(once)]
    return _timings(candidates, [in_a_row(counts) for _ in range(repeats)])


def synchronize(devices):
    """Waits until devices are done."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def _timings(names, rounds):
    """{name: Timing} of what the rounds measured, a list of milliseconds each."""
    low, median, high = np.quantile(rounds, (0.25, 0.5, 0.75), axis=0)
    pairs = zip(median.tolist(), (high - low).tolist(), strict=True)
    return {name: Timing(*pair) for name, pair in zip(names, pairs, strict=True)}


def _events(calls):
    """For each call a function that makes it, as a graph, and gives the milliseconds it took; the
    graphs share their memory.
    """
    pool = torch.cuda.graph_pool_handle()

    def timer_of(call):
        _warm_up(call)
        count = _calls_a_graph(call)
        graph = _captured(call, pool, count)
        return lambda: _elapsed(graph.replay) / count

    return [timer_of(call) for call in calls]


def _warm_up(call):
    """Calls before a capture: cuDNN picks its algorithm and libraries initialise."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            start = time.perf_counter()
            call()
            side.synchronize()
            if time.perf_counter() - start > _LONG_S:
                break
    torch.cuda.current_stream().wait_stream(side)


def _elapsed(call):
    """The device's milliseconds for a call."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def _calls_a_graph(call):
    """So many that the graph's own launch does not count, and no more: large calls take long."""
    return min(math.ceil(_GRAPH_MS / _elapsed(call)), _MOST_CALLS_A_GRAPH)


def _captured(call, pool, calls):
    """A graph of several calls, replayed once."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        for _ in range(calls):
            call()
    graph.replay()
    return graph
