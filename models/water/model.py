"""Clusters of any size without a program: exact S and a model of F, dense or block-sparse.

F of a large cluster takes hours of Hartree-Fock. The model takes that of one molecule alone, turned
as each molecule is, and between molecules what their overlap says:

    F[A, B] = (F[A, A] S[A, A]^-1 S[A, B] + S[A, B] S[B, B]^-1 F[B, B]) / 2,

the extended Hueckel method (Hoffmann, J. Chem. Phys. 39, 1397 (1963)) with a molecule's whole F in
place of energies of orbitals.
"""

import functools
import math

import torch
from torch.nn.functional import pad

from models.water.geometry import ATOMS, water_cluster
from models.water.matrices import load
from models.water.overlap import BASES, FAR, HARMONICS, near_pairs, overlap, pair_overlaps
from spamm_torch.sparse.blocks import Blocks

__all__ = ["model_density", "model_fock", "overlap", "water_cluster"]

_MOLECULE = {"STO-3G": "water STO-3G", "6-31G": "water 6-31G", "6-31G**": "water 6-31G**"}


def model_fock(cluster, basis, s):
    """A model of the Fock matrix F, (N, N) float64, symmetric, in hartree, on the device of ``s``,
    the overlap matrix as from :func:`overlap`. ``basis``: a name of BASES.
    """
    own = molecule_focks(cluster, basis).to(s.device)
    molecules, functions = own.shape[:2]
    rows = s.view(molecules, functions, -1)
    index = torch.arange(molecules, device=s.device)
    own_s = rows.view(molecules, functions, molecules, functions)[index, :, index]
    half = torch.linalg.solve(own_s, own).mT @ rows / 2  # F[A, A] S[A, A]^-1 S[A, B] / 2
    half = half.view_as(s)
    return half + half.mT


def model_density(fock, s, electrons):
    """The density matrix of F and S, (N, N) float64, by eigenvectors: it has the eigenvalues 2, for
    the lowest energies, and 0 against S, so that trace(D S) is the number of electrons.
    """
    lower = torch.linalg.cholesky(s)
    half = torch.linalg.solve_triangular(lower, fock, upper=False)
    _, vectors = torch.linalg.eigh(torch.linalg.solve_triangular(lower, half.mT, upper=False))
    occupied = torch.linalg.solve_triangular(lower.mT, vectors[:, : electrons // 2], upper=True)
    return 2 * occupied @ occupied.mT


def molecule_focks(cluster, basis):
    """(molecules, functions, functions): F of each molecule by itself, turned as it is."""
    rotations = _function_rotations(cluster, basis)
    return rotations.mT @ _molecule_fock(basis) @ rotations


@functools.cache
def _molecule_fock(basis):
    """F (functions, functions) of one molecule by itself, in the place of geometry.molecule()."""
    alone = load(_MOLECULE[basis])
    rotation = _function_rotations(alone.cluster, basis)[0]
    return rotation @ alone.fock @ rotation.mT


def _function_rotations(cluster, basis):
    """(molecules, functions, functions): a turned molecule's functions as sums of unturned ones."""
    frames = torch.from_numpy(cluster.frames)
    blocks = []
    for shell in (shell for symbol in ATOMS for shell in BASES[basis][symbol]):
        turned = torch.ones(len(frames), 1, 1, dtype=torch.float64)
        for _ in range(shell.l):
            turned = torch.einsum("mij,mkl->mikjl", turned, frames).reshape(
                len(frames), 3 * turned.shape[1], -1
            )
        harmonics = torch.from_numpy(HARMONICS[shell.l])
        blocks.append(harmonics @ turned.mT @ harmonics.T)
    return torch.stack(
        [torch.block_diag(*of_molecule) for of_molecule in zip(*blocks, strict=True)]
    )


# ---- Block-sparse: nothing has N^2 numbers -------------------------------------------------------

_PAIRS = 1 << 19  # of molecules that are computed at once


def block_sparse(
    cluster,
    basis,
    *,
    block=64,
    drop=1e-9,
    device="cpu",
    matrices=("overlap", "fock"),
    molecules=slice(None),
):
    """S and the model of F, without blocks whose entries are all below ``drop``.

    ``molecules``: those whose rows are made, from and to a multiple of the block or the end.
    Returns some ``matrices`` as torch.sparse_bsr, float64, exactly symmetric, padded with zeros.
    """
    atoms = torch.from_numpy(cluster.positions).to(device).view(-1, len(ATOMS), 3)
    far = min(FAR, math.log(1e3 / drop)) if drop else FAR
    each = torch.arange(len(atoms), device=device)
    fock = molecule_focks(cluster, basis).to(device)
    to_fock = torch.linalg.solve(pair_overlaps(atoms, basis, each, each), fock).mT / 2
    functions = fock.shape[1]
    columns = -(-len(atoms) * functions // block)
    neighbours = len(near_pairs(atoms, basis, slice(1), far)[0])
    step = block * max(1, _PAIRS // (block * 2 * neighbours))  # they fill whole block rows
    found = {name: [] for name in matrices}
    first, last, _ = molecules.indices(len(atoms))
    for start in range(first, max(last, first + 1), step):
        i, j = near_pairs(atoms, basis, slice(start, min(start + step, last)), far)
        low, high = torch.minimum(i, j), torch.maximum(i, j)
        values = {"overlap": pair_overlaps(atoms, basis, low, high, far)}
        if "fock" in found:
            s = values["overlap"]
            half = _products(to_fock[low], s) + _products(s, to_fock[high].mT)
            own = (i == j).nonzero()[:, 0]
            half[own] = (half[own] + half[own].mT) / 2
            values["fock"] = half
        turned = (i > j)[:, None, None]
        keys, place = _places(i, j, functions, block, columns)
        for name, parts in found.items():
            pairs = torch.where(turned, values[name].mT, values[name])
            filled = pairs.new_zeros(len(keys), block, block)
            filled.view(-1)[place] = pairs.flatten()
            stays = filled.abs().amax((1, 2)) >= drop
            parts.append((keys[stays], filled[stays]))
    rows = [-(-molecule * functions // block) for molecule in (first, last)]
    return [_joined(found.pop(name), rows, columns) for name in matrices]


def _products(a, b):
    """a @ b of many small matrices; bits do not depend on their places, as ``torch.bmm``'s may."""
    found = torch.zeros_like(b)
    for k in range(b.shape[1]):
        found += a[:, :, k, None] * b[:, None, k]
    return found


def _places(i, j, functions, block, columns):
    """The blocks that pairs of molecules touch, ascending, and the place in them of each entry."""
    row, column = (x[:, None] * functions + torch.arange(functions).to(x) for x in (i, j))
    of_row, of_column = row // block, column // block  # one, or two neighbours
    ends = of_row[:, (0, -1), None] * columns + of_column[:, None, (0, -1)]
    keys, slot = ends.unique(return_inverse=True)
    corner = 2 * (of_row - of_row[:, :1])[:, :, None] + (of_column - of_column[:, :1])[:, None]
    place = slot.flatten(1).gather(1, corner.flatten(1)) * block**2
    within = (row % block * block)[:, :, None] + (column % block)[:, None]
    return keys, (place + within.flatten(1)).flatten()


def _joined(parts, rows, columns):
    keys, values = (torch.cat(x) for x in zip(*parts, strict=True))
    row = keys // columns - rows[0]
    crow = pad(torch.bincount(row, minlength=rows[1] - rows[0]).cumsum(0), (1, 0))
    return Blocks(crow, keys % columns, values, columns).matrix()
