"""Sources of F and S: a chain, a file, data/ergo, or a model of a water cluster."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from density.ranks import own_rows
from models.files import UserError, first_line, read_arrays
from spamm_torch import sparse
from spamm_torch.sparse.blocks import is_sparse

_SYMMETRY = 1e-8  # of the largest entry


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
        n = self.functions
        if not n:
            _check_symmetric(self.fock, "fock")
            n = len(self.fock)
            object.__setattr__(self, "functions", n)
        for name in ("overlap", "density"):
            matrix = getattr(self, name)
            if matrix is None or is_sparse(matrix):
                continue
            _check_symmetric(matrix, name)
            if len(matrix) != n:
                raise UserError(
                    f"expected fock and {name} of one size; got {n} x {n} and "
                    f"{len(matrix)} x {len(matrix)}"
                )
        if self.electrons % 2 or not 2 <= self.electrons <= 2 * n - 2:
            raise UserError(
                f"expected an even number of electrons from 2 to {2 * n - 2}, for {n} functions; "
                f"got {self.electrons}"
            )
        if self.atoms < 1:
            raise UserError(f"expected 1 atom or more; got {self.atoms}")

    @property
    def occupied(self) -> int:
        return self.electrons // 2


def _check_symmetric(matrix: Tensor, name: str) -> None:
    if matrix.dim() != 2 or matrix.shape[0] != matrix.shape[1]:
        shape = " x ".join(map(str, matrix.shape)) or "a number"
        raise UserError(f"expected {name} as a square matrix; got {shape}")
    if not len(matrix):
        raise UserError(f"expected {name} with a row or more; got 0 x 0")
    if not matrix.isfinite().all():
        raise UserError(f"expected finite entries of {name}; got NaN or infinity")
    difference, largest = (matrix - matrix.mT).abs().max().item(), matrix.abs().max().item()
    if difference > _SYMMETRY * largest:
        raise UserError(
            f"expected {name} to be symmetric; got entries that differ by {difference:.2g} from "
            f"those across the diagonal, the largest being {largest:.2g}"
        )


_NUMBERS = ("atoms", "electrons")
_ARRAYS = ("fock", "overlap", "density", *_NUMBERS)
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

    return _of_ergo(load(name), f"data/ergo, {name}")


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


def from_file(path: Path, electrons: int | None) -> Problem:
    """An .npz file as in data/ergo, or one of plain arrays: fock (N x N) and electrons (or those
    given), and where they are there overlap and density (N x N) and atoms (a number; else 1, so
    that energies are not divided). UserError: it is missing, damaged, or lacks something.
    """
    require_numpy()
    arrays = read_arrays(path, (*_ARRAYS, "format"))
    if "format" in arrays:
        from models.water.matrices import read

        return _of_ergo(read(path), path.stem, electrons)
    return _of_arrays(arrays, path, electrons)


def _of_arrays(arrays: dict[str, Any], path: Path, electrons: int | None) -> Problem:
    if "fock" not in arrays:
        raise UserError(f"expected an array fock in the .npz file; got none in {path}")
    if electrons is None and "electrons" not in arrays:
        raise UserError(f"expected electrons in the .npz file or --electrons; got none in {path}")
    try:
        numbers = {name: _whole(arrays.pop(name)) for name in _NUMBERS if name in arrays}
        matrices = {
            name: torch.from_numpy(array.astype("float64", casting="safe"))
            for name, array in arrays.items()
        }
    except (ValueError, TypeError) as error:
        raise UserError(f"expected real numbers in {path}; got: {first_line(error)}") from error
    if electrons is not None:
        numbers["electrons"] = electrons
    return Problem(path.stem, **matrices, **{"atoms": 1} | numbers)


def _whole(array: Any) -> int:
    if int(array) != array:
        raise ValueError(f"{array} for a whole number")
    return int(array)


def _of_ergo(matrices: Any, name: str, electrons: int | None = None) -> Problem:
    if matrices.fock is None:
        raise UserError(f"expected a Fock matrix in {name}; ergo was run without Hartree-Fock")
    return Problem(
        f"{name} ({matrices.atoms} atoms, {matrices.basis})",
        matrices.fock,
        matrices.electrons if electrons is None else electrons,
        matrices.atoms,
        matrices.overlap,
        matrices.density,
    )


def require_numpy() -> Any:
    """The module numpy, which the library itself does without; UserError: it is missing."""
    try:
        import numpy
    except ImportError as error:
        raise UserError(
            "expected numpy, which reads and writes matrices; it is missing (--chain does without)"
        ) from error
    return numpy
