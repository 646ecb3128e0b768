"""Inverse factors and the inverse square root, judged by norm(Z^T S Z - 1) of what is returned."""

import math
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import sparse
from ..sparse.blocks import read
from ..sparse.matrices import blocks_at
from .functions import newton_schulz
from .matrices import Callback, Iteration, Matrices, NotConverged, Operand, Result, norm_of, smaller

# Up to so many rows the one diagonal block is the whole matrix. So it is, of dense matrices, where
# the norm of D over the norm of 1 is more than this in the first step: many steps would follow.
_WHOLE, _FAR = 1024, 0.3
_ACCEPTED = 10  # times max_error
_NO_FACTOR = (
    "expected a positive definite matrix; got one with a diagonal block that has no Cholesky factor"
)
_MOST_ITERATIONS = 40  # of four products: a condition number of 1e15 needs no more
_MOST = 2.2  # eigenvalues of Z^T S Z at first, of which a step leaves none above 7/3


def inverse_factor(
    s: Tensor,
    *,
    max_error: float,
    block: int = 64,
    size: int | None = None,
    callback: Callback | None = None,
    group: dist.ProcessGroup | None = None,
) -> Result:
    """A matrix Z with Z^T S Z = 1, of a symmetric positive definite S.

    Z is any such matrix, not the symmetric one: :func:`in_basis` takes a Hamiltonian into its
    basis, and with Z^T a density matrix back.

    Method: Cholesky's factors of diagonal blocks, put together, then Z <- Z (1 + D/2 + 3/8 D^2)
    with D = 1 - Z^T S Z, which is measured against S itself in each step: so what products lose is
    mended by the next step (A. M. N. Niklasson, Phys. Rev. B 70, 193102 (2004); E. H. Rubensson,
    N. Bock, E. Holmström, A. M. N. Niklasson, J. Chem. Phys. 128, 104105 (2008)). Up to N = 1024,
    and of dense matrices whose blocks leave much to do, one diagonal block is the whole matrix.

    Args:
        s: (N, N), symmetric. Padding of ``size`` stays zero.
        max_error: what norm(Z^T S Z - 1) may be: at most ten times it is returned. 0: what rounding
            allows.
        block, size, callback: see above.
        group: see above; up to N = 1024 last bits depend on the number of threads, too.

    Returns:
        A :class:`Result` whose ``residual`` is norm(Z^T S Z - 1) with what products that measured
        it may have skipped, and ``total_bound`` a proven bound of it.

    Raises:
        NotConverged: ``s`` is not positive definite, or too near to singular for ``max_error``.

    Example:
        >>> z = inverse_factor(overlap, max_error=1e-9).matrix
        >>> projector = purify(in_basis(fock, z, max_error=0.0).matrix, 256, max_error=1e-9)
        >>> density = 2 * in_basis(projector.matrix, z.mT, max_error=0.0).matrix
        >>> print(f"{(density * overlap).sum():.4f} electrons")
        256.0000 electrons
    """
    given = "inverse_factor", s, block, size, callback
    of, s = Matrices.opened(*given, group=group, alike={"max_error": max_error})
    if not of.size:
        return of.result(of.identity(s))
    tested = _Overlap(of, s, max_error, max_error)
    is_whole, before = of.size <= _WHOLE, math.sqrt(of.size)  # the norm of 1
    z = of.operand(_whole(of, s, max_error / 8) if is_whole else _leaves(of, s))
    loss = 0.0 if is_whole else 1e-4 * before
    for step in range(_MOST_ITERATIONS):
        d = tested.distance(z, max(max_error / 8, loss), before)
        if step == 0 and (most := 1 - of.gershgorin(d.matrix)[0]) > _MOST:
            part = _MOST / most
            z = of.operand(z.matrix * math.sqrt(part))
            d = of.operand(of.shifted(d.matrix, part, 1 - part))
        error = norm_of(d.norms).item()
        if (result := tested.judged(error, before)) is not None:
            return result
        if step == 0 and not of.is_sparse and not is_whole and error > _FAR * before:
            z, loss = of.operand(_whole(of, s, 0.0)), 0.0
            continue
        falls, before = min(1.0, error / before), error
        loss = max(max_error / 8, 0.05 * error * falls**2)  # the next one is near error * falls^3
        scale: dict[str, Any] = {"residual": error, "beta": 0.5, "alpha": 0.375}
        w = of.product("D / 2 + 3/8 D^2", d, d, loss=loss, added=d.matrix, **scale)
        del d  # nothing is kept beside S and Z that the next product does not need
        loss = loss / 2 / math.sqrt(tested.above)
        z = of.product("Z + Z W", z, w, loss=loss, added=z.matrix, residual=error, symmetric=False)
        del w
        loss = 1e-3 * error * falls**2
    raise tested.failed(before)


