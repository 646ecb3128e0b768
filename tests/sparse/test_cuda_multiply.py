"""Block-sparse ops on CUDA: results are those of the CPU, in graphs and on streams, of any size."""

import itertools
import math
from pathlib import Path

import block_patterns as patterns
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from processes import python
from support import captured, hopper_kernels_run, waiting_is_an_error

import spamm_torch
from spamm_torch import sparse

pytestmark = pytest.mark.cuda
ops = torch.ops.spamm_torch


def call_of(a, plan):
    """The op's arguments for the square of a, to which a is added where the plan says so."""
    crow, col, values = a.crow_indices(), a.col_indices(), a.values()
    options = {"crow_b": crow, "col_b": col, "tau": plan.tau, "symmetric": plan.symmetric}
    if plan.input:
        options |= {"crow_input": crow, "col_input": col, "values_input": values}
    return [*plan[5:10], crow, col, values, values], options


@pytest.mark.parametrize("edge", [32, 64, 128])
@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
def test_a_matrix_is_split_once(edge, tf32, symmetric, set_tf32):
    """For both operands of its square, with the bits of two matrices."""
    set_tf32(tf32)
    options = {"dtype": torch.float32, "device": "cuda"}
    a = patterns.symmetric(patterns.matrix("random", 9, 9, edge, **options))
    a.values()[:, ::5, ::3] *= 1e-9
    a.values()[3, 1] = 0
    a.values()[5, :, 2] *= 1e-30
    a = a if symmetric else sparse.add(a, patterns.matrix("banded", 9, 9, edge, **options))
    (*others, of_a, _), options = call_of(a, sparse.plan(a, a, tau=1e-3, symmetric=symmetric))
    found = ops.bsr_multiply(*others, of_a, of_a, **options)
    right = ops.bsr_multiply(*others, of_a, of_a.clone(), **options)
    assert all(torch.equal(x, y) for x, y in zip(found, right, strict=True))


def test_portable_kernels_give_the_bits_of_dense_storage():
    tests = (
        f"{Path(__file__).with_name('test_block_products.py')}::test_the_bits_of_dense_storage",
        f"{__file__}::test_more_products_than_are_listed_at_a_time",
    )
    options = ("-q", "-m", "cuda and not thorough", "-p", "no:cacheprovider")
    result = python("-m", "pytest", *options, *tests, SPAMM_TORCH_FORCE_SM80="1")
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_more_products_than_are_listed_at_a_time(dtype, monkeypatch):
    monkeypatch.setenv("SPAMM_TORCH_SEGMENTS", "1")  # of dense float64; lists have none
    full = patterns.matrix("full", 1, 300, 64, getattr(torch, dtype), device="cuda")
    c = spamm_torch.mm(full, sparse.transpose(full), tau=1e-30)
    x = sparse.to_dense(full)
    expected = spamm_torch.mm(x, x.mT.contiguous(), tau=1e-30, block=64)
    assert torch.equal(c.to_dense(), expected)


def test_errors():
    a = patterns.matrix("random", 4, 4, 32, device="cuda")
    arguments, options = call_of(a, sparse.plan(a, a, tau=0.1))
    if hopper_kernels_run():
        with pytest.raises(RuntimeError, match=r"b's pattern: expected crow_b and col_b; got no"):
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


# ---- Plans and thresholds are those of the CPU ---------------------------------------------------


INDICES = (torch.int32, torch.int64)
NORMS = (torch.float32, torch.float64)


