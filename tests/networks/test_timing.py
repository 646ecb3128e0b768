"""Times of calls: medians and spreads on a clock of the test's own."""

import itertools
from contextlib import contextmanager

import pytest
import torch

from spamm_torch import _timing as timing
from spamm_torch._timing import Timing, times_of, times_of_parts

CPU = torch.device("cpu")
US = 1e-6


class Clock:
    """Stands still but for what calls take."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def takes(self, *microseconds):
        """A call that takes these times, one after the other and over again."""
        times = itertools.cycle(microseconds)

        def call():
            self.now += US * next(times)

        return call


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(timing, "perf_counter", clock)
    monkeypatch.setattr(timing, "_CPU_REPEATS", (5, 5))
    return clock


def test_medians_and_spreads(clock):
    """The first call of each warms up."""
    steady, varying = times_of([clock.takes(50), clock.takes(9, 10, 12, 8, 11, 10)], CPU)
    assert str(varying) == "10 us ±5%"
    assert (steady.median, steady.spread) == pytest.approx((50, 1))
    assert (varying.median, varying.spread) == pytest.approx((10, 11 / 10))


def test_short_calls_are_repeated_until_their_time_is_over(clock, monkeypatch):
    monkeypatch.setattr(timing, "_CPU_REPEATS", (5, 50))
    counts = []
    for microseconds in (100, 15_000, 1_000_000):
        calls = []
        takes = clock.takes(microseconds)
        times_of([lambda takes=takes, calls=calls: calls.append(takes())], CPU)
        counts.append(len(calls) - 1)
    assert counts == [50, 7, 5]


@pytest.mark.parametrize(
    ("rounds", "attempts", "median", "spread"),
    [
        ([10], 1, 10, 1),
        ([10, 10, 90, 10, 10], 1, 10, 1),  # a single round that something disturbed
        ([10, 90, 10, 90, 10, *[10] * 5], 2, 10, 1),
        ([10, 90, 10, 90, 10, 10, 20, 10, 20, 10, 10, 40, 10, 40, 10], 3, 10, 2),
    ],
)
def test_times_that_vary_are_measured_again(clock, rounds, attempts, median, spread):
    takes, count = clock.takes(rounds[-1], *rounds), itertools.count()
    (found,) = times_of([lambda: (next(count), takes())], CPU)
    assert next(count) == 1 + 5 * attempts
    assert (found.median, found.spread) == pytest.approx((median, spread))


def test_parts_begin_at_marks_and_add_up(clock):
    head, conv, again, tail = map(clock.takes, (1, 20, 300, 4000))

    def call(mark):
        head()
        for part in (conv, again):
            mark("conv")
            part()
        mark("last")
        tail()

    @contextmanager
    def around():
        clock.takes(1e6)()
        yield
        clock.takes(1e6)()

    calls = [call, lambda mark: mark("conv")]
    one, other = times_of_parts(calls, CPU, [around, around])
    medians = {name: found.median for name, found in one.items()}
    assert medians == pytest.approx({"": 1, "conv": 320, "last": 4000})
    assert other == {"": Timing(0.0), "conv": Timing(0.0)}


@pytest.mark.parametrize(
    ("one", "other", "beats"),
    [
        (Timing(96), Timing(100), True),
        (Timing(98), Timing(100), False),  # not by 3%
        (Timing(60, 1.5), Timing(100), True),
        (Timing(70, 1.5), Timing(100), False),
        (Timing(70), Timing(100, 1.5), False),
    ],
)
def test_another_engine_must_win_by_more_than_times_vary(one, other, beats):
    assert one.beats(other) == beats
    assert not other.beats(one)
