"""The allocation of a budget and its search, options and their costs, and times of calls."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import Made, linear_time, made_up
from tiny import dark_pictures, tiny_network, unchanged
from torch import nn

from spamm_torch import SpAMMConv2d, record_stats
from spamm_torch import _timing as timing
from spamm_torch._output import Progress
from spamm_torch._timing import Timing, times_of, times_of_parts
from spamm_torch.calibration import options
from spamm_torch.calibration.options import PIXEL_BLOCKS, RATIOS, Bench
from spamm_torch.calibration.search import Allocation, Option, search
from spamm_torch.networks.config import NOTHING_SKIPPED

FIRST, SECOND = PIXEL_BLOCKS
LAYERS = ("conv_b", "conv_c")

# (squared error, microseconds) of the options of one layer, whose dense time is 12
layers = st.lists(st.tuples(st.integers(0, 8), st.integers(1, 12)), min_size=1, max_size=4)


def option(error, time, ratio=0.5, block=FIRST):
    return Option(block, 1.0, ratio, error, error, time)


@given(st.lists(layers, min_size=1, max_size=3))
def test_no_other_choice_saves_as_much_for_less_error(given):
    """After each step, among all choices of one option for each layer."""
    names = [str(number) for number in range(len(given))]
    own = {n: (12, [option(*of) for of in each]) for n, each in zip(names, given, strict=True)}
    choices = itertools.product(*([(0, 12), *each] for each in given))
    everything = [tuple(map(sum, zip(*choice, strict=True))) for choice in choices]
    allocation, error = Allocation(own), 0.0
    for *_, added in allocation.steps:
        error += added
        chosen = allocation.within(error).values()
        assert math.fsum(each.output_error for each in chosen) == pytest.approx(error)
        time = 12 * (len(names) - len(chosen)) + sum(each.time for each in chosen)
        assert not any(e < error - 1e-9 and t <= time for e, t in everything)
    assert allocation.most == pytest.approx(error)


def test_what_is_left_of_a_budget_goes_into_a_part_of_the_next_step():
    mild, wild = option(0.01, 80, 0.8), option(0.09, 50, 0.4)
    allocation = Allocation({"a": (100, [mild, wild])})
    assert allocation.within(0.005) == {}
    assert allocation.within(0.01)["a"][1:] == pytest.approx(mild[1:])
    part = allocation.within(0.03)["a"]  # a quarter of the second step
    assert part.pixel_block == FIRST
    assert part[1:] == pytest.approx((1.0, 0.7, 0.03, 0.03, 72.5))
    assert allocation.within(allocation.most) == {"a": wild}
    assert (allocation.least(20), allocation.least(21)) == (0.01, pytest.approx(0.09))
    assert allocation.least(51) is None
    other = Allocation({"a": (100, [mild, wild._replace(pixel_block=SECOND)])})
    assert other.within(0.03) == {"a": mild}


class Drops:
    """A drop that jumps from nothing to far too much behind a budget, on each half."""

    def __init__(self, first, second):
        self._most, self.calls = (first, second), []

    def __call__(self, half, budget):
        self.calls.append((half, budget))
        return 0.0 if budget <= self._most[half] else 9.0


budgets = st.floats(1e-6, 1.0)


@given(budgets, budgets, budgets, budgets, st.integers(2, 12))
def test_a_search_never_asks_more_nor_allows_too_much(first, second, one, other, evaluations):
    drops, (least, most) = Drops(first, second), sorted((one, other))
    budget, held = search(least, most, 0.5, evaluations, drops)
    assert budget <= min(first, second, most)
    assert len(drops.calls) <= evaluations
    if budget:  # it was seen to hold
        assert (1, budget) in drops.calls
        assert held <= 0.5
        assert budget >= least
    elif first >= most and second >= most:
        pytest.fail("all was allowed, and nothing chosen")


@given(st.floats(1e-3, 0.9))
def test_bisection_comes_near_to_the_limit(limit):
    """The second half brackets its own one. A budget of nothing is one: zeros cost no error."""
    budget, _ = search(1e-4, 1.0, 0.5, 12, Drops(limit, 1.0))
    assert limit / 1.6 < budget <= limit
    _, _ = search(1e-3, 1.0, 0.5, 12, drops := Drops(1.0, 0.6))
    assert [of for half, of in drops.calls if half] == pytest.approx([1.0, 0.25, 0.5, 0.5**0.5])
    budget, held = search(0.0, 0.0, 0.0, 6, Drops(1.0, 1.0))
    assert 0 < budget < 1e-9
    assert held == 0.0


# ---- Options of layers --------------------------------------------------------------------------


def bench_of(model, pictures):
    bench = Bench(model)
    bench.set_inputs(pictures, Progress("", False))
    return bench


@pytest.fixture(scope="module")
def network():
    return tiny_network(batch_norm=True)


@torch.no_grad()
def test_errors_and_ratios_are_those_of_the_layer_by_itself(network):
    pictures = [dark_pictures(64, seed=seed, size=8) for seed in range(2)]
    found = bench_of(network, pictures).errors()
    assert list(found) == ["conv_a", "conv_b", "conv_c"]
    assert found["conv_a"][1] == []  # three channels
    for layer, outer in (("conv_b", 32), ("conv_c", 64)):
        assert found[layer][0] == 64 * outer * 32 * 9
    before = network[: list(dict(network.named_children())).index("conv_b")]
    inputs = [before(batch) for batch in pictures]
    exact = torch.cat([network.conv_b(x) for x in inputs])
    ratios = {block: [] for block in PIXEL_BLOCKS}
    for each in found["conv_b"][1]:
        layer = SpAMMConv2d.from_dense(network.conv_b, **each.searching.to_dict())
        with record_stats(layer) as stats:
            error = torch.cat([layer(x) for x in inputs]) - exact
        assert stats[""].valid_ratio == pytest.approx(each.valid_ratio, abs=0.01)
        assert each.error**0.5 == pytest.approx(
            (error.norm() / exact.norm()).item(), rel=0.05, abs=1e-5
        )
        ratios[each.pixel_block].append(each.valid_ratio)
    for found in ratios.values():
        assert 0 < len(found) <= len(RATIOS)
        assert found == sorted(found, reverse=True)


@torch.no_grad()
def test_what_is_not_called_or_no_number_has_no_options():
    made = {name: nn.Conv2d(32, 32, 1) for name in ("used", "unused")}
    model, pictures = Made(lambda m, x: m.used(x), **made), dark_pictures(4, channels=32, size=8)
    assert len(bench_of(model, [pictures]).errors()["used"][1]) > 0
    bad = bench_of(model, [torch.full_like(pictures, torch.nan)])
    assert bad.thresholds({"used": option(0.1, 1.0)})["used"].tau == 0
    found = bad.errors()
    assert list(found) == ["used"]
    assert found["used"][1] == []


@torch.no_grad()
def test_errors_are_measured_at_the_output():
    model, pictures = tiny_network(batch_norm=True), dark_pictures(64, size=8)
    bench, exact = bench_of(model, [pictures]), model(pictures)
    own = {name: of for name, (_, of) in bench.errors().items() if of}
    found = bench.with_output_errors(own)
    for name in LAYERS:
        for each, before in zip(found[name], own[name], strict=True):
            assert each[:4] == before[:4]
            with bench.installed({name: each.searching}):
                error = (model(pictures) - exact).norm() / exact.norm()
            assert each.output_error**0.5 == pytest.approx(error.item(), rel=1e-3, abs=1e-5)
    silent = Made(lambda m, x: (m.network(x).argmax(1), "a text"), network=model).eval()
    bench = bench_of(silent, [pictures])
    own = {name: of for name, (_, of) in bench.errors().items() if of}
    assert bench.with_output_errors(own) == own  # where the output says nothing


@pytest.mark.parametrize("pixel_block", PIXEL_BLOCKS)
@pytest.mark.parametrize(("size", "batches"), [(64, 3), (8, 16)])
@torch.no_grad()
def test_layers_compute_their_share_while_others_skip(pixel_block, size, batches):
    model = tiny_network(batch_norm=True)
    bench = bench_of(model, [dark_pictures(size, seed=seed, size=8) for seed in range(batches)])
    found = {name: of for name, (_, of) in bench.errors().items()}
    of_block = {n: [x for x in found[n] if x.pixel_block == pixel_block] for n in LAYERS}
    wanted = {name: of_block[name][-2] for name in LAYERS}
    settings = bench.thresholds(wanted)
    assert {setting.pixel_block for setting in settings.values()} == {pixel_block}

    def ratios(given, name):
        found = [stats[name].valid_ratio for stats in bench.statistics(given)]
        return sum(found) / len(found)

    for name, each in wanted.items():
        assert ratios(settings, name) == pytest.approx(each.valid_ratio, abs=0.03)
    undisturbed = {name: each.setting for name, each in wanted.items()}
    assert abs(ratios(undisturbed, "conv_c") - wanted["conv_c"].valid_ratio) > 0.03


def test_settings_are_installed_by_class_and_leave_nothing():
    model = tiny_network()
    bench, own = Bench(model), [type(module) for module in model.modules()]
    with unchanged(model):
        with bench.installed({"conv_b": NOTHING_SKIPPED}):
            assert type(model.conv_b) is SpAMMConv2d
        with pytest.raises(RuntimeError), bench.installed({"conv_b": NOTHING_SKIPPED}):
            model(torch.ones(1, 5, 8, 8))
    assert [type(module) for module in model.modules()] == own


# ---- Times of layers ----------------------------------------------------------------------------


FOUR_RATIOS = (0.8, 0.6, 0.4, 0.2)


@torch.no_grad()
def times_of_b(monkeypatch, time_of, *ratios_of_blocks, model=None):
    given = [
        option(0.1, 1.0, ratio, block)
        for block, ratios in zip(PIXEL_BLOCKS, ratios_of_blocks, strict=False)
        for ratio in ratios
    ]
    monkeypatch.setattr(options, "times_of_parts", made_up(time_of))
    bench = bench_of(model or tiny_network(), [dark_pictures(2)])
    return bench.times({"conv_b": given})["conv_b"]


def test_noise_is_taken_from_times(monkeypatch):
    noise = {0.8: 1.0, 0.4: -2.0, 0.2: 1.0}  # neither a slope nor a mean of its own

    def time_of(trial):
        if trial.what in ("dense", "None"):
            return Timing(110.0 if trial.what == "dense" else 130.0, 1.1)
        if trial.what == str(SECOND):
            return Timing(50 + 10 * trial.valid_ratio, 1.3)
        return 20 + 100 * trial.valid_ratio + noise[trial.valid_ratio]

    dense, found = times_of_b(monkeypatch, time_of, FOUR_RATIOS, FOUR_RATIOS)
    assert dense == 110
    by_image = [each.time for each in found if each.pixel_block == SECOND]
    assert by_image == pytest.approx([58, 56, 54, 52])
    first = [each.time for each in found if each.pixel_block == FIRST]
    assert first == pytest.approx([79, 60, 41], abs=2)  # 100 does not beat 110, times vary by 1.3
    assert first[0] - first[1] == pytest.approx(first[1] - first[2])


@torch.no_grad()
def test_ties_leave_fewer_options_each_between_two_that_are_timed(monkeypatch):
    """A layer half of whose products are zero: several ratios come to the same."""
    model = nn.Sequential(nn.Conv2d(64, 32, 1))
    pictures = dark_pictures(64, channels=64, size=4)
    pictures[:, 32:] = 0
    bench = bench_of(model, [pictures])
    _, given = bench.errors()["0"]
    ratios = [each.valid_ratio for each in given if each.pixel_block == FIRST]
    assert len(ratios) == len(set(ratios)) < len(RATIOS)
    timed = []
    monkeypatch.setattr(options, "times_of_parts", made_up(lambda x: timed.append(x) or 1.0))
    bench.times({"0": given})
    found = [each.valid_ratio for each in timed if each.what == str(FIRST)]
    assert (max(found), min(found)) == (max(ratios), min(ratios))


@pytest.mark.parametrize(("spread", "most"), [(1.0, 11.6), (1.2, 9.9), (20.0, 0.58)])
def test_layers_that_are_hardly_faster_are_left(monkeypatch, spread, most):
    """Faster by 3%, and by more than the times vary. Times without a line stay."""
    for time, count in ((most * 1.1, 0), (most, 1)):
        base = {"dense": Timing(12.0), "None": Timing(12.0)}
        time_of = lambda of, t=time, b=base: b.get(of.what, Timing(t, spread))  # noqa: E731
        for ratios in ((), (0.5,), (0.5, 0.5)):
            _, found = times_of_b(monkeypatch, time_of, ratios)
            assert [each.time for each in found] == pytest.approx([time] * len(ratios) * count)


def test_all_calls_of_a_layer_count_and_others_do_not(monkeypatch):
    twice = lambda m, x: m.conv_b(m.conv_b(x.repeat(1, 11, 1, 1)[:, :32]))  # noqa: E731
    model = Made(twice, conv_b=nn.Conv2d(32, 32, 1), unused=nn.Conv2d(32, 32, 1)).eval()
    monkeypatch.setattr(options, "times_of_parts", made_up(linear_time))
    given = {name: [option(0.1, 1.0)] for name in ("conv_b", "unused")}
    with torch.no_grad():
        found = bench_of(model, [dark_pictures(2)]).times(given)
    assert list(found) == ["conv_b"]
    assert found["conv_b"][0] == 200


# ---- Calls: medians and spreads on a clock of the test's own -------------------------------------


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
    monkeypatch.setattr(timing, "_CPU_SECONDS", 0.1)
    return clock


@pytest.mark.parametrize(("microseconds", "count"), [(100, 50), (15_000, 7), (1_000_000, 5)])
def test_short_calls_are_repeated_until_their_time_is_over(clock, monkeypatch, microseconds, count):
    monkeypatch.setattr(timing, "_CPU_REPEATS", (5, 50))
    calls, takes = [], clock.takes(microseconds)
    times_of([lambda: calls.append(takes())], CPU)
    assert len(calls) == 1 + count


@pytest.mark.parametrize(
    ("rounds", "attempts", "median", "spread"),
    [
        ([10], 1, 10, 1),
        ([10, 12, 8, 11, 10], 1, 10, 1.1),
        ([10, 10, 90, 10, 10], 1, 10, 1),  # a single round that something disturbed
        ([10, 90, 10, 90, 10, *[10] * 5], 2, 10, 1),
        ([10, 90, 10, 90, 10, 10, 20, 10, 20, 10, 10, 40, 10, 40, 10], 3, 10, 2),
    ],
)
def test_times_that_vary_are_measured_again(clock, rounds, attempts, median, spread):
    """The first call of each warms up."""
    takes, count = clock.takes(rounds[-1], *rounds), itertools.count()
    steady, found = times_of([clock.takes(1), lambda: (next(count), takes())], CPU)
    assert next(count) == 1 + 5 * attempts
    assert (steady.median, steady.spread) == pytest.approx((1, 1))
    assert (found.median, found.spread) == pytest.approx((median, spread))
    assert str(found) == f"10 us ±{50 * (spread - 1):.0f}%"


def test_parts_begin_at_marks_and_add_up(clock):
    head, conv, again, tail = map(clock.takes, (1, 20, 300, 4000))

    def call(mark):
        head()
        for part in (conv, again):
            mark("conv")
            part()
        mark("last")
        tail()

    medians = {name: found.median for name, found in times_of_parts(call, CPU).items()}
    assert medians == pytest.approx({"": 1, "conv": 320, "last": 4000})
    expected = {"": Timing(0.0), "conv": Timing(0.0)}
    assert times_of_parts(lambda mark: mark("conv"), CPU) == expected


def test_another_engine_must_win_by_more_than_times_vary():
    """By 3% at least."""
    steady, wide = Timing(100), Timing(100, 1.5)
    for one, over_steady, over_wide in (
        *((Timing(96), True, False), (Timing(98), False, False), (Timing(70), True, False)),
        *((Timing(60, 1.5), True, True), (Timing(70, 1.5), False, False)),
    ):
        assert (one.beats(steady), one.beats(wide)) == (over_steady, over_wide)
        assert not steady.beats(one)
