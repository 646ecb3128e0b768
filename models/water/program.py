"""Debian's program ergo (www.ergoscf.org): its input, its run in a folder of its own, its files.

ergo works in the folder in which it is started and leaves its matrices there as Matrix Market
files, with its functions sorted by kind of shell. Here they come back in the cluster's own order:
atom by atom, and on each atom in the order of the basis set.
"""

import re
import shutil
import subprocess
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from models.errors import UserError, first_line
from models.water.basis import ERGO_NAME, function_atoms
from models.water.overlap import overlap

# How far ergo's overlaps may be from exact ones. Its own are off by 1e-8 at most.
OVERLAP_TOLERANCE = 5e-8

_HEAD = "%%MatrixMarket matrix coordinate real symmetric"
_POLL_S = 0.5
_NEAR = 1e-6  # bohr; ergo writes coordinates with nine decimals
_STARTS_SCF = "Beginning of SCF cycle"  # the line of the log after S and H_core are written
_INPUT = """\
basis = "{basis}"
molecule_inline
{atoms}
EOF
set_nthreads({threads})
tmpdir = "."
scf.create_mtx_file_S = 1
scf.create_mtx_file_H_core = 1
scf.create_mtx_files_F = 1
scf.create_mtx_files_D = 1
scf.create_basis_func_coord_file = 1
scf.sparse_threshold_for_S = 1e-12
scf.convergence_threshold = 1e-6
J_K.threshold_2el_J = 1e-10
J_K.threshold_2el_K = 1e-10
run "HF"
"""


@dataclass(frozen=True)
class ErgoRun:
    """What ergo computed: (N, N) float64 arrays in the cluster's order, in atomic units.

    Attributes:
        overlap, core_hamiltonian: S and H_core.
        fock, density: F and D of the last cycle; None without a self-consistent field. D has the
            trace 2 with S for each pair of electrons.
        energy: the total, in hartree. cycles: how many it took. Both None likewise.
        order: (N,) the place of each function in ergo's files.
        version: of ergo, as in "3.8".
    """

    overlap: np.ndarray
    core_hamiltonian: np.ndarray
    fock: np.ndarray | None
    density: np.ndarray | None
    energy: float | None
    cycles: int | None
    order: np.ndarray
    version: str


def require_ergo():
    """The program's path.

    Raises:
        UserError: there is none.
    """
    path = shutil.which("ergo")
    if path is None:
        raise UserError("expected the program ergo on PATH (Debian: apt install ergo); found none")
    return path


def run(cluster, basis, *, scf=True, threads=1, progress=lambda text: None):
    """Hartree-Fock on a cluster, in a temporary folder that is gone afterwards.

    Args:
        cluster: a WaterCluster. basis: a name of ergo.basis.BASES.
        scf: False ends ergo as soon as it has written S and H_core.
        threads: that ergo may use.
        progress: called with a line of text after each cycle.

    Returns:
        An ErgoRun.

    Raises:
        UserError: ergo is missing, fails or does not converge; or a file that it should have
            written is missing, damaged, or in an order that is not known.
    """
    program = require_ergo()
    with tempfile.TemporaryDirectory(prefix="ergo_") as name:
        folder = Path(name)
        (folder / "input").write_text(input_text(cluster, basis, threads))
        _call(program, folder, scf, progress)
        return read_run(folder, cluster, basis, scf=scf)


def input_text(cluster, basis, threads):
    """ergo's input for Hartree-Fock on a cluster. Coordinates without a unit are in bohr."""
    atoms = "\n".join(
        f"{symbol} {x!r} {y!r} {z!r}"
        for symbol, (x, y, z) in zip(cluster.symbols, cluster.positions.tolist(), strict=True)
    )
    return _INPUT.format(basis=ERGO_NAME[basis], atoms=atoms, threads=threads)


def read_run(folder, cluster, basis, *, scf):
    """An ErgoRun from the files that ergo has left in a folder; see :func:`run`."""
    energy, cycles = _converged(folder) if scf else (None, None)
    order = _ergo_order(folder / "basis_func_coords.m", cluster, basis)

    def read(name):
        matrix, version = read_symmetric(folder / name)
        if len(matrix) != len(order):
            raise UserError(f"expected {len(order)} functions in {name} of ergo; got {len(matrix)}")
        return matrix[np.ix_(order, order)], version

    s, version = read("S_matrix.mtx")
    difference = np.abs(s - overlap(cluster, basis).numpy()).max()
    if not difference <= OVERLAP_TOLERANCE:
        raise UserError(
            f"expected ergo's overlaps to be exact to {OVERLAP_TOLERANCE:g}; got a difference of "
            f"{difference:.1e}: ergo {version} has other basis functions, or another order of them"
        )
    return ErgoRun(
        overlap=s,
        core_hamiltonian=read("H_core_matrix.mtx")[0],
        fock=read(f"F_matrix_{cycles}.mtx")[0] if scf else None,
        density=read(f"D_matrix_{cycles - 1}.mtx")[0] if scf else None,
        energy=energy,
        cycles=cycles,
        order=order,
        version=version,
    )


