#!/usr/bin/env python
"""Density matrices of GFN-xTB at its own electronic temperature, 300 K, by products.

    python examples/density_300k.py                               # needs tblite
    python examples/density_300k.py --record data/scf/tblite.npz

tblite (GFN2) converges a molecule and says its occupations, which are fractional where levels meet:
three share the electron that the cation of benzene lacks. The solver finds chemical potentials,
entropy and density matrix from H and S by products alone. Both are compared with those by scipy's
eigenvectors, D with the program's, too; all is in atomic units.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from scipy.linalg import eigh
from scipy.optimize import brentq
from scipy.special import entr, expit

from spamm_torch.linalg import DensitySolver
from spamm_torch.linalg.density import BOLTZMANN

KT = 300.0 * BOLTZMANN


def of_tblite(numbers, places, charge):
    """H, S, D and the number of electrons."""
    try:
        from tblite.interface import Calculator
    except ImportError as error:
        sys.exit(f"error: expected tblite, whose matrices these are; got {error}")
    calculator = Calculator("GFN2-xTB", numbers, places, charge=charge)
    for key, value in (("verbosity", 0), ("save-integrals", 1), ("accuracy", 0.001)):
        calculator.set(key, value)
    result = calculator.singlepoint()
    s, density, c = (
        np.asarray(result.get(key))
        for key in ("overlap-matrix", "density-matrix", "orbital-coefficients")
    )
    h = s @ c @ np.diag(result.get("orbital-energies")) @ c.T @ s  # the self-consistent one
    return (h + h.T) / 2, s, density, round(sum(result.get("orbital-occupations")))


def by_eigenvectors(h, s, electrons):
    """D and the free energy."""
    energies, vectors = eigh(h, s)
    density = free = 0.0
    for count in (electrons - electrons // 2, electrons // 2):
        mu = brentq(lambda x, n=count: expit((x - energies) / KT).sum() - n, -9, 9, xtol=1e-15)
        f = expit((mu - energies) / KT)
        density = density + (vectors * f) @ vectors.T
        free += f @ energies - KT * (entr(f) + entr(1 - f)).sum()
    return density, free


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--record", metavar="FILE", help="the matrices, for a test")
    options = parser.parse_args(arguments)
    ring = [(np.cos(x), np.sin(x), 0.0) for x in np.arange(6) * np.pi / 3]
    places = np.array([[radius * y for y in x] for radius in (2.632, 4.690) for x in ring])
    numbers, recorded = np.repeat([6, 1], 6), {}
    for name, charge in (("benzene", 0), ("cation", 1)):
        h, s, density, electrons = of_tblite(numbers, places, charge)
        atoms = np.repeat(np.arange(12), np.repeat([4, 1], 6))
        found = DensitySolver(s, positions=places[atoms])(h, electrons, temperature=300.0)
        d = found.density if found.density.ndim == 2 else found.density.sum(0)
        right, free = by_eigenvectors(h, s, electrons)
        print(
            f"{name:8} mu {found.chemical_potential}, entropy {found.entropy:.6f} k, free energy "
            f"{found.free_energy:.9f}; of eigenvectors' D {abs(d - right).max():.1e}, free energy "
            f"{found.free_energy - free:+.1e}; of the program's D {abs(d - density).max():.1e}"
        )
        recorded |= {f"{name}_hamiltonian": h, f"{name}_overlap": s, f"{name}_density": density}
        recorded |= {f"{name}_electrons": electrons, f"{name}_positions": places[atoms]}
    if options.record:
        np.savez_compressed(options.record, **recorded)


if __name__ == "__main__":
    main()
