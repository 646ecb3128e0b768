"""The inverse square root and the sign by Newton-Schulz iterations, and powers by squaring."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .._arguments import check_integer, check_max_error
from .matrices import Callback, Matrices, NotConverged, Result, norm_of


def inverse_sqrt(
    s: Tensor,
    *,
    max_error: float,
    block: int = 64,
    size: int | None = None,
    most_iterations: int = 100,
    callback: Callback | None = None,
    group: dist.ProcessGroup | None = None,
) -> Result:
    """S^(-1/2) of a symmetric positive definite matrix, symmetric.

    Method: the coupled Newton-Schulz iteration for the square root and its inverse (N. J. Higham,
    "Functions of Matrices", SIAM 2008, section 6.3). Three products an iteration.

    Args:
        s: (N, N), symmetric. Padding of ``size`` stays zero.
        most_iterations: a condition number of 1e15 needs no more than 100.
        max_error, block, size, callback, group: see above.

    Raises:
        NotConverged: as where ``s`` is not positive definite.
    """
    alike = {"max_error": max_error, "most_iterations": most_iterations}
    of, s = Matrices.opened("inverse_sqrt", s, block, size, callback, group=group, alike=alike)
    _, highest = of.gershgorin(s) if of.size else (1.0, 1.0)
    one, scaled = of.identity(s), [s * (1 / highest)]
    del s  # its memory, where the caller does not hold it
    steps = ("1 - Z Y", "Y + Y R / 2", "Z + R Z / 2")
    most = most_iterations if highest > 0 else 0
    z, error = _newton_schulz(of, steps, one, scaled.pop(), one, max_error, most)
    if z is not None:
        return of.result(of.symmetric_part(z * highest**-0.5), error)
    raise NotConverged(
        "expected a positive definite matrix that is far from singular; got one for which "
        f"S^(-1/2) has not converged after {len(of.steps)} products (residual {error:.2g})"
    )


def sign(
    a: Tensor,
    *,
    max_error: float,
    block: int = 64,
    size: int | None = None,
    most_iterations: int = 100,
    callback: Callback | None = None,
    group: dist.ProcessGroup | None = None,
) -> Result:
    """The sign of a symmetric matrix: its eigenvectors with 1 or -1 in place of eigenvalues.

    Method: Newton-Schulz, X (3 - X^2) / 2 (N. J. Higham, "Functions of Matrices", SIAM 2008,
    section 5.3), from the matrix over a bound of its norm. Two products an iteration.

    Args:
        a: (N, N), symmetric, no eigenvalue at 0. Padding of ``size`` stays zero.
        most_iterations: an eigenvalue of 1e-15 of the largest needs no more than 100.
        max_error, block, size, callback, group: see above.

    Raises:
        NotConverged: as where an eigenvalue is 0.
    """
    alike = {"max_error": max_error, "most_iterations": most_iterations}
    of, a = Matrices.opened("sign", a, block, size, callback, group=group, alike=alike)
    bound = max(map(abs, of.gershgorin(a))) if of.size else 1.0
    steps, scale = ("1 - X^2", "X + X R / 2"), 1 / bound if bound else 1.0
    one = of.identity(a)
    x, error = _newton_schulz(of, steps, one, a * scale, None, max_error, most_iterations)
    if x is not None:
        return of.result(of.symmetric_part(x), error)
    raise NotConverged(
        f"expected a symmetric matrix without an eigenvalue at 0; got one whose sign has not "
        f"converged after {len(of.steps)} products (residual {error:.2g})"
    )


def _newton_schulz(
    of: Matrices,
    steps: Sequence[str],
    one: Tensor,
    y: Tensor,
    z: Tensor | None,
    max_error: float,
    most_iterations: int,
) -> tuple[Tensor | None, float]:
    """Y + Y R / 2 and Z + R Z / 2 with R = 1 - Z Y, where Z is Y if there is none, until only the
    errors of products are left in R: Z, or None where that does not come, and the norm of R.
    """
    is_one, map_y = z is None, of.norms(y)
    z, map_z = (y, map_y) if z is None else (z, of.norms(z))
    before, whole = math.inf, math.sqrt(of.size)  # the norm of 1
    for _ in range(most_iterations):
        options: dict[str, Any] = {"residual": before, "added": one, "alpha": -1}
        r, map_r = of.product(steps[0], z, y, (map_z, map_y), max_error, **options)
        error = norm_of(map_r).item()  # of eigenvalues in [0, 1)
        if error < 1e-2 and error >= before / 4:  # was to be squared
            return z, error
        if not error < max(before, of.size) * 2:  # NaN, too
            break
        before, options = error, {"residual": error, "alpha": 0.5}
        share = max_error * max(1.0, whole / max(error, max_error))  # as of a factor 1 + R / 2
        y, map_y = of.product(steps[1], y, r, (map_y, map_r), share, added=y, **options)
        if is_one:
            z, map_z = y, map_y
        else:
            z, map_z = of.product(steps[2], r, z, (map_r, map_z), share, added=z, **options)
    return None, before


def in_basis(
    a: Tensor,
    z: Tensor,
    *,
    max_error: float,
    block: int = 64,
    size: int | None = None,
    callback: Callback | None = None,
    group: dist.ProcessGroup | None = None,
) -> Result:
    """Z A Z of symmetric matrices: a Hamiltonian in the basis Z = S^(-1/2), say.

    Where Z is only near S^(-1/2), as one in float32 is, a second call with W = 3/2 - Z S Z / 2 in
    place of Z mends what the first one lost, but for the square of 1 - Z S Z.

    Args:
        a, z: (N, N), symmetric, of one layout, dtype and block; with ``group`` cut alike.
        max_error, block, size, callback, group: see above.
    """
    alike = {"max_error": max_error}
    of, a = Matrices.opened("in_basis", a, block, size, callback, group=group, alike=alike)
    z = of.kept(z)
    maps = of.norms(z), of.norms(a)
    half, map_half = of.product("Z A", z, a, maps, max_error, symmetric=False)
    del a
    return of.result(of.product("Z A Z", half, z, (map_half, maps[0]), max_error)[0])


# ---- Powers -------------------------------------------------------------------------------------


class _Factor(NamedTuple):
    """A power, its norm map, and the number of its product; 0: a itself."""

    power: int
    matrix: Tensor
    norms: Tensor
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
    """a^n by squaring, at most 2 log2(n) products. Both bounds are of the whole power.

    Args:
        a: (N, N). n: at least 0; 0 gives the identity.
        max_error, block, size, callback, group: see above.
    """

    def check(_: Matrices) -> None:
        check_max_error(max_error)
        check_integer(n, "n")
        if n < 0:
            raise ValueError(f"n must be at least 0; got {n}")

    alike = {"max_error": max_error, "n": n}
    given = "matrix_power", a, block, size, callback
    of, a = Matrices.opened(*given, group=group, alike=alike, check=check)
    if n == 0:
        return replace(of.result(of.identity(a)), total_bound=0.0)
    tree: list[tuple[int, int, float, float]] = []  # (left, right) factors of product, their norms

    def multiply(left: _Factor, right: _Factor) -> _Factor:
        power, maps = left.power + right.power, (left.norms, right.norms)
        given = left.matrix, right.matrix, maps, max_error
        c, norms = of.product(f"a^{power}", *given, symmetric=False)
        tree.append((left.number, right.number, norm_of(maps[0]).item(), norm_of(maps[1]).item()))
        return _Factor(power, c, norms, len(tree))

    square = _Factor(1, a, of.norms(a), 0)
    found = square if n % 2 else None
    for bit in range(1, n.bit_length()):
        square = multiply(square, square)
        if n >> bit & 1:
            found = square if found is None else multiply(found, square)
    result = of.result(found.matrix if found else a)
    slack = 1 + (2.0**-43 if a.dtype == torch.float64 else 2.0**-17)  # of the norms
    number = found.number if found else 0

    def whole(of_products: list[float]) -> float:
        # X Y - X' Y' is (X - X') Y + X' (Y - Y'), where norm(Y) is at most norm(Y') + norm(Y - Y').
        lost = [0.0]
        for (left, right, norm_x, norm_y), bound in zip(tree, of_products, strict=True):
            of_y = norm_y + lost[right]
            lost.append((lost[left] * of_y + norm_x * lost[right] + bound) * slack)
        return lost[number]

    bounds = [whole([made.error_bound for made in result.iterations])]
    bounds.append(whole([made.total_bound for made in result.iterations]))
    return Result(result.matrix, result.iterations, result.seconds, bounds[0], 0.0, bounds[1])
