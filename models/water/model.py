"""Clusters of any size without a program: geometry, exact S, and a model of F.

F of a large cluster takes hours of Hartree-Fock. The model takes that of one molecule alone, turned
as each molecule is, and between molecules what their overlap says:

    F[A, B] = (F[A, A] S[A, A]^-1 S[A, B] + S[A, B] S[B, B]^-1 F[B, B]) / 2,

the extended Hueckel method (Hoffmann, J. Chem. Phys. 39, 1397 (1963)) with a molecule's whole F in
place of energies of orbitals.
"""

import functools

import torch

from models.water.geometry import ATOMS, water_cluster
from models.water.matrices import load
from models.water.overlap import BASES, HARMONICS, overlap

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
