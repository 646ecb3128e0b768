"""Times of layers on lines by valid ratio."""

import pytest

from spamm_torch import SpAMMConfig
from spamm_torch.calibration.statistics import Candidate, LayerStatistics
from spamm_torch.calibration.times import LayerTimes, smoothed


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
