"""Basis sets of water: contracted Gaussians on oxygen and hydrogen.

The numbers are the published ones, as ergo 3.8 has them in its files. STO-3G: Hehre, Stewart and
Pople, J. Chem. Phys. 51, 2657 (1969). 6-31G: Hehre, Ditchfield and Pople, J. Chem. Phys. 56, 2257
(1972). 6-31G**, with p functions on hydrogen and d functions on oxygen: Hariharan and Pople, Theor.
Chim. Acta 28, 213 (1973).
"""

from dataclasses import dataclass

import numpy as np


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
    """How many functions an atom has."""
    return sum(shell.functions for shell in BASES[basis][symbol])


def function_atoms(cluster, basis):
    """(N,) integers: the atom of each function of a cluster, in its order."""
    counts = [functions_of(symbol, basis) for symbol in cluster.symbols]
    return np.repeat(np.arange(len(counts)), counts)
