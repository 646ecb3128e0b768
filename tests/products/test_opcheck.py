"""torch.library.opcheck on every operator: schema, autograd, fake kernel, AOT dispatch."""

import matrices
import pytest
import torch
from torch.library import opcheck

import spamm_torch  # noqa: F401  registers the operators

ops = torch.ops.spamm_torch
pytestmark = pytest.mark.strength(1)


def operand(device, *shape, seed=0, dtype=torch.float32, requires_grad=False):
    values = matrices.normal(*shape, dtype=dtype, device=device, seed=seed)
    return values.requires_grad_(requires_grad)


def maps(device, *batch, dtype=torch.float32):
    norm_a = operand(device, *batch, 3, 4, dtype=dtype).abs()
    return norm_a, operand(device, *batch, 4, 2, dtype=dtype, seed=1).abs()


@pytest.mark.parametrize("dtype", matrices.DTYPES)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_norm_map(device, dtype, requires_grad):
    a = operand(device, 2, 70, 100, dtype=dtype, requires_grad=requires_grad)
    opcheck(ops.norm_map.default, (a, (32, 64)))
    opcheck(ops.norm_map.default, (a[0].t(), (128, 32)))


def test_norm_maps(device):
    a, b = operand(device, 70, 100), operand(device, 100, 40)
    opcheck(ops.norm_maps.default, (a, b, (32, 64, 128)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("batch", [(), (2,)])
class TestStagesOnMaps:
    def test_find_tau(self, device, dtype, batch):
        opcheck(ops.find_tau.default, (*maps(device, *batch, dtype=dtype), 0.4))
        options = {"max_iterations": 5, "tolerance": 0.1}
        opcheck(ops.find_tau.default, (*maps(device, *batch, dtype=dtype), 0.4), options)

    def test_find_tau_for_error(self, device, dtype, batch):
        norm_a, norm_b = maps(device, *batch, dtype=dtype)
        opcheck(ops.find_tau.default, (norm_a, norm_b), {"max_error": 0.1})
        opcheck(
            ops.find_tau.default, (norm_a, norm_b), {"max_error": 0.1, "skip_norm_b": norm_b * 2}
        )

    def test_product_histogram(self, device, dtype, batch):
        low = torch.tensor(1 << 20, device=device)
        opcheck(ops.product_histogram.default, (*maps(device, *batch, dtype=dtype), low, 3, 100))

    def test_valid_counts(self, device, dtype, batch):
        for tau in (torch.tensor(0.5), torch.tensor(0.5, device=device, dtype=dtype)):
            opcheck(ops.valid_counts.default, (*maps(device, *batch, dtype=dtype), tau))

    def test_valid_ratio(self, device, dtype, batch):
        for tau in (torch.tensor(0.5), torch.tensor(0.5, device=device, dtype=dtype)):
            opcheck(ops.valid_ratio.default, (*maps(device, *batch, dtype=dtype), tau))

    def test_error_bound(self, device, dtype, batch):
        norm_a, norm_b = maps(device, *batch, dtype=dtype)
        tau = torch.tensor(0.5, device=device)
        opcheck(ops.error_bound.default, (norm_a, norm_b, tau))
        opcheck(ops.error_bound.default, (norm_a, norm_b, tau), {"skip_norm_b": norm_b * 2})


@pytest.mark.parametrize("dtype", matrices.DTYPES)
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("batch", [(), (2,)])
class TestProducts:
    def operands(self, device, dtype, requires_grad, batch):
        options = {"dtype": dtype, "requires_grad": requires_grad}
        a = operand(device, *batch, 40, 70, **options)
        b = operand(device, *batch, 70, 50, seed=1, **options)
        return a, b, operand(device, 40, 50, seed=2, **options)

    def test_multiply(self, device, dtype, requires_grad, batch):
        a, b, input = self.operands(device, dtype, requires_grad, batch)
        norm_a, norm_b = ops.norm_map(a, (32, 64)), ops.norm_map(b, (64, 32))
        args = (a, b, norm_a, norm_b, torch.tensor(40.0, device=device), (32, 64, 32))
        opcheck(ops.multiply.default, args)
        opcheck(ops.multiply.default, args, {"input": input, "beta": 2, "alpha": 0.5})

    @pytest.mark.parametrize("knob", ["tau", "threshold", "valid_ratio", "max_error"])
    def test_spamm(self, device, dtype, requires_grad, batch, knob):
        a, b, input = self.operands(device, dtype, requires_grad, batch)
        value = torch.tensor(40.0, device=device) if knob == "tau" else 0.5
        opcheck(ops.spamm.default, (a, b), {knob: value})
        more = {"block": (32, 32, 64), "input": input, "beta": 2, "alpha": 0.5}
        opcheck(ops.spamm.default, (a, b), {knob: value, **more})

    def test_spamm_with_norms(self, device, dtype, requires_grad, batch):
        a, b, input = self.operands(device, dtype, requires_grad, batch)
        opcheck(ops.spamm_with_norms.default, (a, b), {"valid_ratio": 0.5})
        more = {"block": (32, 32, 64), "input": input, "beta": 2, "alpha": 0.5}
        opcheck(ops.spamm_with_norms.default, (a, b), {"threshold": 40.0, **more})


def test_products_into_memory(device):
    a, b = operand(device, 40, 70), operand(device, 70, 40, seed=1)
    out, norms = operand(device, 40, 40), torch.ones(2, 2, device=device)
    more = {"input": operand(device, 40, 40), "beta": 2, "symmetric": True, "norms": norms}
    opcheck(ops.spamm_into.default, (a, b), {"out": out, "valid_ratio": 0.5})
    opcheck(
        ops.spamm_into.default, (a, b), {"out": out, "max_error": 0.1, "block": (32,) * 3, **more}
    )
    maps = ops.norm_map(a, (32, 32)), ops.norm_map(b, (32, 32))
    args = (a, b, *maps, torch.tensor(40.0), (32, 32, 32), out)
    opcheck(ops.multiply_into.default, args)
    opcheck(ops.multiply_into.default, args, more)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_symmetric_spamm(device, requires_grad):
    a = operand(device, 70, 70, requires_grad=requires_grad)
    opcheck(ops.spamm.default, (a, a), {"valid_ratio": 0.5, "symmetric": True})


def test_spamm_with_given_maps(device):
    a, b = operand(device, 40, 70), operand(device, 70, 50, seed=1)
    given = {"norm_a": ops.norm_map(a, (64, 64)), "norm_b": ops.norm_map(b, (64, 64))}
    opcheck(ops.spamm.default, (a, b), {"valid_ratio": 0.5, **given})


@pytest.mark.parametrize("shape", [(0, 4, 3), (5, 0, 3), (5, 4, 0)])
def test_spamm_of_empty_operands(device, shape):
    m, k, n = shape
    a, b = operand(device, m, k), operand(device, k, n)
    opcheck(ops.spamm.default, (a, b), {"valid_ratio": 0.5})


@pytest.mark.parametrize("layout", ["transposed", "every third column", "one row"])
def test_spamm_of_strided_operands(device, layout):
    change = matrices.LAYOUTS[layout]
    a, b = change(operand(device, 40, 70)), change(operand(device, 70, 50, seed=1))
    opcheck(ops.spamm.default, (a, b), {"valid_ratio": 0.5})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_rectified_conv2d(device, dtype, requires_grad):
    input = operand(device, 2, 8, 5, 6, dtype=dtype, requires_grad=requires_grad)
    weight = operand(device, 16, 8, 3, 3, dtype=dtype, seed=1)
    bias = operand(device, 16, dtype=dtype, seed=2)
    opcheck(
        ops.conv2d.default,
        (input, weight, bias, [2, 1], [1, 1]),
        {"valid_ratio": 0.5, "activation": "relu"},
        rtol=2e-2 if dtype == torch.float16 else None,
        atol=2e-2 if dtype == torch.float16 else None,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_conv2d_with_norms(device, dtype, layout):
    input = operand(device, 2, 8, 5, 6, dtype=dtype).to(memory_format=layout)
    weight = operand(device, 16, 8, 3, 3, dtype=dtype, seed=1)
    norms = torch.ones(1, 5, 6, 1, device=device)
    opcheck(ops.conv2d_with_norms.default, (input, weight), {"valid_ratio": 0.5})
    opcheck(
        ops.conv2d_with_norms.default,
        (input[0], weight, None, 2),
        {"valid_ratio": 0.5, "norm_input": norms, "activation": "relu", "weight_is_ready": True},
    )
