"""Products of block-sparse matrices: the bits of dense storage, and what is dropped.

Random patterns are held to the oracle by the fuzzer, of which tests/robustness runs some.
"""

import functools
import math

import block_patterns as patterns
import matrices
import pytest
import reference
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import captured, refuses, threads, waiting_is_an_error

import spamm_torch
from spamm_torch import sparse
from spamm_torch.sparse import blocks, maps, products, strips
from spamm_torch.sparse.blocks import read


@pytest.mark.strength(3)
@pytest.mark.parametrize("edge", [32, 64, 128])
@pytest.mark.parametrize("dtype", [*matrices.DTYPES, "tf32"])
@pytest.mark.parametrize("pattern", ["random", "banded", "gaps", "full", "arrow"])
@pytest.mark.parametrize("share", [0.01, 0.3, 0.8])
@pytest.mark.parametrize("size", [448, 2048])
@pytest.mark.parametrize("faint", [False, True])
def test_the_bits_of_dense_storage(
    device, edge, dtype, pattern, share, size, faint, monkeypatch, set_tf32
):
    """Products, sums, norms and mirror images alike. 13 blocks of 64 reach over a slice of K.

    faint: entries of one row or column of a block that are tiny beside the others.
    """
    monkeypatch.setenv("SPAMM_TORCH_SEGMENTS", "1")  # lists have one
    if dtype == "tf32":
        set_tf32(True)
        edge, dtype = max(edge, 64), torch.float32  # dense storage has another kernel for 32
    size, count = (min(size, 832), 1 if faint else 3) if device.type == "cpu" else (size, 1)
    blocks = size // edge
    a = patterns.matrix(pattern, blocks, blocks, edge, dtype, device=device)
    b = patterns.matrix("random", blocks, blocks, edge, dtype, seed=1, device=device)
    if faint and dtype == torch.float32:
        a.values()[..., ::5] *= 1e-9
        b.values()[:, ::3] *= 1e-9
    dense_a, dense_b = sparse.to_dense(a), sparse.to_dense(b)
    tau = patterns.quantile(spamm_torch.norm_map(a), spamm_torch.norm_map(b), share)
    with threads(count):
        found = spamm_torch.mm(a, b, tau=tau, return_norms=True)
        added = spamm_torch.addmm(b, a, a, beta=-2, alpha=0.5, tau=tau)
        s = patterns.symmetric(a)
        mirrored = spamm_torch.addmm(s, s, s, beta=2, alpha=-1, tau=tau, symmetric=True)
    options = {"tau": tau, "block": edge}
    expected = spamm_torch.mm(dense_a, dense_b, **options, return_norms=True)
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x.to_dense(), y)
    dense_added = spamm_torch.addmm(dense_b, dense_a, dense_a, beta=-2, alpha=0.5, **options)
    assert torch.equal(added.to_dense(), dense_added)
    s = sparse.to_dense(s)
    right = spamm_torch.addmm(s, s, s, beta=2, alpha=-1, **options, symmetric=True)
    assert torch.equal(mirrored.to_dense(), right)
    assert torch.equal(mirrored.to_dense(), mirrored.to_dense().mT)


def test_a_ratio_that_keeps_no_stored_product_warns(device, recwarn):
    """No block may be stored, and none of several equal products be nearest."""
    x = patterns.matrix("banded", 4, 4, 32, torch.float64, device=device)
    calls = [
        lambda: spamm_torch.mm(x, x, valid_ratio=0.01).values(),
        lambda: spamm_torch.addmm(x, x, x, beta=0, valid_ratio=0.01).values(),
        lambda: sparse.plan(x, x, valid_ratio=0.01).slots_a,
        lambda: spamm_torch.mm(*[sparse.identity(96, 32, like=x)] * 2, valid_ratio=0.3).values(),
    ]
    line = r"valid_ratio 0\.01 of \d+ products of stored blocks is nearest to none of them|of 3 "
    for call in calls:
        with pytest.warns(UserWarning, match=line) as found:
            assert not call().any()
        assert found[0].filename == __file__
    recwarn.clear()
    none = sparse.from_dense(torch.zeros(96, 96, dtype=torch.float64, device=device), drop=1.0)
    spamm_torch.mm(none, none, valid_ratio=0.01)
    assert spamm_torch.mm(x, x, valid_ratio=0.3).values().any()
    assert not recwarn.list


