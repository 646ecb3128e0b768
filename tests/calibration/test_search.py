"""The search by itself: hulls, moves and bisection."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spamm_torch import SpAMMConfig
from spamm_torch.calibration.moves import chosen_after, lower_hull, moves_of
from spamm_torch.calibration.search import Loss, search
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
        chosen = chosen_after(moves[:count])
        error, time = (
            sum(
                candidates[chosen[str(i)]][part] if str(i) in chosen else (0, 12)[part]
                for i, candidates in enumerate(candidates_by_layer)
            )
            for part in (0, 1)
        )
        spent = 12 * len(candidates_by_layer) - sum(move.saved for move in moves[:count])
        assert spent == pytest.approx(time)
        assert sum(move.added for move in moves[:count]) == pytest.approx(error)
        assert not any(e < error - 1e-9 and t <= time for e, t in everything)


def test_the_hull_leaves_out_what_is_above():
    points = [(0.0, 0.0, 0), (1.0, 1.0, 1), (2.0, 1.0, 2), (2.0, 3.0, 3), (3.0, 5.0, 4)]
    assert [number for _, _, number in lower_hull(points)] == [0, 2, 4]


def test_layers_that_are_hardly_faster_get_no_move():
    assert moves_of(*model_of([[(0, 11.8)]])) == []
    assert len(moves_of(*model_of([[(0, 11.5)]]))) == 1


class Losses:
    """A loss that jumps from nothing to far too much after so many moves, on each half."""

    def __init__(self, first, second):
        self._most, self.calls = (first, second), []

    def __call__(self, half, moves):
        self.calls.append((half, moves))
        return Loss(0.0 if moves <= self._most[half] else 9.0)


@pytest.mark.parametrize("most", range(21))
def test_bisection_finds_the_most_moves(most):
    losses = Losses(most, 100)
    found = search([0.1 * n for n in range(1, 21)], 0.5, 9, losses)
    assert found.moves == most
    assert len(losses.calls) <= 9
    assert (found.held is None) == (most == 0)


@given(st.integers(0, 30), st.integers(0, 30), st.integers(2, 12))
def test_a_search_never_asks_more_nor_allows_too_much(first, second, evaluations):
    losses = Losses(first, second)
    found = search([1.2**n for n in range(30)], 0.5, evaluations, losses)
    assert found.moves <= min(first, second)
    assert len(losses.calls) <= evaluations
    if found.moves:
        held = [moves for half, moves in losses.calls if half == 1]
        assert found.moves == max(moves for moves in held if moves <= second)  # it was seen to hold


def test_it_steps_back_where_the_second_half_refuses():
    errors = [float(n) for n in range(1, 21)]
    losses = Losses(20, 10)
    found = search(errors, 0.5, 9, losses)
    assert [moves for half, moves in losses.calls if half == 1] == [20, 14, 9]
    assert found.moves == 9
    assert search(errors, 0.5, 9, Losses(20, 8)).moves == 0  # evaluations are spent


def test_what_is_left_of_evaluations_goes_between():
    errors = [float(n) for n in range(1, 21)]
    losses = Losses(20, 17)
    assert search(errors, 0.5, 9, losses).moves == 17
    assert [moves for half, moves in losses.calls if half == 1] == [20, 14, 17]
    assert search(errors, 0.5, 9, Losses(20, 16)).moves == 14


def test_no_moves_are_no_search():
    assert search([], 0.5, 9, Losses(0, 0)).moves == 0
