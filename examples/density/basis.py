"""The orthogonal basis S^(-1/2) of a molecule's overlap matrix S.

S^(-1/2) is the orthogonal basis closest to the given one (Löwdin), so it decays as S does.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

import spamm_torch
from models.errors import UserError
from spamm_torch import linalg, sparse

# Up to this size eigenvectors are found faster than some sixty products are computed.
_SMALL = {"cpu": 8192, "cuda": 1024}


def inverse_root(
    overlap: Tensor, *, max_error: float = 1e-13, block: int = 32, size: int | None = None
) -> Tensor:
    """S^(-1/2), symmetric: by eigenvectors where S is small, by products where it is large.

    Args:
        overlap: (N, N), symmetric and positive definite, float64, dense or block-sparse.
        max_error: as of ``spamm_torch.mm``, of each product.
        block: edge of the blocks: 32, 64 or 128.
        size: the true number of rows, where block-sparse ones are padded.

    Raises:
        UserError: ``overlap`` is not positive definite, or so nearly not that it does not show.
    """
    if is_sparse(overlap):
        return by_products(overlap, max_error=max_error, size=size)
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


def by_products(overlap: Tensor, *, max_error: float = 1e-13, **options: int | None) -> Tensor:
    """S^(-1/2), of one that is positive definite.

    Raises:
        UserError: no convergence.
    """
    try:
        return linalg.inverse_sqrt(overlap, max_error=max_error, **options).matrix
    except linalg.NotConverged as error:
        raise UserError(str(error)) from error


def transformed(a: Tensor, z: Tensor, *, max_error: float = 1e-13, block: int = 32) -> Tensor:
    """Z A Z of symmetric matrices."""
    options = {"drop": math.inf} if is_sparse(a) else {"block": block}
    half = spamm_torch.mm(z, a, max_error=max_error, **options)
    return spamm_torch.mm(half, z, max_error=max_error, symmetric=True, **options)


# ---- Dense and block-sparse matrices alike ------------------------------------------------------


def is_sparse(a: Tensor) -> bool:
    return a.layout == torch.sparse_bsr


def symmetric_part(a: Tensor) -> Tensor:
    return (a + a.mT) / 2


def trace(a: Tensor) -> float:
    return (sparse.trace(a) if is_sparse(a) else a.trace()).item()


def inner(a: Tensor, b: Tensor) -> float:
    """tr(A B) of symmetric matrices."""
    return (sparse.inner(a, b) if is_sparse(a) else (a * b).sum()).item()


def distance_from_one(a: Tensor, size: int) -> float:
    """norm(A - 1)."""
    if is_sparse(a):
        return sparse.norm(sparse.add(a, sparse.identity(size, like=a), beta=-1)).item()
    return torch.linalg.vector_norm(a - torch.eye(size).to(a)).item()


def idempotency(x: Tensor) -> float:
    """norm(X - X^2); of a block-sparse X but for 1e-12 of norm(X)^2."""
    if is_sparse(x):
        square = spamm_torch.mm(x, x, max_error=1e-12, symmetric=True)
        return sparse.norm(sparse.add(x, square, beta=-1)).item()
    return torch.linalg.vector_norm(torch.addmm(x, x, x, alpha=-1)).item()
