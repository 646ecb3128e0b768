"""Products of dense and block-sparse matrices alike, with their norms, traces and bounds."""

import itertools
import math
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .. import functional, sparse
from .._arguments import as_knobs, check_integer, check_max_error, check_tensor, dtype_name
from .._info import NormMaps, SkipInfo, skip_info
from ..distributed import axis_of
from ..distributed.block_rows import Rows
from ..sparse.blocks import is_sparse, places_of, read
from ..sparse.maps import BELOW
from ..sparse.matrices import blocks_at
from ..sparse.products import SparseInfo, multiplied

Callback = Callable[[int, float], Any]


@dataclass(frozen=True)
class Iteration:
    """One product as it was made.

    Attributes:
        step: what it was for, as in "2X - X^2".
        dtype: its type.
        max_error: what it could lose; None for a product of torch's own.
        residual: what is to become 0, before the product: trace(X - X^2) of a purification, the
            Frobenius norm of 1 - Z Y or 1 - X^2; 0 in a power.
        seconds: of it and of what followed, up to the next product.
        valid_ratio: share of the products of stored blocks that were computed.
        error_bound: proven bound of the Frobenius norm of what it lost.
    """

    step: str
    dtype: torch.dtype
    max_error: float | None
    residual: float
    seconds: float
    valid_ratio: float
    error_bound: float


class NotConverged(RuntimeError):
    """An iteration has not come to its end."""


@dataclass(frozen=True)
class Result:
    """A function of a matrix, and how it came about.

    Attributes:
        matrix: of the argument's layout and dtype.
        iterations: the products in order.
        seconds: of all, without the counts of what they skipped.
        error_bound: of a power: a proven bound of the Frobenius norm of its error from skipping and
            dropping. Else the sum of all products' bounds, of which later steps mend a part.
        residual: after the last step, as of :class:`Iteration`.
        total_bound: of an inverse factor Z a proven bound of norm(Z^T S Z - 1), rounding and the
            asymmetry of S included (docs/error_bound.md); None of other functions.
    """

    matrix: Tensor
    iterations: list[Iteration]
    seconds: float
    error_bound: float
    residual: float
    total_bound: float | None = None


# ---- Dense and block-sparse matrices alike ------------------------------------------------------

SYMMETRIC = 1024  # times eps and norm(A), what norm(A - A^T) of a symmetric matrix may be
_ENTRIES = 2**24  # that are compared at a time
# Kernels that sum 128 in a row, and those that round operands to eleven bits, with the units of
# float32 that a sum then loses.
_IN_PIECES = ("cpu-plain", "cpu-plain-float32")
_IN_TF32, _OF_TF32 = ("sm90-wgmma-f32x1", "sm80-mma-tf32"), 17000

_Count = Callable[[], SkipInfo | SparseInfo]


class Operand(NamedTuple):
    """A matrix and its norm map; beside torch's own products the norm of all as one block."""

    matrix: Tensor
    norms: Tensor


def _numbers(count: _Count | None) -> tuple[float, float]:
    """The valid ratio and the error bound."""
    if count is None:
        return 1.0, 0.0
    info = count()
    return info.valid_ratio.item(), info.error_bound.item()


