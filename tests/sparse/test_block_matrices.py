"""The functions of spamm_torch.sparse, against dense matrices and scipy."""

import importlib
import math
from pathlib import Path

import block_patterns as patterns
import matrices
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import spamm_torch
from spamm_torch import sparse


def check_invariants(a):
    parts = a.crow_indices(), a.col_indices(), a.values()
    torch.sparse_bsr_tensor(*parts, size=a.shape, check_invariants=True)


@pytest.mark.parametrize("edge", [32, 64, 128])
@pytest.mark.parametrize("shape", [(1, 1), (100, 300), (128, 256), (0, 5)])
def test_from_and_to_dense(dtype, edge, shape, device):
    a = torch.rand(shape, dtype=torch.float64).to(device, dtype)
    found = sparse.from_dense(a, edge)
    assert found.layout == torch.sparse_bsr
    assert found.shape == tuple(-(-n // edge) * edge for n in shape)
    assert found.values().shape[1:] == (edge, edge)
    assert torch.equal(sparse.to_dense(found, shape), a)
    assert torch.equal(sparse.to_dense(found), found.to_dense())


def test_from_dense_drops(device):
    """Blocks of zeros always; blocks whose norm is below a number; never NaN or infinity."""
    a = torch.zeros(128, 128, device=device)
    a[0, 0], a[40, 0], a[0, 40], a[70, 0], a[0, 70], a[127, 127] = (
        3.0, 1e-44, math.nan, -math.inf, 2.0, -2.5,
    )  # fmt: skip
    every = [[0, 0], [0, 1], [0, 2], [1, 0], [2, 0], [3, 3]]
    large, bad = every[:3] + every[4:], [[0, 1], [2, 0]]
    for drop, stored in ((0.0, every), (1e-30, large), (math.inf, bad)):
        found = sparse.from_dense(a, 32, drop)
        assert patterns.stored_in(found, 32).nonzero().tolist() == stored
    at = sparse.from_dense(a, 32, 2.5)
    assert patterns.stored_in(at, 32)[3, 3]
    assert not patterns.stored_in(at, 32)[0, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["csr", "csc", "coo", "bsr", "dia", "lil", "dok"])
def test_from_and_to_scipy(dtype, kind):
    """Also matrices that scipy makes: products, whose columns are in no order, and repeats."""
    scipy = pytest.importorskip("scipy.sparse")
    values = scipy.random_array((100, 70), density=0.1, rng=0).astype(str(dtype)[6:])
    a = getattr(scipy, f"{kind}_array")(values)
    repeats = scipy.coo_array(([1.0, 2.0], ([3, 3], [5, 5])), shape=(9, 9))
    blocks = scipy.bsr_array(np.kron(np.ones((4, 4)), np.eye(32)), blocksize=(32, 32))
    for made in (a, a.T, a @ a.T, repeats, blocks, blocks @ blocks):
        found, dense = sparse.from_scipy(made, 32), torch.tensor(made.toarray())
        assert found.shape == tuple(-(-n // 32) * 32 for n in made.shape)
        assert torch.equal(sparse.to_dense(found, made.shape), dense)
        check_invariants(found)
        back = sparse.to_scipy(found)
        assert back.blocksize == (32, 32)
        assert torch.equal(torch.from_numpy(back.toarray()), found.to_dense())
        cropped = sparse.to_scipy(found, made.shape)
        assert torch.equal(torch.from_numpy(cropped.toarray()), dense)
    for numbers in (a > 0.5, (a > 0.5).astype(int), a * 1j):
        with pytest.raises(TypeError, match="must be float16, bfloat16, float32 or float64"):
            sparse.from_scipy(numbers)


@pytest.mark.parametrize("layout", ["coo", "csr", "csc", "bsr", "bsc"])
def test_from_sparse(layout, dtype, device):
    a = torch.rand(100, 70, dtype=torch.float64) * (torch.rand(100, 70) < 0.05)
    a = a.to(device, dtype)
    given = getattr(a, f"to_sparse_{layout}")(*[(20, 14)][: layout in ("bsr", "bsc")])
    found = sparse.from_sparse(given, 32)
    assert found.shape == (128, 96)
    assert torch.equal(sparse.to_dense(found, (100, 70)), a)
    assert torch.equal(patterns.stored_in(found, 32), (spamm_torch.norm_map(a, 32) != 0).cpu())
    check_invariants(found)


def test_from_sparse_sorts_and_adds_up_repeats():
    """As ``to_dense`` of torch does."""
    blocks = torch.rand(4, 32, 32, dtype=torch.float64)
    index = torch.tensor([0, 3, 4]), torch.tensor([1, 0, 1, 0])
    a = torch.sparse_bsr_tensor(*index, blocks, size=(64, 64), check_invariants=False)
    assert torch.equal(sparse.from_sparse(a, 32).to_dense(), a.to_dense())
    a = torch.sparse_coo_tensor([[0, 0], [5, 5]], [1.0, 2.0], (40, 40))
    assert torch.equal(sparse.to_dense(sparse.from_sparse(a), (40, 40)), a.to_dense())
    assert sparse.from_sparse(torch.zeros(0, 5).to_sparse()).shape == (0, 64)


def test_another_default_device():
    """Results stay with their operands."""
    a = patterns.matrix("random", 3, 3, 32)
    calls = (
        lambda: spamm_torch.mm(a, a, tau=0.0),
        lambda: spamm_torch.mm(a, a, max_error=0.1, drop=math.inf, return_info=True)[0],
        lambda: spamm_torch.norm_map(a),
        lambda: sparse.add(a, a),
        lambda: sparse.transpose(a),
        lambda: sparse.identity(5, like=a),
        lambda: sparse.permute(a, torch.arange(96, device="cpu")),
        lambda: sparse.from_sparse(a, 64),
        lambda: sparse.from_dense(a.to_dense()),
        lambda: spamm_torch.mm(a, a, plan=sparse.plan(a, a, tau=0.0)),
    )
    with torch.device("meta"):
        found = [call() for call in calls]
    assert {x.device.type for x in found} == {"cpu"}


def test_scipy_and_here():
    """Each row of the table: both cells give the same numbers."""
    scipy = pytest.importorskip("scipy.sparse")
    text = (Path(__file__).parents[2] / "docs" / "block_sparse.md").read_text()
    table = text.partition("| scipy | here |")[2].partition("\n\n")[0].splitlines()[2:]
    assert len(table) == 12
    importlib.import_module("scipy.sparse.linalg")
    a, b = (scipy.random_array((130, 130), density=0.02, rng=seed).tocsr() for seed in (0, 1))
    x, i = np.arange(260.0).reshape(130, 2), np.array([5, 3, 129])
    theirs = {"a": a, "b": b, "x": x, "i": i, "sp": scipy, "np": np}
    ours = {name: sparse.from_scipy(y) for name, y in (("a", a), ("b", b))}
    ours |= {"x": torch.from_numpy(np.pad(x, ((0, 62), (0, 0)))), "i": torch.from_numpy(i), "s": a}
    ours |= {"d": torch.from_numpy(a.toarray())}
    ours |= {"spamm_torch": spamm_torch, "sparse": sparse}
    for row in table:
        left, right = (cell.split("`")[1::2] for cell in row.strip("|").split(" | "))
        assert len(left) == len(right) > 0, row
        for one, other in zip(left, right, strict=True):
            expected = eval(one, dict(theirs))
            expected = expected.toarray() if scipy.issparse(expected) else np.asarray(expected)
            found = eval(other, dict(ours))
            if scipy.issparse(found):
                found = found.toarray()
            elif isinstance(found, torch.Tensor) and found.layout == torch.sparse_bsr:
                found = sparse.to_dense(found)
            found = np.asarray(found)[tuple(slice(n) for n in expected.shape)]
            assert np.allclose(found, expected), row


def test_inner():
    a, b = (patterns.matrix("random", 4, 5, 32, seed=seed) for seed in (0, 1))
    expected = (a.to_dense() * b.to_dense()).sum()
    torch.testing.assert_close(sparse.inner(a, b), expected)
    assert sparse.inner(a, sparse.from_dense(torch.zeros(128, 160).double(), 32)) == 0
    with pytest.raises(RuntimeError, match=r"one shape; got \(128, 160\) and \(160, 128\)"):
        sparse.inner(a, sparse.transpose(b))


@pytest.mark.parametrize("size", [0, 1, 32, 70])
def test_identity(size, device):
    found = sparse.identity(size, 32, dtype=torch.float64, device=device)
    right = torch.eye(size, dtype=torch.float64, device=device)
    assert torch.equal(sparse.to_dense(found, (size, size)), right)
    assert sparse.trace(found) == size
    like = patterns.matrix("random", 2, 2, 64, torch.float16, index=torch.int32, device=device)
    alike = sparse.identity(100, like=like)
    assert alike.device == like.device
    assert alike.dtype == torch.float16
    assert alike.crow_indices().dtype == torch.int32
    assert alike.values().shape[1:] == (64, 64)


@pytest.mark.parametrize("pattern", patterns.PATTERNS)
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_numbers_and_the_transpose(pattern, dtype, index, device):
    a = patterns.matrix(pattern, 5, 4, 32, dtype, index=index, device=device)
    dense = a.to_dense()
    assert torch.equal(sparse.diagonal(a), dense.diagonal())
    assert sparse.trace(a).item() == pytest.approx(dense.double().trace().item(), abs=1e-9)
    assert sparse.norm(a).item() == pytest.approx(dense.double().norm().item(), rel=1e-5)
    turned = sparse.transpose(a)
    assert torch.equal(turned.to_dense(), dense.mT)
    assert turned.crow_indices().dtype == index
    check_invariants(turned)


def test_a_norm_neither_vanishes_nor_overflows():
    a = patterns.matrix("full", 2, 2, 32)
    for scale in (1e-200, 1e200):
        assert sparse.norm(a * scale).item() == pytest.approx(a.to_dense().norm().item() * scale)


@given(
    names=st.tuples(*[st.sampled_from(sorted(patterns.PATTERNS))] * 2),
    factors=st.tuples(*[st.sampled_from([1.0, -2.0, 0.0])] * 2),
    dtype=st.sampled_from(matrices.DTYPES),
    drop=st.sampled_from([None, 0.0, 1.0, math.inf]),
)
def test_add(device, names, factors, dtype, drop):
    options = {"dtype": dtype, "device": device}
    a, b = (patterns.matrix(name, 4, 5, 32, seed=i, **options) for i, name in enumerate(names))
    alpha, beta = factors
    c = sparse.add(a, b, alpha=alpha, beta=beta, drop=drop)
    expected = alpha * a.to_dense() + beta * b.to_dense()
    union = patterns.stored_in(a, 32) | patterns.stored_in(b, 32)
    if drop:
        union &= ~(spamm_torch.norm_map(expected, 32) < drop).cpu()
    assert torch.equal(patterns.stored_in(c, 32), union)
    wide = union.repeat_interleave(32, 0).repeat_interleave(32, 1)
    assert torch.equal(c.to_dense(), expected * wide.to(device))


@given(
    pattern=st.sampled_from(sorted(patterns.PATTERNS)),
    rows=st.integers(0, 130),
    columns=st.integers(0, 150),
    edge=st.sampled_from([32, 64]),
    seed=st.integers(0, 99),
)
def test_submatrix(device, pattern, rows, columns, edge, seed):
    a = patterns.matrix(pattern, 5, 6, edge, seed=seed, device=device)
    generator = torch.Generator().manual_seed(seed)
    row, column = (
        torch.randperm(edge * n, generator=generator)[:count]
        for n, count in ((5, rows), (6, columns))
    )
    found = sparse.submatrix(a, row, column)
    expected = a.to_dense().cpu()[row][:, column].to(device)
    assert torch.equal(sparse.to_dense(found, (len(row), len(column))), expected)
    stored = (spamm_torch.norm_map(found.to_dense(), edge) != 0).cpu()
    assert torch.equal(patterns.stored_in(found, edge), stored)
    assert found.shape == tuple(-(-n // edge) * edge for n in expected.shape)


def test_permute(monkeypatch, device):
    """Also in pieces of three blocks; padding stays at the end."""
    monkeypatch.setattr(sparse.matrices, "_ENTRIES", 3 * 32 * 32)
    for size in (70, 192):
        dense = torch.rand(size, size, dtype=torch.float64, device=device)
        order = torch.randperm(size, generator=torch.Generator().manual_seed(0)).to(device)
        found = sparse.permute(sparse.from_dense(dense, 32), order)
        assert torch.equal(sparse.to_dense(found, (size, size)), dense[order][:, order])
    back = sparse.permute(found, order.argsort())
    assert torch.equal(back.to_dense(), dense)


def test_what_torch_has_stays_usable(dtype, tmp_path):
    """Scaling, other types, files: matrices are torch's own."""
    a = patterns.matrix("random", 3, 3, 32, dtype)
    c = spamm_torch.mm(a, a, tau=1e-3)
    assert torch.equal((c * 2).to_dense(), c.to_dense() * 2)
    assert c.to(torch.float64).dtype == torch.float64
    torch.save(c, tmp_path / "c.pt")
    assert torch.equal(torch.load(tmp_path / "c.pt").to_dense(), c.to_dense())
    again = spamm_torch.mm(c, c, tau=1e-3)
    assert again.layout == torch.sparse_bsr
