"""torch.library.opcheck on every operator (schema, autograd, fake kernel, AOT dispatch); flops."""

import matrices
import pytest
import torch
from torch import nn
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

import spamm_torch

ops = torch.ops.spamm_torch


def operand(device, *shape, seed=0, dtype=torch.float32, requires_grad=False):
    values = matrices.normal(*shape, dtype=dtype, device=device, seed=seed)
    return values.requires_grad_(requires_grad)


def cases_of_stages(device):
    """(name, op, arguments, options)"""
    a, b = operand(device, 70, 100), operand(device, 100, 40)
    batch = operand(device, 2, 70, 100, dtype=torch.float16, requires_grad=True)
    yield "norm_map", ops.norm_map, (batch, (32, 64)), {}
    yield "norm_map, strided", ops.norm_map, (a.double().t(), (128, 32)), {}
    yield "norm_maps", ops.norm_maps, (a, b, (32, 64, 128)), {}
    for dtype, of in ((torch.float32, (2,)), (torch.float64, ())):
        maps = [operand(device, *of, *shape, dtype=dtype).abs() for shape in ((3, 4), (4, 2))]
        name, host, tau = f", {dtype}", torch.tensor(0.5), torch.tensor(0.5, device=device)
        skip, low = {"skip_norm_b": maps[1] * 2}, torch.tensor(1 << 20, device=device)
        more = {"max_iterations": 5, "tolerance": 0.1}
        yield f"find_tau{name}", ops.find_tau, (*maps, 0.4), more
        yield f"find_tau by error{name}", ops.find_tau, maps, {"max_error": 0.1, **skip}
        yield f"product_histogram{name}", ops.product_histogram, (*maps, low, 3, 100), {}
        yield f"valid_counts{name}", ops.valid_counts, (*maps, host), {}
        yield f"error_bound{name}", ops.error_bound, (*maps, tau), skip


def cases_of_products(device):
    for dtype, of, wants in ((torch.float32, (), True), (torch.bfloat16, (2,), False)):
        options = {"dtype": dtype, "requires_grad": wants}
        a, b = operand(device, *of, 40, 70, **options), operand(device, *of, 70, 50, **options)
        more = {"input": operand(device, 40, 50, **options), "beta": 2, "alpha": 0.5}
        name, tau = f", {dtype}", torch.tensor(40.0, device=device)
        maps = ops.norm_map(a, (32, 64)), ops.norm_map(b, (64, 32))
        yield f"multiply{name}", ops.multiply, (a, b, *maps, tau, (32, 64, 32)), more
        yield f"spamm{name}", ops.spamm, (a, b), {"tau": tau}
        yield f"spamm by error{name}", ops.spamm, (a, b), {"max_error": 0.5, **more}
        ratio = {"valid_ratio": 0.5, "block": (32, 32, 64), **more}
        yield f"spamm_with_norms{name}", ops.spamm_with_norms, (a, b), ratio
    a, b = operand(device, 40, 70), operand(device, 70, 40, seed=1)
    ratio = {"valid_ratio": 0.5}
    square = operand(device, 70, 70, requires_grad=True)
    yield "symmetric", ops.spamm, (square, square), {**ratio, "symmetric": True}
    given = {"norm_a": ops.norm_map(a, (64, 64)), "norm_b": ops.norm_map(b, (64, 64))}
    yield "given maps", ops.spamm, (a, b), {"threshold": 40.0, **given}
    for sizes in ((0, 4, 3), (5, 0, 3)):
        m, k, n = sizes
        yield f"empty {sizes}", ops.spamm, (operand(device, m, k), operand(device, k, n)), ratio
    for layout in ("transposed", "one row"):
        yield layout, ops.spamm, [matrices.LAYOUTS[layout](x) for x in (a, b)], ratio
    into = {"input": operand(device, 40, 40), "beta": 2, "symmetric": True}
    into["norms"], out = torch.ones(2, 2, device=device), operand(device, 40, 40)
    block = {"max_error": 0.1, "block": (32, 32, 32)}
    yield "spamm_into", ops.spamm_into, (a, b), {"out": out, **block, **into}


def cases_of_convolutions(device):
    for dtype in (torch.float32, torch.float16):
        input = operand(device, 2, 8, 5, 6, dtype=dtype)
        weight = operand(device, 16, 8, 3, 3, dtype=dtype, seed=1)
        given = {"valid_ratio": 0.5, "activation": "relu"}
        yield f"with norms, {dtype}", ops.conv2d_with_norms, (input, weight), {"valid_ratio": 0.5}
        norms = {"norm_input": torch.ones(1, 5, 6, 1, device=device), "weight_is_ready": True}
        single = (input[0], weight, None, 2)
        yield f"one picture, {dtype}", ops.conv2d_with_norms, single, {**given, **norms}
    bias = operand(device, 16, dtype=dtype, seed=2, requires_grad=True)
    yield "half types", ops.conv2d, (input, weight, bias, [2, 1], [1, 1]), given


def cases(device):
    families = cases_of_stages, cases_of_products, cases_of_convolutions
    return {name: case for family in families for name, *case in family(device)}


@pytest.mark.parametrize("name", cases("cpu"))
def test_opcheck(device, name):
    op, args, options = cases(device)[name]
    rounds = {"rtol": 2e-2, "atol": 2e-2} if name == "half types" else {}
    opcheck(op.default, tuple(args), options, **rounds)


# ---- FlopCounterMode counts products as the dense ones that they stand for ----------------------


def flops_of(call, backward=False):
    with FlopCounterMode(display=False) as counter:
        result = call()
        if backward:
            result.sum().backward()
    return counter.get_total_flops()


def product_calls(device):
    a, b = torch.ones(40, 70, device=device), torch.ones(70, 50, device=device)
    bias = torch.ones(50, device=device)
    batches, square = (a.expand(3, -1, -1), b.expand(3, -1, -1)), torch.ones(96, 96, device=device)
    return {
        "symmetric": (
            lambda **knob: spamm_torch.mm(square, square, symmetric=True, **knob),
            lambda: square @ square,
        ),
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


@pytest.mark.parametrize("name", ["mm", "symmetric", "addmm", "bmm", "linear"])
@pytest.mark.parametrize("knob", [{"tau": 1e9}, {"valid_ratio": 0.5}, {"max_error": 0.1}], ids=str)
def test_flops_of_products(device, name, knob):
    ours, dense = product_calls(device)[name]
    assert flops_of(lambda: ours(**knob)) == flops_of(dense) > 0


@pytest.mark.parametrize("shape", [(2, 12, 9, 8), (12, 9, 8)])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("return_norms", [False, True])
def test_flops_of_convolutions(device, shape, groups, return_norms):
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


def test_flops_of_the_backward_pass(device):
    dense = nn.Conv2d(12, 6, 3, padding=1, device=device)
    ours = spamm_torch.SpAMMConv2d.from_dense(dense, tau=1e9)
    input = torch.ones(2, 12, 9, 8, device=device, requires_grad=True)
    found = flops_of(lambda: ours(input), backward=True)
    assert found == flops_of(lambda: dense(input), backward=True)
