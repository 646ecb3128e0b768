"""Times that tests make up."""

import pytest
from tiny import linear_time, made_up


@pytest.fixture
def timed(monkeypatch):
    """Replaces what is measured by a function of the trial: microseconds, or a Timing."""

    def replace(time_of):
        monkeypatch.setattr("spamm_torch.calibration.times.measure", made_up(time_of))

    replace(linear_time)
    return replace
