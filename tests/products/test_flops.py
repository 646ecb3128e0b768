"""FlopCounterMode counts SpAMM's products as the dense ones that they stand for."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import spamm_torch


def flops_of(call, backward=False):
    with FlopCounterMode(display=False) as counter:
        result = call()
        if backward:
            result.sum().backward()
    return counter.get_total_flops()


def product_calls(device):
    a, b = torch.ones(40, 70, device=device), torch.ones(70, 50, device=device)
    bias = torch.ones(50, device=device)
    batches = a.expand(3, -1, -1), b.expand(3, -1, -1)
    return {
        "mm": (lambda **knob: spamm_torch.mm(a, b, **knob), lambda: a @ b),
        "addmm": (
            lambda **knob: spamm_torch.addmm(bias, a, b, **knob),
            lambda: torch.addmm(bias, a, b),
        ),
        "bmm": (lambda **knob: spamm_torch.bmm(*batches, **knob), lambda: torch.bmm(*batches)),
        "linear": (
            lambda **knob: spamm_torch.linear(a.view(2, 20, 70), b.t(), bias, **knob),
            lambda: nn.functional.linear(a.view(2, 20, 70), b.t(), bias),
        ),
    }


@pytest.mark.parametrize("name", ["mm", "addmm", "bmm", "linear"])
@pytest.mark.parametrize("knob", [{"tau": 1e9}, {"valid_ratio": 0.5}, {"max_error": 0.1}], ids=str)
def test_products(device, name, knob):
    ours, dense = product_calls(device)[name]
    assert flops_of(lambda: ours(**knob)) == flops_of(dense) > 0


@pytest.mark.parametrize("shape", [(2, 12, 9, 8), (12, 9, 8)])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("return_norms", [False, True])
def test_convolutions(device, shape, groups, return_norms):
    input = torch.ones(shape, device=device)
    weight = torch.ones(6, 12 // groups, 3, 2, device=device)
    settings = {"stride": (2, 1), "padding": 1, "groups": groups}
    found = flops_of(
        lambda: spamm_torch.conv2d(
            input, weight, **settings, valid_ratio=0.5, return_norms=return_norms
        )
    )
    batch = input if input.dim() == 4 else input.unsqueeze(0)
    assert found == flops_of(lambda: nn.functional.conv2d(batch, weight, **settings)) > 0


def test_the_backward_pass(device):
    dense = nn.Conv2d(12, 6, 3, padding=1, device=device)
    ours = spamm_torch.SpAMMConv2d.from_dense(dense, tau=1e9)
    input = torch.ones(2, 12, 9, 8, device=device, requires_grad=True)
    found = flops_of(lambda: ours(input), backward=True)
    assert found == flops_of(lambda: dense(input), backward=True)
