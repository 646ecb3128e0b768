"""Symmetric products, norms of results, memory that is given and the error search on CUDA.

What these mean is tested on every device in test_symmetric, test_outputs and test_threshold. Here:
sizes that take other tiles, grids and searches, and that nothing is computed or copied twice.
"""

import matrices
import pytest
import torch

import spamm_torch
from spamm_torch import addmm, mm, norm_map

pytestmark = pytest.mark.cuda
ops = torch.ops.spamm_torch


def symmetric(n, dtype=torch.float64, seed=0):
    """Normal entries under a decay, so that sums round and blocks differ."""
    upper = matrices.normal(n, n, dtype=torch.float64, device="cuda", seed=seed).triu()
    whole = upper + upper.triu(1).mT
    return (whole * matrices.exponential_decay(n, base=0.98, device="cuda")).to(dtype)


def mirrored(c):
    return torch.where(torch.ones_like(c, dtype=torch.bool).triu(), c, c.mT)


# ---- Symmetric products -------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2500, 2690])
def test_symmetric_products_in_large_tiles(n):
    """The norms of float64 products, whose every tile has the bits of the whole product's."""
    a = symmetric(n)
    whole = mm(a, a, tau=1e-3)
    c, norms = mm(a, a, tau=1e-3, symmetric=True, return_norms=True)
    assert torch.equal(c, mirrored(whole))
    assert torch.equal(norms, norm_map(c))
    c = addmm(a, a, a, beta=2, alpha=-1, tau=1e-3, symmetric=True)
    assert torch.equal(c, mirrored(addmm(a, a, a, beta=2, alpha=-1, tau=1e-3)))


@pytest.mark.parametrize("scale", [1e-200, 1e200])
def test_norms_of_symmetric_products_far_from_one(scale):
    a = symmetric(300)
    c, norms = mm(a, a * scale, tau=0.0, symmetric=True, return_norms=True)
    assert torch.equal(norms, norm_map(c))
    assert norms[0, 0].isfinite()
    assert norms[0, 0] > 0


# ---- Memory that is given -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", matrices.DTYPES)
@pytest.mark.parametrize("symmetric_product", [False, True])
def test_results_are_written_where_they_belong(dtype, symmetric_product):
    """Without memory for a second result."""
    a = symmetric(1520, dtype)
    out, norms = torch.empty_like(a), norm_map(a)
    options = {"threshold": 1.0, "norm_a": norms, "norm_b": norms, "symmetric": symmetric_product}
    of_out = torch.empty_like(norms)
    expected = ops.spamm(a, a, input=a, beta=2, alpha=-1, **options)
    del expected  # its memory stays with the allocator, and counts as free
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    ops.spamm_into(a, a, out=out, input=a, beta=2, alpha=-1, **options, norms=of_out)
    parts = 2 * a.nbytes if dtype == torch.float32 else 0  # split parts of both operands
    assert torch.cuda.max_memory_allocated() - before < parts + out.nbytes / 2
    assert torch.equal(out, ops.spamm(a, a, input=a, beta=2, alpha=-1, **options))
    assert torch.equal(of_out, norm_map(out))


@pytest.mark.parametrize("symmetric_product", [False, True])
def test_any_memory_will_do(symmetric_product):
    """Columns in a row, rows far apart, an odd address, memory that is read."""
    a = symmetric(333)
    options = {"tau": 1e-3, "symmetric": symmetric_product, "return_norms": True}
    expected = mm(a, a, tau=1e-3, symmetric=symmetric_product)
    memory = torch.zeros(2, 500, 501, dtype=a.dtype, device="cuda")
    outs = {
        "columns": torch.empty_like(a).mT,
        "far": memory[0, :333, 2:335],
        "odd": memory[0, 1:334, 1:334],
        "spread": memory[0, :333].view(-1)[: 333 * 501].view(333, 501)[:, :333],
        "read": a.clone(),
    }
    for name, out in outs.items():
        operand = out if name == "read" else a
        c, norms = mm(operand, operand, **options, out=out)
        assert c is out
        assert torch.equal(out, expected), name
        assert torch.equal(norms, norm_map(out)), name
    assert not memory[1].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_batches_go_where_they_belong(dtype):
    a = torch.stack([symmetric(100, dtype, seed) for seed in range(3)])
    expected = ops.spamm(a, a, threshold=0.0, symmetric=True)
    for memory in (torch.zeros(3, 100, 128), torch.zeros(3, 104, 101)):
        out = memory.to(a)[:, :100, :100]
        ops.spamm_into(a, a, out=out, threshold=0.0, symmetric=True)
        assert torch.equal(out, expected)


