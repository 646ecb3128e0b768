"""Overlaps of contracted Gaussians, exact: S of a cluster of any size, without a program.

By the recurrences of Obara and Saika, J. Chem. Phys. 84, 3963 (1986), pair of molecules by pair and
in them pair of shells by pair; only those near enough for an overlap above 1e-20 or so, or what the
caller names, are computed. Nothing has a number for each pair of molecules but S as a whole.
"""

import itertools
import math
from dataclasses import dataclass, replace

import numpy as np
import torch

from models.water.geometry import ATOMS


@dataclass(frozen=True)
class Shell:
    """The 2 l + 1 functions of one contraction on an atom.

    Attributes:
        l: 0 (s), 1 (p) or 2 (d). exponents, coefficients: of the normalised primitive Gaussians.
    """

    l: int
    exponents: tuple[float, ...]
    coefficients: tuple[float, ...]

    @property
    def functions(self):
        return 2 * self.l + 1


# The numbers are the published ones, as ergo 3.8 has them in its files. STO-3G: Hehre, Stewart and
# Pople, J. Chem. Phys. 51, 2657 (1969). 6-31G: Hehre, Ditchfield and Pople, J. Chem. Phys. 56, 2257
# (1972). 6-31G**, with p functions on hydrogen and d functions on oxygen: Hariharan and Pople,
# Theor. Chim. Acta 28, 213 (1973).
_S = (0.15432897, 0.53532814, 0.44463454)
_STO_3G = {
    "O": (
        Shell(0, (130.70932, 23.808861, 6.4436083), _S),
        Shell(0, (5.0331513, 1.1695961, 0.380389), (-0.09996723, 0.39951283, 0.70011547)),
        Shell(1, (5.0331513, 1.1695961, 0.380389), (0.15591627, 0.60768372, 0.39195739)),
    ),
    "H": (Shell(0, (3.4252509, 0.6239137, 0.1688554), _S),),
}
_6_31G = {
    "O": (
        Shell(
            0,
            (5484.6717, 825.23495, 188.04696, 52.9645, 16.89757, 5.7996353),
            (0.0018311, 0.0139501, 0.0684451, 0.2327143, 0.470193, 0.3585209),
        ),
        Shell(0, (15.539616, 3.5999336, 1.0137618), (-0.1107775, -0.1480263, 1.130767)),
        Shell(0, (0.2700058,), (1.0,)),
        Shell(1, (15.539616, 3.5999336, 1.0137618), (0.0708743, 0.3397528, 0.7271586)),
        Shell(1, (0.2700058,), (1.0,)),
    ),
    "H": (
        Shell(0, (18.731137, 2.8253937, 0.6401217), (0.0334946, 0.23472695, 0.81375733)),
        Shell(0, (0.1612778,), (1.0,)),
    ),
}
_6_31GSS = {
    "O": (*_6_31G["O"], Shell(2, (0.8,), (1.0,))),
    "H": (*_6_31G["H"], Shell(1, (1.1,), (1.0,))),
}
BASES = {"STO-3G": _STO_3G, "6-31G": _6_31G, "6-31G**": _6_31GSS}  # {name: {symbol: shells}}

# Real harmonics as forms: function f of a shell is a sum of form[f] over the products of l of x, y,
# z. In the order of ergo's files, and of one length, so that a rotation of space rotates them.
_HALF, _SIXTH = 0.5**0.5, 6**-0.5
HARMONICS = (
    np.ones((1, 1)),
    np.eye(3)[[1, 2, 0]],  # y, z, x
    np.array(
        [
            [0, _HALF, 0, _HALF, 0, 0, 0, 0, 0],  # xy
            [0, 0, 0, 0, 0, _HALF, 0, _HALF, 0],  # yz
            [-_SIXTH, 0, 0, 0, -_SIXTH, 0, 0, 0, 2 * _SIXTH],  # 2 zz - xx - yy
            [0, 0, _HALF, 0, 0, 0, _HALF, 0, 0],  # xz
            [_HALF, 0, 0, 0, -_HALF, 0, 0, 0, 0],  # xx - yy
        ]
    ),
)


def functions_of(symbol, basis):
    """The number of an atom's functions."""
    return sum(shell.functions for shell in BASES[basis][symbol])


def function_atoms(cluster, basis):
    """(N,) integers: the atom of each function of a cluster, in its order."""
    counts = [functions_of(symbol, basis) for symbol in cluster.symbols]
    return np.repeat(np.arange(len(counts)), counts)


FAR = 46.0  # exp(-46) is 1e-20: overlaps beyond are zero
_CHUNK = 1 << 21  # numbers of a table that are computed at once


def overlap(cluster, basis):
    """The overlap matrix S, (N, N) float64 on the CPU, symmetric, ones on its diagonal. Functions
    stand atom by atom in the cluster's order, on each atom in the order of the basis set.
    """
    atoms = torch.from_numpy(cluster.positions).view(-1, len(ATOMS), 3)
    i, j = near_pairs(atoms, basis)
    i, j = i[i <= j], j[i <= j]
    blocks = pair_overlaps(atoms, basis, i, j)
    functions = blocks.shape[1]
    result = blocks.new_zeros(len(atoms), functions, len(atoms), functions)
    by_molecules = result.transpose(1, 2)
    by_molecules[i, j] = blocks
    by_molecules[j, i] = blocks.mT
    return result.view(len(atoms) * functions, -1)