def _call(program, folder, scf, progress):
    """Runs ergo on the file "input" to its end, or as far as S and H_core."""
    process = subprocess.Popen(
        [program, "input"], cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    told = 0
    try:
        while True:
            ended = process.poll() is not None  # before the log is read: then it is whole
            log = _log(folder)
            energies = re.findall(r"Energy +(\d+) = +(\S+)", log)
            for cycle, energy in energies[told:]:
                progress(f"cycle {cycle}: {energy} hartree")
            told = len(energies)
            if ended or (not scf and _STARTS_SCF in log):
                break
            time.sleep(_POLL_S)
    finally:
        process.kill()
        process.wait()
    if ended and process.returncode < 0:
        raise UserError(f"expected ergo to end by itself; signal {-process.returncode} ended it")
    if not scf and _STARTS_SCF not in log:
        raise UserError(f"expected ergo to write S and H_core; it failed: {_complaint(folder)}")


def _log(folder):
    path = folder / "ergoscf.out"
    return path.read_text(errors="replace") if path.exists() else ""


def _complaint(folder):
    """What ergo's log says went wrong."""
    lines = _log(folder).splitlines()
    errors = [line[4:].strip() for line in lines if line.startswith("ER")]
    return (errors or lines or ["no log"])[-1].strip()


def _converged(folder):
    """The energy and the number of cycles that the log names."""
    log = _log(folder)
    cycles = re.search(r"^RESC CONVERGED after +(\d+) +iterations", log, re.MULTILINE)
    energy = re.search(r"^RESC FINAL ENERGY: +(\S+)", log, re.MULTILINE)
    if not cycles or not energy:
        raise UserError(f"expected ergo's SCF to converge; it did not: {_complaint(folder)}")
    return float(energy.group(1)), int(cycles.group(1))


def _ergo_order(path, cluster, basis):
    """(N,) for each function of the cluster's order, its place in ergo's.

    ergo sorts by kind of shell and keeps, on each atom, the order of the basis set. So a stable
    sort by atom is the cluster's order.

    Raises:
        UserError: the file of places is missing or damaged, or of other atoms.
    """
    try:
        lines = path.read_text().splitlines()
        places = np.array([line.split() for line in lines[1:] if line.strip() != "];"], dtype=float)
    except FileNotFoundError:
        raise UserError(f"expected ergo to write {path.name}; there is no such file") from None
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path.name} of ergo: {first_line(error)}") from error
    atoms = function_atoms(cluster, basis)
    if places.shape == (len(atoms), 3):
        distance, atom = torch.cdist(
            torch.from_numpy(places), torch.from_numpy(cluster.positions), p=torch.inf
        ).min(1)
        order = atom.argsort(stable=True).numpy()
        if distance.max() < _NEAR and np.array_equal(atom.numpy()[order], atoms):
            return order
    raise UserError(
        f"expected {len(atoms)} functions on the cluster's atoms in {path.name}; got other places"
    )


# ---- Symmetric matrices in Matrix Market files --------------------------------------------------


def read_symmetric(path):
    """The matrix (N, N) float64 in a file, and the version of ergo that its comments name.

    Raises:
        UserError: the file is missing, cannot be read, is not such a file, or is damaged.
    """
    try:
        with open(path) as file:
            head = file.readline().strip()
            if head != _HEAD:
                raise UserError(f"expected {path} to open with {_HEAD!r}; got {head[:60]!r}")
            return _matrix_in(file)
    except FileNotFoundError:
        raise UserError(f"expected a matrix of ergo in {path}; there is no such file") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {first_line(error)}") from error
    except ValueError as error:  # bytes that are no text, too
        raise UserError(
            f"expected a whole, finite and square matrix in {path}; it is damaged"
        ) from error


def _matrix_in(file):
    """Matrix and version from the lines after the first; ValueError unless they fit each other."""
    version = "unknown"
    for line in file:
        if not line.startswith("%"):
            break
        named = re.search(r"Ergo.* version (\S+)", line)
        version = named.group(1) if named else version
    else:
        raise ValueError("no sizes")
    rows, columns, entries = map(int, line.split())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of a file that ends here
        numbers = np.loadtxt(file, comments="%", ndmin=2)
    if rows != columns or numbers.shape != (entries, 3) or not np.isfinite(numbers).all():
        raise ValueError("not whole")
    i, j = (numbers[:, axis].astype(np.int64) - 1 for axis in (0, 1))
    if entries and (min(i.min(), j.min()) < 0 or max(i.max(), j.max()) >= rows):
        raise ValueError("an index outside")
    matrix = np.zeros((rows, rows))
    matrix[i, j] = matrix[j, i] = numbers[:, 2]
    return matrix, version
