"""The matrices of one cluster, and the file that holds them."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from models.files import UserError, read_arrays
from models.water.geometry import WaterCluster
from models.water.overlap import function_atoms

MATRICES = ("overlap", "core_hamiltonian", "fock", "density")
_FORMAT = "spamm_torch water cluster 1"
# The matrices that come with the repository: what needs them needs no ergo.
FOLDER = Path(__file__).resolve().parents[2] / "data" / "ergo"
FILES = {  # by name
    "default": "waters_36_6-31g.npz",
    "ten waters": "waters_10_6-31g.npz",
    "water STO-3G": "waters_1_sto-3g.npz",
    "water 6-31G": "waters_1_6-31g.npz",
    "water 6-31G**": "waters_1_6-31gss.npz",
    "pair 6-31G**": "waters_2_6-31gss.npz",  # S and H_core alone
}


@dataclass(frozen=True)
class ErgoMatrices:
    """Results of ergo for a water cluster, in atomic units and in spatial order.

    Functions stand molecule by molecule, and those in the order of ``sparse.spatial_order``.

    Attributes:
        overlap, core_hamiltonian: (N, N) float64: S and H_core.
        fock, density: (N, N) float64: F and D of Hartree-Fock; None where it was not run. D has the
            eigenvalues 2 and 0 against S, so trace(D S) is the number of electrons.
        positions: (N, 3) float64, in bohr: the nucleus of each function.
        cluster: the WaterCluster. basis: name of the basis set.
    """

    overlap: torch.Tensor
    core_hamiltonian: torch.Tensor
    fock: torch.Tensor | None
    density: torch.Tensor | None
    cluster: WaterCluster
    basis: str

    @property
    def positions(self):
        return torch.from_numpy(self.cluster.positions[function_atoms(self.cluster, self.basis)])

    @property
    def atoms(self):
        """The number of atoms."""
        return len(self.cluster.positions)

    @property
    def electrons(self):
        return self.cluster.electrons


def read(path):
    """The ErgoMatrices in a file: data/README.md says what it holds.

    Raises:
        UserError: the file is missing, of another format, or damaged.
    """
    content = read_arrays(path)
    if str(content.get("format")) != _FORMAT:
        raise UserError(f"expected a file as in data/ergo; got another in {path}")
    try:
        return _parsed(content)
    except (LookupError, ValueError, TypeError, MemoryError) as error:
        raise UserError(f"expected whole and finite matrices in {path}; it is damaged") from error


def load(name="default"):
    """The ErgoMatrices of an embedded cluster.

    Args:
        name: a name of FILES.

    Raises:
        UserError: another name; or the file is missing or damaged.
    """
    if name not in FILES:
        raise UserError(f"expected embedded matrices: {', '.join(FILES)}; got {name}")
    return read(FOLDER / FILES[name])


def _parsed(content):
    """ErgoMatrices from the arrays of a file; KeyError or ValueError where they do not fit."""
    cluster = WaterCluster(content["atoms"], content["frames"])
    atoms, frames = 3 * cluster.molecules, cluster.molecules
    if content["atoms"].shape != (atoms, 3) or content["frames"].shape != (frames, 3, 3):
        raise ValueError("no molecules")
    basis = str(content["basis"])
    functions = len(function_atoms(cluster, basis))

    def matrix(name):
        if name not in content and name in ("fock", "density"):
            return None
        full = np.zeros((functions, functions))
        full[np.triu_indices(functions)] = content[name]
        if not np.isfinite(full).all():
            raise ValueError("not finite")
        return torch.from_numpy(full + np.triu(full, 1).T)

    return ErgoMatrices(*map(matrix, MATRICES), cluster=cluster, basis=basis)
