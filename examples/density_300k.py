#!/usr/bin/env python
"""Density matrices of GFN-xTB at its own electronic temperature, 300 K, by products.

    python examples/density_300k.py                               # needs tblite
    python examples/density_300k.py --record data/scf/tblite.npz
    python examples/density_300k.py --dxtb                        # needs dxtb instead
    python examples/density_300k.py --speed                       # a chain and waters, over LAPACK

tblite (GFN2) or dxtb (GFN1) converges a molecule and says its occupations, which are fractional
where levels meet: three share the electron that the cation of benzene lacks. The solver finds
chemical potentials, entropy and density matrix from H and S by products alone. Both are compared
with those by scipy's eigenvectors, D with the program's, too; all is in atomic units.
"""

import argparse
import functools
import importlib
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from scipy.linalg import eigh
from scipy.optimize import brentq
from scipy.special import entr, expit

from spamm_torch.linalg import DensitySolver
from spamm_torch.linalg.density import BOLTZMANN

KT = 300.0 * BOLTZMANN


def program(name):
    """A module of the program whose matrices these are."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        sys.exit(f"error: expected {name.split('.')[0]}, whose matrices these are; got {error}")


def of_tblite(numbers, places, charge):
    """H, S, D and the number of electrons."""
    interface = program("tblite.interface")
    calculator = interface.Calculator("GFN2-xTB", numbers, places, charge=charge)
    for key, value in (("verbosity", 0), ("save-integrals", 1), ("accuracy", 0.001)):
        calculator.set(key, value)
    result = calculator.singlepoint()
    s, density, c = (
        np.asarray(result.get(key))
        for key in ("overlap-matrix", "density-matrix", "orbital-coefficients")
    )
    h = s @ c @ np.diag(result.get("orbital-energies")) @ c.T @ s  # the self-consistent one
    return (h + h.T) / 2, s, density, round(sum(result.get("orbital-occupations")))


def of_dxtb(numbers, places, charge):
    """H, S, D and the number of electrons."""
    dxtb, kind = program("dxtb"), {"dtype": torch.float64}
    options = {"verbosity": 0, "fermi_etemp": 300.0, "f_atol": 1e-12, "x_atol": 1e-12}
    given = torch.from_numpy(numbers), dxtb.GFN1_XTB
    calculator = dxtb.Calculator(*given, **kind, opts=options)
    calculator.opts.cache.store.overlap = True
    result = calculator.singlepoint(torch.from_numpy(places), torch.tensor(charge, **kind))
    s, electrons = calculator.integrals.overlap.matrix, round(result.occupation.sum().item())
    return *(x.numpy() for x in (result.hamiltonian, s, result.density)), electrons


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


def chain(carbons):
    """Atomic numbers and places, in bohr, of an alkane stretched out."""
    side = np.where(np.arange(carbons) % 2, 0.81, -0.81)
    carbon = np.stack([2.4 * np.arange(carbons), side, np.zeros(carbons)], 1)
    up = np.sign(side)[:, None] * [0.0, 1.19, 0.0]
    ends = [carbon[i] + [x, -1.42 * side[i], 0.0] for i, x in ((0, -1.71), (-1, 1.71))]
    hydrogen = [carbon + up + [0.0, 0.0, z] for z in (-1.68, 1.68)]
    return np.repeat([6, 1], [carbons, 2 * carbons + 2]), np.concatenate([carbon, *hydrogen, ends])


def cluster(waters):
    """Atomic numbers and places, in bohr, of water molecules on a grid, each turned at random."""
    random, edge = np.random.default_rng(0), int(np.ceil(waters ** (1 / 3)))
    grid = 5.9 * np.stack(np.unravel_index(np.arange(waters), (edge,) * 3), 1)
    turns = np.linalg.qr(random.standard_normal((waters, 3, 3)))[0]
    molecule = np.array([[0.0, 0.0, 0.0], [1.81, 0.0, 0.0], [-0.45, 1.75, 0.0]])
    return np.tile([8, 1, 1], waters), (grid[:, None] + molecule @ turns).reshape(-1, 3)


def measure(h, s, electrons, positions):
    """Processor times of one thread, the least of five in turns, of LAPACK, of the solver and of it
    with its Z; and the largest error of D.
    """
    made = functools.partial(DensitySolver, s, positions=positions, storage="dense", accuracy=1e-8)
    kept, least = made(), [np.inf] * 3
    calls = (
        lambda: eigh(h, s, driver="gvd"),
        lambda: kept(h, electrons),
        lambda: made()(h, electrons),
    )
    for _ in range(6):
        for which, call in enumerate(calls):
            began = time.thread_time()
            call()
            least[which] = min(least[which], time.thread_time() - began)
    vectors = calls[0]()[1][:, : electrons // 2]
    return least, abs(calls[1]().density - 2 * vectors @ vectors.T).max()


def speed():
    """Prints times for two molecules whose matrices are not small."""
    torch.set_num_threads(1)
    for name, (numbers, places) in (("C160H322", chain(160)), ("120 waters", cluster(120))):
        h, s, _, electrons = of_tblite(numbers, places, 0)
        positions = places[np.repeat(np.arange(len(numbers)), np.where(numbers == 1, 1, 4))]
        (own, kept, computed), error = measure(h, s, electrons, positions)
        print(
            f"{name}: {len(s)} functions, eigh {own:.3f} s; {kept:.3f} s with Z kept, "
            f"{own / kept:.2f}x; {computed:.3f} s, {own / computed:.2f}x; error of D {error:.0e}"
        )


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dxtb", action="store_true", help="dxtb instead of tblite")
    parser.add_argument("--record", metavar="FILE", help="the matrices, for a test")
    parser.add_argument("--speed", action="store_true", help="times over LAPACK's, by tblite")
    options = parser.parse_args(arguments)
    if options.speed:
        return speed()
    ring = [(np.cos(x), np.sin(x), 0.0) for x in np.arange(6) * np.pi / 3]
    places = np.array([[radius * y for y in x] for radius in (2.632, 4.690) for x in ring])
    numbers, recorded = np.repeat([6, 1], 6), {}
    for name, charge in (("benzene", 0), ("cation", 1)):
        h, s, density, electrons = (of_dxtb if options.dxtb else of_tblite)(numbers, places, charge)
        atoms = np.repeat(np.arange(12), np.repeat([4, (len(h) - 24) // 6], 6))
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
