"""What all tests share: the devices they run on and hypothesis's profiles."""

import os

import pytest
import torch
from hypothesis import settings

# No deadlines: an example's time says more about the machine than about the code. "ci" draws the
# same examples every time; "dev" keeps looking for new ones.
settings.register_profile("dev", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, max_examples=200)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if "CI" in os.environ else "dev"))


def pytest_runtest_setup(item):
    if item.get_closest_marker("cuda") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if item.get_closest_marker("multi_gpu") and torch.cuda.device_count() < 2:
        pytest.skip(f"needs two CUDA devices; found {torch.cuda.device_count()}")
    if item.get_closest_marker("inductor") and " " in torch.__file__:
        pytest.skip("Inductor's C++ needs a path of torch without a space")


def pytest_collection_finish(session):
    """A run of nothing but tests for CUDA must not pass by skipping them all."""
    asked = session.config.option.markexpr
    alone = all(item.get_closest_marker("cuda") for item in session.items)
    if asked and session.items and alone and not torch.cuda.is_available():
        raise pytest.UsageError(f"expected a CUDA device for -m {asked!r}; torch finds none")


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request):
    """Runs a test on the CPU and, marked ``cuda``, on the first CUDA device."""
    return torch.device(request.param)
