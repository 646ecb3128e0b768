"""The sign by Newton-Schulz iterations, matrices in another basis, and powers by squaring."""

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .._arguments import check_integer, check_max_error
from .matrices import Callback, Matrices, NotConverged, Operand, Result, norm_of

_MOST_ITERATIONS = 100  # an eigenvalue, or a root, of 1e-15 of the largest needs no more


def sign(
    a: Tensor,
    *,
    max_error: float,
    block: int = 64,
    size: int | None = None,
    callback: Callback | None = None,
    group: dist.ProcessGroup | None = None,
) -> Result:
    """The sign of a symmetric matrix: its eigenvectors with 1 or -1 in place of eigenvalues.

    Method: Newton-Schulz, X (3 - X^2) / 2 (N. J. Higham, "Functions of Matrices", SIAM 2008,
    section 5.3), from the matrix over a bound of its norm. Two products an iteration.

    Args:
        a: (N, N), symmetric, no eigenvalue at 0. Padding of ``size`` stays zero.
        max_error: what norm(1 - X^2) + norm(A X - X A) / norm(A) may be, relative to norm(1), the
            root of N: at most ten times it is returned. 0: what rounding allows. X itself is off by
            that over the distance of the eigenvalues from 0.
        block, size, callback, group: see above.

    Returns:
        A :class:`Result` whose ``residual`` is this sum, of the matrix that is returned.

    Raises:
        NotConverged: as where an eigenvalue is 0.
    """
    given = "sign", a, block, size, callback
    of, a = Matrices.opened(*given, group=group, alike={"max_error": max_error})
    bound = (max(map(abs, of.gershgorin(a))) if of.size else 1.0) or 1.0
    whole = math.sqrt(of.size)  # the norm of 1
    loss = max_error * whole / 8
    x, error = newton_schulz(of, a * (1 / bound), loss)
    if x is not None:
        result = of.result(of.symmetric_part(x), error)
        error += of.commutator(a, x, loss * bound) / bound
        rounding = 0.0 if max_error else 64 * torch.finfo(a.dtype).eps * (whole + of.size / 16)
        if error <= max(10 * max_error * whole, rounding):
            return replace(result, residual=error)
    raise NotConverged(
        f"expected a symmetric matrix without an eigenvalue at 0, and an error that rounding "
        f"allows; got one whose sign has not converged after {len(of.steps)} products (residual "
        f"{error:.2g} for max_error={max_error:.2g})"
    )


def newton_schulz(
    of: Matrices, a: Tensor, loss: float, is_root: bool = False
) -> tuple[Tensor | None, float]:
    """The sign of A, by X <- X + X R / 2 with R = 1 - X^2; or A^(-1/2) with ``is_root``, by
    Y <- Y + Y R / 2 from A and Z <- Z + R Z / 2 from 1 with R = 1 - Z Y.

    The latter R is not mirrored: Z and Y commute but for rounding, of which a mirror image would
    make what every step multiplies by up to the condition number.

    Returns:
        X or Z, or None where it does not converge, and norm(R).
    """
    one, before = of.identity(a), math.inf
    y, z = of.operand(a), of.operand(one) if is_root else None
    r_step, y_step = ("1 - Z Y", "Y + Y R / 2") if is_root else ("1 - X^2", "X + X R / 2")
    for _ in range(_MOST_ITERATIONS):
        options: dict[str, Any] = {"loss": loss, "residual": before, "added": one, "alpha": -1}
        r = of.product(r_step, z or y, y, symmetric=not is_root, **options)
        error = norm_of(r.norms).item()
        if error < 1e-2 and error >= before / 4:  # was to be squared
            return (z or y).matrix, error
        if not error < max(before, of.size) * 2:  # NaN, too
            break
        before, options = error, {"loss": loss, "residual": error, "alpha": 0.5}
        y = of.product(y_step, y, r, added=y.matrix, **options)
        if z is not None:
            z = of.product("Z + R Z / 2", r, z, added=z.matrix, **options)
    return None, before


