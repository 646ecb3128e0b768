"""A device without memory, at each allocation of every pipeline: torch's error, nothing broken."""

import contextlib

import pytest
import torch
from support import is_torchs, memory_limit
from torch import nn

import spamm_torch
from spamm_torch import linalg, sparse

pytestmark = pytest.mark.cuda
OPS = torch.ops.spamm_torch
MIB = 2**20
# cuDNN takes another algorithm where its workspace does not fit; products of blocks are made in
# strips then, whose sums are rounded in another order.
BY_MEMORY = {"torch's own": 1e-3, "purify": 1e-7}  # the tolerance


def randn(*shape, dtype=torch.float16):
    generator = torch.Generator("cuda").manual_seed(0)
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


def products(dtype):
    a, b = randn(3000, 2600, dtype=dtype), randn(2600, 3400, dtype=dtype)
    square = randn(3000, 3000, dtype=dtype)
    square = square + square.mT
    return {
        "tau": lambda: spamm_torch.mm(a, b, tau=60.0),
        "valid ratio": lambda: spamm_torch.mm(a, b, valid_ratio=0.5, return_norms=True),
        "max error": lambda: spamm_torch.mm(a, b, max_error=0.1, return_info=True),
        "copied operands": lambda: spamm_torch.mm(
            a[:, 1:], b[1:, ::2], tau=60.0, block=(128, 32, 64)
        ),
        "symmetric": lambda: spamm_torch.mm(square, square, tau=60.0, symmetric=True),
        "in place": lambda: spamm_torch.addmm(
            y := square.clone(), y, y, beta=2, alpha=-1, tau=60.0, out=y
        ),
        "batches": lambda: spamm_torch.bmm(
            a.expand(3, -1, -1), b.expand(3, -1, -1), valid_ratio=0.5
        ),
    }


def convolutions(dtype):
    x, weight = randn(140, 72, 30, 30, dtype=dtype), randn(136, 72, 3, 3, dtype=dtype)
    last = x.contiguous(memory_format=torch.channels_last)
    unskipped = {"padding": 1, "tau": 0.0}
    name = "torch's own" if is_torchs(last, weight, **unskipped) else "nothing skipped"
    return {
        name: lambda: spamm_torch.conv2d(last, weight, **unskipped, relu=True),
        "tau": lambda: spamm_torch.conv2d(last, weight, padding=1, tau=500.0, return_norms=True),
        "other layouts": lambda: spamm_torch.conv2d(x, weight, padding=1, valid_ratio=0.5),
        "an im2col matrix": lambda: spamm_torch.conv2d(
            x[:, :6], weight[:, :3], groups=2, valid_ratio=0.5
        ),
        "info": lambda: spamm_torch.conv2d(
            last, weight, padding=1, max_error=0.1, return_info=True
        ),
        "pool": lambda: OPS.max_pool2d(last, 3, 2, 1, norms=True),
        "pooled convolution": lambda: OPS.conv2d_max_pool(last, weight, activation="relu"),
    }


def matrices(dtype):
    distance = (torch.arange(2048)[:, None] - torch.arange(2048)).abs()
    a = sparse.from_dense(torch.exp(-distance / 50.0).to(dtype), 64, drop=1e-6).cuda()
    levels = torch.diag(2.0 * (-1.0) ** torch.arange(2048)).double()  # with a gap in the middle
    h = sparse.from_dense(levels + 0.1 * torch.exp(-distance / 5.0), 64, drop=1e-9).cuda()
    dense = randn(2048, 1000, dtype=dtype)
    return {
        "blocks": lambda: spamm_torch.mm(
            a, a, max_error=1e-3, drop=1e-4, return_norms=True, return_info=True
        ),
        "sum of blocks": lambda: spamm_torch.addmm(a, a, a, tau=1e-3, symmetric=True),
        "blocks times dense": lambda: spamm_torch.mm(a, dense, tau=1e-3),
        "add": lambda: sparse.add(a, sparse.transpose(a)),
        "purify": lambda: sparse.to_dense(linalg.purify(h, 2048, max_error=1e-8).matrix),
    }


def network(dtype):
    layers = [nn.Conv2d(72, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)]
    model = nn.Sequential(*layers, nn.Conv2d(64, 136, 3), nn.ReLU()).to("cuda", dtype).eval()
    spamm_torch.convert_(model, spamm_torch.SpAMMConfig(tau=0.01))
    x = randn(140, 72, 30, 30, dtype=dtype).contiguous(memory_format=torch.channels_last)

    def call():
        with torch.no_grad():
            return model(x)

    return {"network": call}


def bits(result):
    """Copies on the CPU of all tensors in a result."""
    if isinstance(result, torch.Tensor):
        found = result.values() if result.layout != torch.strided else result
        return [found.cpu()]
    return [
        x for part in result if isinstance(part, (torch.Tensor, tuple, list)) for x in bits(part)
    ]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("family", [products, convolutions, matrices, network])
def test_no_memory_at_any_allocation(family, dtype):
    """With 0, 2, 4, ... MiB until it is enough: step by step a later allocation fails."""
    calls, failed = family(dtype), 0
    for name, call in calls.items():
        expected = bits(call())
        torch.cuda.synchronize()
        found, more = None, 0
        while found is None:
            with memory_limit([0], more), contextlib.suppress(torch.OutOfMemoryError):
                found = bits(call())
            more += 2 * MIB if more < 64 * MIB else more // 4
        failed += more > 2 * MIB  # the allocator's pieces may hold enough for small results
        for wanted, got in zip(expected, found, strict=True):
            if name in BY_MEMORY:
                close = {"rtol": BY_MEMORY[name], "atol": BY_MEMORY[name]}
                torch.testing.assert_close(wanted, got, **close)
            else:
                assert torch.equal(wanted, got), name
        for wanted, got in zip(expected, bits(call()), strict=True):
            assert torch.equal(wanted, got), name
        torch.cuda.synchronize()  # no error is left behind
    assert failed > 0
