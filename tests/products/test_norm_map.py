"""norm_map: Frobenius norms of blocks, right over the whole range of each type."""

import itertools

import matrices
import numpy as np
import pytest
import reference
import torch
from hypothesis import given
from hypothesis import strategies as st

import spamm_torch

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
    shape=st.tuples(st.integers(0, 300), st.integers(0, 300)),
    block=st.tuples(st.sampled_from(matrices.EDGES), st.sampled_from(matrices.EDGES)),
    dtype=st.sampled_from(matrices.DTYPES),
    layout=st.sampled_from(sorted(matrices.LAYOUTS)),
    exponent=st.integers(-10, 10),
    seed=st.integers(0, 100),
)
def test_any_matrix(device, shape, block, dtype, layout, exponent, seed):
    values = matrices.normal(*shape, dtype=dtype, device=device, seed=seed) * 2.0**exponent
    a = matrices.LAYOUTS[layout](values)
    assert_norms(spamm_torch.norm_map(a, block), a, block)
    assert torch.equal(spamm_torch.norm_map(a), spamm_torch.norm_map(a, (64, 64)))


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
    for index in itertools.product(*map(range, shape[:2])):
        assert torch.equal(norms[index], spamm_torch.norm_map(a[index], block))


@given(
    edges=st.tuples(*[st.integers(0, 300)] * 3),
    block=st.tuples(*[st.sampled_from(matrices.EDGES)] * 3),
    dtype=st.sampled_from(matrices.DTYPES),
    layouts=st.tuples(*[st.sampled_from(sorted(matrices.LAYOUTS))] * 2),
)
def test_both_operands_at_once_have_the_very_same_norms(device, edges, block, dtype, layouts):
    (m, k, n), (block_m, block_k, block_n) = edges, block
    a = matrices.LAYOUTS[layouts[0]](matrices.normal(m, k, dtype=dtype, device=device))
    b = matrices.LAYOUTS[layouts[1]](matrices.normal(k, n, dtype=dtype, device=device, seed=1))
    b = b * (2.0**-20 if dtype == torch.float16 else 2.0**-100)  # squares underflow: redone
    norm_a, norm_b = torch.ops.spamm_torch.norm_maps(a, b, block)
    assert torch.equal(norm_a, spamm_torch.norm_map(a, (block_m, block_k)))
    assert torch.equal(norm_b, spamm_torch.norm_map(b, (block_k, block_n)))


@pytest.mark.parametrize("layout", sorted(matrices.LAYOUTS))
@pytest.mark.parametrize("dtype", matrices.DTYPES)
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


# ---- Exact where sum and root are representable -------------------------------------------------


@pytest.mark.parametrize("edge", matrices.EDGES)
def test_exact_for_constant_blocks(device, dtype, edge):
    """Every block of x has the norm x * edge, edge being the root of its size."""
    a = torch.full((2 * edge, edge), 3.0, dtype=dtype, device=device)
    a[edge:] = 0.375
    norms = spamm_torch.norm_map(a, edge).cpu().flatten()
    assert norms.tolist() == [3.0 * edge, 0.375 * edge]


@pytest.mark.parametrize("position", [(0, 0), (17, 63), (63, 5), (63, 63)])
def test_exact_for_pythagorean_entries(device, dtype, position):
    a = torch.zeros(64, 64, dtype=dtype, device=device)
    a[30, 31] = -20
    a[position] = 21
    assert spamm_torch.norm_map(a, 64).item() == 29


# ---- The whole range of each type ---------------------------------------------------------------


# For float16 also the smallest normal and the smallest subnormal number.
RANGES = {
    torch.float16: (65504.0, 2.0**-14, 2.0**-24),
    torch.bfloat16: (3.3e38, 1e30, 1e-30, 1e-38, 9.2e-41),
    torch.float32: (3.4e38, 1e30, 1e19, 1e-19, 1e-30, 1e-40, 1e-45),
    torch.float64: (1.7e308, 1e200, 1e-200, 1e-310, 5e-324),
}


@pytest.mark.parametrize(
    ("dtype", "magnitude"), [(dtype, x) for dtype, of in RANGES.items() for x in of]
)
@pytest.mark.parametrize("block", matrices.EDGES)
def test_neither_vanishes_nor_overflows(device, dtype, magnitude, block):
    """Full blocks, sparse ones and single entries of one magnitude; Inf only where the norm is."""
    a = torch.zeros(4 * block, block, dtype=dtype)
    a[:block] = magnitude
    a[block : 2 * block : 7, ::5] = -magnitude
    a[2 * block + 3, 4] = magnitude
    a[3 * block + 3, 4] = magnitude
    a[3 * block + 4, 3] = magnitude
    a = a.to(device)
    norms = spamm_torch.norm_map(a, block)
    assert_norms(norms, a, block)
    assert (norms > 0).all()


def test_random_entries_over_the_whole_range(device, dtype):
    """Each block at its own magnitude, from the smallest subnormal numbers to the largest ones."""
    info = torch.finfo(dtype)
    low = np.log2(float(info.smallest_normal)) + np.log2(float(info.eps))
    exponents = torch.linspace(float(low) + 2, float(np.log2(float(info.max))) - 3, 36)
    scale = (2.0 ** exponents.double()).reshape(6, 6)
    scale = scale.repeat_interleave(32, 0).repeat_interleave(32, 1)
    values = matrices.normal(192, 192, dtype=torch.float64).clamp(-4, 4) * scale
    a = values.to(device, dtype)
    for block in (32, 64, (32, 64)):
        assert_norms(spamm_torch.norm_map(a, block), a, block)


@pytest.mark.parametrize(
    ("dtype", "large", "small"),
    [(torch.bfloat16, 1e30, 1e-30), (torch.float32, 1e30, 1e-30), (torch.float64, 1e200, 1e-200)],
)
def test_large_and_small_entries_side_by_side(device, dtype, large, small):
    """In one block the large one rules; a small block is not harmed by its large neighbours."""
    a = torch.full((96, 96), small, dtype=dtype, device=device)
    a[::2, :32] = large
    a[64:, 64:] = large
    assert_norms(spamm_torch.norm_map(a, 32), a, 32)


@pytest.mark.parametrize("special", [float("inf"), -float("inf"), float("nan")])
def test_inf_and_nan_stay_in_their_block(device, dtype, special):
    a = matrices.normal(96, 96, dtype=dtype, device=device)
    a[40, 70] = special
    norms = spamm_torch.norm_map(a, 32)
    assert_norms(norms, a, 32)
    finite = torch.isfinite(norms).flatten().tolist()
    assert finite == [True] * 5 + [False] + [True] * 3


# ---- Edges, repetition --------------------------------------------------------------------------


def test_edges_count_as_zeros_whatever_lies_beyond(device, dtype):
    """A window in a matrix of NaN: nothing outside the window is read as part of it."""
    whole = torch.full((200, 200), float("nan"), dtype=dtype, device=device)
    window = whole[3:103, 5:78]
    window.fill_(1)
    norms = spamm_torch.norm_map(window, 64)
    assert_norms(norms, window, 64)
    assert norms[1, 1].item() == pytest.approx((36 * 9) ** 0.5, rel=1e-6)
