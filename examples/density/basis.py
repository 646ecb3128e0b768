"""An orthogonal basis: Z with Z^T S Z = 1, of a molecule's overlap matrix S."""

import math

import torch
from torch import Tensor

from density.ranks import group, identity, summed
from models.files import UserError
from spamm_torch import linalg, sparse
from spamm_torch.sparse.blocks import is_sparse


def inverse_factor(
    overlap: Tensor, *, max_error: float = 1e-13, block: int = 32, size: int | None = None
) -> Tensor:
    """Z, where norm(Z^T S Z - 1) is about ``max_error`` times the number of functions.

    ``size``: the true number of rows, where block-sparse ones are padded. UserError: ``overlap`` is
    not positive definite, as far as that shows.
    """
    options = {"size": size, "group": group(overlap)} if is_sparse(overlap) else {"block": block}
    try:
        error = max_error * (size or overlap.shape[1])
        return linalg.inverse_factor(overlap, max_error=error, **options).matrix
    except linalg.NotConverged as problem:
        raise UserError(str(problem)) from problem


def transformed(
    a: Tensor, z: Tensor, *, max_error: float = 1e-13, block: int = 32, back: bool = False
) -> Tensor:
    """Z^T A Z of a symmetric matrix, or Z A Z^T."""
    options = {"max_error": max_error, "block": block, "group": group(a)}
    return linalg.in_basis(a, z, transposed=back, **options).matrix


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
