"""Times of calls that use several devices, or several processes: eager, and by the clock.

Such a call cannot be a CUDA graph, for it waits for its devices. As in common.timing, candidates
take turns and the median over the rounds counts. A timing is of several calls in a row, so that
neither the clock nor waiting for the devices counts.
"""

import math
import time

import torch

from common.timing import summary

_ROW_MS = 10.0  # a row of this length hides what the clock and waiting for a device add
_MOST_CALLS = 50  # in a row


def by_clock(candidates, repeats, synchronize, agree=lambda times: times):
    """Times {name: call} in turns; gives {name: Timing} of one call, launches included.

    Args:
        candidates: calls without arguments. repeats: number of rounds.
        synchronize: waits until the devices are done.
        agree: for processes that measure together: waits for the others, and makes one list of
            milliseconds, the same for all, of a list from each.
    """

    def in_a_row(counts):
        measured = []
        for call, count in zip(candidates.values(), counts, strict=True):
            agree([0.0])
            synchronize()
            start = time.perf_counter()
            for _ in range(count):
                call()
            synchronize()
            measured.append(_milliseconds(start) / count)
        return agree(measured)

    once = [1] * len(candidates)
    in_a_row(once)  # warms up
    counts = [_calls_in_a_row(single) for single in in_a_row(once)]
    rounds = [in_a_row(counts) for _ in range(repeats)]
    columns = zip(*rounds, strict=True)
    return {name: summary(times) for name, times in zip(candidates, columns, strict=True)}


def side_by_side(calls, devices, repeats):
    """Milliseconds of each call on its device while the others run; on CPUs, one after the other.

    Args:
        calls: one for each device; none waits for its device. devices: of one type.
        repeats: number of rounds, whose median counts.
    """
    timed = _timed_on_cpus if devices[0].type == "cpu" else _timed_on_gpus
    timed(calls, devices, 1)  # warms up
    count = _calls_in_a_row(max(timed(calls, devices, 1)))
    rounds = [timed(calls, devices, count) for _ in range(repeats)]
    return [summary(times).median for times in zip(*rounds, strict=True)]


def host_time(call, repeats, synchronize):
    """Milliseconds until a call returns to Python, its devices being idle before: the median."""

    def once():
        synchronize()
        start = time.perf_counter()
        call()
        return _milliseconds(start)

    once()  # warms up
    return summary([once() for _ in range(repeats)]).median


def _timed_on_cpus(calls, _, count):
    measured = []
    for call in calls:
        start = time.perf_counter()
        for _ in range(count):
            call()
        measured.append(_milliseconds(start) / count)
    return measured


def _timed_on_gpus(calls, devices, count):
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in devices]
    for call, device, (start, end) in zip(calls, devices, events, strict=True):
        with torch.cuda.device(device):
            start.record()
            for _ in range(count):
                call()
            end.record()
    for _, end in events:
        end.synchronize()
    return [start.elapsed_time(end) / count for start, end in events]


def _milliseconds(start):
    return 1e3 * (time.perf_counter() - start)


def _calls_in_a_row(single):
    """So many calls of ``single`` milliseconds that a row of them is long enough."""
    return min(_MOST_CALLS, max(1, math.ceil(_ROW_MS / single)))
