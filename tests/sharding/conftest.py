"""What the tests of several devices share."""

import pytest
import torch


@pytest.fixture(params=[0, 1])
def either_gpu_is_current(request):
    """Runs a test with the first GPU as the current one, and with the second."""
    with torch.cuda.device(request.param):
        yield
