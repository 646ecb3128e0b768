"""Files of matrices, and those that are embedded."""

import matrices as operands
import numpy as np
import pytest
import reference
import torch

import spamm_torch
from models.errors import UserError
from models.water import matrices
from models.water.matrices import FILES, FOLDER, load


def levels(known):
    """Energies of F against S, and D in the basis of their vectors."""
    lower = torch.linalg.cholesky(known.overlap)
    half = torch.linalg.solve_triangular(lower, known.fock, upper=False)
    energies, vectors = torch.linalg.eigh(
        torch.linalg.solve_triangular(lower, half.mT, upper=False)
    )
    return energies, vectors.T @ (lower.T @ known.density @ lower) @ vectors


def test_the_embedded_density_is_that_of_the_embedded_fock_matrix():
    known = load()
    assert (known.density * known.overlap).sum().item() == pytest.approx(known.electrons, abs=1e-6)
    energies, density = levels(known)
    occupied = known.electrons // 2
    assert energies[occupied] - energies[occupied - 1] > 0.2
    expected = torch.zeros(len(energies), dtype=torch.float64)
    expected[:occupied] = 2
    torch.testing.assert_close(density, expected.diag(), rtol=0, atol=1e-4)


def test_the_embedded_matrices_fit_each_other():
    for name in FILES:
        known = load(name)
        functions = len(known.overlap)
        for matrix in (known.overlap, known.core_hamiltonian, known.fock, known.density):
            if matrix is not None:
                assert matrix.dtype == torch.float64
                assert matrix.shape == (functions, functions)
                assert torch.equal(matrix, matrix.T)
        assert known.positions.shape == (functions, 3)
        assert torch.equal(known.molecule.unique(), torch.arange(known.atoms // 3))
        assert known.electrons == 10 * known.atoms // 3
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 4_000_000


def test_spatial_order_lets_blocks_be_skipped():
    """The embedded order, the same found again from any other, and those that are not local."""
    known = load()
    n = len(known.overlap)
    molecules = torch.randperm(known.atoms // 3, generator=torch.Generator().manual_seed(1))
    at_random = molecules[known.molecule].argsort(stable=True)
    found_again = spamm_torch.spatial_order(known.positions[at_random], known.molecule[at_random])
    orders = {
        "embedded": torch.arange(n),
        "found": at_random[found_again],
        "at random": torch.randperm(n, generator=torch.Generator().manual_seed(0)),
        "ergo's": known.ergo_order.argsort(),
    }
    kept = {}
    for name, order in orders.items():
        norms = spamm_torch.norm_map(known.overlap[order][:, order], 32)
        kept[name] = spamm_torch.valid_ratio(norms, norms, 1e-2).item()
    assert max(kept["embedded"], kept["found"]) < 0.9 * min(kept["at random"], kept["ergo's"])


def refused(path, message):
    with pytest.raises(UserError, match=message) as raised:
        matrices.read(path)
    assert "\n" not in str(raised.value)


def test_bad_files(tmp_path):
    path = tmp_path / "file.npz"
    refused(path, "cannot read .*: No such file")
    whole = (FOLDER / FILES["water STO-3G"]).read_bytes()
    for content in (b"", b"no archive", whole[: len(whole) // 2]):
        path.write_bytes(content)
        refused(path, "expected an .npz file of plain arrays; got .*file.npz")
    np.savez(path, overlap=np.ones(3))
    refused(path, "expected a file as in data/ergo")
    with np.load(FOLDER / FILES["water STO-3G"]) as file:
        content = dict(file)
    nan = content["overlap"].copy()
    nan[3] = np.nan
    short = content["fock"][:-1]
    for change in ({"overlap": nan}, {"fock": short}, {"basis": "none"}, {"ergo_order": nan}):
        np.savez(path, **(content | change))
        refused(path, "it is damaged")
    del content["overlap"]
    np.savez(path, **content)
    refused(path, "it is damaged")


def test_an_unknown_name():
    with pytest.raises(UserError, match=r"expected embedded matrices: default, .*; got none"):
        load("none")


@pytest.mark.parametrize("block", [32, 64])
@pytest.mark.parametrize("name", matrices.MATRICES)
def test_squares_in_float32_are_as_accurate_as_torchs(device, name, block):
    """Blocks hold entries of many magnitudes.

    Normwise, as for other badly scaled data; also where most block products are skipped.
    """
    a = getattr(load(), name).to(device)
    exact = a.float().double() @ a.float().double()
    rounding = (a.float() @ a.float() - exact).norm()
    error = spamm_torch.mm(a.float(), a.float(), tau=0.0, block=block) - exact
    assert error.norm() <= 4 * rounding
    max_error = 1e-3
    error = spamm_torch.mm(a.float(), a.float(), max_error=max_error, block=block) - exact
    assert error.norm() <= max_error * a.norm() ** 2 + 4 * rounding


# ---- Products of entries of many magnitudes, against the oracle ---------------------------------


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


@pytest.mark.parametrize("dtype", operands.DTYPES)
@pytest.mark.parametrize("tau", [1e-10, 1e-8, 1e-6, 1e-4, 1e-2])
def test_the_square_of_the_overlaps(device, dtype, tau):
    a = load().overlap.to(device, dtype)
    assert_product(a, a, tau, 32)
