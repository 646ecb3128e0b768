"""Times of calls, of layers by valid ratio where they stand in the model, and of the model."""

import itertools
from collections import Counter
from contextlib import contextmanager, nullcontext

import pytest
import torch
from support import Made
from tiny import dark_pictures, made_up, tiny_network
from torch import nn

from spamm_torch import SpAMMConfig
from spamm_torch import _timing as timing
from spamm_torch._output import SILENT
from spamm_torch._timing import Timing, times_of, times_of_parts
from spamm_torch.calibration import times
from spamm_torch.calibration.form import PIXEL_BLOCKS, SPAMM, Form
from spamm_torch.calibration.statistics import Candidate, LayerStatistics
from spamm_torch.calibration.times import Trial, time_layers, time_models
from spamm_torch.networks.example import Example
from spamm_torch.networks.install import fused_of

RATIOS = (0.8, 0.6, 0.4, 0.2)


def statistics_of(*ratios_of_blocks):
    """Candidates with these ratios, in a shape of blocks for each argument."""
    candidates = (
        Candidate(SpAMMConfig(tau=2 - ratio, pixel_block=block), ratio, 0.1, 0.1)
        for block, ratios in zip(PIXEL_BLOCKS, ratios_of_blocks, strict=False)
        for ratio in ratios
    )
    return LayerStatistics(1.0, tuple(candidates))


@torch.no_grad()
def times_of_b(monkeypatch, time_of, statistics, model=None):
    monkeypatch.setattr(times, "measure", made_up(time_of))
    example, model = Example(dark_pictures(2)), model or tiny_network()
    found = time_layers(Form(model, example), {"conv_b": statistics}, example, SILENT)
    return found["conv_b"]


def test_noise_is_taken_from_times(monkeypatch):
    noise = {0.8: 1.0, 0.4: -2.0, 0.2: 1.0}  # neither a slope nor a mean of its own

    def time_of(trial):
        if trial.setting is None or not trial.setting.tau:
            return Timing(110.0 if trial.what == "dense" else 130.0, 1.1)
        if trial.setting.pixel_block == PIXEL_BLOCKS[1]:
            return Timing(50 + 10 * trial.valid_ratio, 1.3)
        return 20 + 100 * trial.valid_ratio + noise[trial.valid_ratio]

    found = times_of_b(monkeypatch, time_of, statistics_of(RATIOS, RATIOS))
    assert [each.median for each in found.candidates[4:]] == pytest.approx([58, 56, 54, 52])
    first = [each.median for each in found.candidates[:4]]
    slope = (first[0] - first[3]) / 0.6
    assert first == pytest.approx([first[3] + slope * (ratio - 0.2) for ratio in RATIOS])
    assert abs(slope - 100) < 5  # of single steps: 90 to 107
    assert {each.spread for each in found.candidates} == {1.3}
    assert (found.dense, found.spamm) == (Timing(110.0, 1.1), Timing(130.0, 1.1))


@pytest.mark.parametrize("ratios", [(), (0.5,), (0.5, 0.5)])
def test_times_without_a_line_stay(monkeypatch, ratios):
    found = times_of_b(monkeypatch, lambda _: 7.0, statistics_of(ratios))
    assert found.candidates == (Timing(7.0),) * len(ratios)


def test_all_calls_of_a_layer_count_and_others_do_not(monkeypatch):
    twice = lambda m, x: m.conv_b(m.conv_b(x.repeat(1, 11, 1, 1)[:, :32]))  # noqa: E731
    model = Made(twice, conv_b=nn.Conv2d(32, 32, 1), unused=nn.Conv2d(32, 32, 1)).eval()
    example = Example(dark_pictures(2))
    monkeypatch.setattr(times, "measure", made_up(lambda _: 5.0))
    statistics = {"conv_b": statistics_of(RATIOS), "unused": statistics_of(RATIOS)}
    with torch.no_grad():
        found = time_layers(Form(model, example), statistics, example, SILENT)
    assert list(found) == ["conv_b"]
    assert found["conv_b"].dense == found["conv_b"].spamm == Timing(10.0)


def test_layers_are_timed_between_the_others(monkeypatch):
    """By a clock that goes on with each op: a layer's part has its op alone."""
    ticks = Counter()

    def clock():
        return float(ticks["ops"])

    class Ticking(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            ticks["ops"] += 1
            return func(*args, **(kwargs or {}))

    monkeypatch.setattr(timing, "perf_counter", clock)
    monkeypatch.setattr(timing, "_CPU_REPEATS", (3, 3))
    model, example = tiny_network(), Example(dark_pictures(2))
    form = Form(model, example)
    given = {name: statistics_of(RATIOS[:1]) for name in ("conv_b", "conv_c")}
    with torch.no_grad(), Ticking():
        found = time_layers(form, given, example, SILENT)
    assert set(found) == {"conv_b", "conv_c"}
    for layer in found.values():
        assert layer.dense.median == layer.candidates[0].median == 1e6


# ---- The whole model ----------------------------------------------------------------------------


@torch.no_grad()
def test_the_model_is_timed_as_it_was_and_converted_in_turns(monkeypatch):
    seen, model, example = [], tiny_network(), Example(dark_pictures(2))
    form = Form(model, example)
    time = made_up(lambda trial: seen.append(trial) or Timing(10.0 * len(seen), 1.1))
    monkeypatch.setattr(times, "measure", time)
    are_fused = []
    model.register_forward_pre_hook(lambda *_: are_fused.append(fused_of(model) is not None))
    engines = {"as it was": (None, 1.0), "skipping": (dict.fromkeys(form.layers, SPAMM), 0.5)}
    found = time_models(form, engines, example, SILENT)
    assert found == {"as it was": Timing(10.0, 1.1), "skipping": Timing(20.0, 1.1)}
    assert [trial.valid_ratio for trial in seen] == [1.0, 0.5]
    assert are_fused == [False, True]
    assert fused_of(model) is None
    assert type(model.conv_b) is nn.Conv2d


def test_a_trial_of_the_model_is_the_whole_of_it():
    trial = Trial("", "as it was")
    run = {"": trial}, lambda _: torch.ones(3)
    found = times.measure([run], torch.device("cpu"), [nullcontext])
    assert list(found) == [trial]
    assert found[trial].median > 0


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