def in_basis(
    a: Tensor,
    z: Tensor,
    *,
    max_error: float,
    transposed: bool = False,
    block: int = 64,
    size: int | None = None,
    callback: Callback | None = None,
    group: dist.ProcessGroup | None = None,
) -> Result:
    """Z^T A Z of a symmetric matrix, symmetric: a Hamiltonian in the basis of an inverse factor Z.

    Where Z is only near an inverse factor, as one in float32 is, a second call with
    W = 3/2 - Z^T S Z / 2 in place of Z mends what the first one lost, but for the square of
    1 - Z^T S Z.

    Args:
        a: (N, N), symmetric.
        z: (N, N), any, of the layout, dtype and block of ``a``, or ``z.mT`` of such a matrix; with
            ``group`` cut as ``a``, and no ``z.mT``.
        transposed: Z A Z^T, which takes a projector back from the basis: the same as ``z.mT``.
        max_error, block, size, callback, group: see above.
    """
    alike = {"max_error": max_error, "transposed": transposed}
    given = "in_basis", a, block, size, callback
    of, a = Matrices.opened(*given, group=group, alike=alike, needs_size=False)
    z = of.kept(z, "z", symmetric=False)
    left, right = (z, of.transposed(z)) if transposed else (None, z)
    right = of.operand(right)
    half = of.product("A Z", of.operand(a), right, max_error, symmetric=False)
    del a, z
    if left is None:
        left, half = of.transposed(half.matrix), right  # (A Z)^T Z
    del right
    return of.result(of.product("Z^T A Z", of.operand(left), half, max_error).matrix)


class _Factor(NamedTuple):
    """A power, and the number of its product; 0: a itself."""

    power: int
    operand: Operand
    number: int


def matrix_power(
    a: Tensor,
    n: int,
    *,
    max_error: float,
    block: int = 64,
    size: int | None = None,
    callback: Callback | None = None,
    group: dist.ProcessGroup | None = None,
) -> Result:
    """a^n by squaring, at most 2 log2(n) products. ``error_bound`` is of the whole power.

    Args:
        a: (N, N). n: at least 0; 0 gives the identity.
        max_error, block, size, callback, group: see above.

    Example:
        >>> fourth = matrix_power(overlap, 4, max_error=1e-9)
        >>> error = torch.dist(fourth.matrix, torch.matrix_power(overlap, 4))
        >>> bool(error <= fourth.error_bound + 1e-12)  # and rounding
        True
    """

    def check(_: Matrices) -> None:
        check_max_error(max_error)
        check_integer(n, "n")
        if n < 0:
            raise ValueError(f"n must be at least 0; got {n}")

    alike = {"max_error": max_error, "n": n}
    given = "matrix_power", a, block, size, callback
    options: dict[str, Any] = {"check": check, "symmetric": False, "needs_size": n == 0}
    of, a = Matrices.opened(*given, group=group, alike=alike, **options)
    if n == 0:
        return of.result(of.identity(a))
    tree: list[tuple[int, int, float, float]] = []  # the factors of each product, and their norms

    def multiply(left: _Factor, right: _Factor) -> _Factor:
        power, pair = left.power + right.power, (left.operand, right.operand)
        product = of.product(f"a^{power}", *pair, max_error, symmetric=False)
        norm_x, norm_y = (norm_of(x.norms).item() for x in pair)
        tree.append((left.number, right.number, norm_x, norm_y))
        return _Factor(power, product, len(tree))

    square = _Factor(1, of.operand(a), 0)
    whole = square if n % 2 else None
    for bit in range(1, n.bit_length()):
        square = multiply(square, square)
        if n >> bit & 1:
            whole = square if whole is None else multiply(whole, square)
    result = of.result(whole.operand.matrix if whole and whole.number else a.clone())
    slack = 1 + (2.0**-43 if a.dtype == torch.float64 else 2.0**-17)  # of the norms
    # X Y - X' Y' is (X - X') Y + X' (Y - Y'), where norm(Y) is at most norm(Y') + norm(Y - Y').
    lost = [0.0]
    for (left, right, norm_x, norm_y), own in zip(tree, result.iterations, strict=True):
        of_y = norm_y + lost[right]
        lost.append((lost[left] * of_y + norm_x * lost[right] + own.error_bound) * slack)
    bound = lost[whole.number if whole else 0]
    return replace(result, error_bound=math.inf if math.isnan(bound) else bound)  # 0 * inf