def inverse_sqrt(
    s: Tensor,
    *,
    max_error: float,
    block: int = 64,
    size: int | None = None,
    callback: Callback | None = None,
    group: dist.ProcessGroup | None = None,
) -> Result:
    """S^(-1/2) of a symmetric positive definite matrix, symmetric.

    :func:`inverse_factor` is another such Z, faster and more accurate.

    Method: the coupled Newton-Schulz iteration for the square root and its inverse (N. J. Higham,
    "Functions of Matrices", SIAM 2008, section 6.3), three products an iteration, from scratch with
    smaller errors where norm(Z S Z - 1) comes out too large.

    Args:
        s: (N, N), symmetric. Padding of ``size`` stays zero.
        max_error: what norm(Z S Z - 1) may be: at most ten times it is returned. 0: what rounding
            allows.
        block, size, callback, group: see above.

    Returns, Raises: as of :func:`inverse_factor`.

    Example:
        >>> z = inverse_sqrt(overlap, max_error=1e-9).matrix
        >>> bool(torch.dist(z @ overlap @ z, torch.eye(256)) < 1e-8)
        True
    """
    given = "inverse_sqrt", s, block, size, callback
    of, s = Matrices.opened(*given, group=group, alike={"max_error": max_error})
    if not of.size:
        return of.result(of.identity(s))
    tested = _Overlap(of, s, max_error, _ACCEPTED * max_error)
    loss, root = max_error / 16, tested.above**-0.5
    while True:
        scaled = s * root * root  # 1 / above may overflow
        z, error = newton_schulz(of, scaled, loss, is_root=True)
        if z is None:
            raise tested.failed(error)
        z = of.operand(of.symmetric_part(z) * root)
        error = norm_of(tested.distance(z, max_error / 8, error).norms).item()
        if (result := tested.judged(error, math.inf if loss else 0.0)) is not None:
            return result
        loss = smaller(loss, max_error / error / 8 if error else 0.0)


# ---- The door and the judge ----------------------------------------------------------------------


class _Overlap:
    """S, and how far Z^T S Z is from 1."""

    def __init__(self, of: Matrices, s: Tensor, max_error: float, goal: float):
        self.of, self.max_error, self.goal = of, max_error, goal
        self.above, self.width = of.bound_of_norm(s) or 1.0, math.inf
        self.s, self.one = of.operand(s), of.identity(s)

    def distance(self, z: Operand, loss: float, before: float) -> Operand:
        """1 - (S Z)^T Z, where both products together lose at most 3 ``loss``."""
        of, self.z = self.of, z
        rounding = torch.finfo(z.matrix.dtype).eps * math.sqrt(of.size) / 2  # of 1
        self.width, self.lost = of.bound_of_norm(z.matrix), 3 * loss + rounding
        each: dict[str, Any] = {"loss": loss / self.width, "residual": before}
        y = of.product("S Z", self.s, z, symmetric=False, **each).matrix
        y = of.operand(of.transposed(y))
        self.of_y = y.norms
        each = {"loss": loss, "residual": before, "added": self.one, "alpha": -1}
        return of.product("1 - Z^T S Z", y, z, **each)

    @property
    def condition(self) -> float:
        """A bound of the condition number, once Z is an inverse factor."""
        return self.above * self.width**2

    def judged(self, error: float, before: float) -> Result | None:
        """The result, where norm(1 - Z^T S Z) is what was asked for; None where it may still fall.

        NotConverged where it will not. Below 1/2 each step cubes it.
        """
        of, whole = self.of, error + self.lost
        rounding = torch.finfo(self.z.matrix.dtype).eps * (self.condition + 8 * math.sqrt(of.size))
        goal, most = self.goal, _ACCEPTED * self.max_error
        if not self.max_error:
            goal, most = rounding / 10, rounding
        has_stalled = before < 0.5 and error >= before / 4
        if whole <= (most if has_stalled else goal):
            result = of.result(self.z.matrix, whole)
            bound = error + self._off_by(*result.iterations[-2:])
            return replace(result, total_bound=bound * (1 + 1e-4))
        if has_stalled or not error < 2 * max(before, math.sqrt(of.size)):
            raise self.failed(error)
        return None

    def _off_by(self, first: Iteration, second: Iteration) -> float:
        """A bound of how far the measured norm may be from the true one."""
        of, z = self.of, self.z.norms
        of_y = first.error_bound + of.rounding(self.s, z)
        y = Operand(self.s.matrix, self.of_y)  # the matrix for its type and size alone
        of_d = second.error_bound + of.rounding(y, z, math.sqrt(of.size))
        return math.sqrt(2) * (self.width * of_y + of_d) + of.asymmetry * self.width**2

    def failed(self, error: float) -> NotConverged:
        number, known = len(self.of.steps), f"at most {self.condition:.2g}"
        return NotConverged(
            "expected a positive definite matrix whose condition number allows the error; got "
            f"norm(1 - Z^T S Z) = {error:.2g} for max_error={self.max_error:.2g} after {number} "
            f"products (condition number {known if self.width < math.inf else 'unknown'})"
        )