def near_pairs(atoms, basis, rows=slice(None), far=FAR):
    """The pairs (i, j) of molecules with an overlap above exp(-far) or so, by a list of cells.

    Args:
        atoms: (molecules, 3, 3) positions in bohr. rows: the molecules i that count, a slice.

    Returns two int64 tensors on the device of ``atoms``; each pair in both orders, and those of a
    molecule with itself. By i, and in no order of j.
    """
    centre, reach = atoms[:, 0], _reach(basis, far) + 2 * (atoms[0] - atoms[0, 0]).norm(dim=1).max()
    cell = ((centre - centre.min(0).values) / reach).long() + 1  # an empty cell at each end
    counts = cell.max(0).values + 2
    stride = torch.stack((counts[1] * counts[2], counts[2], torch.ones_like(counts[0])))
    key = (cell * stride).sum(1)
    sorted_key, order = key.sort(stable=True)
    i = torch.arange(len(atoms), device=atoms.device)[rows]
    around = torch.arange(-1, 2, device=atoms.device)
    # Three cells along the last axis are neighbours in the order.
    beside = torch.cartesian_prod(around, around, around[1:2])
    middle = key[i, None] + (beside * stride).sum(1)
    first = torch.searchsorted(sorted_key, middle - 1)
    lengths = (torch.searchsorted(sorted_key, middle + 1, right=True) - first).flatten()
    before = lengths.cumsum(0) - lengths
    place = torch.arange(int(lengths.sum()), device=atoms.device)
    place += (first.flatten() - before).repeat_interleave(lengths)
    j = order[place]
    i = i.repeat_interleave(lengths.view(len(i), len(beside)).sum(1))
    near = (centre[i] - centre[j]).square().sum(1) <= reach**2
    return i[near], j[near]


def pair_overlaps(atoms, basis, i, j, far=FAR):
    """Overlaps (pairs, f, f) of the f functions of molecules ``i`` with those of molecules ``j``;
    the rest is as of near_pairs. Of (j, i) they are the transpose but for rounding.
    """
    shells = _shells(basis)
    functions = shells[-1].places.stop
    found = atoms.new_zeros(len(i), functions, functions)
    for a, b in itertools.product(shells, shells):
        apart = atoms[i, a.atom] - atoms[j, b.atom]
        reach = far * (1 / min(a.exponents) + 1 / min(b.exponents))
        near = (apart.square().sum(1) <= reach).nonzero()[:, 0]
        chunk = max(1, _CHUNK // (len(a.exponents) * len(b.exponents) * 3 ** (a.l + b.l)))
        for part in near.split(chunk):
            found[part, a.places, b.places] = _blocks(a, b, apart[part])
    own = (i == j).nonzero()[:, 0]
    above = found[own].triu(1)
    found[own] = above + above.mT + torch.eye(functions).to(found)
    return found


# ---- Shells -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Shell:
    """A shell of a molecule: its atom there, and the places of its functions."""

    atom: int
    places: slice
    l: int
    exponents: tuple[float, ...]
    factors: list[float]  # of the plain Gaussians with which each function has the norm 1


def _shells(basis):
    found, at = [], 0
    for atom, symbol in enumerate(ATOMS):
        for shell in BASES[basis][symbol]:
            # A primitive's norm is this, times what depends on l alone.
            power = (2 * shell.l + 3) / 4
            pairs = zip(shell.coefficients, shell.exponents, strict=True)
            factors = [c * e**power for c, e in pairs]
            places = slice(at, at := at + shell.functions)
            plain = _Shell(atom, places, shell.l, shell.exponents, factors)
            norm = _blocks(plain, plain, torch.zeros(1, 3, dtype=torch.float64))[0, 0, 0].sqrt()
            found.append(replace(plain, factors=[f / norm.item() for f in factors]))
    return found


def _reach(basis, far):
    widest = min(e for shells in BASES[basis].values() for s in shells for e in s.exponents)
    return math.sqrt(2 * far / widest)


def _blocks(a, b, apart):
    """Overlaps (pairs, 2 l_a + 1, 2 l_b + 1) of shells whose centres are A - B = ``apart``."""
    of_a, of_b = (apart.new_tensor(x.exponents) for x in (a, b))
    total = of_a[:, None] + of_b
    factors = apart.new_tensor(a.factors)[:, None] * apart.new_tensor(b.factors)
    weights = factors * (math.pi / total) ** 1.5
    distance = apart.square().sum(1)[:, None, None]
    gaussian = weights * torch.exp(-of_a[:, None] * of_b / total * distance)
    along = _along_axes(a.l, of_a[:, None], b.l, of_b, apart)
    forms = apart.new_empty(len(apart), 3**a.l, 3**b.l)
    for p, powers_a in enumerate(_powers(a.l)):
        for q, powers_b in enumerate(_powers(b.l)):
            powers = enumerate(zip(powers_a, powers_b, strict=True))
            factors = [along[of][axis] for axis, of in powers if any(of)]
            forms[:, p, q] = math.prod(factors, start=gaussian).sum((1, 2))
    left, right = (torch.from_numpy(HARMONICS[x.l]).to(forms) for x in (a, b))
    return left @ forms @ right.T


def _powers(l):
    """For each product of l of x, y, z, in the order of HARMONICS: the power of each."""
    return [
        tuple(axes.count(axis) for axis in range(3))
        for axes in itertools.product(range(3), repeat=l)
    ]


def _along_axes(l_a, of_a, l_b, of_b, apart):
    """{(i, j): (3, pairs, primitives of A, of B)}: means of (x - A)^i (x - B)^j over the product of
    both Gaussians, along each axis."""
    total = of_a + of_b
    x = apart.T[:, :, None, None]
    to_a, to_b = -of_b / total * x, of_a / total * x  # from A and from B to the product's centre
    along = {(0, 0): torch.ones_like(to_a)}
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
