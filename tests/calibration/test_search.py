"""The search by itself, thresholds and candidates, and the times of calls, layers and the model."""

import itertools
import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import Made, made_up
from tiny import dark_pictures, tiny_network
from torch import nn

from spamm_torch import SpAMMConfig, SpAMMConv2d, record_stats
from spamm_torch import _timing as timing
from spamm_torch._output import SILENT
from spamm_torch._timing import Timing, times_of, times_of_parts
from spamm_torch.calibration import times
from spamm_torch.calibration.form import PIXEL_BLOCKS, SPAMM, Form
from spamm_torch.calibration.inputs import Loss
from spamm_torch.calibration.search import PARTS, chosen_after, lower_hull, moves_of, search
from spamm_torch.calibration.statistics import (
    RATIOS,
    Candidate,
    LayerStatistics,
    _power_law,
    measure_layers,
    thresholds_for,
    with_output_errors,
)
from spamm_torch.calibration.times import LayerTimes, Trial, time_layers, time_models
from spamm_torch.networks.config import Engine
from spamm_torch.networks.example import Example
from spamm_torch.networks.install import fused_of

SETTING = SpAMMConfig(tau=1.0)

# (squared error, microseconds) of the candidates of one layer, and its time with nothing skipped
layers = st.lists(st.tuples(st.integers(0, 8), st.integers(1, 12)), min_size=1, max_size=4)


def times_like(base, *candidates, spread=1.0):
    of = [Timing(float(time), spread) for time in (base, base, *candidates)]
    return LayerTimes(of[0], of[1], tuple(of[2:]))


def model_of(candidates_by_layer, base=12.0):
    statistics, times = {}, {}
    for number, candidates in enumerate(candidates_by_layer):
        found = tuple(Candidate(SETTING, 0.5, 0.1, error**0.5) for error, _ in candidates)
        statistics[str(number)] = LayerStatistics(1.0, found)
        times[str(number)] = times_like(base, *(time for _, time in candidates))
    return statistics, times


@pytest.mark.parametrize(
    ("loss", "is_allowed"),
    [
        *((Loss(1.0), True), (Loss(1.01), False), (Loss(0.0, 2.0), True), (Loss(0.0, 2.01), False)),
        *((Loss(1.01, 0.0), False), (Loss(-5.0, 1.0), True)),
    ],
)
def test_a_loss_is_bound_by_its_drop_and_by_twice_that_of_changed_answers(loss, is_allowed):
    assert loss.is_within(1.0) == is_allowed


@given(st.lists(layers, min_size=1, max_size=3))
def test_no_other_choice_saves_as_much_for_less_error(candidates_by_layer):
    moves = moves_of(*model_of(candidates_by_layer))
    options = [[(0, 12), *candidates] for candidates in candidates_by_layer]
    everything = [
        tuple(map(sum, zip(*choice, strict=True))) for choice in itertools.product(*options)
    ]
    for count in range(1, len(moves) + 1):
        chosen = chosen_after(moves[:count]).values()
        error = sum(move.candidate.output_error**2 for move in chosen)
        time = 12 * (len(candidates_by_layer) - len(chosen)) + sum(move.time for move in chosen)
        assert 12 * len(candidates_by_layer) - sum(m.saved for m in moves[:count]) == (
            pytest.approx(time)
        )
        assert sum(move.added for move in moves[:count]) == pytest.approx(error)
        assert not any(e < error - 1e-9 and t <= time for e, t in everything)


def test_moves_between_ratios_of_one_shape_of_blocks_have_parts():
    by_position, by_image = (
        [
            Candidate(SpAMMConfig(tau=1.0, pixel_block=block), ratio, error, error)
            for ratio, error in ((0.8, 0.0), (0.5, 0.3))
        ]
        for block in ((64, 1, 1), (1, 8, 8))
    )
    times = {"a": times_like(100, 80, 50)}
    moves = moves_of({"a": LayerStatistics(1.0, tuple(by_position))}, times)
    assert len(moves) == 1 + PARTS
    ratios = [move.candidate.valid_ratio for move in moves]
    assert ratios == pytest.approx([0.8, 0.7, 0.6, 0.5])
    assert [move.time for move in moves] == pytest.approx([80, 70, 60, 50])
    assert [move.candidate.error**2 for move in moves] == pytest.approx([0, 0.03, 0.06, 0.09])
    mixed = LayerStatistics(1.0, (by_position[0], by_image[1]))
    assert [move.candidate for move in moves_of({"a": mixed}, times)] == [*mixed.candidates]