def norm_map(stored, dtype=torch.float64, index=torch.int64, seed=0):
    """crow, col and norms of a mask of blocks; some norms are equal, zero or no numbers."""
    generator = torch.Generator().manual_seed(seed)
    count = int(stored.sum())
    norms = 10.0 ** (-4 * torch.rand(count, generator=generator, dtype=torch.float64))
    norms[:: 1 + count // 3] = 0.25
    norms[1 :: 1 + count // 2] = 0.0
    norms[7::41], norms[11::43] = math.inf, math.nan
    crow = torch.nn.functional.pad(stored.sum(1).cumsum(0), (1, 0))
    return crow.to(index), stored.nonzero()[:, 1].to(index), norms.to(dtype)


def on_cuda(arguments):
    return [x.cuda() if isinstance(x, torch.Tensor) else x for x in arguments]


def both(op, *arguments, **options):
    """The op's results on the device, moved to the CPU, and those of the CPU."""
    moved = dict(zip(options, on_cuda(options.values()), strict=True))
    found, right = op(*on_cuda(arguments), **moved), op(*arguments, **options)
    if isinstance(right, torch.Tensor):
        return found.cpu(), right
    assert [x.dtype for x in found] == [x.dtype for x in right]
    return [x.cpu() for x in found], right


def assert_equal_plans(maps, tau, **options):
    """Plans of a threshold on the device, and of one on the host."""
    found, expected = both(ops.bsr_plan, *maps, tau, **options)
    moved = dict(zip(options, on_cuda(options.values()), strict=True))
    for plan in (found, ops.bsr_plan(*on_cuda(maps), tau, **moved)):
        assert all(torch.equal(x.cpu(), y) for x, y in zip(plan, expected, strict=True))
    return expected


@given(
    sizes=st.tuples(*[st.integers(0, 80)] * 3),
    names=st.tuples(*[st.sampled_from(sorted(patterns.PATTERNS))] * 3),
    dtype=st.sampled_from(NORMS),
    index=st.tuples(*[st.sampled_from(INDICES)] * 2),
    tau=st.sampled_from([0.0, 1e-6, 1e-4, 1e-2, math.inf]),
    added=st.booleans(),
    symmetric=st.booleans(),
    lists=st.booleans(),
    seed=st.integers(0, 99),
)
def test_plans(sizes, names, dtype, index, tau, added, symmetric, lists, seed):
    m, k, n = sizes
    n = m if symmetric else n
    generator = torch.Generator().manual_seed(seed)

    def stored(name, *shape):
        if 0 in shape:
            return torch.zeros(shape, dtype=torch.bool)
        return patterns.PATTERNS[name](*shape, lambda *s: torch.rand(s, generator=generator))

    a = norm_map(stored(names[0], m, k), dtype, index[0], seed)
    b = norm_map(stored(names[1], k, n), dtype, index[1], seed + 1)
    options = {"symmetric": symmetric, "lists": lists}
    if added:
        crow, col, _ = norm_map(stored(names[2], m, n), dtype, index[0], seed)
        options |= {"crow_input": crow, "col_input": col}
    assert_equal_plans((*a, *b, n), torch.tensor(tau, dtype=torch.float64), **options)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("dtype", NORMS)
def test_plans_of_many_columns_and_long_lists(symmetric, dtype):
    """More block columns than shared memory holds, and lists longer than 32 products."""
    generator = torch.Generator().manual_seed(0)
    n = 70_000

    def rows(count, columns):
        col = torch.randint(columns, (count, 3), generator=generator).sort(1).values
        keep = torch.cat((torch.ones(count, 1, dtype=torch.bool), col.diff(dim=1) > 0), 1)
        crow = torch.nn.functional.pad(keep.sum(1).cumsum(0), (1, 0))
        return crow, col[keep], torch.rand(int(keep.sum()), generator=generator).to(dtype)

    wide = (*rows(n, 200), *rows(200, n), n) if not symmetric else (*rows(n, n), *rows(n, n), n)
    assert_equal_plans(wide, torch.tensor(0.1), symmetric=symmetric)
    full = norm_map(torch.ones(150, 150, dtype=torch.bool), dtype)
    *_, first, slots, _ = assert_equal_plans(
        (*full, *full, 150), torch.tensor(1e-4), symmetric=symmetric
    )
    assert first.diff().max() > 64
    assert len(slots) == first[-1]


@pytest.mark.parametrize("dtype", NORMS)
@pytest.mark.parametrize("index", INDICES)
@pytest.mark.parametrize("pattern", ["random", "banded", "gaps", "full", "none"])
@pytest.mark.parametrize("shape", [(5,) * 3, (60,) * 3, (400,) * 3, (3, 5, 2000), (3, 5, 40_000)])
def test_thresholds(dtype, index, pattern, shape):
    """Also of more columns in a row of C than have bins at a time, and than are numbered."""
    generator, maps = torch.Generator().manual_seed(shape[0]), []
    for seed, edges in enumerate(itertools.pairwise(shape)):
        stored = patterns.PATTERNS[pattern](*edges, lambda *s: torch.rand(s, generator=generator))
        crow, col, norms = norm_map(stored, dtype, index, seed)
        maps += [crow, col, norms.nan_to_num(0.5, 0.5)]
    maps.append(shape[-1])
    for ratio in (1e-6, 0.1, 0.5, 1.0):
        assert torch.equal(*both(ops.bsr_find_tau, *maps, valid_ratio=ratio))
    whole = maps[2].double().norm() * maps[5].double().norm()
    for error in (0.0, 1e-9, 1e-5, 1e-2, 0.5, math.inf):
        found, tau = both(ops.bsr_find_tau, *maps, max_error=error)
        assert torch.equal(found, tau)
        (bound, products), (right, counts) = both(ops.bsr_error_bound, *maps, tau)
        assert torch.equal(products, counts)
        torch.testing.assert_close(
            bound, right, rtol=1e-6 if dtype == torch.float32 else 1e-9, atol=0
        )
        assert bound <= error * whole or not math.isfinite(error)
        again, _ = ops.bsr_error_bound(*on_cuda(maps), tau)
        assert torch.equal(again.cpu(), bound)


def test_bad_patterns():
    """The lines of the CPU; what does not wait gives NaN, and nothing is read outside."""
    crow, col, norms = norm_map(torch.ones(3, 3, dtype=torch.bool))
    wrong = (
        {"col": col.flip(0)},
        {"col": col + 100},
        {"col": col - 1},
        {"crow": crow.flip(0)},
        {"crow": crow * 1000},
        {"crow": torch.tensor([0, 9, 3, 9])},
    )
    for changed in wrong:
        one = ({"crow": crow, "col": col, "norms": norms} | changed).values()
        for maps in ((*one, crow, col, norms, 3), (crow, col, norms, *one, 3)):
            with pytest.raises(RuntimeError) as right:
                ops.bsr_plan(*maps, torch.tensor(0.0))
            with pytest.raises(RuntimeError) as found:
                ops.bsr_plan(*on_cuda(maps), torch.tensor(0.0))
            lines = [str(x.value).partition("\nException raised")[0] for x in (right, found)]
            assert lines[0] == lines[1]
            for knob in ({"valid_ratio": 0.5}, {"max_error": 0.5}):
                assert ops.bsr_find_tau(*on_cuda(maps), **knob).isnan()
            assert ops.bsr_error_bound(*on_cuda(maps), torch.tensor(0.1))[0].isnan()
    good = (crow, col, norms) * 2
    added = {"crow_input": crow.cuda(), "col_input": col.flip(0).cuda()}
    with pytest.raises(RuntimeError, match=r"input's block columns must ascend"):
        ops.bsr_plan(*on_cuda((*good, 3)), torch.tensor(0.0), **added)
    with pytest.raises(RuntimeError, match=r"norm_a and norm_b must be on the same device"):
        ops.bsr_plan(*on_cuda(good[:3]), *good[3:], 3, torch.tensor(0.0))


def test_graphs():
    """A bound is captured; a plan, whose sizes the host must know, is not."""
    maps = on_cuda((*norm_map(torch.ones(40, 40, dtype=torch.bool)) * 2, 40))
    maps[2].nan_to_num_(0.5, 0.5)
    tau = torch.tensor(1e-3, dtype=torch.float64)
    graph, found = captured(lambda: ops.bsr_error_bound(*maps, tau)[0])
    maps[2].mul_(2)
    graph.replay()
    assert torch.equal(found, ops.bsr_error_bound(*maps, tau)[0])
    with pytest.raises(RuntimeError, match=r"waits for the size of its result.*expected a plan"):
        captured(lambda: ops.bsr_plan(*maps, torch.tensor(0.1)))


def test_plans_that_are_used_again_do_not_wait():
    a = patterns.matrix("random", 6, 6, 32, device="cuda")
    plan = sparse.plan(a, a, tau=0.3)
    b = torch.sparse_bsr_tensor(
        a.crow_indices(), a.col_indices(), a.values() * 2, size=a.shape, check_invariants=False
    )
    with waiting_is_an_error():
        read = (sparse.blocks.read(x, "a", "mm", has_op=True) for x in (a, b))
        sparse.maps.check_plan(plan, *read, None, False)
        spamm_torch.find_tau(*[spamm_torch.norm_map(x) for x in (a, b)], max_error=1e-3)
        sparse.trace(a), sparse.norm(a)
        a.values().mul_(2)
        for x in (a, b):
            spamm_torch.mm(x, x, plan=plan, return_norms=True)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("size", [1, 60, 1100])
@pytest.mark.parametrize("dtype", NORMS)
@pytest.mark.parametrize("index", INDICES)
def test_dropping(dtype, index, size, symmetric):
    generator = torch.Generator().manual_seed(size)
    stored = torch.rand(size, size, generator=generator) < 40 / size
    stored |= stored.T.clone()
    crow, col, norms = norm_map(stored, dtype, index)
    full = torch.zeros(size, size, dtype=dtype)
    full[stored] = norms
    maps = (crow, col, (full.triu() + full.triu(1).T)[stored])  # as of a matrix and its mirror
    operands = {name: norms.nan_to_num(0.5, 0.5) for name in ("norm_a", "norm_b")}
    options = [{"below": below} for below in (0.0, 0.01, 0.25, math.inf)]
    for share in (0.0, 1e-12, 1e-4, 0.01, math.inf):
        options += [{"below": below, "share": share, **operands} for below in (0.01, math.inf)]
    for each in options:
        found, right = both(ops.bsr_drop, *maps, **each, symmetric=symmetric)
        for x, y in zip(found[:4], right[:4], strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)
        rounding = 1e-6 if dtype == torch.float32 else 1e-12
        assert found[4].item() == pytest.approx(right[4].item(), rel=rounding)
        assert found[5].numel() == 0
    values = torch.randn(len(norms), 32, 32, generator=generator, dtype=dtype)
    finite = (crow, col, norms.nan_to_num(0.5, 0.5))
    found, right = both(ops.bsr_drop, *finite, values=values, below=0.01)
    torch.testing.assert_close(found[5], right[5], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("stored", [0, 1, 2, 3_000_000])
@pytest.mark.parametrize("dtype", NORMS)
def test_dropping_from_few_and_from_many_blocks(dtype, stored):
    """Also where each thread block has many rows, and rows differ much."""
    rows = min(stored, 5000)
    crow = torch.zeros(rows + 1, dtype=torch.int64)
    if rows:
        length = torch.arange(1, rows + 1, dtype=torch.float64).pow(3)
        crow[1:] = (length.cumsum(0) / length.sum() * stored).round().long()
    col = torch.arange(stored) - crow[:-1].repeat_interleave(crow.diff())
    norms = 10.0 ** (-6 * torch.rand(stored, dtype=torch.float64)).to(dtype)
    for share in (1e-3, 1e-9):
        operands = {"norm_a": norms, "norm_b": norms[: stored // 2 + 1]}
        given = {"below": math.inf, "share": share, **operands}
        found, right = both(ops.bsr_drop, crow, col, norms, **given)
        assert all(map(torch.equal, found[:4], right[:4]))