def test_a_given_norm_map_decides():
    a = patterns.matrix("full", 3, 3, 32)
    norms = spamm_torch.norm_map(a)
    ones = torch.sparse_csr_tensor(
        norms.crow_indices(), norms.col_indices(), torch.ones(9, dtype=torch.float64), size=(3, 3)
    )
    assert spamm_torch.mm(a, a, tau=1.5, norm_a=ones, norm_b=ones)._nnz() == 0
    assert spamm_torch.mm(a, a, tau=1.0, norm_a=ones, norm_b=ones)._nnz() == 9
    x, zeros = torch.rand(96, 40, dtype=torch.float64), torch.zeros(3, 2, dtype=torch.float64)
    assert not spamm_torch.mm(a, x, tau=1e-9, norm_b=zeros).any()


# ---- Values that are no numbers -----------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bad_blocks_are_kept(bad):
    """Never skipped and never dropped, wherever they meet a stored block."""
    a = patterns.matrix("banded", 5, 5, 32)
    a.values()[4, 3, 7] = bad  # block (1, 2)
    c, info = spamm_torch.mm(a, a, tau=math.inf, drop=math.inf, return_info=True)
    stored = [[0, 2], [1, 1], [1, 2], [1, 3], [2, 2]]
    assert patterns.stored_in(c, 32).nonzero().tolist() == stored
    assert not c.to_dense()[35, 32:128].isfinite().any()
    assert info.valid_ratio > 0
    assert spamm_torch.mm(a, a, max_error=0.5, drop=1.0)._nnz() >= 4


@pytest.mark.parametrize("edge", [32, 64, 128])
@pytest.mark.parametrize("spoilt", [math.nan, math.inf])
def test_spoilt_blocks_reach_no_others(device, edge, dtype, spoilt):
    """A block with NaN or infinity spoils what it meets stored blocks for."""
    a = patterns.matrix("random", 6, 6, edge, dtype, device=device)
    b = patterns.matrix("random", 6, 6, edge, dtype, seed=1, device=device)
    tau = patterns.quantile(spamm_torch.norm_map(a), spamm_torch.norm_map(b), 0.5)
    clean = spamm_torch.mm(a, b, tau=tau)
    a.values()[3, 1, 2] = spoilt
    row = int(torch.searchsorted(a.crow_indices(), 3, right=True)) - 1
    found = spamm_torch.mm(a, b, tau=tau)
    valid = patterns.kept(a, b, spamm_torch.norm_map(a), spamm_torch.norm_map(b), tau)
    met = torch.from_numpy(valid[row, int(a.col_indices()[3])])
    x, y = (
        m.to_dense().cpu().unflatten(0, (6, edge)).unflatten(2, (6, edge)).transpose(1, 2)
        for m in (found, clean)
    )
    assert torch.equal(~x[row].isfinite().all(-1).all(-1), met)
    kept = torch.ones(6, 6, dtype=torch.bool)
    kept[row] = ~met
    assert torch.equal(x[kept], y[kept])


# ---- Dropping -----------------------------------------------------------------------------------


