"""Overlaps of contracted Gaussians, exact: S of a cluster of any size, without a program.

By the recurrences of Obara and Saika, J. Chem. Phys. 84, 3963 (1986), pair of shells by pair; only
those near enough for an overlap above 1e-20 or so are computed.
"""

import itertools

import numpy as np
import torch

from models.water.basis import BASES, HARMONICS, function_atoms

_FAR = 46  # exp(-46) is 1e-20: overlaps beyond are zero
_CHUNK = 1 << 21  # numbers of a table that are computed at once


def overlap(cluster, basis):
    """The overlap matrix S.

    Args:
        cluster: a WaterCluster. basis: a name of ergo.basis.BASES.

    Returns:
        (N, N) float64 on the CPU, symmetric, ones on its diagonal. Functions stand atom by atom in
        the cluster's order, on each atom in the order of the basis set.
    """
    atoms = function_atoms(cluster, basis)
    first = np.searchsorted(atoms, np.arange(len(cluster.positions)))
    result = np.zeros((len(atoms), len(atoms)))
    np.fill_diagonal(result, 1)
    sites = _sites(cluster, basis, first)
    for (number, a), (other, b) in itertools.combinations_with_replacement(enumerate(sites), 2):
        _fill(result, a, b, once=number == other)
    return torch.from_numpy(result)


class _Sites:
    """All shells of one kind: one contraction on all atoms of one element."""

    def __init__(self, shell, positions, first):
        self.l = shell.l
        self.positions, self.first = positions, first
        self.exponents = np.array(shell.exponents)
        self.coefficients = _normalised(shell)

    @property
    def functions(self):
        return self.first[:, None] + np.arange(2 * self.l + 1)


def _sites(cluster, basis, first):
    symbols = np.array(cluster.symbols)
    found = []
    for symbol, shells in BASES[basis].items():
        of_element = np.flatnonzero(symbols == symbol)
        starts = first[of_element]
        for shell in shells:
            found.append(_Sites(shell, cluster.positions[of_element], starts))
            starts = starts + shell.functions
    return found


def _normalised(shell):
    """Factors of the plain Gaussians with which each function of a shell has the norm 1."""
    exponents = np.array(shell.exponents)
    # A primitive's norm is this, times what depends on l alone.
    factors = np.array(shell.coefficients) * exponents ** ((2 * shell.l + 3) / 4)
    here = np.zeros((1, 3))
    own = _blocks(shell.l, exponents, factors, shell.l, exponents, factors, here)[0]
    return factors / np.sqrt(own[0, 0])


def _fill(result, a, b, *, once):
    """Writes the overlaps of all shells of two kinds; ``once``: of one kind with itself."""
    reach = np.sqrt(_FAR * (1 / a.exponents.min() + 1 / b.exponents.min()))
    i, j = _near(a.positions, b.positions, reach)
    if once:
        i, j = i[i < j], j[i < j]  # a shell's own functions are orthonormal
    rows, columns = a.functions[i][:, :, None], b.functions[j][:, None, :]
    apart = a.positions[i] - b.positions[j]
    chunk = max(1, _CHUNK // (len(a.exponents) * len(b.exponents) * 3 ** (a.l + b.l)))
    for start in range(0, len(i), chunk):
        part = slice(start, start + chunk)
        blocks = _blocks(
            a.l, a.exponents, a.coefficients, b.l, b.exponents, b.coefficients, apart[part]
        )
        result[rows[part], columns[part]] = blocks
        result[columns[part], rows[part]] = blocks


def _near(positions, others, reach):
    """The pairs of indices whose points are within reach of each other."""
    distances = torch.cdist(
        torch.from_numpy(positions),
        torch.from_numpy(others),
        compute_mode="donot_use_mm_for_euclid_dist",
    )
    return [indices.numpy() for indices in (distances <= reach).nonzero(as_tuple=True)]


def _blocks(l_a, exponents_a, factors_a, l_b, exponents_b, factors_b, apart):
    """Overlaps (pairs, 2 l_a + 1, 2 l_b + 1) of shells whose centres are A - B = ``apart``."""
    along = _along_axes(l_a, exponents_a, l_b, exponents_b, apart)
    weights = factors_a[:, None] * factors_b
    forms = np.empty((len(apart), 3**l_a, 3**l_b))
    for p, powers_a in enumerate(_powers(l_a)):
        for q, powers_b in enumerate(_powers(l_b)):
            x, y, z = (along[powers_a[axis], powers_b[axis]][axis] for axis in range(3))
            forms[:, p, q] = np.einsum("nij,nij,nij,ij->n", x, y, z, weights)
    return HARMONICS[l_a] @ forms @ HARMONICS[l_b].T


def _powers(l):
    """For each product of l of x, y, z, in the order of HARMONICS: the power of each."""
    return [
        tuple(axes.count(axis) for axis in range(3))
        for axes in itertools.product(range(3), repeat=l)
    ]


def _along_axes(l_a, exponents_a, l_b, exponents_b, apart):
    """{(i, j): (3, pairs, primitives of A, of B)}: integrals of (x - A)^i (x - B)^j and both
    Gaussians along each axis."""
    a, b = exponents_a[:, None], exponents_b
    total = a + b
    x = apart.T[:, :, None, None]
    to_a, to_b = -b / total * x, a / total * x  # from A and from B to the product's centre
    along = {(0, 0): np.sqrt(np.pi / total) * np.exp(-a * b / total * x**2)}
    for i, j in itertools.product(range(l_a + 1), range(l_b + 1)):
        if i:
            lower = sum(
                n * along[low] for n, low in ((i - 1, (i - 2, j)), (j, (i - 1, j - 1))) if n
            )
            along[i, j] = to_a * along[i - 1, j] + lower / (2 * total)
        elif j:
            lower = (j - 1) * along[i, j - 2] if j > 1 else 0
            along[i, j] = to_b * along[i, j - 1] + lower / (2 * total)
    return along