class Matrices:
    """Matrices of one form, on ranks as :class:`Rows` keeps them, and their products so far."""

    rows: Rows | None = None
    # The last block-sparse product, whose memory is not kept for this, with its trace and norm.
    sums: tuple[weakref.ref[Tensor] | None, Tensor | None] = (None, None)
    asymmetry: float = 0.0  # the distance of what was given from what is kept

    def __init__(
        self,
        function: str,
        a: Tensor,
        block: int,
        size: int | None,
        callback: Callback | None,
        *,
        are_shards: bool = False,
    ):
        self.is_sparse, self.callback, self.are_shards = is_sparse(a), callback, are_shards
        self.function, self.is_size_given = function, size is not None
        self.block = read(a, "a", function).edge if self.is_sparse else block
        if not self.is_sparse:
            check_tensor(a, "a")
        if a.dim() != 2 or (a.shape[0] != a.shape[1] and not are_shards):
            raise RuntimeError(f"{function} expects a square matrix; got shape {tuple(a.shape)}")
        if a.dtype not in (torch.float32, torch.float64):
            raise TypeError(f"{function} expects float32 or float64; got {dtype_name(a.dtype)}")
        rows = a.shape[1]
        self.size = rows if size is None else size
        check_integer(self.size, "size")
        least = rows - self.block + 1 if self.is_sparse and rows else rows
        if not least <= self.size <= rows:
            raise ValueError(f"size must be from {least} to {rows} for {rows} rows; got {size}")
        # Each product's facts, known while the clock runs, and what counts the rest afterwards.
        self.steps: list[tuple[tuple[str, torch.dtype, float | None, float], _Count | None]] = []
        self.clock = [time.perf_counter()]

    @classmethod
    def opened(
        cls,
        *given: Any,
        group: Any,
        alike: dict[str, Any],
        check: Callable[..., Any] | None = None,
        symmetric: bool = True,
        needs_size: bool = True,
    ) -> tuple["Matrices", Tensor]:
        """Checks a call's arguments; returns also ``a`` as it is kept. With a group collective: all
        ranks raise what ``check``, or the one of max_error, raises, and where ``alike`` differ.
        ``symmetric``, ``needs_size``: as of :meth:`kept`.
        """
        axis = None if group is None else axis_of(group)
        are_shards = axis is not None and axis.size > 1
        function, a, _, size, _ = given

        def create() -> Matrices:
            of = cls(*given, are_shards=are_shards)
            check_max_error(alike["max_error"]) if check is None else check(of)
            return of

        if axis is None or not are_shards:
            of = create()
        else:
            rows = Rows.agreed(function, a, axis, alike | {"size": size}, create)
            of = create()
            of.rows = rows
        return of, of.kept(a, "a", symmetric=symmetric, needs_size=needs_size)

    def kept(
        self, a: Tensor, name: str, *, symmetric: bool = True, needs_size: bool = False
    ) -> Tensor:
        """A matrix of the caller as it is kept. With ``symmetric`` its symmetric part, where its
        distance from that is rounding; ``asymmetry`` is then this distance. With ``needs_size``
        rows of padding would count.

        Raises:
            ValueError: a matrix that is not finite or not symmetric, rows of zeros at the end of a
                block-sparse one without ``size`` where it is needed, others behind ``size``.
        """
        if self.rows is not None:
            a = self.rows.whole_rows(read(a, name, self.function)).matrix()
        elif a.layout == torch.sparse_bsc:
            a = sparse.transpose(a.mT)
        sums = self.whole(_sums(a))
        if not len(sums):
            return a
        largest = sums.max().item()
        if not math.isfinite(largest):
            raise ValueError(
                f"{self.function} expects finite numbers; got NaN or infinity in {name}"
            )
        if self.is_sparse:
            self._check_size(sums, name, needs_size)
        if not symmetric or not largest:
            return a
        size, off = self._size_and_asymmetry(a, largest)
        if not off <= SYMMETRIC * torch.finfo(a.dtype).eps * size:
            raise ValueError(
                f"{self.function} expects a symmetric matrix; got norm(A - A^T) = {off:.2g} beside "
                f"norm(A) = {size:.2g} for {name}: its symmetric part is (A + A^T) / 2"
            )
        self.asymmetry = off / 2
        return self.symmetric_part(a) if off else a

    def _check_size(self, sums: Tensor, name: str, needed: bool) -> None:
        """Checks a block-sparse matrix with these sums of rows."""
        rows, tail = len(sums), sums[-self.block :].tolist()
        used = rows - next((i for i, x in enumerate(reversed(tail)) if x), len(tail) - 1)
        if self.is_size_given and used > self.size:
            raise ValueError(
                f"rows of {name} behind size={self.size} must be 0; got another in row {used - 1}"
            )
        if needed and not self.is_size_given and used < rows:
            raise ValueError(
                f"{self.function} expects no rows of zeros at the end of {name}; got {rows - used} "
                f"among {rows}, which would count as states: give size={used}"
            )

    def _size_and_asymmetry(self, a: Tensor, largest: float) -> tuple[float, float]:
        """norm(A) and norm(A - A^T). Squares neither vanish nor overflow over the largest sum."""
        squares = torch.zeros(2, dtype=torch.float64, device=a.device)
        for pair in self.with_mirrored(a):
            squares += torch.stack([norm_of(x / largest) ** 2 for x in pair])
        size, off = (self.whole(squares).sqrt() * largest).tolist()
        return size, off

    def with_mirrored(self, a: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Pieces of A, and of A - A^T such as have its norm: no copy of all of it."""
        if not self.is_sparse:
            for x, y in zip(*(m.split(max(1, _ENTRIES // len(a))) for m in (a, a.mT)), strict=True):
                yield x, x - y
            return
        blocks = read(a, "a", self.function)
        if self.rows is None:
            other, keys = blocks.values.mT, blocks.col.long() * blocks.rows + blocks.row_of()
            place = places_of(keys, blocks.keys())
        else:
            mirrored = read(self.transposed(a), "a", self.function)
            other, place = mirrored.values, places_of(blocks.keys(), mirrored.keys())
        some = max(1, _ENTRIES // self.block**2)
        for x, at in zip(blocks.values.split(some), place.split(some), strict=True):
            alone = (at < 0)[:, None, None]  # its own square and that of its mirror image
            yield x, torch.where(alone, x * math.sqrt(2), x - other[at])

    def transposed(self, a: Tensor) -> Tensor:
        """The transpose; of a dense matrix a view. Collective over ranks."""
        if not self.is_sparse:
            return a.mT
        mirrored = sparse.transpose(a)
        if self.rows is None:
            return mirrored
        # Blocks are sorted by rows now, and so by the ranks that are to have them.
        axis, of = self.rows.axis, read(mirrored, "a", self.function)
        leave = of.crow[list(self.rows.at)].diff()
        arrive = torch.empty_like(leave)
        dist.all_to_all_single(arrive, leave, group=axis.group)
        counts = arrive.tolist(), leave.tolist()

        def moved(x: Tensor) -> Tensor:
            arrived = x.new_empty(sum(counts[0]), *x.shape[1:])
            dist.all_to_all_single(arrived, x.contiguous(), *counts, group=axis.group)
            return arrived

        keys, order = moved(of.keys()).sort()
        values = moved(of.values)[order]
        return blocks_at(keys, values, of.rows, of.columns, of.crow.dtype).matrix()

    def operand(self, a: Tensor) -> Operand:
        """Takes the norm map of a matrix."""
        if self.rows is not None:
            return Operand(a, self.rows.norms(a))
        return Operand(a, functional.norm_map(a, self.block))

    def product(
        self,
        step: str,
        x: Operand,
        y: Operand,
        max_error: float | None = None,
        *,
        loss: float | None = None,
        residual: float = 0.0,
        added: Tensor | None = None,
        beta: float = 1,
        alpha: float = 1,
        symmetric: bool = True,
        out: Tensor | None = None,
    ) -> Operand:
        """alpha * X Y + beta * added, which may lose ``max_error`` of norm(X) norm(Y), or ``loss``;
        by torch's own product where neither is given.
        """
        (a, map_a), (b, map_b) = x, y
        if loss is not None:
            norms = (norm_of(map_a) * norm_of(map_b)).item()
            max_error = loss / norms if norms else 0.0
        if self.steps:
            self.clock.append(time.perf_counter())
        if self.callback is not None:
            self.callback(len(self.steps), residual)
        count: _Count | None = None
        operands = (a, b) if added is None else (added, a, b)
        scale = {} if added is None else {"beta": beta, "alpha": alpha}
        if max_error is None:
            c = (torch.mm if added is None else torch.addmm)(*operands, **scale, out=out)
            norms = norm_of(c)
        elif self.rows is not None:
            options: dict[str, Any] = {"added": added, "symmetric": symmetric, **scale}
            c, norms, count = self.rows.product(a, b, (map_a, map_b), max_error, **options)
        else:
            below = BELOW[map_a.dtype] if symmetric else 1.0
            options = {"norm_a": map_a, "norm_b": map_b, "block": self.block, **scale}
            options["symmetric"] = symmetric
            if self.is_sparse:
                knob = {"tau": None, "valid_ratio": None, "max_error": max_error}
                options |= {"drop": math.inf, "input": added, "below": below}
                blocks, map_c, _, count, sums = multiplied("product", a, b, knob, **options)
                c, norms = blocks.matrix(), map_c.matrix()
                self.sums = (weakref.ref(c), sums)
            else:
                tau = map_a.new_zeros(())
                if max_error:
                    tau = functional.find_tau(map_a, map_b, max_error=max_error) * below
                options |= {"tau": tau if max_error else 0.0, "out": out, "return_norms": True}
                function: Callable[..., Any] = functional.mm if added is None else functional.addmm
                c, norms = function(*operands, **options)
                maps = NormMaps(map_a, map_b, map_b, (self.block,) * 3)
                count = partial(skip_info, maps, as_knobs(tau, None, None))
        self.steps.append(((step, a.dtype, max_error, residual), count))
        return Operand(c, norms)

    def result(self, matrix: Tensor, residual: float = 0.0) -> Result:
        """The result of the products so far, with the sum of their bounds."""
        if self.steps:
            self.clock.append(time.perf_counter())
        took = [end - start for start, end in itertools.pairwise(self.clock)]
        pairs = zip(self.steps, took, strict=False)
        iterations = [Iteration(*of, seconds, *_numbers(count)) for (of, count), seconds in pairs]
        bound = sum(each.error_bound for each in iterations)
        if self.rows is not None:
            matrix = self.rows.own_rows(read(matrix, "a", "linalg")).matrix()
        return Result(matrix, iterations, self.clock[-1] - self.clock[0], bound, residual)

    def rounding(self, x: Operand, y: Tensor, added: float = 0.0) -> float:
        """A bound of what rounding changes in a product of X and of a matrix with these norms, plus
        a matrix with the norm ``added``: docs/error_bound.md has the proof.
        """
        info, depth = torch.finfo(x.matrix.dtype), x.matrix.shape[1]
        device, block = x.matrix.device, (self.block,) * 3
        kernel = torch.ops.spamm_torch.backend_for(device, x.matrix.dtype, block)
        units = 150 + (128 + depth / 32 if kernel in _IN_PIECES else 4 * depth)
        units += _OF_TF32 if kernel in _IN_TF32 else 0
        # At least the norm of the product of the magnitudes; a norm that is not finite is no bound.
        size = functional.error_bound(x.norms, y, math.inf).item()
        norms = norm_of(x.norms).item(), norm_of(y).item()
        lost = math.expm1(units * info.eps / 2) * size + 4 * info.eps * added
        flushed = info.tiny * depth * (2 * depth + 16 + sum(norms))
        return (lost + flushed) * (1 + 2.0**-16) if sum(norms) < math.inf else math.inf

    def commutator(self, a: Tensor, x: Tensor, loss: float) -> float:
        """norm(A X - X A) of symmetric matrices, with what their product may lose.

        No step of a function, and so to be called after :meth:`result`.
        """
        self.callback = None
        operands = self.operand(a), self.operand(x)
        product, _ = self.product("A X", *operands, loss=loss, symmetric=False)
        largest = self.whole(_sums(product)).amax().item()
        return self._size_and_asymmetry(product, largest or 1.0)[1] + 2 * loss

    def identity(self, like: Tensor) -> Tensor:
        """1, which is zero in padding."""
        if not self.is_sparse:
            return torch.eye(self.size, dtype=like.dtype, device=like.device)
        make = self.rows.identity if self.rows is not None else sparse.identity
        return make(self.size, like=like)

    def shifted(self, a: Tensor, scale: float, shift: float) -> Tensor:
        """scale * a + shift * 1."""
        if self.is_sparse:
            return sparse.add(a, self.identity(a), alpha=scale, beta=shift)
        a = a * scale
        a.diagonal().add_(shift)
        return a

    def gershgorin(self, a: Tensor) -> tuple[float, float]:
        return _bounds(*(self.whole(x) for x in _circles(a)))

    def trace_and_norm(self, x: Operand) -> tuple[float, float]:
        """tr(X) and norm(X). Waits for the device, but for the last product's."""
        product, sums = self.sums
        if sums is None or product is None or product() is not x.matrix:
            trace = self.diagonal(x.matrix).sum(dtype=torch.float64)
            sums = torch.stack((trace, norm_of(x.norms)))
        trace, norm = sums.tolist()
        return trace, norm

    def diagonal(self, a: Tensor) -> Tensor:
        return self.whole(sparse.diagonal(a) if self.is_sparse else a.diagonal())

    def whole(self, x: Tensor) -> Tensor:
        """Numbers of all rows; each rank has 0 at the rows of others."""
        if self.rows is not None:
            self.rows.axis.sum(x)
        return x

    def own_rows(self, a: Tensor) -> Tensor:
        """This rank's part of a block-sparse matrix that all have; others are zero here."""
        if self.rows is None:
            return a
        at, rank = self.rows.at, self.rows.axis.rank
        return read(a, "a", self.function).of_rows(at[rank], at[rank + 1]).matrix()

    def symmetric_part(self, a: Tensor) -> Tensor:
        """(A + A^T) / 2."""
        mirrored = self.transposed(a)
        if self.is_sparse:
            return sparse.add(a, mirrored, alpha=0.5, beta=0.5)
        return (a + mirrored) / 2

    def bound_of_norm(self, a: Tensor) -> float:
        """A bound of the spectral norm: the root of the largest sums of a row and of a column.

        Rounded up to eight bits, so that ranks, which sum in another order, agree with one process.
        """
        rows, columns = (self.whole(_sums(a, dim)).amax() for dim in (1, 0))
        bound, power = math.frexp((rows.sqrt() * columns.sqrt()).item())
        return math.ldexp(math.ceil(bound * 256), power - 8) if bound < math.inf else bound


def norm_of(a: Tensor) -> Tensor:
    """The norm of a matrix, or of one with this norm map."""
    values = a.values() if is_sparse(a) else a
    return torch.linalg.vector_norm(values, dtype=torch.float64)


def smaller(share: float, factor: float) -> float:
    """At most half of an error, near ``factor`` of it; 0 below rounding.

    A power of 2 times it, so that ranks agree, whose sums differ in their last bits.
    """
    share = share * 2.0 ** min(-1, math.floor(math.log2(factor))) if factor > 0 else 0.0
    return share if share > 1e-16 else 0.0


def gershgorin(a: Tensor) -> tuple[float, float]:
    """Proven bounds of the eigenvalues of a symmetric matrix (Gershgorin's circles)."""
    return _bounds(*_circles(a))


def _circles(a: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's entry on the diagonal and the sum of the others, without their signs."""
    centre = (sparse.diagonal(a) if is_sparse(a) else a.diagonal()).double()
    return centre, _sums(a) - centre.abs()


def _sums(a: Tensor, dim: int = 1) -> Tensor:
    """The sums of magnitudes of each row, or with ``dim`` 0 of each column, float64."""
    if not is_sparse(a):
        return torch.linalg.vector_norm(a, 1, dim, dtype=torch.float64)
    blocks = read(a, "a", "gershgorin")
    number, at = (blocks.rows, blocks.row_of()) if dim else (blocks.columns, blocks.col.long())
    sums = torch.zeros(number, blocks.edge, dtype=torch.float64, device=a.device)
    of_blocks = torch.linalg.vector_norm(blocks.values, 1, 1 + dim, dtype=torch.float64)
    return sums.index_add_(0, at, of_blocks).flatten()


def _bounds(centre: Tensor, radius: Tensor) -> tuple[float, float]:
    lowest, highest = torch.stack(((centre - radius).min(), (centre + radius).max())).tolist()
    return lowest, highest
