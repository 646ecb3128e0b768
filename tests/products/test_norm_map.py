"""norm_map: Frobenius norms of blocks, right over the whole range of each type."""

import itertools

import matrices
import numpy as np
import pytest
import reference
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import norm_maps

import spamm_torch
from fuzzing import space

# The error bound's slack counts on these.
RELATIVE = {torch.float32: 2.0**-19, torch.float64: 2.0**-45}


def assert_norms(actual, a, block):
    """Right to a few bits; a subnormal norm to its last bit. Beyond the type: Inf."""
    dtype = matrices.norm_dtype(a.dtype)
    assert actual.dtype == dtype
    assert actual.device == a.device
    exact = reference.norm_map(a, block)
    assert actual.shape == exact.shape
    with np.errstate(over="ignore"):
        expected = torch.from_numpy(exact).to(dtype).double()
    info = torch.finfo(dtype)
    within = {"rtol": RELATIVE[dtype], "atol": info.smallest_normal * info.eps}
    torch.testing.assert_close(actual.cpu().double(), expected, **within, equal_nan=True)


@given(
    edges=st.tuples(*[st.integers(0, 300)] * 3),
    block=st.tuples(*[st.sampled_from(matrices.EDGES)] * 3),
    dtype=st.sampled_from(matrices.DTYPES),
    layouts=st.tuples(*[st.sampled_from(sorted(matrices.LAYOUTS))] * 2),
    pattern=st.sampled_from(sorted(set(space.PATTERNS))),
    seed=st.integers(0, 100),
)
def test_any_matrices(device, edges, block, dtype, layouts, pattern, seed):
    """Both operands at once have the very same norms."""
    (m, k, n), pair = edges, []
    for shape, layout in zip(((m, k), (k, n)), layouts, strict=True):
        values = space.values(shape, pattern, dtype, seed + len(pair)).to(device)
        pair.append(matrices.LAYOUTS[layout](values))
    together = torch.ops.spamm_torch.norm_maps(*pair, block)
    for norms, both, a, of in zip(
        norm_maps(*pair, block), together, pair, (block[:2], block[1:]), strict=True
    ):
        assert_norms(norms, a, of)
        torch.testing.assert_close(both, norms, rtol=0, atol=0, equal_nan=True)


@given(
    shape=st.tuples(*[st.integers(0, 3)] * 2, *[st.integers(0, 140)] * 2),
    block=st.sampled_from(matrices.EDGES),
    dtype=st.sampled_from(matrices.DTYPES),
    layout=st.sampled_from(sorted(matrices.BATCH_LAYOUTS)),
)
def test_leading_batch_dimensions(device, shape, block, dtype, layout):
    a = matrices.BATCH_LAYOUTS[layout](matrices.normal(*shape, dtype=dtype, device=device))
    norms = spamm_torch.norm_map(a, block)
    assert_norms(norms, a, block)
    assert torch.equal(spamm_torch.norm_map(a), spamm_torch.norm_map(a, (64, 64)))
    for index in itertools.product(*map(range, shape[:2])):
        assert torch.equal(norms[index], spamm_torch.norm_map(a[index], block))


@pytest.mark.parametrize("layout", sorted(matrices.LAYOUTS))
def test_parts_have_the_very_same_norms(device, dtype, layout):
    """Also a part of one row, which shards and ranks may have, and one of one column."""
    a = matrices.LAYOUTS[layout](matrices.normal(97, 97, dtype=dtype, device=device))
    expected = spamm_torch.norm_map(a, 32)
    for part in (slice(0, 32), slice(64, 96), slice(96, 97)):
        blocks = slice(part.start // 32, part.start // 32 + 1)
        assert torch.equal(spamm_torch.norm_map(a[part], 32), expected[blocks])
        assert torch.equal(spamm_torch.norm_map(a[:, part], 32), expected[:, blocks])


@pytest.mark.cuda
@pytest.mark.parametrize("block", list(itertools.product(matrices.EDGES, repeat=2)))
def test_rows_have_the_very_same_norms_wherever_they_lie(dtype, block):
    """Whole chunks, masked and shifted ones, and both in one warp, sum in the same order."""
    a = matrices.normal(150, 290, dtype=dtype, device="cuda")
    whole = torch.nn.functional.pad(a, (0, 94, 0, 106))  # all blocks lie inside
    rows, columns = -(-150 // block[0]), -(-290 // block[1])
    expected = spamm_torch.norm_map(whole, block)[:rows, :columns]
    assert torch.equal(spamm_torch.norm_map(a, block), expected)
    for offset, width in ((1, 293), (0, 304), (16, 320), (7, 300), (3, 296), (0, 291)):
        wide = torch.full((150, width), float("nan"), dtype=dtype, device="cuda")
        view = wide[:, offset : offset + 290]
        view.copy_(a)
        assert torch.equal(spamm_torch.norm_map(view, block), expected), (offset, width)
        turned = spamm_torch.norm_map(view.mT, block[::-1])
        assert torch.equal(turned, expected.mT), (offset, width)


# For float16 also the smallest normal and the smallest subnormal number.
RANGES = {
    torch.float16: (65504.0, 2.0**-14, 2.0**-24),
    torch.bfloat16: (3.3e38, 1e30, 1e-30, 1e-38, 9.2e-41),
    torch.float32: (3.4e38, 1e30, 1e19, 1e-19, 1e-30, 1e-40, 1e-45),
    torch.float64: (1.7e308, 1e200, 1e-200, 1e-310, 5e-324),
}


@pytest.mark.parametrize("block", matrices.EDGES)
def test_neither_vanishes_nor_overflows(device, dtype, block):
    """Full blocks, sparse ones, few entries of one magnitude, alone and beside ones."""
    for magnitude in RANGES[dtype]:
        a = torch.zeros(5 * block, block, dtype=dtype)
        a[:block] = magnitude
        a[block : 2 * block : 7, ::5] = -magnitude
        a[2 * block + 3, 4] = magnitude
        a[3 * block + 3, 4] = a[3 * block + 4, 3] = magnitude
        a[4 * block + 3, 4], a[4 * block + 4] = magnitude, 1
        a = a.to(device)
        norms = spamm_torch.norm_map(a, block)
        assert_norms(norms, a, block)
        assert (norms > 0).all()