@pytest.mark.parametrize("edge", [32, 64])
@pytest.mark.parametrize("symmetric", [False, True])
def test_drop_leaves_out_blocks_below_it(edge, symmetric):
    a = patterns.matrix("random", 8, 8, edge)
    a = patterns.symmetric(a) if symmetric else a
    whole, norms = spamm_torch.mm(a, a, tau=1e-3, symmetric=symmetric, return_norms=True)
    ascending = norms.values().sort().values
    for drop in (0.0, ascending[0], ascending[9], ascending[10] * 1.01, ascending[-1], math.inf):
        options = {"symmetric": symmetric, "return_norms": True, "return_info": True}
        c, stay, info = spamm_torch.mm(a, a, tau=1e-3, drop=float(drop), **options)
        mask = patterns.stored_in(norms) & (norms.to_dense() >= drop)
        if symmetric:
            mask = mask.triu() | mask.triu(1).mT
        assert torch.equal(patterns.stored_in(c, edge), mask)
        wide = mask.repeat_interleave(edge, 0).repeat_interleave(edge, 1)
        assert torch.equal(c.to_dense(), whole.to_dense() * wide)
        assert torch.equal(stay.to_dense(), norms.to_dense() * mask)
        lost = (whole.to_dense() - c.to_dense()).norm()
        assert lost <= info.drop_bound <= lost * (1 + 1e-9) + 1e-300
        assert info.error_bound >= info.drop_bound + info.skip_bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("symmetric", [False, True])
