#!/usr/bin/env python
"""pyscf's Hartree-Fock with density matrices by products instead of eigenvectors.

    python examples/scf_pyscf.py                # all molecules: needs pyscf
    python examples/scf_pyscf.py water10 oh     # some
    python examples/scf_pyscf.py --record data/scf/pyscf.npz oh water2 lithium2

``by_products`` is all that joins the two. Each line compares a run with pyscf's own: cycles, energy
in hartree, the density matrix's largest difference. See docs/density_matrix.md.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

try:
    from pyscf import gto, scf
except ImportError as error:
    sys.exit(f"error: expected pyscf, which this example compares with; got {error}")

from models.water.geometry import water_cluster
from spamm_torch.linalg import DensitySolver

TETRAPEPTIDE = """N 1.01 2.36 -2.17; C 0.86 3.52 -1.24; C 0.28 3.00 0.09; O -0.61 3.56 0.72;
C -0.02 4.60 -1.86; N 0.89 1.83 0.50; C 0.33 1.03 1.57; C -0.76 0.06 1.07; O -1.51 -0.54 1.83;
N -0.75 -0.16 -0.30; C -1.87 -0.80 -0.99; C -1.90 -2.34 -0.86; O -2.03 -3.08 -1.84;
C -1.83 -0.43 -2.48; O -1.66 0.98 -2.66; N -1.88 -2.83 0.42; C -1.95 -4.25 0.73;
C -2.50 -4.50 2.14; O -2.64 -5.59 2.68; C -0.57 -4.89 0.61; O -2.85 -3.38 2.80;
H 0.06 2.05 -2.44; H 1.42 2.71 -3.04; H 1.86 3.93 -1.03; H -1.03 4.23 -2.05; H -0.10 5.46 -1.19;
H 0.40 4.95 -2.81; H 1.49 1.39 -0.19; H 1.14 0.44 2.01; H -0.11 1.68 2.33; H -0.33 0.59 -0.83;
H -2.80 -0.40 -0.55; H -0.98 -0.92 -2.99; H -2.75 -0.74 -2.98; H -1.98 1.18 -3.56;
H -1.90 -2.17 1.20; H -2.64 -4.72 0.03; H 0.14 -4.44 1.31; H -0.16 -4.76 -0.40;
H -0.61 -5.96 0.82; H -3.18 -3.69 3.67"""


def by_products(mf):
    """A mean field of pyscf, RHF or UHF, that takes its density matrices from a DensitySolver."""
    s, atoms = mf.get_ovlp(), [label[0] for label in mf.mol.ao_labels(fmt=False)]
    solver = DensitySolver(s, positions=mf.mol.atom_coords()[atoms])

    def eig(fock, *_, **__):
        mf.found = solver(fock, mf.mol.nelec)
        return fock[..., 0], fock  # pyscf but hands them on, as energies and orbitals

    mf.eig, mf.get_occ, mf.make_rdm1 = eig, lambda e, _: e, lambda *_, **__: mf.found.density
    mf.get_grad = lambda _, __, f: f @ mf.found.density @ s - s @ mf.found.density @ f
    return mf


def coronene():
    """24 carbon atoms 1.42 A apart, hydrogen on the rim."""
    ring = [complex(np.cos(angle), np.sin(angle)) for angle in np.arange(6) * np.pi / 3]
    centres = [0j] + [np.sqrt(3) * 1j * x for x in ring]
    carbon = {np.round(1.42 * (centre + x), 4) for centre in centres for x in ring}
    lines = [f"C {x.real} {x.imag} 0" for x in carbon]
    for x in carbon:
        near = [y for y in carbon if 0.1 < abs(y - x) < 1.6]
        if len(near) == 2:
            away = 2 * x - sum(near)
            hydrogen = x + 1.09 * away / abs(away)
            lines.append(f"H {hydrogen.real} {hydrogen.imag} 0")
    return "; ".join(lines)


def water(molecules):
    cluster = water_cluster(molecules)
    return list(zip(cluster.symbols, cluster.positions.tolist(), strict=True))


MOLECULES = {
    "water10": lambda: {"atom": water(10), "unit": "bohr", "basis": "6-31g"},
    "water2": lambda: {"atom": water(2), "unit": "bohr", "basis": "6-31g"},
    "peptide": lambda: {"atom": TETRAPEPTIDE, "basis": "sto-3g"},
    "coronene": lambda: {"atom": coronene(), "basis": "sto-3g"},
    "oh": lambda: {"atom": "O 0 0 0; H 0 0 0.97", "basis": "6-31g", "spin": 1},
    "lithium2": lambda: {"atom": "Li 0 0 0; Li 0 0 2.67", "basis": "6-311++g**"},
    "hydroxide": lambda: {"atom": "O 0 0 0; H 0 0 0.96", "basis": "6-31++g", "charge": -1},
}


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("molecules", nargs="*", default=[x for x in MOLECULES if x != "water2"])
    parser.add_argument("--record", metavar="FILE", help="each cycle's Fock and density matrices")
    options = parser.parse_args(arguments)
    recorded = {}
    for name in options.molecules:
        mol = gto.M(**MOLECULES[name](), verbose=0)
        kind = scf.UHF if mol.spin else scf.RHF
        start, runs, dm = kind(mol), [], None
        if mol.spin:  # in the first Fock matrix of OH two levels are equal: there is no gap
            start.max_cycle = 1
            start.kernel()
            dm = start.make_rdm1()
        for mf in (kind(mol), by_products(kind(mol))):
            mf.conv_tol = 1e-10
            history = []
            mf.callback = lambda now, keep=history: keep.append((now["fock_last"], now["dm"]))
            mf.kernel(dm0=dm)
            runs.append((mf, history))
        (own, history), (ours, _) = runs
        density = own.make_rdm1()
        print(
            f"{name:10} N = {mol.nao:4}, cycles {ours.cycles:2} and {own.cycles:2}, energy "
            f"{ours.e_tot - own.e_tot:+.1e}, density {abs(ours.found.density - density).max():.1e},"
            f" converged {ours.converged}",
            flush=True,
        )
        recorded |= {
            f"{name}_overlap": mol.intor("int1e_ovlp"),
            f"{name}_positions": mol.atom_coords()[[x[0] for x in mol.ao_labels(fmt=False)]],
            f"{name}_electrons": np.array(mol.nelec),
            f"{name}_focks": np.stack([fock for fock, _ in history]),
            f"{name}_densities": np.stack([np.asarray(dm) for _, dm in history]),
        }
    if options.record:
        np.savez_compressed(options.record, **recorded)


if __name__ == "__main__":
    main()