def _whole(of: Matrices, s: Tensor, drop: float) -> Tensor:
    """Cholesky's inverse factor of all. ``drop``: about what blocks that are left out may cost."""
    if not of.is_sparse:
        return _inverse_factors(of, s)
    whole = read(s, "s", of.function).dense()
    of.whole(whole)
    z = torch.zeros_like(whole)
    z[: of.size, : of.size] = _inverse_factors(of, whole[: of.size, : of.size])
    largest = torch.linalg.matrix_norm(whole, 1).item()
    return of.own_rows(sparse.from_dense(z, of.block, drop / math.sqrt(largest) / s.shape[1]))


def _leaves(of: Matrices, s: Tensor) -> Tensor:
    """Cholesky's inverse factors of the diagonal blocks, as one matrix."""
    edge = of.block
    if not of.is_sparse:
        z, rows = torch.zeros_like(s), of.size // edge * edge
        parts = (x[:rows, :rows].view(rows // edge, edge, -1, edge) for x in (z, s.contiguous()))
        of_z, of_s = (x.diagonal(dim1=0, dim2=2).permute(2, 0, 1) for x in parts)
        of_z.copy_(_inverse_factors(of, of_s))
        z[rows:, rows:] = _inverse_factors(of, s[rows:, rows:])
        return z
    blocks = read(s, "s", of.function)
    row = blocks.row_of()
    of_diagonal = (row == blocks.col).nonzero()[:, 0]
    if of.whole(row.new_tensor([len(of_diagonal)])).item() < blocks.rows:
        raise NotConverged(_NO_FACTOR)
    row, values = row[of_diagonal], blocks.values[of_diagonal]
    padding = (row[:, None] * edge + torch.arange(edge, device=row.device)) >= of.size
    values.diagonal(dim1=1, dim2=2).add_(padding)
    values = _inverse_factors(of, values)
    values.diagonal(dim1=1, dim2=2).sub_(padding.to(values))
    keys = row * blocks.columns + row
    return blocks_at(keys, values, blocks.rows, blocks.columns, blocks.crow.dtype).matrix()


def _inverse_factors(of: Matrices, s: Tensor) -> Tensor:
    """Upper triangular, of one matrix or of many."""
    factor, failed = torch.linalg.cholesky_ex(s)
    one = torch.eye(s.shape[-1], dtype=s.dtype, device=s.device)
    inverses = torch.linalg.solve_triangular(factor.mT, one, upper=True).contiguous()
    # Near the edge of a type cuSOLVER may report success and leave NaN.
    if of.whole((failed.sum() + inverses.isfinite().logical_not_().sum())[None]).item():
        raise NotConverged(_NO_FACTOR)
    return inverses
