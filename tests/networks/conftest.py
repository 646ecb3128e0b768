"""What the tests of networks share."""

import pytest


@pytest.fixture
def measured(monkeypatch):
    """Replaces measured times: ``measured(of_layers, of_models)``, in the order of candidates."""

    def replace(of_layers, of_models):
        for module, times in (("engines", of_layers), ("conversion", of_models)):
            monkeypatch.setattr(
                f"spamm_torch.networks.{module}.times_of",
                lambda calls, _, times=times: list(times[: len(calls)]),
            )

    return replace
