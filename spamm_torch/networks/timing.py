"""Times of calls, for choosing between them: medians of interleaved runs, cold L2 on CUDA."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

_CUDA_REPEATS = 15
_CPU_REPEATS = (5, 50)  # the least and the most; short calls are repeated more often
_CPU_SECONDS = 0.2
_L2_BYTES = 1 << 27  # more than the L2 of any GPU that is served

Call = Callable[[], Any]


def times_of(calls: Sequence[Call], device: torch.device) -> list[float]:
    """Microseconds of each call: medians, one run of each in turn.

    On CUDA each call is captured into a graph, so that the host does not count, and the L2 cache is
    flushed between runs; a call that cannot be captured is run as it is. On the CPU the least time
    counts, since others only add to it.
    """
    for call in calls:
        call()
    if device.type != "cuda":
        return _cpu_times(calls)
    with torch.cuda.device(device):
        return _cuda_times([_captured(call) for call in calls])


def _cpu_times(calls: Sequence[Call]) -> list[float]:
    times: list[list[float]] = [[] for _ in calls]
    least, most = _CPU_REPEATS
    end = time.perf_counter() + _CPU_SECONDS
    for repeat in range(most):
        if repeat >= least and time.perf_counter() > end:
            break
        for found, call in zip(times, calls, strict=True):
            start = time.perf_counter()
            call()
            found.append(1e6 * (time.perf_counter() - start))
    return [min(found) for found in times]


def _captured(call: Call) -> Call:
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
        return call
    return graph.replay


def _cuda_times(calls: Sequence[Call]) -> list[float]:
    flushed = torch.empty(_L2_BYTES, dtype=torch.int8, device="cuda")
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(_CUDA_REPEATS):
        for found, call in zip(times, calls, strict=True):
            flushed.zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            end.synchronize()
            found.append(1e3 * start.elapsed_time(end))
    return [statistics.median(found) for found in times]
