"""Matrices from files, as other programs write them: Matrix Market and NumPy.

The files are in tests/data; make_matrices.py there says what they hold.
"""

from pathlib import Path

import matrices
import numpy as np
import pytest
import reference
import torch

import spamm_torch

DATA = Path(__file__).parents[1] / "data"


def read_matrix_market(path):
    """A dense float64 array from a real Matrix Market file, coordinate or array form."""
    header, *lines = path.read_text().splitlines()
    _, _, form, field, symmetry = header.lower().split()
    assert header.startswith("%%MatrixMarket matrix")
    assert field in ("real", "integer")
    assert symmetry in ("general", "symmetric")
    size, *entries = (line.split() for line in lines if line.strip() and not line.startswith("%"))
    rows, columns = map(int, size[:2])
    if form == "array":
        assert symmetry == "general"
        return np.array(entries, dtype=float).reshape(columns, rows).T
    matrix = np.zeros((rows, columns))
    assert len(entries) == int(size[2])
    for i, j, value in entries:
        matrix[int(i) - 1, int(j) - 1] = float(value)
        if symmetry == "symmetric":
            matrix[int(j) - 1, int(i) - 1] = float(value)
    return matrix


@pytest.fixture(scope="module")
def overlap():
    return read_matrix_market(DATA / "water_overlap.mtx")


def norm_maps(a, b, block):
    return spamm_torch.norm_map(a, block), spamm_torch.norm_map(b, block)


def assert_product(a, b, tau, block):
    maps = norm_maps(a, b, block)
    actual = reference.to_float64(spamm_torch.mm(a, b, tau=tau, block=block))
    error = np.abs(actual - reference.multiply(a, b, *maps, tau, block))
    bound = reference.rounding_bound(a, b, *maps, tau, block)
    if a.is_cuda and a.dtype == torch.float32:
        bound += split_bound(a, b, maps, tau, block)
    assert (error <= bound).all()


def split_bound(a, b, maps, tau, block):
    """What Hopper's split parts may lose besides, elementwise.

    An entry is off by at most 2^-39 of its block's largest entry, so for each k a block product
    loses at most 2^-38 of the product of the largest entries of its blocks.
    """
    largest_a, largest_b = (largest_entries(x, block) for x in (a, b))
    norm_a, norm_b = (reference.to_float64(norms) for norms in maps)
    valid = ~(norm_a[:, :, None] * norm_b[None] < tau)
    lost = (valid * largest_a[:, :, None] * largest_b[None]).sum(1) * block * 2.0**-38
    return lost.repeat(block, 0).repeat(block, 1)[: a.shape[0], : b.shape[1]]


def largest_entries(x, block):
    """The largest magnitude of each block."""
    starts = [np.arange(0, size, block) for size in x.shape]
    magnitudes = np.abs(reference.to_float64(x))
    return np.maximum.reduceat(np.maximum.reduceat(magnitudes, starts[0], 0), starts[1], 1)


def test_the_overlap_is_one(overlap):
    """Symmetric, ones on the diagonal, positive definite: the file was read as it was meant."""
    assert overlap.shape == (240, 240)
    np.testing.assert_array_equal(overlap, overlap.T)
    np.testing.assert_array_equal(np.diag(overlap), 1)
    assert np.linalg.eigvalsh(overlap).min() > 0


@pytest.mark.parametrize("dtype", matrices.DTYPES)
@pytest.mark.parametrize("tau", [1e-10, 1e-8, 1e-6, 1e-4, 1e-2])
def test_square_of_an_overlap_matrix(device, overlap, dtype, tau):
    a = torch.from_numpy(overlap).to(device, dtype)
    assert_product(a, a, tau, 32)


def test_the_error_shrinks_with_tau(device, overlap):
    """The paper's Table 4: ||E|| of C = A * A by tau, here against the proven bound as well."""
    a = torch.from_numpy(overlap).to(device)
    maps = norm_maps(a, a, 32)
    dense = a @ a
    errors = []
    for tau in (1e-2, 1e-4, 1e-6, 1e-8, 1e-10):
        error = (spamm_torch.mm(a, a, tau=tau, block=32) - dense).norm().item()
        assert error <= spamm_torch.error_bound(*maps, tau).item() + 1e-13 * dense.norm().item()
        errors.append(error)
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 1e-8  # something is skipped
    assert errors[-1] < 1e-9
    assert spamm_torch.valid_ratio(*maps, 1e-10).item() < 0.5  # decay: most products are nothing


@pytest.mark.parametrize("dtype", matrices.DTYPES)
def test_product_of_two_file_formats(device, dtype):
    """Matrix Market's array form and NumPy's, both stored by columns and used as they lie."""
    a = torch.from_numpy(read_matrix_market(DATA / "algebraic_decay.mtx"))
    b = torch.from_numpy(np.load(DATA / "exponential_decay.npy"))
    assert not a.is_contiguous()
    assert not b.is_contiguous()
    a, b = a.to(device, dtype), b.to(device, dtype)
    assert a.stride() == (1, 70)
    assert b.stride() == (1, 90)
    candidates = reference.thresholds(*norm_maps(a, b, 32))
    for tau in candidates[:: len(candidates) // 5]:
        assert_product(a, b, float(tau), 32)


def test_a_memory_mapped_file():
    """Copy-on-write pages of a file serve as an operand without being loaded first."""
    mapped = torch.from_numpy(np.load(DATA / "exponential_decay.npy", mmap_mode="c"))
    loaded = torch.from_numpy(np.load(DATA / "exponential_decay.npy"))
    expected = spamm_torch.mm(loaded, loaded.t(), tau=0.5, block=32)
    assert torch.equal(spamm_torch.mm(mapped, mapped.t(), tau=0.5, block=32), expected)


def test_the_reader_itself(tmp_path):
    path = tmp_path / "small.mtx"
    path.write_text(
        "%%MatrixMarket matrix coordinate real general\n% a comment\n\n"
        "2 3 3\n1 1 5\n2 3 -1e-3\n1 2 7\n"
    )
    np.testing.assert_array_equal(read_matrix_market(path), [[5, 7, 0], [0, 0, -1e-3]])
    path.write_text("%%MatrixMarket matrix array integer general\n2 2\n1\n2\n3\n4\n")
    np.testing.assert_array_equal(read_matrix_market(path), [[1, 3], [2, 4]])
