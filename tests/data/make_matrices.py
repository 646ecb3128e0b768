"""Writes the matrix files of this folder: `python tests/data/make_matrices.py`.

water_overlap.mtx: the overlap matrix of 80 water molecules on a 2 x 2 x 20 lattice, ordered along
    the long axis: 240 x 240, "coordinate real symmetric", entries below 1e-12 left out.
algebraic_decay.mtx: c / (|i-j|^2 + 1) with signs that alternate by i,
    70 x 90, "array real general".
exponential_decay.npy: 0.9^|i-j|, 90 x 110, float32, in Fortran (column-major) order.
"""

from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent
EXPONENT_O, EXPONENT_H = 0.2700058, 0.1612778
LATTICE = 5.6  # about the distance of neighbouring molecules in liquid water
BOND, ANGLE = 1.81, np.deg2rad(104.5)


def water_atoms(rng):
    """Positions and exponents of the atoms, each molecule turned at random."""
    positions, exponents = [], []
    for z, y, x in np.ndindex(20, 2, 2):
        oxygen = LATTICE * np.array([x, y, z]) + rng.normal(0, 0.2, 3)
        turn, _ = np.linalg.qr(rng.normal(size=(3, 3)))
        arms = [[np.cos(s * ANGLE / 2), np.sin(s * ANGLE / 2), 0] for s in (-1, 1)]
        positions += [oxygen, *(oxygen + BOND * turn @ arm for arm in np.array(arms))]
        exponents += [EXPONENT_O, EXPONENT_H, EXPONENT_H]
    return np.array(positions), np.array(exponents)


def overlap(positions, exponents):
    """Overlaps of one s-type Gaussian on each atom, lengths in bohr.

    Exponents p, q at the distance r: (2 sqrt(pq) / (p + q))^(3/2) * exp(-pq / (p + q) * r^2). The
    exponents are those of the outermost s functions of the basis set 6-31G.
    """
    p, q = exponents[:, None], exponents[None, :]
    square = np.sum((positions[:, None] - positions[None]) ** 2, axis=-1)
    return (2 * np.sqrt(p * q) / (p + q)) ** 1.5 * np.exp(-p * q / (p + q) * square)


def distance(rows, columns):
    return np.abs(np.arange(rows)[:, None] - np.arange(columns))


def write_symmetric(path, matrix, threshold):
    rows, columns = np.nonzero(np.tril(np.abs(matrix) >= threshold))
    with open(path, "w") as file:
        file.write("%%MatrixMarket matrix coordinate real symmetric\n")
        file.write("% overlap of s-type Gaussians on 80 water molecules; see make_matrices.py\n")
        file.write(f"{matrix.shape[0]} {matrix.shape[1]} {len(rows)}\n")
        for i, j in zip(rows, columns, strict=True):
            file.write(f"{i + 1} {j + 1} {matrix[i, j]:.12g}\n")


def write_array(path, matrix):
    with open(path, "w") as file:
        file.write("%%MatrixMarket matrix array real general\n")
        file.write(f"{matrix.shape[0]} {matrix.shape[1]}\n")
        file.writelines(f"{value:.9g}\n" for value in matrix.T.ravel())


def main():
    atoms = water_atoms(np.random.default_rng(1))
    write_symmetric(FOLDER / "water_overlap.mtx", overlap(*atoms), 1e-12)
    signs = 1 - 2 * (np.arange(70)[:, None] % 2)
    write_array(FOLDER / "algebraic_decay.mtx", signs / (distance(70, 90) ** 2.0 + 1))
    exponential = (0.9 ** distance(90, 110)).astype(np.float32)
    np.save(FOLDER / "exponential_decay.npy", np.asfortranarray(exponential))


if __name__ == "__main__":
    main()
