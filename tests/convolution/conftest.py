"""What the tests of convolutions share."""

import pytest
import torch


@pytest.fixture
def exact_reference(monkeypatch):
    """cuDNN, which dense references use, may round to TF32 by default."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