def test_captured_in_a_graph():
    a = symmetric(400)
    out = torch.empty_like(a)

    def step():
        return mm(a, a, max_error=1e-3, symmetric=True, return_norms=True, out=out)[1]

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        norms = step()
    for seed in (1, 2):
        a.copy_(symmetric(400, seed=seed))
        graph.replay()
        assert torch.equal(out, mm(a, a, max_error=1e-3, symmetric=True))
        assert torch.equal(norms, norm_map(out))


# ---- float64 on small matrices ------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1040, 300, 1040), (70, 200, 1000), (1000, 65, 80), (1, 40, 1)])
@pytest.mark.parametrize("tau", [0.0, 4000.0])
def test_edges_of_float64_products_have_the_bits_of_whole_blocks(shape, tau):
    """Where half of the last block or more is outside, it is skipped."""
    m, k, n = shape
    a = matrices.normal(m, k, dtype=torch.float64, device="cuda")
    b = matrices.normal(k, n, dtype=torch.float64, device="cuda", seed=1)
    c = mm(a, b, tau=tau)
    if tau == 0:
        torch.testing.assert_close(c, a @ b, rtol=1e-12, atol=1e-11)
    pad = torch.nn.functional.pad
    whole = mm(pad(a, (0, 0, 0, -m % 64)), pad(b, (0, -n % 64)), tau=tau)
    assert torch.equal(c, whole[:m, :n])


# ---- The error search ---------------------------------------------------------------------------

# One thread block searches, or many; with a thread for each block of C, for several, or with
# several for each. They share out K in parts that may be uneven, and the last one empty.
SEARCHES = [(5, 7, 4), (17, 17, 17), (19, 300, 20), (70, 33, 91), (300, 40, 310)]
SEARCHES += [(1, 5000, 1), (1, 97, 1), (2, 5000, 2), (12, 1001, 16), (12, 1001, 17)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SEARCHES)
def test_the_error_search_finds_what_the_cpu_finds(dtype, shape):
    m, k, n = shape
    # Entries over many powers of two, as in the norm maps of matrices with decay.
    norm_a = (4 * matrices.normal(m, k, dtype=torch.float64)).exp().to(dtype)
    norm_b = (4 * matrices.normal(k, n, dtype=torch.float64, seed=1)).exp().to(dtype)
    for max_error in (0.0, 1e-9, 1e-4, 0.1, 0.7, 2.0):
        expected = ops.find_tau(norm_a, norm_b, max_error=max_error)
        found = ops.find_tau(norm_a.cuda(), norm_b.cuda(), max_error=max_error)
        assert found.item() == expected.item(), max_error


@pytest.mark.parametrize("scale", [1e-180, 1e-150, 1.0, 1e150])
def test_the_error_search_far_from_one(scale):
    norm_a = matrices.normal(40, 50, dtype=torch.float64).abs() * scale
    norm_b = matrices.normal(50, 60, dtype=torch.float64, seed=1).abs()
    # Where all products are too small for float64, any threshold is right.
    others = (norm_b, norm_b * scale) if scale * scale > 0 else (norm_b,)
    for other in others:
        expected = ops.find_tau(norm_a, other, max_error=0.1)
        assert ops.find_tau(norm_a.cuda(), other.cuda(), max_error=0.1).item() == expected.item()


def test_the_error_search_of_equal_products_and_batches():
    ones = torch.ones(3, 30, 30, device="cuda")
    assert ops.find_tau(ones, ones, max_error=0.5).item() == 1
    assert ops.find_tau(ones, ones, max_error=2.0).item() == float("inf")
    norms = matrices.normal(4, 20, 20, device="cuda").abs()
    expected = ops.find_tau(norms.cpu(), norms.cpu(), max_error=0.2)
    assert ops.find_tau(norms, norms, max_error=0.2).item() == expected.item()


def test_a_product_by_max_error_asks_the_search_once():
    a = symmetric(1040)
    c, info = mm(a, a, max_error=1e-3, symmetric=True, return_info=True)
    norms = norm_map(a)
    assert info.tau == spamm_torch.find_tau(norms, norms, max_error=1e-3)
    assert torch.equal(c, mm(a, a, tau=info.tau, symmetric=True))