def test_the_hull_leaves_out_what_is_above():
    points = [(0.0, 0.0, 0), (1.0, 1.0, 1), (2.0, 1.0, 2), (2.0, 3.0, 3), (3.0, 5.0, 4)]
    assert [number for _, _, number in lower_hull(points)] == [0, 2, 4]


@pytest.mark.parametrize(("spread", "most"), [(1.0, 11.6), (1.2, 9.9), (20.0, 0.58)])
def test_layers_that_are_hardly_faster_get_no_move(spread, most):
    """Faster by 3%, and by more than the times vary."""
    statistics, _ = model_of([[(0, 1)]])
    for time, count in ((most * 1.1, 0), (most, 1)):
        assert len(moves_of(statistics, {"0": times_like(12, time, spread=spread)})) == count


class Losses:
    """A loss that jumps from nothing to far too much after so many moves, on each half."""

    def __init__(self, first, second):
        self._most, self.calls = (first, second), []

    def __call__(self, half, moves):
        self.calls.append((half, moves))
        return Loss(0.0 if moves <= self._most[half] else 9.0)

    def held(self):
        """The moves tried on the second half."""
        return [moves for half, moves in self.calls if half == 1]


def growing(count):
    """Sums of squared errors that grow with every move."""
    return [1e-3 * 1.2**n for n in range(1, count + 1)]


@pytest.mark.parametrize("most", range(21))
def test_bisection_finds_the_most_moves(most):
    losses = Losses(most, 100)
    found = search(growing(20), 0.5, 9, losses)
    assert found.moves == most
    assert len(losses.calls) <= 9
    assert (found.held is None) == (most == 0)
    assert search(growing(20), 0.0, 9, Losses(most, 100)).moves == most  # a limit, too
    assert search([], 0.5, 9, Losses(most, 100)).moves == 0


@pytest.mark.parametrize("limit", [3e-4, 2e-3, 0.02, 0.05, 0.3])
@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_a_loss_that_grows_is_followed_to_its_limit(power, limit):
    errors = growing(60)

    def loss(half, count):
        return Loss(0.5 * (errors[count - 1] / limit) ** power)

    most = sum(error <= limit for error in errors)
    assert search(errors, 0.5, 9, loss).moves >= most - 1


@given(st.integers(0, 30), st.integers(0, 30), st.integers(2, 12))
def test_a_search_never_asks_more_nor_allows_too_much(first, second, evaluations):
    losses = Losses(first, second)
    found = search(growing(30), 0.5, evaluations, losses)
    assert found.moves <= min(first, second)
    assert len(losses.calls) <= evaluations
    if found.moves:  # it was seen to hold
        assert found.moves == max(moves for moves in losses.held() if moves <= second)


def test_it_steps_back_where_the_second_half_refuses():
    found = search(growing(20), 0.5, 9, losses := Losses(20, 12))
    refused = losses.held()[0]
    assert refused == 20
    errors = growing(20)
    second = losses.held()[1]
    assert errors[second - 1] <= 0.7 * errors[refused - 1] < errors[second]
    assert found.moves <= 12
    # The rest of the evaluations goes between.
    losses = Losses(20, 19)
    assert search(growing(20), 0.5, 9, losses).moves == 19
    assert losses.held() == [20, 18, 19]


def test_what_the_second_half_leaves_goes_on_in_the_first():
    """With more numbers than the first half's share of evaluations tells apart."""
    losses = Losses(333, 1000)
    found = search(growing(400), 0.5, 9, losses)
    halves = [half for half, _ in losses.calls]
    assert halves[:6] == [0] * 5 + [1]
    assert 0 in halves[6:]
    assert found.moves == max(losses.held())


# ---- Thresholds ----------------------------------------------------------------------------------


LAYERS = ("conv_b", "conv_c")


def least_of(candidates, pixel_block):
    """The candidate in these blocks that computes the least."""
    return [found for found in candidates if found.setting.pixel_block == pixel_block][-1]


@torch.no_grad()
def ratios_with(model, form, examples, settings):
    engines = {name: Engine("spamm", setting) for name, setting in settings.items()}
    with form.installed(engines), record_stats(model) as stats:
        for example in examples:
            example.call(model)
    return {name: stats[name].valid_ratio for name in settings}


