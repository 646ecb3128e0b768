"""Times of competing calls, measured so that their ratios mean something.

All candidates take turns, round after round, so that they meet the same clocks and the same
neighbours on the machine; the median over the rounds counts. On CUDA a candidate is a CUDA graph,
timed with events: the time of the device, not of Python's launches. Eager calls, on request, are
timed by the clock, several in a row until the device is done.
"""

import math
import time
from dataclasses import dataclass

import numpy as np
import torch

_MOST_CALLS_A_GRAPH = 10
_GRAPH_MS = 3.0  # a graph of this length hides its launch
_MOST_IN_A_ROW = 50  # eager calls
_ROW_S = 0.05  # a row of this length hides what the clock and waiting for the device add
_LONG_S = 0.1  # a call of this length warms up by itself
_FLUSH_BYTES = 256 << 20  # more than any L2 cache


@dataclass(frozen=True)
class Timing:
    """Milliseconds a call: the median over the rounds, and the quartiles' distance."""

    median: float
    spread: float


def interleaved(candidates, device, repeats, *, cold=False, eager=False):
    """Times {name: call} in turns; gives {name: Timing}.

    Args:
        candidates: calls without arguments.
        device: where they run.
        repeats: number of rounds.
        cold: empty the L2 cache before each call (CUDA only).
        eager: calls as Python makes them instead of CUDA graphs.
    """
    if device.type == "cpu":
        timers_of = _wall_clock
    else:
        timers_of = _eager if eager else _cold_events if cold else _events
    timers = dict(zip(candidates, timers_of(candidates.values()), strict=True))
    times = {name: [] for name in candidates}
    for _ in range(repeats):
        for name, timer in timers.items():
            times[name].append(timer())
    return {name: summary(measured) for name, measured in times.items()}


def summary(times):
    """The Timing of what the rounds measured."""
    low, median, high = np.quantile(times, (0.25, 0.5, 0.75)).tolist()
    return Timing(median, high - low)


def _wall_clock(calls):
    """For each call a function that makes it and gives the milliseconds it took; warmed up."""

    def timer_of(call):
        def timer():
            start = time.perf_counter()
            call()
            return 1e3 * (time.perf_counter() - start)

        return timer

    for call in calls:
        call()
    return [timer_of(call) for call in calls]


def _eager(calls):
    """As above on CUDA, per call of several in a row, launches and device included."""

    def seconds(call, count):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            call()
        torch.cuda.synchronize()
        return time.perf_counter() - start

    def timer_of(call):
        count = min(_MOST_IN_A_ROW, math.ceil(_ROW_S / seconds(call, 1)))
        return lambda: 1e3 * seconds(call, count) / count

    for call in calls:
        call()
    return [timer_of(call) for call in calls]


def _events(calls):
    """As above on CUDA, per call of a graph; the graphs take turns and share their memory."""
    pool = torch.cuda.graph_pool_handle()

    def timer_of(call):
        _warm_up(call)
        count = _calls_a_graph(call)
        return _event_timer(_captured(call, pool, count), count)

    return [timer_of(call) for call in calls]


def _cold_events(calls):
    """As above with one call a graph, and the L2 cache overwritten before each."""
    pool = torch.cuda.graph_pool_handle()
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def timer_of(call):
        _warm_up(call)
        return _event_timer(_captured(call, pool, 1), 1, before=flush.zero_)

    return [timer_of(call) for call in calls]


def _event_timer(graph, calls, before=lambda: None):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def timer():
        before()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / calls

    return timer


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


def _calls_a_graph(call):
    """So many that the graph's own launch does not count, and no more: large calls take long."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return min(math.ceil(_GRAPH_MS / start.elapsed_time(end)), _MOST_CALLS_A_GRAPH)


def _captured(call, pool, calls):
    """A graph of several calls, replayed once."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        for _ in range(calls):
            call()
    graph.replay()
    return graph
