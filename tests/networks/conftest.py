"""Parts that the tests of networks share."""

import pytest
import torch
from support import one_thread  # noqa: F401  the fixture is automatic


@pytest.fixture(autouse=True)
def inference():
    """Compiles everything anew, without gradients."""
    torch._dynamo.reset()
    with torch.no_grad():
        yield
