"""Times of layers on lines by valid ratio."""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

from spamm_torch import SpAMMConfig
from spamm_torch.calibration.calls import ConvCall
from spamm_torch.calibration.statistics import Candidate, LayerStatistics
from spamm_torch.calibration.times import LayerTimes, _with_layouts, smoothed


def statistics_of(*ratios_of_blocks):
    """Candidates with these ratios, in a shape of blocks for each argument."""
    blocks = ((64, 1, 1), (1, 8, 8))
    return LayerStatistics(
        1.0,
        tuple(
            Candidate(SpAMMConfig(tau=1.0, pixel_block=block), ratio, 0.1, 0.1)
            for block, ratios in zip(blocks, ratios_of_blocks, strict=False)
            for ratio in ratios
        ),
    )


def test_noise_is_taken_from_times():
    ratios = (0.8, 0.6, 0.4, 0.2)
    noise = (1.0, -3.0, 3.0, -1.0)  # neither a slope nor a mean of its own
    first = [20 + 100 * ratio for ratio in ratios]
    second = [50 + 10 * ratio for ratio in ratios]
    measured = [time + off for time, off in zip(first, noise, strict=True)] + second
    found = smoothed(LayerTimes(110.0, 130.0, tuple(measured)), statistics_of(ratios, ratios))
    assert found.candidates[4:] == pytest.approx(second)
    slope = (found.candidates[0] - found.candidates[3]) / 0.6
    for time, ratio in zip(found.candidates[:4], ratios, strict=True):
        assert time == pytest.approx(found.candidates[3] + slope * (ratio - 0.2))
    assert abs(slope - 100) < 5  # of single steps: 80 to 130
    assert (found.dense, found.spamm) == (110.0, 130.0)


@pytest.mark.parametrize("ratios", [(), (0.5,), (0.5, 0.5)])
def test_times_without_a_line_stay(ratios):
    times = LayerTimes(9.0, 9.0, tuple(range(len(ratios))))
    assert smoothed(times, statistics_of(ratios)) == times


def test_all_calls_of_a_layer_with_a_layout_are_timed(monkeypatch):
    """One call of "twice" has a layout, and so another weight; "once" has none."""
    own, other = torch.ones(4, 4, 3, 3), torch.ones(4, 16, 2, 2)
    calls = [("twice", own), ("once", own), ("twice", other)]
    geometry = ((1, 1), (1, 1), (1, 1), 1)
    timed = []

    @contextmanager
    def watch(_, on_call):
        def forward(_):
            for name, weight in calls:
                image = torch.ones(1, weight.shape[1], 8, 8)
                on_call(name, ConvCall(image, weight, None, geometry, None))

        example.call = forward
        yield

    def measure(trials, _):
        timed.extend(trial.layer for trial in trials)
        return dict.fromkeys(trials, 5.0)

    monkeypatch.setattr("spamm_torch.calibration.times.watch", watch)
    monkeypatch.setattr("spamm_torch.calibration.times.measure", measure)
    exact = SimpleNamespace(setting=SpAMMConfig(tau=1.0))
    form = SimpleNamespace(layers=("once", "twice"), exact=exact, installed=lambda _: nullcontext())
    example = SimpleNamespace()
    before = {"once": LayerTimes(9.0, 8.0), "twice": LayerTimes(18.0, 16.0)}
    shapes = dict.fromkeys(before, own.shape)
    found = _with_layouts(None, form, example, before, shapes)
    assert found == {"once": LayerTimes(9.0, 8.0), "twice": LayerTimes(18.0, 10.0)}
    assert timed == ["twice", "twice"]
