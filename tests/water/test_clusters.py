"""Water clusters: geometry, exact overlaps against ergo's, and the model of F."""

import dataclasses

import numpy as np
import pytest
import torch

import spamm_torch
from models.water import blocks
from models.water import overlap as overlaps
from models.water.basis import BASES, HARMONICS, function_atoms
from models.water.geometry import BOHR, JITTER, SPACING, WaterCluster, molecule, water_cluster
from models.water.matrices import FILES, load
from models.water.model import model_fock, overlap


def part(cluster, molecules):
    """Some molecules of a cluster."""
    atoms = cluster.positions.reshape(-1, 3, 3)[molecules].reshape(-1, 3)
    return WaterCluster(atoms, cluster.frames[molecules])


@pytest.mark.parametrize("molecules", [1, 2, 27, 100])
def test_geometry(molecules):
    cluster = water_cluster(molecules)
    atoms = cluster.positions.reshape(molecules, 3, 3) * BOHR
    bonds = atoms[:, 1:] - atoms[:, :1]
    lengths = np.linalg.norm(bonds, axis=2)
    np.testing.assert_allclose(lengths, 0.96, rtol=1e-12)
    angles = np.degrees(np.arccos((bonds[:, 0] * bonds[:, 1]).sum(1) / lengths.prod(1)))
    np.testing.assert_allclose(angles, 104.5, rtol=1e-9)
    apart = torch.pdist(torch.from_numpy(atoms[:, 0]))
    assert (apart >= SPACING - 2 * JITTER).all()
    assert cluster.symbols == ("O", "H", "H") * molecules
    assert cluster.electrons == 10 * molecules


def test_frames_turn_the_molecule():
    cluster = water_cluster(20)
    np.testing.assert_allclose(np.linalg.det(cluster.frames), 1, rtol=1e-12)
    atoms = cluster.positions.reshape(-1, 3, 3)
    turned = molecule() @ cluster.frames.swapaxes(1, 2)
    np.testing.assert_allclose(atoms - atoms[:, :1], turned, atol=1e-12)
    assert np.abs(cluster.frames.mean(0)).max() < 0.5  # in all directions


def test_a_seed_is_a_cluster():
    assert np.array_equal(water_cluster(30, 5).positions, water_cluster(30, 5).positions)
    assert not np.array_equal(water_cluster(30, 5).positions, water_cluster(30, 6).positions)


