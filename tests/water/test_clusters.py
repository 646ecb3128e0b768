"""Water clusters: geometry, exact overlaps against ergo's, and the model of F."""

import dataclasses
import itertools

import matrices as operands
import numpy as np
import pytest
import torch
from support import norm_maps, raises_line

import spamm_torch
from fuzzing import products as drawn
from models.files import UserError
from models.water import matrices
from models.water import overlap as overlaps
from models.water.geometry import BOHR, JITTER, SPACING, molecule, water_cluster
from models.water.matrices import FILES, FOLDER, load
from models.water.model import block_sparse, model_fock, overlap
from models.water.overlap import BASES, function_atoms


@pytest.mark.parametrize("molecules", [1, 2, 27, 100])
def test_geometry(molecules):
    cluster = water_cluster(molecules)
    atoms = cluster.positions.reshape(molecules, 3, 3) * BOHR
    _, first, second = molecule() * BOHR
    assert np.linalg.norm(first) == pytest.approx(np.linalg.norm(second)) == pytest.approx(0.96)
    assert np.degrees(np.arccos(first @ second / 0.96**2)) == pytest.approx(104.5)
    np.testing.assert_allclose(np.linalg.det(cluster.frames), 1, rtol=1e-12)
    turned = molecule() @ cluster.frames.swapaxes(1, 2) * BOHR
    np.testing.assert_allclose(atoms - atoms[:, :1], turned, atol=1e-12)
    assert molecules < 20 or np.abs(cluster.frames.mean(0)).max() < 0.5  # in all directions
    apart = torch.pdist(torch.from_numpy(atoms[:, 0]))
    assert (apart >= SPACING - 2 * JITTER).all()
    assert cluster.symbols == ("O", "H", "H") * molecules
    assert cluster.electrons == 10 * molecules
    again, other = (water_cluster(molecules, seed).positions for seed in (0, 5))
    assert np.array_equal(again, cluster.positions)
    assert not np.array_equal(other, cluster.positions)


