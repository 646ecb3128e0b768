"""Sources of F and S: a chain, data/ergo, or a model of a water cluster."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from density.ranks import own_rows
from models.files import UserError
from spamm_torch import sparse
from spamm_torch.sparse.blocks import is_sparse


@dataclass(frozen=True)
class Problem:
    """A closed shell: every occupied state holds two electrons.

    Attributes:
        name: as a report calls it.
        fock: (N, N), symmetric, float64, hartree; block-sparse ones are padded.
        electrons: even, from 2 to 2 N - 2.
        atoms: by which energies are divided.
        overlap: (N, N), symmetric, float64; None for orthogonal functions.
        density: to compare with; None where there is none. Its trace with S is the electrons.
        functions: N.
    """

    name: str
    fock: Tensor
    electrons: int
    atoms: int
    overlap: Tensor | None = None
    density: Tensor | None = None
    functions: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "functions", self.functions or len(self.fock))

    @property
    def occupied(self) -> int:
        return self.electrons // 2


BASES = ("STO-3G", "6-31G", "6-31G**")  # of the model; named here, for --help has no numpy


def chain(sites: int, gap: float, block: int | None = None) -> Problem:
    """A tight-binding chain, half filled: levels of -gap/2 and gap/2 in turns, hopping 1/2.

    Its states have the energies +-sqrt((gap / 2)^2 + cos(k)^2). The density matrix decays the
    slower, the smaller the gap. Energies are in units of hartree. ``block``: of a block-sparse F;
    None: a dense one.
    """
    site = torch.arange(sites)
    level, hopping = (gap / 2 * (-1.0) ** (site + 1)).double(), torch.full((sites - 1,), 0.5)
    row, column = (
        torch.cat((site, x, y)) for x, y in ((site[1:], site[:-1]), (site[:-1], site[1:]))
    )
    place, values = torch.stack((row, column)), torch.cat((level, hopping, hopping))
    with torch.sparse.check_sparse_tensor_invariants():
        fock = torch.sparse_coo_tensor(place, values, (sites, sites))
    fock = fock.to_dense() if block is None else sparse.from_sparse(fock, block)
    return Problem(f"Chain of {sites} sites, gap {gap:g}", fock, sites, sites, functions=sites)


def embedded(name: str) -> Problem:
    """F, S and D of a water cluster in data/ergo, computed by the program ergo."""
    require_numpy()
    from models.water.matrices import load

    of = load(name)
    if of.fock is None:
        raise UserError(f"expected a Fock matrix in {name}; ergo was run without Hartree-Fock")
    name = f"data/ergo, {name} ({of.atoms} atoms, {of.basis})"
    return Problem(name, of.fock, of.electrons, of.atoms, of.overlap, of.density)


def waters(molecules: int, basis: str, seed: int, blocks: dict[str, Any] | None = None) -> Problem:
    """A water cluster of any size: exact overlaps and a model of F.

    ``blocks``: block, drop, device and molecules of block-sparse matrices; None: dense ones.
    """
    require_numpy()
    from models.water import model

    cluster = model.water_cluster(molecules, seed)
    if blocks is not None:
        overlap, fock = model.block_sparse(cluster, basis, **blocks)
    else:
        overlap = model.overlap(cluster, basis)
        fock = model.model_fock(cluster, basis, overlap)
    name, atoms = f"{molecules} waters, {basis}, model F", len(cluster.positions)
    functions = functions_of_waters(molecules, basis)
    return Problem(name, fock, cluster.electrons, atoms, overlap, functions=functions)


def functions_of_waters(molecules: int, basis: str) -> int:
    """N of such a cluster."""
    require_numpy()
    from models.water.geometry import ATOMS
    from models.water.overlap import functions_of

    return molecules * sum(functions_of(symbol, basis) for symbol in ATOMS)


def as_blocks(problem: Problem, block: int, are_whole: bool) -> Problem:
    """With block-sparse matrices in place of dense ones; of whole ones this process's rows."""
    made = {name: getattr(problem, name) for name in ("fock", "overlap")}
    for name, matrix in made.items():
        if matrix is not None and not is_sparse(matrix):
            matrix = sparse.from_dense(matrix, block)
        made[name] = own_rows(matrix) if matrix is not None and are_whole else matrix
    return replace(problem, **made)


def require_numpy() -> Any:
    """The module numpy, which the library itself does without; UserError: it is missing."""
    try:
        import numpy
    except ImportError as error:
        raise UserError(
            "expected numpy, which reads and writes matrices; it is missing (--chain does without)"
        ) from error
    return numpy
