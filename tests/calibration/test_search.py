"""The search by itself: hulls, moves and bisection."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spamm_torch import SpAMMConfig
from spamm_torch.calibration.moves import PARTS, chosen_after, lower_hull, moves_of
from spamm_torch.calibration.search import Curve, Loss, search
from spamm_torch.calibration.statistics import Candidate, LayerStatistics
from spamm_torch.calibration.times import LayerTimes

SETTING = SpAMMConfig(tau=1.0)

# (squared error, microseconds) of the candidates of one layer, and its time with nothing skipped
layers = st.lists(st.tuples(st.integers(0, 8), st.integers(1, 12)), min_size=1, max_size=4)


def model_of(candidates_by_layer, base=12.0):
    statistics, times = {}, {}
    for number, candidates in enumerate(candidates_by_layer):
        found = tuple(Candidate(SETTING, 0.5, 0.1, error**0.5) for error, _ in candidates)
        statistics[str(number)] = LayerStatistics(1.0, found)
        times[str(number)] = LayerTimes(base, base, tuple(float(time) for _, time in candidates))
    return statistics, times


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
    times = {"a": LayerTimes(100.0, 100.0, (80.0, 50.0))}
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


def test_layers_that_are_hardly_faster_get_no_move():
    assert moves_of(*model_of([[(0, 11.8)]])) == []
    assert len(moves_of(*model_of([[(0, 11.5)]]))) == 1


class Losses:
    """A loss that jumps from nothing to far too much after so many moves, on each half."""

    def __init__(self, first, second, *others):
        self._most, self.calls = ((first, second), *others), []

    def __call__(self, form, half, moves):
        self.calls.append((form, half, moves))
        return Loss(0.0 if moves <= self._most[form][half] else 9.0)

    def held(self):
        """The moves that the second half was asked for."""
        return [moves for _, half, moves in self.calls if half == 1]


def curve(count, factor=1.0, cost=0.0):
    """Moves that each save a microsecond, whose squared errors grow."""
    return Curve(
        [factor * 1e-3 * 1.2**n for n in range(1, count + 1)],
        [n - cost for n in range(1, count + 1)],
    )


@pytest.mark.parametrize("most", range(21))
def test_bisection_finds_the_most_moves(most):
    losses = Losses(most, 100)
    found = search([curve(20)], 0.5, 9, losses)
    assert found.moves == most
    assert len(losses.calls) <= 9
    assert (found.held is None) == (most == 0)


@pytest.mark.parametrize("limit", [3e-4, 2e-3, 0.02, 0.05, 0.3])
@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_a_loss_that_grows_is_followed_to_its_limit(power, limit):
    moves = curve(60)

    def loss(form, half, count):
        assert (form, half) == (0, 0) or half == 1
        return Loss(0.5 * (moves.errors[count - 1] / limit) ** power)

    most = sum(error <= limit for error in moves.errors)
    assert search([moves], 0.5, 9, loss).moves >= most - 1


@given(st.integers(0, 30), st.integers(0, 30), st.integers(2, 12))
def test_a_search_never_asks_more_nor_allows_too_much(first, second, evaluations):
    losses = Losses(first, second)
    found = search([curve(30)], 0.5, evaluations, losses)
    assert found.moves <= min(first, second)
    assert len(losses.calls) <= evaluations
    if found.moves:  # it was seen to hold
        assert found.moves == max(moves for moves in losses.held() if moves <= second)


def test_it_steps_back_where_the_second_half_refuses():
    found = search([curve(20)], 0.5, 9, losses := Losses(20, 12))
    refused = losses.held()[0]
    assert refused == 20
    errors = curve(20).errors
    second = losses.held()[1]
    assert errors[second - 1] <= 0.7 * errors[refused - 1] < errors[second]
    assert found.moves <= 12


def test_what_is_left_of_evaluations_goes_between():
    losses = Losses(20, 19)
    assert search([curve(20)], 0.5, 9, losses).moves == 19
    assert losses.held() == [20, 18, 19]


def test_what_the_second_half_leaves_goes_on_in_the_first():
    """With more numbers than the first half's share of evaluations tells apart."""
    losses = Losses(333, 1000)
    found = search([curve(400)], 0.5, 9, losses)
    halves = [half for _, half, _ in losses.calls]
    assert halves[:6] == [0] * 5 + [1]
    assert 0 in halves[6:]
    assert found.moves == max(losses.held())


def test_no_moves_are_no_search():
    assert search([Curve([], [])], 0.5, 9, Losses(0, 0)).moves == 0


def test_no_drop_at_all_is_a_limit_too():
    losses = Losses(7, 100)
    assert search([curve(20)], 0.0, 9, losses).moves == 7


# ---- Two forms ----------------------------------------------------------------------------------


def test_the_form_that_saves_more_is_taken():
    both = [curve(20), curve(20)]
    found = search(both, 0.5, 9, losses := Losses(15, 20, (8, 20)))
    assert (found.form, found.moves) == (0, 15)
    assert len(losses.calls) <= 9
    assert sum(form == 1 for form, _, _ in losses.calls) == 1  # one evaluation tells
    found = search(both, 0.5, 9, losses := Losses(8, 20, (15, 20)))
    assert found.form == 1
    assert 8 < found.moves <= 15
    assert len(losses.calls) <= 9


def test_what_a_form_costs_counts():
    found = search([curve(20, cost=12.0), curve(20)], 0.5, 9, Losses(15, 20, (8, 20)))
    assert found.form == 1
    assert 15 - 12 < found.moves <= 8


def test_a_form_that_cannot_save_more_is_not_tried():
    losses = Losses(15, 20, (20, 20))
    found = search([curve(20), curve(9)], 0.5, 9, losses)
    assert found.form == 0
    assert all(form == 0 for form, _, _ in losses.calls)


def test_two_forms_with_few_evaluations():
    """What nothing could be tried of is no measure for another form."""
    curves = [Curve(errors=(1.0, 2.0, 3.0), saved=(1.0, 2.0, 3.0)) for _ in range(2)]
    for evaluations in (2, 3, 4):
        forms = []

        def loss(form, half, moves, forms=forms):
            forms.append(form)
            return Loss(0.0, 0.0)

        assert search(curves, 0.5, evaluations, loss).moves > 0
        assert 0 < len(forms) <= evaluations
        assert forms[0] == 0
