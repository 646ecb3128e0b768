"""Inverse factors of overlap matrices that pyscf made, of conditions up to 1e7, against eigh."""

import gc
from pathlib import Path

import numpy as np
import pytest
import torch
from support import (
    one_thread,  # noqa: F401  the fixture is automatic
)

from models.water import matrices
from spamm_torch import linalg, sparse
from spamm_torch.linalg import inverses

ROOT = Path(__file__).parents[2]
FUNCTIONS = ("inverse_factor", "inverse_sqrt")


def recorded():
    with np.load(ROOT / "data" / "overlaps" / "overlaps.npz") as file:
        for name, lower in file.items():
            size = int((2 * len(lower)) ** 0.5)
            s = torch.zeros(size, size, dtype=torch.float64)
            s[np.tril_indices(size)] = torch.from_numpy(lower)
            yield name, s + s.tril(-1).mT
    yield "ten waters 6-31G", matrices.load("ten waters").overlap


OVERLAPS = dict(recorded())


def off(z, s):
    return torch.linalg.vector_norm(z.mT @ s @ z - torch.eye(len(s), dtype=s.dtype)).item()


def by_eigenvectors(s):
    values, vectors = torch.linalg.eigh(s)
    return (vectors * values.rsqrt()) @ vectors.mT


@pytest.fixture(params=["one leaf", "leaves"])
def leaves(request, monkeypatch):
    """With a Cholesky factor of the whole matrix, and with those of blocks alone."""
    if request.param == "leaves":
        monkeypatch.setattr(inverses, "_WHOLE", 0)
        monkeypatch.setattr(inverses, "_FAR", 2)


def found_and_dense(function, s, storage, **options):
    if storage == "dense":
        found = getattr(linalg, function)(s, block=32, **options)
        return found, found.matrix
    found = getattr(linalg, function)(sparse.from_dense(s, 32), size=len(s), **options)
    whole = sparse.to_dense(found.matrix)
    assert not whole[len(s) :].any()
    assert not whole[:, len(s) :].any()
    return found, whole[: len(s), : len(s)]


@pytest.mark.parametrize("storage", ["dense", "block-sparse"])
@pytest.mark.parametrize("max_error", [0.0, 1e-10, 1e-7, 1e-4])
@pytest.mark.parametrize("name", OVERLAPS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_error_that_was_asked_for(name, function, max_error, storage, leaves):
    s = OVERLAPS[name]
    eigh = off(by_eigenvectors(s), s)
    if 0 < max_error < eigh / 20:
        with pytest.raises(linalg.NotConverged, match="condition number at most"):
            found_and_dense(function, s, storage, max_error=max_error)
        return
    if 0 < max_error < 10 * eigh:
        return  # rounding decides
    found, z = found_and_dense(function, s, storage, max_error=max_error)
    true = off(z, s)
    assert true <= (10 * max_error or 100 * eigh)
    assert true - 10 * eigh <= found.residual <= 10 * max_error + 100 * eigh
    assert true <= found.total_bound < 1e5 * (found.residual + eigh)
    if function == "inverse_sqrt":
        assert torch.equal(z, z.mT)
        right = by_eigenvectors(s)
        assert torch.linalg.vector_norm(z - right) <= true * torch.linalg.matrix_norm(right, 2) ** 3


@pytest.mark.parametrize("storage", ["dense", "block-sparse"])
def test_a_basis_and_back(storage):
    """The energies of F C = S C e, and a density matrix with trace(D S) the number of electrons."""
    of = matrices.load("ten waters")
    s, f, put = of.overlap, of.fock, (lambda a: a)
    options = {"block": 32}
    if storage == "block-sparse":
        put, options = (lambda a: sparse.from_dense(a, 32)), {"size": len(s)}
    z = linalg.inverse_factor(put(s), max_error=1e-10, **options).matrix
    basis = linalg.in_basis(put(f), z, max_error=0.0, **options).matrix
    x = linalg.purify(basis, of.electrons, max_error=1e-9, **options).matrix
    backs = [linalg.in_basis(x, z, max_error=0.0, transposed=True, **options).matrix]
    backs.append(linalg.in_basis(x, z.mT, max_error=0.0, **options).matrix)
    for back in backs:
        density = 2 * (back if storage == "dense" else sparse.to_dense(back, (len(s),) * 2))
        assert torch.linalg.vector_norm(density - of.density) <= 1e-4  # ergo's own convergence
        assert (density * s).sum().item() == pytest.approx(of.electrons, abs=1e-8)
    right = by_eigenvectors(s)
    vectors = torch.linalg.eigh(right @ f @ right).eigenvectors
    occupied = right @ vectors[:, : of.electrons // 2]
    assert torch.linalg.vector_norm(density - 2 * occupied @ occupied.mT) <= 1e-7


def test_no_more_matrices_are_kept_than_products_need(leaves):
    gc.freeze()  # what was made before is not looked at
    s = OVERLAPS["ten waters 6-31G"]
    given, most = sparse.from_dense(s, 32), [0]

    def count(number, residual):
        alive = (x for x in gc.get_objects() if type(x) is torch.Tensor)
        stored = (x.values() for x in alive if x.layout == torch.sparse_bsr)
        shape = (len(given.values()) // 2, 32, 32)  # identities have fewer
        most[0] = max(most[0], len({x.data_ptr() for x in stored if x.shape > shape}))

    linalg.inverse_factor(given, max_error=1e-9, size=len(s), callback=count)
    assert most[0] == 3  # S, Z and one more
