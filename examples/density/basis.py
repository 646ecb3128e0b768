"""The orthogonal basis S^(-1/2) of a molecule's overlap matrix S.

S^(-1/2) is the orthogonal basis closest to the given one (Löwdin), so it decays as S does. Where S
is large, it comes from products alone, by the coupled Newton-Schulz iteration for the square root
and its inverse (N. J. Higham, "Functions of Matrices", SIAM 2008, section 6.3; Schulz, 1933).
"""

from __future__ import annotations

import torch
from torch import Tensor

import spamm_torch
from density.purification import gershgorin
from models.errors import UserError

# Up to this size eigenvectors are found faster than some sixty products are computed.
_SMALL = {"cpu": 8192, "cuda": 1024}
_MOST_ITERATIONS = 100  # a condition number of 1e15 needs no more


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

    def multiply(a: Tensor, b: Tensor) -> Tensor:
        """The product of polynomials of S, which commute."""
        return spamm_torch.mm(a, b, max_error=max_error, block=block, symmetric=True)

    _, highest = gershgorin(overlap)
    y, z = overlap / highest, torch.eye(len(overlap)).to(overlap)  # towards S^(1/2), S^(-1/2)
    before = torch.inf
    for _ in range(_MOST_ITERATIONS):
        residual = multiply(z, y).neg_()
        residual.diagonal().add_(1)  # 1 - Z Y, of eigenvalues in [0, 1)
        error = torch.linalg.vector_norm(residual).item()
        if error < 1e-2 and error > before / 4:  # was to be squared: products' errors are left
            return symmetric_part(z) / highest**0.5
        before = error
        half = residual.mul_(0.5)
        y, z = y + multiply(y, half), z + multiply(half, z)
    raise UserError(
        "expected an overlap matrix that is far from singular; got one for which S^(-1/2) has not "
        f"converged after {_MOST_ITERATIONS} iterations"
    )


def transformed(a: Tensor, z: Tensor, *, max_error: float = 1e-13, block: int = 32) -> Tensor:
    """Z A Z of symmetric matrices."""
    multiply = lambda a, b: spamm_torch.mm(a, b, max_error=max_error, block=block)  # noqa: E731
    return symmetric_part(multiply(multiply(z, a), z))


def symmetric_part(a: Tensor) -> Tensor:
    return (a + a.mT) / 2
