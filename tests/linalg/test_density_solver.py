"""DensitySolver against eigenvectors, on matrices that other programs made."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from support import (
    one_thread,  # noqa: F401  the fixture is automatic
    refuses,
)

from models.water import matrices
from spamm_torch import sparse
from spamm_torch.linalg import DensitySolver, NotConverged, density
from spamm_torch.linalg.density import BOLTZMANN
from spamm_torch.linalg.expansion import Fermi, expansion_for, fermi_window

SCF = Path(__file__).resolve().parents[2] / "data" / "scf"


@pytest.fixture(scope="module")
def waters():
    """F, S, positions, electrons of ten waters, computed by ergo; and eigenvalues, vectors."""
    made = matrices.load("ten waters")
    return made.fock, made.overlap, made.positions, made.electrons, *states(made.fock, made.overlap)


def states(f, s):
    f, s = (torch.as_tensor(x, dtype=torch.float64) for x in (f, s))
    inverse = torch.linalg.inv(torch.linalg.cholesky(s))
    values, vectors = torch.linalg.eigh(inverse @ f @ inverse.mT)
    return values, inverse.mT @ vectors


def filled(values, vectors, count, temperature=0.0):
    """D, that times energies, mu and entropy of one spin."""
    if not temperature:
        f = (torch.arange(len(values)) < count).double()
        return (vectors * f) @ vectors.mT, (vectors * f * values) @ vectors.mT, None, 0.0
    low, high, kt = values.min() - 1e3, values.max() + 1e3, BOLTZMANN * temperature
    for _ in range(200):
        mu = (low + high) / 2
        f = torch.special.expit((mu - values) / kt)
        low, high = (mu, high) if f.sum() < count else (low, mu)
    entropy = (torch.special.entr(f) + torch.special.entr(1 - f)).sum().item()
    return (vectors * f) @ vectors.mT, (vectors * f * values) @ vectors.mT, float(mu), entropy


def solver_of(s, storage, **options):
    """A solver for a matrix in dense or block-sparse storage."""
    s = torch.as_tensor(s)
    if storage == "sparse":
        s, options = sparse.from_dense(s, 32), options | {"size": len(s)}
    return DensitySolver(s, **options)


def off(a, b):
    return float(abs(torch.as_tensor(a) - torch.as_tensor(b)).max())


# ---- Zero temperature ---------------------------------------------------------------------------


@pytest.mark.parametrize("storage", ["dense", "sparse"])
@pytest.mark.parametrize("accuracy", [1e-5, 1e-8, 1e-10])
def test_closed_shell(waters, storage, accuracy):
    f, s, positions, electrons, values, vectors = waters
    solver = solver_of(s, storage, positions=positions, accuracy=accuracy)
    d, weighted, *_ = filled(values, vectors, electrons // 2)
    homo, lumo = values[electrons // 2 - 1].item(), values[electrons // 2].item()
    counts = []
    for shift in (0.0, 1e-3, 1e-3):  # calls that learn from those before
        found = solver(f + shift * s, electrons=electrons, energy_weighted=True)
        assert off(found.density, 2 * d) <= found.error <= accuracy
        assert off(found.energy_weighted, 2 * (weighted + shift * d)) <= 30 * accuracy
        assert abs(found.electrons - electrons) <= electrons * accuracy
        energy = 2 * values[: electrons // 2].sum().item() + shift * electrons
        assert abs(found.energy - energy) <= 10 * electrons * accuracy
        assert found.energy == found.free_energy
        assert homo + shift <= found.homo + 1e-9 < found.lumo <= lumo + shift + 2e-9
        assert found.homo - homo < 0.2 * (lumo - homo)
        assert lumo - found.lumo < 0.2 * (lumo - homo)
        assert found.homo < found.chemical_potential < found.lumo
        counts.append(found.products)
    assert max(counts[1:]) < 0.8 * counts[0]


def test_forms_and_orders(waters):
    """Results in the form of F: numpy of any strides and bytes, scipy, tensors of either layout."""
    scipy_sparse = pytest.importorskip("scipy.sparse")
    f, s, positions, electrons, values, vectors = waters
    d = 2 * filled(values, vectors, electrons // 2)[0]
    mixed = torch.randperm(len(s), generator=torch.Generator().manual_seed(1))
    back = mixed.argsort()
    for storage in ("dense", "sparse"):
        mixed_s = s[mixed][:, mixed]
        mixed_s = mixed_s.numpy() if storage == "dense" else scipy_sparse.csr_array(mixed_s)
        solver = DensitySolver(mixed_s, positions=positions[mixed].numpy())
        f_mixed = f[mixed][:, mixed].contiguous()
        found = solver(f_mixed.numpy(), electrons).density
        assert isinstance(found, np.ndarray)
        assert off(found[back][:, back], d) <= 1e-8
        found = solver(sparse.from_dense(f_mixed, 32), electrons).density
        assert found.layout == torch.sparse_bsr
        found = sparse.to_dense(found, tuple(s.shape))
        assert off(found[back][:, back], d) <= 1e-8
        found = solver(f_mixed.float(), electrons, accuracy=1e-6).density
        assert found.dtype == torch.float64
        solver = solver_of(s, storage, positions=positions)
        found = solver(scipy_sparse.csr_array(f), electrons).density
        assert isinstance(found, scipy_sparse.csr_array)
        assert off(found.toarray(), d) <= 1e-8
    own = DensitySolver(sparse.from_dense(s, 64), order=torch.arange(len(s)))
    assert off(own(f, electrons).density, d) <= 1e-8
    padded = DensitySolver(sparse.from_dense(s, 64), size=len(s))
    assert off(padded(f, electrons).density, d) <= 1e-8
    turned, solver = f.numpy()[::-1, ::-1], DensitySolver(s.numpy()[::-1, ::-1])
    found = solver(turned, electrons).density
    assert off(found[::-1, ::-1].copy(), d) <= 1e-8
    assert off(solver(turned.astype(">f8"), electrons).density, found) <= 1e-12


def test_cycles_of_pyscf():
    """Every Fock matrix of three runs: RHF of two waters and of Li2 in diffuse functions, whose S
    has a condition of 7e4 and whose states have a larger gap above the core; UHF of the radical OH.
    """
    of_pyscf = dict(np.load(SCF / "pyscf.npz"))
    for name in ("water2", "oh", "lithium2"):
        s, electrons = of_pyscf[f"{name}_overlap"], of_pyscf[f"{name}_electrons"]
        solver = DensitySolver(s, positions=of_pyscf[f"{name}_positions"])
        given = tuple(map(int, electrons)) if name == "oh" else int(electrons.sum())
        products = []
        for f, d in zip(of_pyscf[f"{name}_focks"], of_pyscf[f"{name}_densities"], strict=True):
            found = solver(f, given)
            assert isinstance(found.density, np.ndarray)
            assert off(found.density, d) <= found.error <= 1e-8
            products.append(found.products)
            if name != "oh":
                homo, lumo = states(f, s)[0][given // 2 - 1 :][:2].tolist()
                assert homo <= found.homo + 1e-9 < found.lumo <= lumo + 2e-9
        assert products[-1] < products[0]


def test_spins(waters):
    """Odd numbers, pairs, and one F for both spins."""
    f, s, positions, electrons, values, vectors = waters
    solver = DensitySolver(s, positions=positions)
    high, low = (filled(values, vectors, electrons // 2 - x)[0] for x in (0, 1))
    for given in (
        {"electrons": electrons - 1},
        {"electrons": (electrons // 2, electrons // 2 - 1)},
    ):
        found = solver(f, **given)
        assert off(found.density, torch.stack((high, low))) <= 1e-8
        assert len(found.homo) == len(found.chemical_potential) == 2
    found = solver([f, f], electrons, spin=0)
    assert off(found.density, torch.stack((high, high))) <= 1e-8
    assert off(solver(f, electrons).density, found.density.sum(0)) <= 2e-8


@pytest.mark.parametrize("storage", ["dense", "sparse"])
def test_none_and_all(waters, storage):
    f, s, positions, *_ = waters
    solver, n = solver_of(s, storage, positions=positions), len(s)
    for temperature in (0.0, 300.0):
        empty = solver(f, 0, temperature=temperature)
        assert not empty.density.any()
        assert empty.energy == 0
        full = solver(f, 2 * n, temperature=temperature)
        assert off(full.density @ s, 2 * torch.eye(n)) <= 1e-7
        assert full.electrons == 2 * n


def test_chemical_potential(waters):
    f, s, positions, electrons, values, vectors = waters
    solver = DensitySolver(s, positions=positions)
    d = filled(values, vectors, electrons // 2)[0]
    middle = (values[electrons // 2 - 1] + values[electrons // 2]).item() / 2
    for _ in range(2):
        found = solver(f, mu=middle)
        assert off(found.density, 2 * d) <= 1e-8
        assert abs(found.electrons - electrons) <= 1e-6
        assert abs(found.free_energy - found.energy + middle * electrons) <= 1e-6
    assert not solver(f, mu=-1e3).density.any()
    assert solver(f, mu=1e3).electrons == 2 * len(s)


def test_orthogonal_functions():
    h = torch.diag((-1.0) ** torch.arange(100)).double()
    h += 0.3 * (torch.diag(torch.ones(99), 1) + torch.diag(torch.ones(99), -1))
    d = 2 * filled(*states(h, torch.eye(100)), 50)[0]
    assert off(DensitySolver()(h, 100).density, d) <= 1e-8
    assert off(DensitySolver(order=torch.arange(100).flip(0))(h, 100).density, d) <= 1e-8


# ---- No answer ----------------------------------------------------------------------------------


def test_levels_cut_in_half():
    ring = torch.zeros(60, 60, dtype=torch.float64)
    ring[torch.arange(60), torch.arange(1, 61) % 60] = -1.0
    ring += ring.mT.clone()
    for given in ({"electrons": 60}, {"electrons": 59, "spin": 0}, {"mu": 0.0}):
        with pytest.raises(NotConverged):  # two levels at 0 for two electrons
            DensitySolver()(ring, **given)
    found = DensitySolver()(ring, 60, temperature=300.0)
    d, _, mu, entropy = filled(*torch.linalg.eigh(ring), 30, 300.0)
    assert off(found.density, 2 * d) <= 1e-8
    assert abs(found.chemical_potential - mu) <= 1e-8
    assert abs(found.entropy - 2 * entropy) <= 1e-6


def test_more_than_rounding_allows(waters):
    f, s, _, electrons, *_ = waters
    refuses(
        NotConverged, lambda: DensitySolver(s)(f, electrons, accuracy=1e-15), "accuracy of 1e-15"
    )


# ---- Temperature --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["benzene", "cation"])
@pytest.mark.parametrize("storage", ["dense", "sparse"])
def test_tblite_at_300_kelvin(name, storage):
    """Its own fractional occupations."""
    of_tblite = dict(np.load(SCF / "tblite.npz"))
    h, s, electrons = (of_tblite[f"{name}_{x}"] for x in ("hamiltonian", "overlap", "electrons"))
    values, vectors = states(h, s)
    solver = solver_of(s, storage, positions=of_tblite[f"{name}_positions"])
    counts = [(int(electrons) + 1) // 2, int(electrons) // 2]
    right = [filled(values, vectors, x, 300.0) for x in counts]
    for _ in range(2):
        found = solver(h, int(electrons), temperature=300.0, energy_weighted=True)
        d = torch.as_tensor(found.density)
        d = d.sum(0) if d.dim() == 3 else d
        assert off(d, right[0][0] + right[1][0]) <= 2e-8
        assert off(d, of_tblite[f"{name}_density"]) <= 1e-6  # as far as it is converged
        weighted = torch.as_tensor(found.energy_weighted)
        weighted = weighted.sum(0) if weighted.dim() == 3 else weighted
        assert off(weighted, right[0][1] + right[1][1]) <= 2e-8
        energy = sum(x[1].mul(torch.as_tensor(s)).sum().item() for x in right)
        free = energy - 300 * BOLTZMANN * sum(x[3] for x in right)
        assert abs(found.free_energy - free) <= 1e-8
        assert abs(found.entropy - sum(x[3] for x in right)) <= 1e-6
    if name == "cation":
        assert found.entropy > 1


@pytest.mark.parametrize("temperature", [300.0, 3000.0, 3e4, 3e6])
@pytest.mark.parametrize("count", [77, 85.5, 3.25])
def test_temperatures(waters, temperature, count):
    f, s, positions, _, values, vectors = waters
    d, _, mu, entropy = filled(values, vectors, count / 2, temperature)
    solver = DensitySolver(s, positions=positions)
    found = solver(f, count, spin=0, temperature=temperature)
    assert off(found.density, 2 * d) <= found.error <= 1e-8
    assert abs(found.chemical_potential - mu) <= 1e-7
    assert abs(found.entropy - 2 * entropy) <= 1e-6
    given = solver(f, mu=mu, temperature=temperature)
    assert off(given.density, 2 * d) <= 1e-8
    assert abs(given.electrons - count) <= 1e-6


def test_polynomials_of_fermi_functions():
    """At points of the whole spectrum, wherever in its range the chemical potential is."""
    for width, mu in ((1.0, 0.3), (30.0, 21.0)):
        made = expansion_for(*fermi_window(1e-3, (0.0, width), mu))
        fermi = Fermi(made, 1e-3, 1e-9)
        energies = torch.linspace(0, width, 20001, dtype=torch.float64)
        energies = torch.cat((energies, torch.linspace(mu - 0.05, mu + 0.05, 20001).double()))
        angle = torch.acos((2 * made.images(energies)[-1] - 1).clamp(-1, 1))
        chebyshev = torch.cos(angle[:, None] * torch.arange(fermi.degree + 1))
        for at in (mu, mu + 0.3 * (fermi.range[1] - mu)):
            coefficients, error = fermi.polynomial(at)
            got = chebyshev @ torch.tensor(coefficients, dtype=torch.float64)
            assert off(got, torch.special.expit((at - energies) / 1e-3)) <= 2 * error + 1e-9


# ---- Gradients ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        {"electrons": 4},
        {"electrons": 3},
        {"electrons": 4.6, "spin": 0, "temperature": 3e5},
        {"mu": 1.7, "temperature": 3e5},
    ],
    ids=str,
)
def test_gradients(given):
    generator = torch.Generator().manual_seed(3)
    noise = torch.rand(2, 5, 5, dtype=torch.float64, generator=generator) * 0.2
    f = (torch.diag(torch.arange(5.0)).double() + noise[0]).requires_grad_()
    s = (torch.eye(5).double() + noise[1]).requires_grad_()

    def function(f, s):
        solver = DensitySolver((s + s.mT) / 2, accuracy=1e-9, order=[3, 1, 0, 4, 2])
        found = solver((f + f.mT) / 2, **given)
        return found.density, found.energy, found.free_energy

    assert torch.autograd.gradcheck(function, (f, s), eps=1e-5, atol=1e-6, fast_mode=True)


def test_calls_repeat_the_share_that_met_the_accuracy(waters, monkeypatch):
    """A first call that shares too much out runs again; the next one does not."""
    f, s, positions, electrons, *_ = waters
    monkeypatch.setattr(density, "_EARLY", 30.0)
    monkeypatch.setattr(density, "_LAST", 30.0)
    solver = solver_of(s, "sparse", positions=positions, accuracy=1e-6)
    first, second = (solver(f, electrons) for _ in range(2))
    assert first.products > 60
    assert second.products < 30
    assert max(first.error, second.error) <= 1e-6


# ---- Other programs and devices -----------------------------------------------------------------


@pytest.mark.skipif(importlib.util.find_spec("pyscf") is None, reason="no pyscf")
def test_scf_of_pyscf(capsys):
    import scf_pyscf

    scf_pyscf.main(["oh", "water2"])
    for line in capsys.readouterr().out.splitlines():
        words = line.replace(",", "").split()
        cycles, own = int(words[5]), int(words[7])
        assert cycles == own, line
        assert abs(float(words[9])) <= 1e-9, line
        assert float(words[11]) <= 1e-7, line
        assert words[-1] == "True", line


@pytest.mark.cuda
def test_on_cuda(waters):
    """Few functions: torch's products, from the second call on in a CUDA graph."""
    f, s, positions, electrons, values, vectors = waters
    d = 2 * filled(values, vectors, electrons // 2)[0]
    for storage in ("dense", "sparse"):
        solver = solver_of(s, storage, positions=positions, device="cuda")
        for shift in (0.0, 0.0, 1e-3, 2e-3):
            found = solver((f + shift * s).cuda(), electrons)
            assert found.density.is_cuda
            assert off(found.density.cpu(), d) <= 1e-8
        warm = solver(f, electrons - 3, spin=0, temperature=300.0)
        right = filled(values, vectors, (electrons - 3) / 2, 300.0)[0]
        assert off(warm.density, 2 * right) <= 1e-8
