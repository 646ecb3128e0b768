"""Tiles and copies of operands on CUDA: whatever serves, the bits are the same."""

import itertools

import matrices
import pytest
import torch
from matrices import normal

from spamm_torch import mm, norm_map

pytestmark = pytest.mark.cuda
HALF = [torch.float16, torch.bfloat16]
MOST = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 2e-6}  # of an error


def operands(m, k, n, dtype):
    make = {"dtype": dtype, "device": "cuda"}
    return normal(m, k, **make), normal(k, n, **make, seed=1)


def middle(a, b):
    """A tau that skips about half of the block products."""
    return 1.0001 * (norm_map(a).median() * norm_map(b).median()).item()


def require_near(c, exact):
    assert ((c.double() - exact).norm() / exact.norm()).item() < MOST[c.dtype]


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("edges", [(1040, 1100), (2056, 2060), (2049, 2112), (4104, 1300)])
def test_parts_have_the_bits_of_the_whole(dtype, edges):
    """The tiles of the whole and of its parts are of different shapes."""
    a, b = operands(edges[0], 300, edges[1], dtype)
    for tau in (0.0, middle(a, b)):
        whole = mm(a, b, tau=tau)
        slices = [((0, 64), (512, 1024), (960, edge)) for edge in edges]  # of whole blocks
        for rows, columns in itertools.product(*slices):
            part = mm(a[slice(*rows)], b[:, slice(*columns)], tau=tau)
            assert torch.equal(part, whole[slice(*rows), slice(*columns)])


@pytest.mark.parametrize("dtype", matrices.DTYPES)
@pytest.mark.parametrize("shape", [(1100, 700, 1030), (2056, 130, 2056), (70, 2500, 90)])
def test_layouts_change_no_bit(dtype, shape):
    """The norm pass copies what the kernels cannot read in place, or not as fast."""
    a, b = operands(*shape, dtype)
    tau = middle(a, b)
    expected, given = mm(a, b, tau=tau), {"norm_a": norm_map(a), "norm_b": norm_map(b)}
    for names in itertools.product(("misaligned", "transposed", "wide rows"), repeat=2):
        x, y = (matrices.LAYOUTS[name](of) for name, of in zip(names, (a, b), strict=True))
        assert torch.equal(mm(x, y, tau=tau), expected), names
        assert torch.equal(mm(x, y, tau=tau, **given), expected), names
    square = a[:, : len(a)][: a.shape[1]]
    odd = matrices.LAYOUTS["misaligned"](square)
    assert torch.equal(mm(odd, odd, tau=tau), mm(square, square.clone(), tau=tau))


@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
@pytest.mark.parametrize("shape", [(64, 20_000, 64), (1, 4096, 1000), (100, 5000, 300)])
def test_long_sums_on_few_tiles(dtype, shape):
    a, b = operands(*shape, dtype)
    require_near(mm(a, b, tau=0.0), a.double() @ b.double())
    for tau in (0.0, middle(a, b), 1e30):
        expected = mm(a, b, tau=tau)
        assert all(torch.equal(mm(a, b, tau=tau), expected) for _ in range(10))
        assert torch.equal(mm(a, b, tau=tau, norm_a=norm_map(a), norm_b=norm_map(b)), expected)
    assert not mm(a, b, tau=1e30).any()
