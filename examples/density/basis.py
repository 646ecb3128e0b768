"""The orthogonal basis S^(-1/2) of a molecule's overlap matrix S.

S^(-1/2) is the orthogonal basis closest to the given one (Löwdin), so it decays as S does.
"""

import math
from typing import Any

import torch
from torch import Tensor

from density.ranks import group, identity, summed
from models.files import UserError
from spamm_torch import linalg, sparse
from spamm_torch.sparse.blocks import is_sparse

# Up to this size eigenvectors are found faster than some sixty products are computed.
_SMALL = {"cpu": 8192, "cuda": 1024}


def inverse_root(
    overlap: Tensor, *, max_error: float = 1e-13, block: int = 32, size: int | None = None
) -> Tensor:
    """S^(-1/2), symmetric: by eigenvectors where S is small, else by products, of which each may
    lose ``max_error``. ``size``: the true number of rows, where block-sparse ones are padded.
    UserError: ``overlap`` is not positive definite, as far as that shows.
    """
    if is_sparse(overlap):
        return by_products(overlap, max_error=max_error, size=size, group=group(overlap))
    _, failed_at = torch.linalg.cholesky_ex(overlap)
    if failed_at:
        raise UserError(
            "expected a positive definite overlap matrix; got one whose leading "
            f"{failed_at} x {failed_at} minor is not"
        )
    if len(overlap) <= _SMALL[overlap.device.type]:
        return by_eigenvectors(overlap)
    return by_products(overlap, max_error=max_error, block=block)


def by_eigenvectors(overlap: Tensor) -> Tensor:
    """S^(-1/2), of one that is positive definite."""
    values, vectors = torch.linalg.eigh(overlap)
    return symmetric_part((vectors * values.rsqrt()) @ vectors.mT)


def by_products(overlap: Tensor, *, max_error: float = 1e-13, **options: Any) -> Tensor:
    """S^(-1/2), of one that is positive definite; UserError: no convergence."""
    try:
        return linalg.inverse_sqrt(overlap, max_error=max_error, **options).matrix
    except linalg.NotConverged as error:
        raise UserError(str(error)) from error


def transformed(a: Tensor, z: Tensor, *, max_error: float = 1e-13, block: int = 32) -> Tensor:
    """Z A Z of symmetric matrices."""
    return linalg.in_basis(a, z, max_error=max_error, block=block, group=group(a)).matrix


# ---- Dense and block-sparse matrices alike ------------------------------------------------------


def symmetric_part(a: Tensor) -> Tensor:
    return (a + a.mT) / 2


def trace(a: Tensor, size: int) -> float:
    return inner(a, identity(size, a)) if is_sparse(a) else a.trace().item()


def inner(a: Tensor, b: Tensor) -> float:
    """tr(A B) of symmetric matrices."""
    return summed(sparse.inner(a, b), a) if is_sparse(a) else (a * b).sum().item()


def norm(a: Tensor) -> float:
    return math.sqrt(inner(a, a))


def distance_from_one(a: Tensor, size: int) -> float:
    """norm(A - 1)."""
    if is_sparse(a):
        return norm(sparse.add(a, identity(size, a), beta=-1))
    return torch.linalg.vector_norm(a - torch.eye(size).to(a)).item()


def idempotency(x: Tensor) -> float:
    """norm(X - X^2); of a block-sparse X but for 1e-12 of norm(X)^2."""
    if is_sparse(x):
        square = linalg.matrix_power(x, 2, max_error=1e-12, group=group(x)).matrix
        return norm(sparse.add(x, square, beta=-1))
    return torch.linalg.vector_norm(torch.addmm(x, x, x, alpha=-1)).item()