@pytest.mark.parametrize("pixel_block", PIXEL_BLOCKS)
@pytest.mark.parametrize(("size", "batches"), [(64, 3), (8, 16)])
@torch.no_grad()
def test_layers_compute_their_share_while_others_skip(pixel_block, size, batches):
    model = tiny_network(batch_norm=True)
    examples = [Example(dark_pictures(size, seed=seed, size=8)) for seed in range(batches)]
    form = Form(model, examples[0])
    found = measure_layers(form, examples, SILENT)
    wanted = {name: least_of(found[name].candidates, pixel_block) for name in LAYERS}
    settings = thresholds_for(form, examples, wanted)

    assert {setting.pixel_block for setting in settings.values()} == {pixel_block}
    # Nothing skips before the first of them.
    undisturbed = {name: candidate.setting for name, candidate in wanted.items()}
    assert settings["conv_b"].tau == pytest.approx(undisturbed["conv_b"].tau, rel=1e-5)
    computed = ratios_with(model, form, examples, settings)
    for name, candidate in wanted.items():
        assert computed[name] == pytest.approx(candidate.valid_ratio, abs=0.01)
    before = ratios_with(model, form, examples, undisturbed)
    assert abs(before["conv_c"] - wanted["conv_c"].valid_ratio) > 0.02


@torch.no_grad()
def test_layers_that_see_nan_skip_nothing():
    model = tiny_network()
    good = [Example(dark_pictures(64, size=8))]
    form = Form(model, good[0])
    found = measure_layers(form, good, SILENT)
    wanted = {"conv_b": least_of(found["conv_b"].candidates, PIXEL_BLOCKS[0])}
    bad = [Example(torch.full((64, 3, 8, 8), torch.nan))]
    assert thresholds_for(form, bad, wanted)["conv_b"].tau == 0


@pytest.fixture(scope="module")
def network():
    return tiny_network(batch_norm=True)


@torch.no_grad()
def statistics_of(model, pictures):
    examples = [Example(batch) for batch in pictures]
    return measure_layers(Form(model, examples[0]), examples, SILENT)


@torch.no_grad()
def test_candidates(network):
    pictures = [dark_pictures(64, seed=seed, size=8) for seed in range(2)]
    found = statistics_of(network, pictures)
    assert list(found) == ["conv_a", "conv_b", "conv_c"]
    assert found["conv_a"].candidates == ()  # three channels
    for layer, outer in (("conv_b", 32), ("conv_c", 64)):
        assert found[layer].multiplications == 64 * outer * 32 * 9

    before = network[: list(dict(network.named_children())).index("conv_b")]
    fused = nn.utils.fusion.fuse_conv_bn_eval(network.conv_b, network.bn_b)
    inputs = [before(batch) for batch in pictures]
    exact = torch.cat([fused(x).relu() for x in inputs])
    by_block = {block: [] for block in PIXEL_BLOCKS}
    for candidate in found["conv_b"].candidates:
        layer = SpAMMConv2d.from_dense(fused, **candidate.setting.setting(), activation="relu")
        with record_stats(layer) as stats:
            error = torch.cat([layer(x) for x in inputs]) - exact
        assert stats[""].valid_ratio == pytest.approx(candidate.valid_ratio, abs=1e-3)
        assert candidate.error == pytest.approx(
            (error.norm() / exact.norm()).item(), rel=1e-3, abs=1e-6
        )
        by_block[candidate.setting.pixel_block].append(candidate.valid_ratio)
    for ratios in by_block.values():
        assert 0 < len(ratios) <= len(RATIOS)
        assert ratios == sorted(ratios, reverse=True)
        assert len(set(ratios)) == len(ratios)  # none twice


def test_what_is_not_called_or_no_number_has_no_candidates():
    layers = {name: nn.Conv2d(32, 32, 1) for name in ("used", "unused")}
    model, pictures = Made(lambda m, x: m.used(x), **layers), dark_pictures(4, channels=32, size=8)
    assert len(statistics_of(model, [pictures])["used"].candidates) > 0
    found = statistics_of(model, [torch.full_like(pictures, torch.nan)])
    assert list(found) == ["used"]
    assert found["used"].candidates == ()


def test_layers_that_give_zeros_have_no_error():
    conv = nn.Conv2d(32, 32, 1, bias=False)
    nn.init.ones_(conv.weight)
    model = nn.Sequential(conv, nn.ReLU()).eval()
    pictures = -dark_pictures(4, channels=32, size=8)  # and so are all outputs negative
    candidates = statistics_of(model, [pictures])["0"].candidates
    assert {candidate.error for candidate in candidates} == {0.0}