def test_what_stays_has_a_trace_and_a_norm(device, dtype, symmetric):
    a = patterns.symmetric(patterns.matrix("random", 9, 9, 64, dtype, device=device))
    knob = {"tau": None, "valid_ratio": None, "max_error": 0.01}
    options = {"block": 64, "norm_a": None, "norm_b": None, "symmetric": symmetric}
    c, *_, sums = products.multiplied("mm", a, a, knob, drop=math.inf, **options)
    assert len(c.col) < 81
    right = torch.stack((sparse.trace(c.matrix()), sparse.norm(c.matrix()))).cpu()
    torch.testing.assert_close(sums, right, rtol=1e-6 if dtype == torch.float32 else 1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("knob", [{"tau": 0.0}, {"max_error": 0.5}])
def test_what_is_dropped_where_norms_end(dtype, knob, device):
    """64 blocks of sqrt(2) units each, whose norms are stored as 1."""
    unit = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    x = torch.zeros(256, 256, dtype=dtype, device=device)
    x[::32, ::32] = x[1::32, ::32] = unit
    one, a = (sparse.from_dense(m, 32) for m in (torch.eye(256).to(x), x))
    c, info = spamm_torch.mm(one, a, **knob, drop=1.0, return_info=True)
    lost = math.sqrt(2 * (64 - c._nnz())) * unit
    assert info.drop_bound.item() >= lost
    assert info.error_bound.item() >= lost
    assert "max_error" in knob or c._nnz() == 0


@given(
    max_error=st.sampled_from([1e-6, 1e-4, 1e-2, 0.5]),
    drop=st.sampled_from([1e-6, 1e-2, 0.3, math.inf]),
    alpha=st.sampled_from([1.0, -3.0, 0.0]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 50),
)
def test_max_error_covers_skipping_and_dropping(max_error, drop, alpha, dtype, seed):
    a, x = (patterns.matrix("random", 5, 5, 32, dtype, seed=seed + i) for i in (0, 1))
    options = {"max_error": max_error, "drop": drop, "alpha": alpha, "beta": 1.0}
    c, info = spamm_torch.addmm(x, a, a, **options, return_info=True)
    dense, added = a.to_dense().double(), x.to_dense().double()
    error = (c.to_dense().double() - (added + alpha * dense @ dense)).norm().item()
    size = added.norm().item() + abs(alpha) * dense.norm().item() ** 2
    rounding = torch.finfo(dtype).eps * size  # four times what is seen
    assert error <= info.error_bound.item() * (1 + 1e-5) + rounding
    most = abs(alpha) * max_error * dense.norm().item() ** 2
    assert info.error_bound.item() <= most * (1 + 1e-6)


def test_a_bound_where_nothing_is_multiplied():
    """alpha = 0: sums that overflow do not count."""
    c, a = (patterns.matrix("random", 2, 2, 32, seed=seed) for seed in range(2))
    given = {"alpha": 0, "beta": 0.5, "valid_ratio": 0.25, "return_info": True}
    found, info = spamm_torch.addmm(c, a * 1e30, a * 1e30, **given)
    assert torch.equal(found.to_dense(), c.to_dense() / 2)
    assert info.error_bound == 0


def test_a_tenth_of_a_max_error_is_for_dropping():
    a = patterns.matrix("random", 9, 9, 32)
    norms = spamm_torch.norm_map(a)
    for drop, share in ((None, 1.0), (0.0, 1.0), (1.0, 0.9), (math.inf, 0.9)):
        _, info = spamm_torch.mm(a, a, max_error=1e-2, drop=drop, return_info=True)
        assert info.tau == spamm_torch.find_tau(norms, norms, max_error=share * 1e-2)
        assert info.drop_bound <= 0.1 * 1e-2 * norms.values().norm() ** 2


# ---- One dense operand --------------------------------------------------------------------------


@pytest.mark.parametrize("edge", [32, 64, 128])
@pytest.mark.parametrize("width", [1, 70, 128])
@pytest.mark.parametrize("knob", [{"tau": 1e-1}, {"valid_ratio": 0.5}, {"max_error": 1e-2}])
def test_a_dense_operand_gives_a_dense_result(dtype, edge, width, knob):
    a = patterns.matrix("random", 4, 5, edge, dtype)
    x = torch.rand(5 * edge, width, dtype=torch.float64).to(dtype)
    y = torch.rand(width, 4 * edge, dtype=torch.float64).to(dtype)
    for left, right in ((a, x), (y, a)):
        c, norms, info = spamm_torch.mm(left, right, **knob, return_norms=True, return_info=True)
        dense = [m.to_dense() if m.layout == torch.sparse_bsr else m for m in (left, right)]
        expected = spamm_torch.mm(*dense, tau=info.tau, block=edge)
        assert c.layout == torch.strided
        assert torch.equal(c, expected)
        assert torch.equal(norms, spamm_torch.norm_map(c, edge))
        bias = torch.rand(c.shape[1], dtype=torch.float64).to(dtype)
        added = spamm_torch.addmm(bias, left, right, beta=2, tau=info.tau)
        expected = spamm_torch.addmm(bias, *dense, beta=2, tau=info.tau, block=edge)
        assert torch.equal(added, expected)


# ---- Memory and sizes ---------------------------------------------------------------------------


def test_values_that_are_views():
    a = patterns.matrix("random", 4, 4, 32)
    wide = torch.zeros(a._nnz(), 2, 32, 32, dtype=torch.float64)
    wide[:, 1] = a.values().mT
    view = torch.sparse_bsr_tensor(
        a.crow_indices(), a.col_indices(), wide[:, 1].mT, size=a.shape, check_invariants=True
    )
    assert not view.values().is_contiguous()
    found, expected = (spamm_torch.mm(x, x, tau=1e-2) for x in (view, a))
    assert torch.equal(found.to_dense(), expected.to_dense())
    assert torch.equal(spamm_torch.norm_map(view).values(), spamm_torch.norm_map(a).values())


def test_memory_that_does_not_suffice():
    """2.1 TB of result: said with the bytes, and before they are allocated."""
    one = torch.ones(1, 1, 1, dtype=torch.float64).expand(4000, 128, 128)
    column = torch.ones(4000, 1, dtype=torch.bool)
    a, b = (patterns.of_blocks(stored, one) for stored in (column, column.mT))
    norm_a, norm_b = ((128.0 * stored.double()).to_sparse_csr() for stored in (column, column.mT))
    with pytest.raises(torch.OutOfMemoryError) as caught:
        spamm_torch.mm(a, b, tau=1.0, norm_a=norm_a, norm_b=norm_b)
    needs = "mm needs 2,097,792,000,000 bytes for 16,000,000 blocks and 16,000,000 products; got "
    assert needs in str(caught.value)
    assert str(caught.value).endswith(" blocks would fit")
    with pytest.raises(torch.OutOfMemoryError, match="plan needs"):
        sparse.plan(a, b, tau=1.0, norm_a=norm_a, norm_b=norm_b)


@pytest.mark.parametrize("pattern", ["random", "arrow", "gaps", "full", "none"])
@pytest.mark.parametrize("edge", [32, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("most", [1, 7, 10**9])
def test_products_in_strips(pattern, edge, dtype, symmetric, added, most, device, monkeypatch):
    """``most``: blocks of a strip. The bits of one piece."""
    monkeypatch.setattr(strips, "_MOST_BYTES", most * edge**2 * dtype.itemsize)
    a, b, x = (
        patterns.matrix(name, 9, 9, edge, dtype, seed=seed, device=device)
        for seed, name in enumerate((pattern, "random", "banded"))
    )
    if symmetric:
        a, x = patterns.symmetric(a), patterns.symmetric(x)
        b = a
    options = {"symmetric": symmetric, "return_norms": True, "return_info": True}
    scale = {"beta": 0.5, "alpha": -2.0} if added else {"alpha": 1}
    left, right, input = (read(m, "a", "mm") for m in (a, b, x))
    for knob, drop in (({"max_error": 1e-2}, math.inf), ({"tau": 0.1}, 0.3)):
        given = {"drop": drop} | knob | options
        calls = functools.partial(spamm_torch.addmm, x, **scale), spamm_torch.mm
        c, norms, info = calls[not added](a, b, **given)
        given = {"input": x if added else None, "symmetric": symmetric, "tau": info.tau}
        plan = sparse.plan(a, b, **given)
        of_strips = strips.Strips("mm", plan, left, right, input if added else None, **scale)
        kept, values, bound = of_strips.product(drop, knob.get("max_error"))
        assert kept.has_pattern_of(read(c, "c", "mm"))
        assert torch.equal(values, c.values())
        assert torch.equal(kept.values, norms.values())
        assert bound == info.drop_bound


def test_memory_that_suffices_in_strips(monkeypatch):
    """A product that drops most of its blocks, where these alone fit."""
    i = torch.arange(40 * 64)
    a = sparse.from_dense(0.9 ** (i[:, None] - i).abs().double(), 64, drop=1e-6)
    knob = {"tau": 1e-9, "drop": 10.0}
    made = sparse.plan(a, a, tau=1e-9).blocks
    expected = spamm_torch.mm(a, a, **knob)
    bytes_of_one = 64**2 * 8 + 32
    stored = expected._nnz()
    assert 1.5 * stored < made
    for module in (maps, strips, blocks):
        monkeypatch.setattr(module, "free_bytes", lambda _: 12 * made * bytes_of_one // 10)
    found = spamm_torch.mm(a, a, **knob)
    assert torch.equal(found.col_indices(), expected.col_indices())
    assert torch.equal(found.values(), expected.values())
    for module in (maps, strips, blocks):
        monkeypatch.setattr(module, "free_bytes", lambda _: (stored - 1) * bytes_of_one)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        spamm_torch.mm(a, a, **knob)
    needs = f"mm needs {stored * bytes_of_one:,} bytes for {stored:,} blocks; got "
    assert needs in str(caught.value)


# ---- Norm maps ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("pattern", patterns.PATTERNS)
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_functions_of_norm_maps(dtype, pattern, share, device):
    a = patterns.matrix(pattern, 5, 6, 32, dtype, device=device)
    b = patterns.matrix("random", 6, 4, 32, dtype, seed=1, device=device)
    norm_a, norm_b = spamm_torch.norm_map(a, 32), spamm_torch.norm_map(b, (32, 32))
    assert norm_a.layout == torch.sparse_csr
    assert torch.equal(norm_a.to_dense(), spamm_torch.norm_map(sparse.to_dense(a), 32))
    tau = patterns.quantile(norm_a, norm_b, share)
    valid = patterns.kept(a, b, norm_a, norm_b, tau)
    counts = spamm_torch.valid_counts(norm_a, norm_b, tau)
    assert torch.equal(counts.to_dense().cpu(), torch.from_numpy(valid.sum(1)).int())
    stored = patterns.kept(a, b, norm_a, norm_b, 0.0).sum()
    ratio = spamm_torch.valid_ratio(norm_a, norm_b, tau)
    assert ratio.item() == pytest.approx(valid.sum() / stored if stored else 1)
    bound = spamm_torch.error_bound(norm_a, norm_b, tau).item()
    dense = [x.to_dense().cpu() for x in (norm_a, norm_b)]
    right = float(reference.error_bound(*dense, tau))
    assert right <= bound <= right * (1 + 1e-5) + 1e-300
    found = spamm_torch.find_tau(norm_a, norm_b, valid_ratio=0.4)
    assert abs(patterns.kept(a, b, norm_a, norm_b, found.item()).sum() - 0.4 * stored) <= 0.51
    for max_error in (0.0, 1e-2, math.inf):
        found = spamm_torch.find_tau(norm_a, norm_b, max_error=max_error)
        assert found.dtype == dtype
        # Blocks that are not stored lose nothing.
        dense = norm_a.to_dense(), norm_b.to_dense()
        assert found == spamm_torch.find_tau(*dense, max_error=max_error)
    c, info = spamm_torch.mm(a, b, valid_ratio=0.4, return_info=True)
    assert info.tau == spamm_torch.find_tau(norm_a, norm_b, valid_ratio=0.4)
    again = spamm_torch.mm(a, b, tau=info.tau, norm_a=norm_a, norm_b=norm_b)
    assert torch.equal(c.to_dense(), again.to_dense())


# ---- Plans --------------------------------------------------------------------------------------


@pytest.mark.parametrize("symmetric", [False, True])
def test_a_plan_is_used_again(symmetric):
    a = patterns.symmetric(patterns.matrix("random", 6, 6, 32))
    x = patterns.symmetric(patterns.matrix("random", 6, 6, 32, seed=2))
    plan = sparse.plan(a, a, tau=0.3, symmetric=symmetric)
    added = sparse.plan(a, a, tau=0.3, input=x, symmetric=symmetric)
    for factor in (1.0, 3.0):  # the plan decides, whatever the norms are
        b = a * factor
        c = spamm_torch.mm(b, b, plan=plan, symmetric=symmetric)
        expected = spamm_torch.mm(b, b, tau=0.3 * factor**2, symmetric=symmetric)
        assert torch.equal(c.to_dense(), expected.to_dense())
        assert c._nnz() == plan.blocks
        c = spamm_torch.addmm(x, b, b, beta=0.5, plan=added, symmetric=symmetric)
        expected = spamm_torch.addmm(x, b, b, beta=0.5, tau=0.3 * factor**2, symmetric=symmetric)
        assert torch.equal(c.to_dense(), expected.to_dense())
    if not symmetric:
        norms = spamm_torch.norm_map(a)
        assert plan.products == patterns.kept(a, a, norms, norms, 0.3).sum()
    assert repr(plan) == f"Plan(blocks={plan.blocks}, products={plan.products}, tau=0.3)"


def test_a_plan_keeps_its_max_error():
    """With ``drop`` it is the call itself; without, no bound is left for dropping."""
    a = patterns.matrix("random", 8, 8, 32)
    for drop in (1e-2, math.inf):
        expected = spamm_torch.mm(a, a, max_error=1e-3, drop=drop)
        plan = sparse.plan(a, a, max_error=1e-3, drop=drop)
        c = spamm_torch.mm(a, a, plan=plan, drop=drop)
        assert torch.equal(c.to_dense(), expected.to_dense())
        assert c._nnz() == expected._nnz()
    assert 0 < c._nnz() < plan.blocks
    plan = sparse.plan(a, a, max_error=1e-3)
    assert spamm_torch.mm(a, a, plan=plan, drop=math.inf)._nnz() == plan.blocks
    c = spamm_torch.mm(a, a, plan=sparse.plan(a, a, tau=0.01), drop=math.inf)
    assert c._nnz() == 0


@pytest.mark.cuda
def test_a_plan_sees_a_pattern_that_changed_in_place():
    """A look at it would wait: the result says it."""
    a = patterns.matrix("banded", 5, 5, 64, device="cuda")
    plan = sparse.plan(a, a, max_error=1e-3, drop=math.inf)
    a.values().mul_(2)
    with waiting_is_an_error():
        c, norms = spamm_torch.mm(a, a, plan=plan, return_norms=True)
    assert norms.values().isfinite().all()
    a.col_indices()[0] = 4
    with waiting_is_an_error():
        c, norms = spamm_torch.mm(a, a, plan=plan, return_norms=True)
    assert c.values().isnan().flatten(1).any(1).all()
    assert norms.values().isnan().all()
    refuses(RuntimeError, lambda: sparse.trace(a), "a's block columns must ascend")


@pytest.mark.parametrize("pattern", patterns.PATTERNS)
@pytest.mark.parametrize("edge", [32, 64])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("room", [0, 1, 5, 42])
def test_a_plan_of_stated_capacity(pattern, edge, dtype, index, room, device):
    """The product where it fits, with blocks of zeros that make it a valid matrix; else NaN."""
    a = patterns.matrix(pattern, 5, 6, edge, dtype, index=index, device=device)
    b = patterns.matrix("random", 6, 7, edge, dtype, seed=1, index=index, device=device)
    tau = patterns.quantile(spamm_torch.norm_map(a), spamm_torch.norm_map(b), 0.5)
    expected, all_products = spamm_torch.mm(a, b, tau=tau), sparse.plan(a, b, tau=0.0).products
    blocks, products = min(35, expected._nnz() + room), all_products + room
    if not blocks or not products:
        return
    plan = sparse.plan(a, b, tau=tau, capacity=(blocks, products))
    c, norms = spamm_torch.mm(a, b, plan=plan, return_norms=True)
    assert plan.excess.tolist() == [0, 0]
    assert c._nnz() == blocks
    assert c.col_indices().dtype == index
    torch.sparse_bsr_tensor(
        *(c.crow_indices(), c.col_indices(), c.values()), size=c.shape, check_invariants=True
    )
    assert torch.equal(c.to_dense(), expected.to_dense())
    assert torch.equal(norms.to_dense(), spamm_torch.norm_map(expected).to_dense())
    for less, missing in (((blocks - room - 1, products), 0), ((blocks, products - room - 1), 1)):
        if min(less) > 0 and (missing == 1 or blocks - room == expected._nnz()):
            plan = sparse.plan(a, b, tau=tau, capacity=less)
            assert plan.excess[missing] == 1
            assert spamm_torch.mm(a, b, plan=plan).values().isnan().all()


@pytest.mark.cuda
@pytest.mark.parametrize("knob", [{"max_error": 1e-2}, {"valid_ratio": 0.4}])
@pytest.mark.parametrize("edge", [32, 64, 128])
def test_a_capacity_in_a_graph(dtype, edge, knob):
    """Norms, threshold, plan and product of values that change."""
    a = patterns.matrix("banded", 40, 40, edge, dtype, device="cuda")

    def call():
        plan = sparse.plan(a, a, **knob, capacity=(600, 600))
        return plan.excess, spamm_torch.mm(a, a, plan=plan)

    graph, (excess, c) = captured(call)
    for scale in (1.0, 3.0):
        a.values().mul_(scale)
        graph.replay()
        assert excess.tolist() == [0, 0]
        assert torch.equal(c.to_dense(), spamm_torch.mm(a, a, **knob).to_dense())
