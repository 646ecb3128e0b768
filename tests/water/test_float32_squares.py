"""float32 products of real decay matrices, whose blocks hold entries of many magnitudes."""

import pytest

import spamm_torch
from models.water.embedded import load
from models.water.matrices import MATRICES


@pytest.mark.parametrize("block", [32, 64])
@pytest.mark.parametrize("name", MATRICES)
def test_squares_are_as_accurate_as_torchs(device, name, block):
    """Normwise, as for other badly scaled data; also where most block products are skipped."""
    a = getattr(load(), name).to(device)
    exact = a.float().double() @ a.float().double()
    rounding = (a.float() @ a.float() - exact).norm()
    error = spamm_torch.mm(a.float(), a.float(), tau=0.0, block=block) - exact
    assert error.norm() <= 4 * rounding
    max_error = 1e-3
    error = spamm_torch.mm(a.float(), a.float(), max_error=max_error, block=block) - exact
    assert error.norm() <= max_error * a.norm() ** 2 + 4 * rounding