def test_it_is_a_drop_in_spatial_order():
    cluster = water_cluster(200)
    atoms = torch.from_numpy(cluster.positions)
    oxygens = atoms[::3]
    radius = (oxygens - oxygens.mean(0)).norm(dim=1).max() * BOHR
    assert radius < 1.3 * SPACING * (200 / (4 / 3 * np.pi)) ** (1 / 3)  # that of a ball
    order = spamm_torch.spatial_order(atoms, torch.arange(600) // 3)
    assert torch.equal(order, torch.arange(600))


def test_functions_of_an_atom():
    cluster = water_cluster(2)
    for basis, functions in {"STO-3G": (5, 1), "6-31G": (9, 2), "6-31G**": (14, 5)}.items():
        oxygen, hydrogen = functions
        counts = np.bincount(function_atoms(cluster, basis))
        assert counts.tolist() == [oxygen, hydrogen, hydrogen] * 2


@pytest.mark.parametrize("name", FILES)
def test_overlaps_are_ergos(name):
    known = load(name)
    difference = (overlap(known.cluster, known.basis) - known.overlap).abs().max().item()
    assert difference <= 5e-8  # ergo's own are off by 1e-8 at most


@pytest.mark.parametrize("basis", BASES)
def test_overlaps_by_quadrature(basis):
    """Against a sum over a grid, of the functions that are smooth enough for it."""
    cluster = part(water_cluster(2), [1])
    step = 0.25
    along = np.arange(-9, 9, step)
    grid = np.stack(np.meshgrid(along, along, along, indexing="ij"), -1).reshape(-1, 3)
    values, smooth, at = [], [], 0
    centre = cluster.positions.mean(0)
    for symbol, position in zip(cluster.symbols, cluster.positions - centre, strict=True):
        for shell in BASES[basis][symbol]:
            if max(shell.exponents) < 4:
                values.append(shell_values(shell, grid - position))
                smooth += range(at, at + shell.functions)
            at += shell.functions
    values = np.concatenate(values, 1)
    expected = values.T @ values
    norms = np.sqrt(np.diag(expected))
    found = overlap(cluster, basis).numpy()[np.ix_(smooth, smooth)]
    np.testing.assert_allclose(found, expected / np.outer(norms, norms), atol=1e-5)


def shell_values(shell, apart):
    """(points, functions) values of a shell's functions, but for a common factor."""
    forms = np.ones((len(apart), 1))
    for _ in range(shell.l):
        forms = (forms[:, :, None] * apart[:, None, :]).reshape(len(apart), -1)
    exponents = np.array(shell.exponents)
    weights = np.array(shell.coefficients) * exponents ** ((2 * shell.l + 3) / 4)
    radial = np.exp(-(apart**2).sum(1)[:, None] * exponents) @ weights
    return radial[:, None] * (forms @ HARMONICS[shell.l].T)


def test_overlaps_of_a_part_are_a_part_of_the_overlaps(monkeypatch):
    cluster, chosen = water_cluster(40), [3, 17, 30]
    whole = overlap(cluster, "6-31G**").view(40, 24, 40, 24)
    assert torch.equal(whole.view(960, 960), whole.view(960, 960).T)
    monkeypatch.setattr(overlaps, "_CHUNK", 1)  # pair by pair
    few = overlap(part(cluster, chosen), "6-31G**").view(3, 24, 3, 24)
    torch.testing.assert_close(few, whole[chosen][:, :, chosen], rtol=0, atol=1e-14)


@pytest.mark.parametrize("basis", BASES)
def test_the_model_of_one_molecule_is_ergos(basis):
    known = load(f"water {basis}")
    found = model_fock(known.cluster, basis, known.overlap)
    torch.testing.assert_close(found, known.fock, rtol=0, atol=1e-12)


def test_the_model_is_near_ergos():
    known = load()
    found = model_fock(known.cluster, known.basis, known.overlap)
    assert torch.equal(found, found.T)
    assert (found - known.fock).norm() < 0.03 * known.fock.norm()


@pytest.mark.parametrize("basis", BASES)
def test_the_model_turns_with_the_cluster(device, basis):
    """Levels of energy are the same for a cluster and the same one turned as a whole."""
    cluster, turn = water_cluster(6), water_cluster(1, seed=9).frames[0]
    turned = dataclasses.replace(
        cluster, positions=cluster.positions @ turn.T, frames=turn @ cluster.frames
    )
    levels = []
    for each in (cluster, turned):
        s = overlap(each, basis).to(device)
        fock = model_fock(each, basis, s)
        assert fock.device == s.device
        lower = torch.linalg.cholesky(s)
        half = torch.linalg.solve_triangular(lower, fock, upper=False)
        orthogonal = torch.linalg.solve_triangular(lower, half.mT, upper=False)
        levels.append(torch.linalg.eigvalsh(orthogonal))
    torch.testing.assert_close(levels[0], levels[1], rtol=0, atol=1e-10)
    occupied = cluster.electrons // 2
    assert levels[0][occupied] - levels[0][occupied - 1] > 0.3  # a gap, as water has


@pytest.mark.parametrize(("basis", "molecules"), [("STO-3G", 150), ("6-31G", 90)])
@pytest.mark.parametrize("block", [32, 64])
def test_block_sparse_matrices_are_the_dense_ones(device, monkeypatch, basis, molecules, block):
    monkeypatch.setattr(blocks, "_PAIRS", 1)  # in several parts
    cluster = water_cluster(molecules)
    s = overlap(cluster, basis)
    for drop, most in ((0.0, 1e-14), (1e-3, 1e-3)):
        found = blocks.block_sparse(cluster, basis, block=block, drop=drop, device=device)
        for given, expected in zip(found, (s, model_fock(cluster, basis, s)), strict=True):
            dense = given.to_dense().cpu()
            assert torch.equal(dense, dense.T)
            off = (dense[: len(s), : len(s)] - expected).abs().max()
            assert off <= most * expected.abs().max()
            assert not dense[len(s) :].any()
            assert (given.values().abs().amax((1, 2)) >= drop).all()
            assert (given._nnz() < 0.8 * (len(dense) // block) ** 2) == (drop > 0)


def test_near_pairs_by_brute_force():
    cluster = water_cluster(300)
    atoms = torch.from_numpy(cluster.positions).view(-1, 3, 3)
    i, j = overlaps.near_pairs(atoms, "STO-3G", slice(50, 90), far=6)
    found = torch.zeros(300, 300, dtype=torch.bool).index_put((i, j), torch.tensor(True))
    assert len(i) == found.sum() < 300 * 40
    apart = torch.cdist(atoms.flatten(0, 1), atoms.flatten(0, 1)).view(300, 3, 300, 3).amin((1, 3))
    near = apart <= (2 * 6 / 0.1688554) ** 0.5  # hydrogen's widest Gaussian
    assert not (near & ~found)[50:90].any()
    assert not found[:50].any()
    assert not found[90:].any()


def test_orders_keep_as_much_as_the_docstring_says():
    cluster = water_cluster(150)
    s = overlap(cluster, "6-31G")
    atoms = torch.from_numpy(function_atoms(cluster, "6-31G"))
    positions, molecules = torch.from_numpy(cluster.positions)[atoms], atoms // 3
    mixed = torch.randperm(150, generator=torch.Generator().manual_seed(0))
    at_random = mixed[molecules].argsort(stable=True)
    orders = {
        "in :func:`spatial_order` with a group": at_random[
            spamm_torch.spatial_order(positions[at_random], molecules[at_random])
        ],
        "without groups": spamm_torch.spatial_order(positions),
        "with the molecules at random": at_random,
    }
    doc = " ".join(spamm_torch.spatial.__doc__.split())
    for words, order in orders.items():
        norms = spamm_torch.norm_map(s[order][:, order], 32)
        kept = [spamm_torch.valid_ratio(norms, norms, tau).item() for tau in (1e-10, 1e-6, 1e-2)]
        assert f"{kept[0]:.2f}, {kept[1]:.2f} and {kept[2]:.2f} {words}" in doc