@torch.no_grad()
def output_errors_of(model, examples):
    form = Form(model, examples[0])
    layers = measure_layers(form, examples, SILENT)
    found = with_output_errors(form, examples, layers, SILENT)
    for name, layer in layers.items():
        for one, other in zip(layer.candidates, found[name].candidates, strict=True):
            assert (one.setting, one.error) == (other.setting, other.error)
    return form, found


@torch.no_grad()
def test_errors_are_those_of_the_output():
    model = tiny_network(batch_norm=True)
    pictures = dark_pictures(64, size=8)
    form, found = output_errors_of(model, [Example(pictures)])
    exact = model(pictures)
    # Those that were tried. In conv_b less is lost at the second of them, by chance.
    for name, ratio in (("conv_b", 0.5), ("conv_c", 0.5), ("conv_c", 0.26)):
        tried = min(found[name].candidates, key=lambda each: abs(each.valid_ratio - ratio))
        engines = {**dict.fromkeys(form.layers, SPAMM), name: Engine("spamm", tried.setting)}
        with form.installed(engines):
            error = (model(pictures) - exact).norm() / exact.norm()
        assert tried.output_error == pytest.approx(error.item(), rel=1e-3)
    for layer in found.values():  # between them more of one is more of the other
        by_error = sorted(layer.candidates, key=lambda each: each.error)
        assert by_error == sorted(layer.candidates, key=lambda each: each.output_error)


def test_where_the_output_says_nothing_the_layers_error_stands():
    silent = Made(lambda m, x: (m.network(x).argmax(1), "a text"), network=tiny_network())
    _, found = output_errors_of(silent.eval(), [Example(dark_pictures(64, size=8))])
    for layer in found.values():
        for candidate in layer.candidates:
            assert candidate.output_error == candidate.error


def test_power_laws():
    law = _power_law([(0.1, 0.01), (0.2, 0.04)])
    assert law(0.4) == pytest.approx(0.16)
    assert law(0) == 0
    assert _power_law([(0.1, 0.01)])(0.2) == pytest.approx(0.02)
    assert _power_law([(0.1, 0.02), (0.2, 0.01)])(0.4) == pytest.approx(0.08)  # by chance
    for points in ([], [(0.1, 0.0)], [(0.1, math.nan)], [(0.0, 0.1)]):
        assert _power_law(points)(0.3) == 0.3


# ---- Times of layers by valid ratio, where they stand in the model -------------------------------


FOUR_RATIOS = (0.8, 0.6, 0.4, 0.2)


def candidates_of(*ratios_of_blocks):
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

    found = times_of_b(monkeypatch, time_of, candidates_of(FOUR_RATIOS, FOUR_RATIOS))
    assert [each.median for each in found.candidates[4:]] == pytest.approx([58, 56, 54, 52])
    first = [each.median for each in found.candidates[:4]]
    slope = (first[0] - first[3]) / 0.6
    assert first == pytest.approx([first[3] + slope * (ratio - 0.2) for ratio in FOUR_RATIOS])
    assert abs(slope - 100) < 5  # of single steps: 90 to 107
    assert {each.spread for each in found.candidates} == {1.3}
    assert (found.dense, found.spamm) == (Timing(110.0, 1.1), Timing(130.0, 1.1))


@pytest.mark.parametrize("ratios", [(), (0.5,), (0.5, 0.5)])
def test_times_without_a_line_stay(monkeypatch, ratios):
    found = times_of_b(monkeypatch, lambda _: 7.0, candidates_of(ratios))
    assert found.candidates == (Timing(7.0),) * len(ratios)


def test_all_calls_of_a_layer_count_and_others_do_not(monkeypatch):
    twice = lambda m, x: m.conv_b(m.conv_b(x.repeat(1, 11, 1, 1)[:, :32]))  # noqa: E731
    model = Made(twice, conv_b=nn.Conv2d(32, 32, 1), unused=nn.Conv2d(32, 32, 1)).eval()
    example = Example(dark_pictures(2))
    monkeypatch.setattr(times, "measure", made_up(lambda _: 5.0))
    statistics = {"conv_b": candidates_of(FOUR_RATIOS), "unused": candidates_of(FOUR_RATIOS)}
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
    given = {name: candidates_of(FOUR_RATIOS[:1]) for name in ("conv_b", "conv_c")}
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
    found = times.measure([run], torch.device("cpu"), [lambda: None])
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

    calls = [call, lambda mark: mark("conv")]
    one, other = times_of_parts(calls, CPU, [clock.takes(1e6)] * 2)
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
