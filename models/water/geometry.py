"""Places of the atoms of a cluster of water molecules."""

import itertools
from dataclasses import dataclass

import numpy as np
import torch

import spamm_torch

BOHR = 0.52917721092  # angstrom (CODATA 2010)
SPACING = 3.1  # angstrom between neighbouring oxygens of the grid: the density of water
JITTER = 0.1  # angstrom by which an oxygen leaves its place of the grid, at most, in each direction
BOND, ANGLE = 0.96, 104.5  # O-H in angstrom, H-O-H in degrees

NUCLEUS = {"O": 8, "H": 1}
ATOMS = ("O", "H", "H")  # of a molecule


@dataclass(frozen=True)
class WaterCluster:
    """Atoms in the order O, H, H of one molecule after the other.

    Attributes:
        positions: (atoms, 3) in bohr, float64.
        frames: (molecules, 3, 3): the rotation that takes the molecule of :func:`molecule` to the
            place's own, applied to columns.
    """

    positions: np.ndarray
    frames: np.ndarray

    @property
    def molecules(self):
        return len(self.frames)

    @property
    def symbols(self):
        return ATOMS * self.molecules

    @property
    def electrons(self):
        return sum(NUCLEUS[symbol] for symbol in self.symbols)


def molecule():
    """(3, 3) positions of O, H, H in bohr: O at the origin, x-y its plane, x between the bonds."""
    half = np.radians(ANGLE / 2)
    along, across = BOND / BOHR * np.cos(half), BOND / BOHR * np.sin(half)
    return np.array([[0, 0, 0], [along, across, 0], [along, -across, 0]])


def water_cluster(molecules, seed=0):
    """A drop of water: molecules on a jittered grid, turned at random, in spatial order.

    Takes the places of a cubic grid that are nearest to its middle. The order of the molecules is
    that of ``sparse.spatial_order``. The same numbers give the same cluster.
    """
    random = np.random.default_rng(seed)
    oxygens = SPACING * _grid(molecules) + JITTER * (2 * random.random((molecules, 3)) - 1)
    frames = _rotations(random.random((molecules, 3)))
    atoms = oxygens[:, None] / BOHR + np.einsum("mij,aj->mai", frames, molecule())
    order = _spatial_order(atoms)
    return WaterCluster(atoms[order].reshape(-1, 3), frames[order])


def _spatial_order(atoms):
    """The order of molecules whose atoms are (molecules, 3, 3)."""
    molecule = torch.arange(len(atoms)).repeat_interleave(atoms.shape[1])
    order = spamm_torch.sparse.spatial_order(torch.from_numpy(atoms).flatten(0, 1), molecule)
    return molecule[order[:: atoms.shape[1]]].numpy()


def _grid(places):
    """(places, 3) whole numbers: those nearest to 0, and among equals in the order of a count."""
    edge = int(np.ceil(np.cbrt(places)))  # a ball of this radius has more places than asked for
    cube = np.array(list(itertools.product(range(-edge, edge + 1), repeat=3)))
    return cube[np.argsort((cube**2).sum(1), kind="stable")[:places]].astype(float)


def _rotations(uniform):
    """Random rotations (n, 3, 3) of three uniform numbers each (Shoemake, "Uniform random
    rotations", Graphics Gems III, 1992)."""
    first, second, third = uniform.T
    a, b = np.sqrt(1 - first), np.sqrt(first)
    x, y = a * np.sin(2 * np.pi * second), a * np.cos(2 * np.pi * second)
    z, w = b * np.sin(2 * np.pi * third), b * np.cos(2 * np.pi * third)
    rows = [
        [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
        [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
        [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
    ]
    return np.moveaxis(np.array(rows), -1, 0)
