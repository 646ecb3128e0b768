"""The orthogonal basis S^(-1/2) of a molecule's overlap matrix S.

S^(-1/2) is the orthogonal basis closest to the given one (Löwdin), so it decays as S does.
"""

from __future__ import annotations

import torch
from torch import Tensor

import spamm_torch
from models.errors import UserError
from spamm_torch import linalg

# Up to this size eigenvectors are found faster than some sixty products are computed.
_SMALL = {"cpu": 8192, "cuda": 1024}


def inverse_root(overlap: Tensor, *, max_error: float = 1e-13, block: int = 32) -> Tensor:
    """S^(-1/2), symmetric: by eigenvectors where S is small, by products where it is large.

    Args:
        overlap: (N, N), symmetric and positive definite, float64.
        max_error: as of ``spamm_torch.mm``, of each product.
        block: edge of the blocks: 32, 64 or 128.

    Raises:
        UserError: ``overlap`` is not positive definite, or so nearly not that it does not show.
    """
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


def by_products(overlap: Tensor, *, max_error: float = 1e-13, block: int = 32) -> Tensor:
    """S^(-1/2), of one that is positive definite.

    Raises:
        UserError: no convergence.
    """

    try:
        return linalg.inverse_sqrt(overlap, max_error=max_error, block=block).matrix
    except linalg.NotConverged as error:
        raise UserError(str(error)) from error


def transformed(a: Tensor, z: Tensor, *, max_error: float = 1e-13, block: int = 32) -> Tensor:
    """Z A Z of symmetric matrices."""
    multiply = lambda a, b: spamm_torch.mm(a, b, max_error=max_error, block=block)  # noqa: E731
    return symmetric_part(multiply(multiply(z, a), z))


def symmetric_part(a: Tensor) -> Tensor:
    return (a + a.mT) / 2
