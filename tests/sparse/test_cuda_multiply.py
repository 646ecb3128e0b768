"""bsr_multiply on CUDA by plans of the CPU: against the oracle, and the bits of dense storage."""

import block_patterns as patterns
import matrices
import pytest
import torch
from support import captured
from test_block_products import assert_is_product

import spamm_torch
from spamm_torch import sparse

pytestmark = pytest.mark.cuda
ops = torch.ops.spamm_torch


def call_of(a, b, plan, input=None):
    """The op's arguments on the device."""
    parts = [
        [x.cuda() for x in (m.crow_indices(), m.col_indices(), m.values())]
        for m in (a, b, *([] if input is None else [input]))
    ]
    (crow_b, col_b, values_b), added = parts[1], parts[2:]
    options = {"crow_b": crow_b, "col_b": col_b, "tau": plan.tau.cuda()}
    names = ("crow_input", "col_input", "values_input")
    options |= dict(zip(names, added[0], strict=True)) if added else {}
    return [x.cuda() for x in plan[5:10]] + parts[0] + [values_b], options


def multiply(a, b, tau, input=None, beta=1.0, alpha=1.0, symmetric=False):
    """C, and its norms in C's pattern; both on the CPU."""
    plan = sparse.plan(a, b, tau=tau, input=input, symmetric=symmetric)
    arguments, options = call_of(a, b, plan, input)
    options |= {"beta": beta, "alpha": alpha, "symmetric": symmetric}
    values, norms = ops.bsr_multiply(*arguments, **options)
    index = a.crow_indices().dtype
    pattern = (plan.crow.to(index), plan.col.to(index))
    size = (a.shape[0], b.shape[1])
    c = torch.sparse_bsr_tensor(*pattern, values.cpu(), size=size)
    edge = values.shape[1]
    blocks = tuple(x // edge for x in size)
    return c, torch.sparse_csr_tensor(*pattern, norms.cpu(), size=blocks)


@pytest.mark.parametrize("pattern", patterns.PATTERNS)
@pytest.mark.parametrize("edge", [32, 64, 128])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_against_the_oracle(pattern, edge, dtype, index, share):
    a = patterns.matrix(pattern, 5, 6, edge, dtype, index=index)
    b = patterns.matrix("random", 6, 7, edge, dtype, seed=1, index=index)
    norm_a, norm_b = spamm_torch.norm_map(a), spamm_torch.norm_map(b)
    tau = patterns.quantile(norm_a, norm_b, share)
    c, norms = multiply(a, b, tau)
    valid = patterns.kept(a, b, norm_a, norm_b, tau)
    assert_is_product(c, patterns.product(a, b, valid), valid, edge)
    dense = spamm_torch.norm_map(c.to_dense().cuda(), edge)
    assert torch.equal(norms.to_dense(), dense.cpu())


def dense_product(function, *matrices, norms, tau, edge, **options):
    """Of dense storage on the device, by the CPU's norms, which may round in another way."""
    given = {"norm_a": norms[0].to_dense().cuda(), "norm_b": norms[1].to_dense().cuda()}
    on_device = (sparse.to_dense(x).cuda() for x in matrices)
    return function(*on_device, tau=tau, block=edge, **given, **options).cpu()


@pytest.mark.strength(3)
@pytest.mark.parametrize("edge", [32, 64, 128])
@pytest.mark.parametrize("dtype", [*matrices.DTYPES, "tf32"])
@pytest.mark.parametrize("pattern", ["random", "banded", "gaps", "full", "arrow"])
@pytest.mark.parametrize("share", [0.01, 0.3, 0.8])
@pytest.mark.parametrize("size", [448, 2048])
@pytest.mark.parametrize("faint", [False, True])
def test_the_bits_of_dense_storage(edge, dtype, pattern, share, size, faint, monkeypatch, set_tf32):
    """faint: entries of one row or column of a block that are tiny beside the others."""
    monkeypatch.setenv("SPAMM_TORCH_SEGMENTS", "1")  # lists have one
    is_tf32 = dtype == "tf32"
    if is_tf32:
        set_tf32(True)
        edge, dtype = max(edge, 64), torch.float32  # dense storage has another kernel for 32
    blocks = size // edge
    a = patterns.matrix(pattern, blocks, blocks, edge, dtype)
    b = patterns.matrix("random", blocks, blocks, edge, dtype, seed=1)
    if faint and dtype == torch.float32:
        for x, place in ((a, (..., slice(0, edge, 5))), (b, (slice(None), slice(0, edge, 3)))):
            x.values()[place] *= 1e-9
    s = patterns.symmetric(a)
    norm_a, norm_b, norm_s = (spamm_torch.norm_map(x) for x in (a, b, s))
    tau = patterns.quantile(norm_a, norm_b, share)

    found, _ = multiply(a, b, tau)
    expected = dense_product(spamm_torch.mm, a, b, norms=(norm_a, norm_b), tau=tau, edge=edge)
    assert torch.equal(found.to_dense(), expected)

    found, _ = multiply(a, a, tau, b, beta=-2.0, alpha=0.5)
    options = {"tau": tau, "edge": edge, "beta": -2, "alpha": 0.5}
    expected = dense_product(spamm_torch.addmm, b, a, a, norms=(norm_a,) * 2, **options)
    assert torch.equal(found.to_dense(), expected)

    found, norms = multiply(s, s, tau, s, beta=2.0, alpha=-1.0, symmetric=True)
    options |= {"beta": 2, "alpha": -1, "symmetric": True}
    expected = dense_product(spamm_torch.addmm, s, s, s, norms=(norm_s,) * 2, **options)
    assert torch.equal(found.to_dense(), expected)
    assert torch.equal(norms.to_dense(), spamm_torch.norm_map(expected.cuda(), edge).cpu())


@pytest.mark.parametrize("edge", [32, 64, 128])
@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
def test_a_matrix_is_split_once(edge, tf32, symmetric, set_tf32):
    """For both operands of its square, with the bits of two matrices."""
    set_tf32(tf32)
    a = patterns.symmetric(patterns.matrix("random", 9, 9, edge, torch.float32))
    a.values()[:, ::5, ::3] *= 1e-9
    a.values()[3, 1] = 0
    a.values()[5, :, 2] *= 1e-30
    a = a if symmetric else sparse.add(a, patterns.matrix("banded", 9, 9, edge, torch.float32))
    arguments, options = call_of(a, a, sparse.plan(a, a, tau=1e-3, symmetric=symmetric))
    *others, of_a, _ = arguments
    options["symmetric"] = symmetric
    found = ops.bsr_multiply(*others, of_a, of_a, **options)
    right = ops.bsr_multiply(*others, of_a, of_a.clone(), **options)
    assert all(torch.equal(x, y) for x, y in zip(found, right, strict=True))


@pytest.mark.parametrize("edge", [32, 64, 128])
@pytest.mark.parametrize("spoilt", [float("nan"), float("inf")])
def test_spoilt_blocks_reach_no_others(edge, dtype, spoilt):
    """A block with NaN or infinity spoils what it meets stored blocks for."""
    a = patterns.matrix("random", 6, 6, edge, dtype)
    b = patterns.matrix("random", 6, 6, edge, dtype, seed=1)
    tau = patterns.quantile(spamm_torch.norm_map(a), spamm_torch.norm_map(b), 0.5)
    clean, _ = multiply(a, b, tau)
    a.values()[3, 1, 2] = spoilt
    row = int(torch.searchsorted(a.crow_indices(), 3, right=True)) - 1
    found, _ = multiply(a, b, tau)
    valid = patterns.kept(a, b, spamm_torch.norm_map(a), spamm_torch.norm_map(b), tau)
    met = torch.from_numpy(valid[row, int(a.col_indices()[3])])
    x, y = (
        m.to_dense().unflatten(0, (6, edge)).unflatten(2, (6, edge)).transpose(1, 2)
        for m in (found, clean)
    )
    assert torch.equal(~x[row].isfinite().all(-1).all(-1), met)
    kept = torch.ones(6, 6, dtype=torch.bool)
    kept[row] = ~met
    assert torch.equal(x[kept], y[kept])


@pytest.mark.parametrize("edge", [32, 64])
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
def test_no_products(edge, dtype, added, symmetric):
    a = patterns.symmetric(patterns.matrix("random", 4, 4, edge, dtype))
    found, norms = multiply(a, a, float("inf"), a if added else None, beta=2.0, symmetric=symmetric)
    expected = 2 * a.to_dense() if added else torch.zeros_like(a.to_dense())
    assert torch.equal(found.to_dense(), expected)
    assert len(norms.values()) == (len(a.values()) if added else 0)


@pytest.mark.parametrize("edge", [32, 64, 128])
def test_in_graphs_and_on_streams(edge, dtype):
    """No call waits for the host, and none shares memory with another."""
    a = patterns.symmetric(patterns.matrix("banded", 9, 9, edge, dtype))
    plan = sparse.plan(a, a, tau=1e-3, input=a, symmetric=True)
    arguments, options = call_of(a, a, plan, a)
    options |= {"symmetric": True, "beta": 0.5}
    expected = [x.clone() for x in ops.bsr_multiply(*arguments, **options)]
    graph, replayed = captured(lambda: ops.bsr_multiply(*arguments, **options))
    streams = [torch.cuda.Stream() for _ in range(3)]
    found = []
    for _ in range(4):
        graph.replay()
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                found.append(ops.bsr_multiply(*arguments, **options))
    torch.cuda.synchronize()
    for results in (replayed, *found):
        assert all(torch.equal(x, y) for x, y in zip(results, expected, strict=True))


def test_errors():
    a = patterns.matrix("random", 4, 4, 32)
    arguments, options = call_of(a, a, sparse.plan(a, a, tau=0.1))
    with pytest.raises(RuntimeError, match=r"need b's pattern: expected crow_b and col_b; got no"):
        ops.bsr_multiply(*arguments)
    for i in (0, 3, 5, 7, 8):
        on_cpu = [x.cpu() if i == j else x for j, x in enumerate(arguments)]
        with pytest.raises(RuntimeError, match="must be on the same device"):
            ops.bsr_multiply(*on_cpu, **options)


@pytest.mark.thorough
def test_more_than_2_31_entries():
    blocks = 2**19 + 3
    place = torch.arange(blocks + 1, device="cuda")
    slots = place[:-1].int()
    a = torch.randn(blocks, 64, 64, dtype=torch.float16, device="cuda")
    lists = (place, place[:-1], place, slots, slots)
    found, norms = ops.bsr_multiply(*lists, place, place[:-1], a, a)
    assert found.numel() > 2**31
    for part in (slice(0, 8), slice(blocks - 8, blocks)):
        expected = torch.bmm(a[part], a[part])
        assert torch.allclose(found[part], expected, atol=2e-2)
        assert torch.allclose(norms[part], found[part].float().norm(dim=(1, 2)))
