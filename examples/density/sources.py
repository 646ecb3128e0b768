"""Where F and S come from: a chain, a file, data/ergo, or a model of a water cluster."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import torch

from density.problem import Problem
from models.errors import UserError, first_line

_NUMBERS = ("atoms", "electrons")
_ARRAYS = ("fock", "overlap", "density", *_NUMBERS)
BASES = ("STO-3G", "6-31G", "6-31G**")  # of the model; named here, for --help has no numpy


def chain(sites: int, gap: float) -> Problem:
    """A tight-binding chain, half filled: levels of -gap/2 and gap/2 in turns, hopping 1/2.

    Its states have the energies +-sqrt((gap / 2)^2 + cos(k)^2). The density matrix decays the
    slower, the smaller the gap. Energies are in units of hartree.
    """
    site = torch.arange(sites)
    fock = torch.diag(gap / 2 * (-1.0) ** (site + 1)).double()
    fock += 0.5 * ((site[:, None] - site).abs() == 1)
    return Problem(f"Chain of {sites} sites, gap {gap:g}", fock, sites, sites)


def embedded(name: str) -> Problem:
    """F, S and D of a water cluster in data/ergo, computed by the program ergo."""
    require_numpy()
    from models.water.matrices import load

    return _of_ergo(load(name), f"data/ergo, {name}")


def waters(molecules: int, basis: str, seed: int) -> Problem:
    """A water cluster of any size: exact overlaps and a model of F."""
    require_numpy()
    from models.water import model

    cluster = model.water_cluster(molecules, seed)
    overlap = model.overlap(cluster, basis)
    fock = model.model_fock(cluster, basis, overlap)
    atoms = len(cluster.positions)
    return Problem(f"{molecules} waters, {basis}, model F", fock, cluster.electrons, atoms, overlap)


def from_file(path: Path, electrons: int | None) -> Problem:
    """An .npz file of scripts/make_ergo_matrices.py, or one of plain arrays.

    Plain arrays are fock (N x N) and electrons, and where they are there overlap and density
    (N x N) and atoms (a number; else 1, so that energies are not divided).

    Args:
        electrons: instead of the file's.

    Raises:
        UserError: the file is missing, damaged, or lacks what is needed.
    """
    np = require_numpy()
    try:
        with np.load(path) as file:
            is_of_ergo = "format" in file.files
            arrays = {name: file[name] for name in _ARRAYS if name in file.files}
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or first_line(error)}") from error
    except (ValueError, TypeError, AttributeError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"expected an .npz file of plain arrays; got {path}") from error
    if is_of_ergo:
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
    """The module numpy, which the library itself does without.

    Raises:
        UserError: it is not installed.
    """
    try:
        import numpy
    except ImportError as error:
        raise UserError(
            "expected numpy, which reads and writes matrices; it is missing (--chain does without)"
        ) from error
    return numpy