def test_it_is_a_drop_in_spatial_order():
    cluster = water_cluster(200)
    atoms = torch.from_numpy(cluster.positions)
    oxygens = atoms[::3]
    radius = (oxygens - oxygens.mean(0)).norm(dim=1).max() * BOHR
    assert radius < 1.3 * SPACING * (200 / (4 / 3 * np.pi)) ** (1 / 3)  # that of a ball
    order = spamm_torch.sparse.spatial_order(atoms, torch.arange(600) // 3)
    assert torch.equal(order, torch.arange(600))


@pytest.mark.parametrize("name", FILES)
def test_overlaps_are_ergos(name, monkeypatch):
    monkeypatch.setattr(overlaps, "_CHUNK", 5000)  # of several pairs of functions
    known = load(name)
    difference = (overlap(known.cluster, known.basis) - known.overlap).abs().max().item()
    assert difference <= 5e-8  # ergo's own are off by 1e-8 at most


def test_the_model_is_ergos_of_one_molecule_and_near_it():
    for basis in BASES:
        known = load(f"water {basis}")
        found = model_fock(known.cluster, basis, known.overlap)
        torch.testing.assert_close(found, known.fock, rtol=0, atol=1e-12)
    known = load()
    found = model_fock(known.cluster, known.basis, known.overlap)
    assert torch.equal(found, found.T)
    assert (found - known.fock).norm() < 0.03 * known.fock.norm()


def levels(fock, s):
    """Energies of F against S, their vectors in the basis of the factor of S, and this factor."""
    lower = torch.linalg.cholesky(s)
    half = torch.linalg.solve_triangular(lower, fock, upper=False)
    orthogonal = torch.linalg.solve_triangular(lower, half.mT, upper=False)
    return *torch.linalg.eigh(orthogonal), lower


@pytest.mark.parametrize("basis", BASES)
def test_the_model_turns_with_the_cluster(device, basis):
    """Levels of energy are the same for a cluster and the same one turned as a whole."""
    cluster, turn = water_cluster(6), water_cluster(1, seed=9).frames[0]
    turned = dataclasses.replace(
        cluster, positions=cluster.positions @ turn.T, frames=turn @ cluster.frames
    )
    found = []
    for each in (cluster, turned):
        s = overlap(each, basis).to(device)
        fock = model_fock(each, basis, s)
        assert fock.device == s.device
        found.append(levels(fock, s)[0])
    torch.testing.assert_close(*found, rtol=0, atol=1e-10)
    occupied = cluster.electrons // 2
    assert found[0][occupied] - found[0][occupied - 1] > 0.3  # a gap, as water has


@pytest.mark.parametrize(("basis", "molecules"), [("STO-3G", 150), ("6-31G", 90)])
@pytest.mark.parametrize("block", [32, 64])
def test_block_sparse_matrices_are_the_dense_ones(device, monkeypatch, basis, molecules, block):
    monkeypatch.setattr("models.water.model._PAIRS", 1)  # in several parts
    cluster = water_cluster(molecules)
    s = overlap(cluster, basis)
    for drop, most in ((0.0, 1e-14), (1e-3, 1e-3)):
        found = block_sparse(cluster, basis, block=block, drop=drop, device=device)
        for given, expected in zip(found, (s, model_fock(cluster, basis, s)), strict=True):
            dense = given.to_dense().cpu()
            assert torch.equal(dense, dense.T)
            off = (dense[: len(s), : len(s)] - expected).abs().max()
            assert off <= most * expected.abs().max()
            assert not dense[len(s) :].any()
            assert (given.values().abs().amax((1, 2)) >= drop).all()
            assert (given._nnz() < 0.8 * (len(dense) // block) ** 2) == (drop > 0)


def test_orders_keep_as_much_as_the_docstring_says():
    """The shares of the products of S times S."""
    cluster = water_cluster(150)
    s = overlap(cluster, "6-31G")
    atoms = torch.from_numpy(function_atoms(cluster, "6-31G"))
    positions, molecules = torch.from_numpy(cluster.positions)[atoms], atoms // 3
    mixed = torch.randperm(150, generator=torch.Generator().manual_seed(0))
    at_random = mixed[molecules].argsort(stable=True)
    found = spamm_torch.sparse.spatial_order(positions[at_random], molecules[at_random])
    orders = {
        "in :func:`spatial_order` with a group": at_random[found],
        "without groups": spamm_torch.sparse.spatial_order(positions),
        "with the molecules at random": at_random,
    }
    doc = " ".join(spamm_torch.spatial.__doc__.split())
    for words, order in orders.items():
        norms = spamm_torch.norm_map(s[order][:, order], 32)
        kept = [spamm_torch.valid_ratio(norms, norms, tau) for tau in (1e-10, 1e-6, 1e-2)]
        assert f"{kept[0]:.2f}, {kept[1]:.2f} and {kept[2]:.2f} {words}" in doc


# ---- Points in space -----------------------------------------------------------------------------


def points(n, dimensions=3, *, seed=0, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(n, dimensions, generator=generator, dtype=torch.float64).to(device)


def bisected(positions):
    """The order in its plainest form, from a list of places: piece after piece, level by level."""
    pieces = [list(range(len(positions)))]
    while max(map(len, pieces)) > 1:
        boxes = [box(positions, piece) for piece in pieces]
        middles = [[low / 2 + high / 2 for low, high in of_piece] for of_piece in boxes]
        halves = []
        for at, piece in enumerate(pieces):
            edges = [high / 2 - low / 2 for low, high in boxes[at]]
            axis = edges.index(max(edges))
            before, behind = middles[max(at - 1, 0)], middles[min(at + 1, len(pieces) - 1)]
            sign = -1 if before[axis] > behind[axis] else 1
            ordered = sorted(piece, key=lambda i: sign * positions[i][axis])
            middle = (len(piece) + 1) // 2
            halves += [half for half in (ordered[:middle], ordered[middle:]) if half]
        pieces = halves
    return [i for piece in pieces for i in piece]


def box(positions, indices):
    places = zip(*(positions[i] for i in indices), strict=True)
    return [(min(along), max(along)) for along in places]


PLACES = [
    *(points(n, dimensions, seed=n) for n in (1, 2, 3, 7, 64, 129) for dimensions in (1, 2, 3, 5)),
    *(  # ties, in any real dtype
        (8 * points(100, seed=1)).floor().to(dtype)
        for dtype in (torch.float16, torch.float32, torch.int64, torch.uint8)
    ),
]


@pytest.mark.parametrize("positions", PLACES)
def test_it_is_recursive_bisection(device, positions):
    order = spamm_torch.sparse.spatial_order(positions.to(device))
    assert (order.dtype, order.device.type) == (torch.int64, device.type)
    assert order.tolist() == bisected(positions.tolist())


def test_what_does_not_matter(device):
    """Strides, gradients and groups of one point; points at one place keep their order."""
    positions = points(60, seed=2, device=device)
    expected = spamm_torch.sparse.spatial_order(positions)
    strided = positions.t().contiguous().t().requires_grad_()
    assert torch.equal(spamm_torch.sparse.spatial_order(strided), expected)
    groups = torch.arange(60, device=device, dtype=torch.int32)
    assert torch.equal(spamm_torch.sparse.spatial_order(positions, groups), expected)
    order = spamm_torch.sparse.spatial_order(torch.ones(50, 3, device=device))
    assert order.tolist() == list(range(50))
    assert spamm_torch.sparse.spatial_order(positions[:0]).shape == (0,)


def test_groups_stay_together_in_the_order_of_their_middles(device):
    positions = points(90, seed=3, device=device)
    labels = torch.tensor([7, -2, 10**12], device=device)[torch.arange(90, device=device) % 3]
    groups = labels + torch.arange(90, device=device) // 30 * 100
    order = spamm_torch.sparse.spatial_order(positions, groups)
    assert sorted(order.tolist()) == list(range(90))
    ordered = [(int(groups[i]), i) for i in order.tolist()]
    runs = [(label, list(run)) for label, run in itertools.groupby(ordered, lambda pair: pair[0])]
    assert len(runs) == 9  # each in one piece
    for label, run in runs:
        assert [i for _, i in run] == (groups == label).nonzero().flatten().tolist()
    of_group = [positions[groups == label] for label in groups.unique()]
    middles = [((of.amin(0) + of.amax(0)) / 2).tolist() for of in of_group]
    expected = [int(groups.unique()[place]) for place in bisected(middles)]
    assert [label for label, _ in runs] == expected


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_places_that_are_none(device, value):
    positions = points(9, device=device)
    positions[4, 1] = positions[7, 0] = value
    with pytest.raises(ValueError, match=r"positions must be finite; got \[.*\] for point 4$"):
        spamm_torch.sparse.spatial_order(positions)


# ---- Matrices of ergo ----------------------------------------------------------------------------


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
        assert known.electrons == 10 * known.atoms // 3
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 4_000_000
    known = load()
    assert (known.density * known.overlap).sum().item() == pytest.approx(known.electrons, abs=1e-6)
    energies, vectors, lower = levels(known.fock, known.overlap)
    density = vectors.T @ (lower.T @ known.density @ lower) @ vectors
    occupied = known.electrons // 2
    assert energies[occupied] - energies[occupied - 1] > 0.2
    expected = 2.0 * (torch.arange(len(energies)) < occupied).double()
    torch.testing.assert_close(density, expected.diag(), rtol=0, atol=1e-4)


def refused(path, message):
    with raises_line(UserError, message):
        matrices.read(path)


def test_bad_files(tmp_path):
    path = tmp_path / "file.npz"
    refused(path, "cannot read .*: No such file")
    np.savez(path, overlap=np.ones(3))
    refused(path, "expected a file as in data/ergo")
    with np.load(FOLDER / FILES["water STO-3G"]) as file:
        content = dict(file)
    nan = content["overlap"].copy()
    nan[3] = np.nan
    short = content["fock"][:-1]
    changes = {
        "overlap": (nan, np.zeros(28, dtype="U3")),
        "fock": (short,),
        "basis": ("none", np.array(["STO-3G"] * 3)),
        "atoms": (np.zeros(3), np.zeros((10**6, 3))),
        "frames": (np.zeros(1),),
    }
    for change in ({name: value} for name, values in changes.items() for value in values):
        np.savez(path, **(content | change))
        refused(path, "it is damaged")
    del content["overlap"]
    np.savez(path, **content)
    refused(path, "it is damaged")
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


@pytest.mark.parametrize("dtype", operands.DTYPES)
@pytest.mark.parametrize("tau", [1e-10, 1e-8, 1e-6, 1e-4, 1e-2])
def test_the_square_of_the_overlaps(device, dtype, tau):
    a = load().overlap.to(device, dtype)
    maps, case = norm_maps(a, a, 32), {"block": 32, "tf32": False}
    case |= dict.fromkeys(("pattern_a", "pattern_b"), "tiny")  # subnormal numbers among others
    found = spamm_torch.mm(a, a, tau=tau, block=32)
    drawn.compare([found], a.cpu(), a.cpu(), [x.cpu() for x in maps], tau, case, device)
