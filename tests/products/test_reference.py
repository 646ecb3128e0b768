"""The oracle against itself, against NumPy, and against the figures of the cuSpAMM paper."""

import matrices
import numpy as np
import pytest
import reference
import torch
from hypothesis import given
from hypothesis import strategies as st


def maps_of(a, b, block):
    m, k, n = reference.edges(block)
    dtype = matrices.norm_dtype(a.dtype)
    return (
        torch.from_numpy(reference.norm_map(a, (m, k))).to(dtype),
        torch.from_numpy(reference.norm_map(b, (k, n))).to(dtype),
    )


@given(
    shape=st.tuples(*[st.integers(0, 260)] * 3),
    block=st.tuples(*[st.sampled_from(matrices.EDGES)] * 3),
    dtype=st.sampled_from(matrices.DTYPES),
    quantile=st.floats(0, 1),
    seed=st.integers(0, 100),
)
def test_flat_form_and_recursion_agree(shape, block, dtype, quantile, seed):
    m, k, n = shape
    a = matrices.patchy(m, k, dtype=dtype, seed=seed)
    b = matrices.patchy(k, n, dtype=dtype, seed=seed + 1)
    maps = maps_of(a, b, block)
    candidates = reference.thresholds(*maps)
    tau = candidates[int(quantile * (len(candidates) - 1))]
    flat = reference.multiply(a, b, *maps, tau, block)
    np.testing.assert_array_equal(
        flat, reference.multiply_by_recursion(a, b, *maps, tau, block), strict=True
    )
    error = reference.to_float64(a) @ reference.to_float64(b) - flat
    # The maps are rounded to float32, hence the 1e-6.
    assert np.linalg.norm(error) <= reference.error_bound(*maps, tau) * (1 + 1e-6)


@pytest.mark.parametrize("special", [float("inf"), float("nan")])
def test_both_forms_never_skip_what_is_not_finite(special):
    a, b = matrices.normal(96, 96), matrices.normal(96, 96, seed=1)
    a[40, 70] = special
    maps = maps_of(a, b, 32)
    flat = reference.multiply(a, b, *maps, float("inf"), 32)
    assert np.isnan(flat[40]).all() or np.isinf(flat[40]).all()
    assert (flat[:32] == 0).all()
    assert (flat[64:] == 0).all()
    recursion = reference.multiply_by_recursion(a, b, *maps, float("inf"), 32)
    np.testing.assert_array_equal(flat, recursion)


def test_nothing_skipped_is_the_product():
    a, b = matrices.patchy(100, 130), matrices.patchy(130, 70, seed=1)
    product = a.double().numpy() @ b.double().numpy()
    maps = maps_of(a, b, 32)
    for tau in (0.0, -1.0, float("nan")):
        np.testing.assert_array_equal(reference.multiply(a, b, *maps, tau, 32), product)
    assert reference.valid_ratio(*maps, 0.0) == 1
    assert reference.error_bound(*maps, 0.0) == 0


def test_norms_are_numpys():
    a = matrices.normal(70, 90, dtype=torch.float64)
    norms = reference.norm_map(a, (32, 64))
    assert norms.shape == (3, 2)
    for i, j in np.ndindex(3, 2):
        block = a.numpy()[32 * i : 32 * (i + 1), 64 * j : 64 * (j + 1)]
        assert norms[i, j] == pytest.approx(np.linalg.norm(block), rel=1e-14)


@pytest.mark.parametrize(("ratio", "tau"), [(0.30, 1.434815), (0.15, 1.521774), (0.05, 1.695691)])
def test_paper_table_1(ratio, tau):
    """N = 1024 of Table 1; the library's own test has every size."""
    a = matrices.algebraic_decay(1024)
    norms, _ = maps_of(a, a, 32)
    assert reference.find_tau(norms, norms, ratio) == pytest.approx(tau, rel=0.01)
