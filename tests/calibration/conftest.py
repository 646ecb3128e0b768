"""Times that tests make up."""

import pytest
from tiny import linear_time


@pytest.fixture
def timed(monkeypatch):
    """Replaces what is measured by a function of the trial."""

    def replace(time_of):
        monkeypatch.setattr(
            "spamm_torch.calibration.times.measure",
            lambda calls, _: {trial: time_of(trial) for trial in calls},
        )

    replace(linear_time)
    return replace
