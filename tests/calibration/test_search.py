"""The search by itself: hulls, moves and bisection."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spamm_torch import SpAMMConfig
from spamm_torch._timing import Timing
from spamm_torch.calibration.inputs import Loss
from spamm_torch.calibration.search import PARTS, chosen_after, lower_hull, moves_of, search
from spamm_torch.calibration.statistics import Candidate, LayerStatistics
from spamm_torch.calibration.times import LayerTimes

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


def test_what_is_left_of_evaluations_goes_between():
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


def test_no_moves_are_no_search():
    assert search([], 0.5, 9, Losses(0, 0)).moves == 0


def test_no_drop_at_all_is_a_limit_too():
    losses = Losses(7, 100)
    assert search(growing(20), 0.0, 9, losses).moves == 7
