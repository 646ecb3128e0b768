"""Stages in profiles: by their ops' names in torch's, and as NVTX ranges on request.

tests/cpp/nvtx_test.cpp sees the ranges themselves.
"""

from pathlib import Path

import pytest
import torch
from support import python
from torch.profiler import ProfilerActivity, profile

import spamm_torch

REPOSITORY = Path(__file__).resolve().parents[2]
STAGES = {f"spamm_torch::{name}" for name in ("norm_map", "find_tau", "multiply")}


def product(device, dtype):
    a = torch.arange(128.0 * 128).reshape(128, 128).cos().to(device, dtype)
    return spamm_torch.mm(a, a.t(), valid_ratio=0.5)


def convolution(device, dtype, **knob):
    x = torch.arange(64.0 * 64 * 16).reshape(64, 64, 4, 4).cos().to(device, dtype)
    weight = torch.arange(64.0 * 64 * 9).reshape(64, 64, 3, 3).sin().to(device, dtype)
    knob = knob or {"valid_ratio": 0.5}
    return spamm_torch.conv2d(x, weight, padding=1, **knob)


def names_in_profile(call):
    call()  # what is set up in the first call
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as found:
        call()
    return {event.key for event in found.key_averages()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_stages_stand_in_torchs_profile(device, dtype):
    assert names_in_profile(lambda: product(device, dtype)) >= STAGES | {"spamm_torch::spamm"}
    found = names_in_profile(lambda: convolution(device, dtype))
    assert found >= STAGES | {"spamm_torch::conv2d"}
    held = names_in_profile(lambda: convolution(device, dtype, tau=1.0))
    assert held & STAGES == STAGES - {"spamm_torch::find_tau"}  # nothing is searched


@pytest.mark.parametrize("value", ["1", "0"])
def test_nvtx_changes_no_result(device, value, tmp_path):
    """In a process of its own: the variable is read when the library is loaded."""
    path = tmp_path / "found.pt"
    code = (
        "import sys, torch; sys.path[:0] = sys.argv[1:4]; import test_profiling as test; "
        "device = torch.device(sys.argv[4]); "
        "torch.save([test.product(device, torch.float32), test.convolution(device, torch.float32)],"
        " sys.argv[5])"
    )
    here = Path(__file__).parent
    arguments = REPOSITORY, here.parent, here, device, path
    python("-c", code, *arguments, check=True, SPAMM_TORCH_NVTX=value)
    expected = product(device, torch.float32), convolution(device, torch.float32)
    for found, result in zip(torch.load(path), expected, strict=True):
        assert torch.equal(found, result)
