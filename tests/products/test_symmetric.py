"""Symmetric products: the upper triangle of the product and its mirror image."""

import matrices
import pytest
import reference
import torch

from spamm_torch import addmm, mm, norm_map

ops = torch.ops.spamm_torch
BLOCKS = [32, 64, 128, (64, 32, 64), (32, 128, 32)]


def mirrored(c):
    """The upper triangle of ``c`` and its mirror image."""
    return torch.where(torch.ones_like(c, dtype=torch.bool).triu(), c, c.mT)


def rounding(n, dtype=torch.float64, device="cuda", seed=0):
    """A symmetric matrix under a decay, so that sums round and blocks differ."""
    upper = matrices.normal(n, n, dtype=torch.float64, device=device, seed=seed).triu()
    whole = upper + upper.triu(1).mT
    return (whole * matrices.exponential_decay(n, base=0.98, device=device)).to(dtype)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize(
    "n", [1, 64, 200, 500, *(pytest.param(n, marks=pytest.mark.cuda) for n in (1040, 2500, 2690))]
)
def test_is_the_mirrored_upper_triangle_of_the_product(force, device, dtype, block, n):
    """Odd and even numbers of tiles on the diagonal, tiles that stick out, large ones; batches."""
    force(1)
    a = torch.stack([rounding(n, dtype, device, seed) for seed in range(2)])
    for tau in (0.0, 20.0, 1e30):
        options = {"threshold": tau, "block": reference.edges(block)}
        c, norms = ops.spamm_with_norms(a, a, **options, symmetric=True)
        assert torch.equal(c, mirrored(ops.spamm(a, a, **options)))
        assert torch.equal(norms, norm_map(c, options["block"][0]))
        x, options = a[0], {"tau": tau, "block": block}
        assert torch.equal(mm(x, x, **options, symmetric=True), mirrored(mm(x, x, **options)))
        options |= {"beta": 2, "alpha": -0.5}
        for added in (a[1], x.new_tensor([3.0])):
            c = addmm(added, x, x, **options, symmetric=True)
            assert torch.equal(c, mirrored(addmm(added, x, x, **options)))


def test_norms_are_those_of_the_mirror_image(device, dtype):
    """The product itself is another one below the diagonal."""
    a, b = (matrices.normal(300, 300, dtype=dtype, device=device, seed=seed) for seed in (0, 1))
    for block in ([32] * 3, [64] * 3):
        c, norms = ops.spamm_with_norms(a, b, threshold=0.0, block=block, symmetric=True)
        assert torch.equal(c, mirrored(ops.spamm(a, b, threshold=0.0, block=block)))
        assert torch.equal(norms, norm_map(c, block[0]))


@pytest.mark.parametrize("tau", [0.0, 0.3])
def test_float64_squares_on_the_cpu_have_the_bits_of_the_whole_product(tau):
    upper = matrices.normal(500, 500, dtype=torch.float64).triu()
    a = (upper + upper.triu(1).mT) * matrices.exponential_decay(500, dtype=torch.float64)
    norms = norm_map(a)
    valid = norms[:, :, None] * norms[None] >= tau
    assert torch.equal(valid, valid.permute(2, 1, 0))  # no decision hangs on a norm's rounding
    assert torch.equal(mm(a, a, tau=tau, symmetric=True), mm(a, a, tau=tau))


def test_negative_zeros_infinities_and_nans_are_mirrored(device, dtype):
    a = torch.zeros(300, 300, dtype=dtype, device=device)
    a[290, 3] = a[3, 290] = float("inf")
    a[5, 90] = a[90, 5] = float("nan")
    a[200, 200] = 3
    c, norms = mm(a, a, tau=1.0, block=32, symmetric=True, return_norms=True)
    expected = mirrored(mm(a, a, tau=1.0, block=32))
    torch.testing.assert_close(c, expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(norms, norm_map(expected, 32), rtol=0, atol=0, equal_nan=True)
    assert c.isnan().any()
    assert c[200, 200] == 9
    minus = addmm(torch.full_like(a, -0.0), a, a, tau=1e30, symmetric=True)
    assert torch.equal(minus.signbit(), minus.signbit().mT)


# ---- On CUDA: other grids, and nothing computed or copied twice ---------------------------------


@pytest.mark.cuda
@pytest.mark.parametrize("symmetric_product", [False, True])
def test_results_are_written_where_they_belong(dtype, symmetric_product):
    """Without memory for a second result."""
    a = rounding(1520, dtype)
    out, norms = torch.empty_like(a), norm_map(a)
    options = {"threshold": 1.0, "norm_a": norms, "norm_b": norms, "symmetric": symmetric_product}
    of_out = torch.empty_like(norms)
    ops.spamm(a, a, input=a, beta=2, alpha=-1, **options)  # its memory stays, and counts as free
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    ops.spamm_into(a, a, out=out, input=a, beta=2, alpha=-1, **options, norms=of_out)
    parts = 2 * a.nbytes if dtype == torch.float32 else 0  # split parts of both operands
    assert torch.cuda.max_memory_allocated() - before < parts + out.nbytes / 2
    assert torch.equal(out, ops.spamm(a, a, input=a, beta=2, alpha=-1, **options))
    assert torch.equal(of_out, norm_map(out))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_batches_go_where_they_belong(dtype):
    a = torch.stack([rounding(100, dtype, seed=seed) for seed in range(3)])
    expected = ops.spamm(a, a, threshold=0.0, symmetric=True)
    for memory in (torch.zeros(3, 100, 128), torch.zeros(3, 104, 101)):
        out = memory.to(a)[:, :100, :100]
        ops.spamm_into(a, a, out=out, threshold=0.0, symmetric=True)
        assert torch.equal(out, expected)


@pytest.mark.cuda
@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("shape", [(200, 300), (1040, 520), (2056, 1000), (2048, 1024)])
def test_a_matrix_times_its_transpose(dtype, shape, tf32, set_tf32):
    """Small ones are computed as a whole, with the same bits, but float32 at full accuracy."""
    set_tf32(tf32)
    x = matrices.normal(*shape, dtype=dtype, device="cuda")
    norms = norm_map(x)
    middle = (norms[:, None] * norms).median().item()
    for tau in (0.0, middle, 1e30):
        c, of_c = mm(x, x.mT, tau=tau, symmetric=True, return_norms=True)
        assert torch.equal(c, c.mT)
        assert torch.equal(c, mirrored(mm(x, x.mT, tau=tau)))
        assert torch.equal(of_c, norm_map(c))
