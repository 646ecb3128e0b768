"""The functions of spamm_torch.sparse."""

import functools
import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._arguments import (
    DTYPES,
    EDGES,
    check_integer,
    check_number,
    check_tensor,
    dtype_name,
    is_integer,
)
from .blocks import (
    Blocks,
    all_blocks,
    check_drop,
    check_memory,
    check_no_gradient,
    check_pair,
    chosen,
    index_dtype,
    is_sparse,
    places_of,
    read,
    total,
)

_ENTRIES = 2**22  # that permute handles at a time
_read = functools.partial(read, dense_too=False)


# ---- From and to other forms --------------------------------------------------------------------


def from_dense(a: Tensor, block: int = 64, drop: float = 0.0) -> Tensor:
    """A dense matrix as a block-sparse one.

    Args:
        a: (M, N), of any size: padded with zeros to multiples of the block.
        block: 32, 64 or 128.
        drop: leave out blocks whose Frobenius norm is below this, and blocks of zeros. Blocks with
            NaN or infinity stay.

    Returns:
        ``torch.sparse_bsr`` with int64 indices, its columns ascending in each row.

    Example:
        >>> x = from_dense(a, drop=1e-9)
        >>> print(f"{len(x.values())} blocks of {x.values().shape[1]} x {x.values().shape[2]}")
        52 blocks of 64 x 64
    """
    check_tensor(a, "a")
    block = _checked_edge(block)
    check_drop(drop)
    if a.dim() != 2:
        raise RuntimeError(f"from_dense expects a matrix (2-d); got shape {tuple(a.shape)}")
    blocks = all_blocks(a, block)
    norms = blocks.with_norms().values
    return chosen(blocks, ~(norms < drop) & (norms != 0)).matrix()


def to_dense(a: Tensor, shape: tuple[int, int] | None = None) -> Tensor:
    """A block-sparse matrix as a dense one, (M, N) or the first rows and columns of ``shape``."""
    blocks = _read(a, "a", "to_dense")
    _check_shape(shape, a)
    entries = blocks.edge**2 * blocks.values.element_size()
    check_memory("to_dense", blocks.rows * blocks.columns, entries, a.device)
    dense = blocks.dense()
    return dense if shape is None else dense[: shape[0], : shape[1]]


def from_scipy(a: Any, block: int = 64) -> Tensor:
    """A sparse matrix or array of scipy, of any format and size, padded with zeros.

    Its columns may stand in any order, as in scipy's own products; repeats are added up.

    Example:
        >>> x = from_scipy(scipy.sparse.eye_array(100, format="csr"))
        >>> print(to_scipy(spamm_torch.mm(x, x, tau=0.0), (100, 100)).trace())
        100.0
    """
    block = _checked_edge(block)
    if not hasattr(a, "tobsr"):
        raise TypeError(f"from_scipy expects a sparse matrix of scipy; got {type(a).__name__}")
    sizes = [-(-n // block) * block for n in a.shape]
    found = a.copy().tocsr()
    found.resize(*sizes)
    found = found.tobsr((block, block))
    found.sum_duplicates()
    found.sort_indices()
    crow, col, values = map(torch.from_numpy, (found.indptr, found.indices, found.data))
    columns = sizes[1] // block
    return _read(Blocks(crow, col, values, columns).matrix(), "a", "from_scipy").matrix()


def to_scipy(a: Tensor, shape: tuple[int, int] | None = None) -> Any:
    """As ``scipy.sparse.bsr_array``, sharing memory; with ``shape``, cropped as ``csr_array``."""
    bsr_array = importlib.import_module("scipy.sparse").bsr_array  # the library does without
    crow, col, values, _ = _read(a, "a", "to_scipy")
    _check_shape(shape, a)
    if values.dtype not in (torch.float32, torch.float64):
        raise TypeError(
            "to_scipy expects float32 or float64, as scipy has no half types; got "
            f"{dtype_name(values.dtype)}"
        )
    found = bsr_array(tuple(x.numpy(force=True) for x in (values, col, crow)), shape=tuple(a.shape))
    if shape is None:
        return found
    found = found.tocsr()
    found.resize(*shape)
    return found


def from_sparse(a: Tensor, block: int = 64) -> Tensor:
    """A sparse tensor of torch, of any layout, block and size, padded with zeros.

    Its columns may stand in any order; repeats are added up.

    Args:
        a: (M, N), COO, CSR, CSC, BSR or BSC.
        block: 32, 64 or 128.

    Returns:
        As :func:`from_dense`, with the blocks that hold a stored entry.

    Example:
        >>> x = from_sparse(torch.eye(100).to_sparse_coo())
        >>> x.shape, to_dense(x, (100, 100)).equal(torch.eye(100))
        (torch.Size([128, 128]), True)
    """
    block = _checked_edge(block)
    if not is_sparse(a):
        raise TypeError(f"from_sparse expects a sparse tensor of torch; got {_kind(a)}")
    check_no_gradient(a, "a")
    if a.dim() != 2 or (a.layout == torch.sparse_coo and a.dense_dim()):
        raise RuntimeError(
            f"from_sparse expects a sparse matrix (2-d); got shape {tuple(a.shape)}"
            + (f" with {a.dense_dim()} dense dimensions" if a.dim() == 2 else "")
        )
    if a.dtype not in DTYPES:
        raise TypeError(
            f"a must be float16, bfloat16, float32 or float64; got {dtype_name(a.dtype)}"
        )
    entries = a.detach().to_sparse_coo()
    row, column = entries._indices()
    _check_inside(row, a.shape[0], "rows")
    _check_inside(column, a.shape[1], "columns")
    rows, columns = (-(-n // block) for n in a.shape)
    keys, place = (row // block * columns + column // block).unique(return_inverse=True)
    check_memory("from_sparse", len(keys), block**2 * a.element_size(), a.device)
    values = entries._values().new_zeros(len(keys), block, block)
    values.index_put_((place, row % block, column % block), entries._values(), accumulate=True)
    return blocks_at(keys, values, rows, columns, torch.int64).matrix()


def identity(
    size: int,
    block: int = 64,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    like: Tensor | None = None,
) -> Tensor:
    """The identity of ``size`` rows; rows that pad it to a multiple of the block are zero.

    Args:
        dtype, device: None: those of ``like``, else torch's default.
        like: a block-sparse matrix whose block, dtype, device and index dtype it takes.
    """
    check_integer(size, "size")
    if size < 0:
        raise ValueError(f"size must be at least 0; got {size}")
    index = torch.int64
    if like is not None:
        blocks = _read(like, "like", "identity")
        block, dtype, index = blocks.edge, dtype or blocks.values.dtype, blocks.crow.dtype
        device = like.device if device is None else device
    block = _checked_edge(block)
    rows = -(-size // block)
    values = torch.eye(block, dtype=dtype, device=device).repeat(rows, 1, 1)
    if rows:
        values[-1].diagonal()[size - (rows - 1) * block :] = 0
    offsets = torch.arange(rows + 1, dtype=index, device=values.device)
    return Blocks(offsets, offsets[:-1], values, rows).matrix()


def _checked_edge(block: Any) -> int:
    if not is_integer(block) or block not in EDGES:
        raise ValueError(f"block must be 32, 64 or 128; got {block!r}")
    return int(block)


def _check_shape(shape: Any, a: Tensor) -> None:
    """Raises unless ``shape``, if it is given, is that of some first rows and columns."""
    if shape is None:
        return
    if not isinstance(shape, Sequence) or len(shape) != 2 or not all(map(is_integer, shape)):
        raise TypeError(f"shape must be two integers, (rows, columns); got {shape!r}")
    if not all(0 <= s <= n for s, n in zip(shape, a.shape, strict=True)):
        raise RuntimeError(f"shape must be at most {tuple(a.shape)}; got {tuple(shape)}")


def _kind(x: Any) -> str:
    return "a dense one: from_dense" if isinstance(x, Tensor) else type(x).__name__


# ---- Numbers ------------------------------------------------------------------------------------


def diagonal(a: Tensor) -> Tensor:
    """The entries (i, i), as many as the smaller side has."""
    return _diagonal(a, "diagonal")


def _diagonal(a: Tensor, function: str) -> Tensor:
    blocks = _read(a, "a", function)
    rows = torch.arange(min(blocks.rows, blocks.columns), device=blocks.col.device)
    at = places_of(rows * (blocks.columns + 1), blocks.keys())
    if not len(blocks.col):
        return blocks.values.new_zeros(len(rows) * blocks.edge)
    stored = blocks.values.diagonal(dim1=1, dim2=2)[at]
    return torch.where((at >= 0)[:, None], stored, 0).flatten()


def trace(a: Tensor) -> Tensor:
    """The sum of the diagonal, 0-d float64."""
    return _diagonal(a, "trace").sum(dtype=torch.float64)


def norm(a: Tensor) -> Tensor:
    """The Frobenius norm, 0-d float64: nothing vanishes or overflows before the norm does."""
    return total(read(a, "a", "norm").with_norms().values)


def inner(a: Tensor, b: Tensor) -> Tensor:
    """The sum of a[i, j] * b[i, j], 0-d float64: tr(A^T B), of any two patterns."""
    left, right = _pair(a, b, "inner")
    place = places_of(left.keys(), right.keys())
    both = (place >= 0).nonzero()[:, 0]
    found = left.values.new_zeros((), dtype=torch.float64)
    for part in both.split(max(1, _ENTRIES // left.edge**2)):
        pair = (left.values[part].double(), right.values[place[part]].double())
        found += (pair[0] * pair[1]).sum()
    return found


def _pair(a: Tensor, b: Tensor, function: str) -> tuple[Blocks, Blocks]:
    """The blocks of two matrices that must be alike."""
    left, right = _read(a, "a", function), _read(b, "b", function)
    check_pair(left, right)
    if a.shape != b.shape:
        shapes = f"{tuple(a.shape)} and {tuple(b.shape)}"
        raise RuntimeError(f"{function} expects two matrices of one shape; got {shapes}")
    return left, right


# ---- Matrices -----------------------------------------------------------------------------------


def transpose(a: Tensor) -> Tensor:
    """The transpose."""
    blocks = _read(a, "a", "transpose")
    row, column = blocks.row_of(), blocks.col.long()
    keys, order = (column * blocks.rows + row).sort()
    values = blocks.values.new_empty(blocks.values.shape)
    some = max(1, 8 * _ENTRIES // blocks.edge**2)  # at a time: no copy of a whole matrix
    for part, numbers in zip(values.split(some), order.split(some), strict=True):
        part.copy_(blocks.values[numbers].mT)
    return blocks_at(keys, values, blocks.columns, blocks.rows, blocks.crow.dtype).matrix()


def add(
    a: Tensor, b: Tensor, *, alpha: float = 1, beta: float = 1, drop: float | None = None
) -> Tensor:
    """alpha * a + beta * b, of any two patterns.

    Args:
        a, b: of one shape, block and dtype.
        drop: leave out blocks of the sum whose norm is below this; None: none, not even of zeros.

    Example:
        >>> x = from_dense(a, drop=1e-9)
        >>> print(norm(add(x, x, beta=-1)).item())
        0.0
    """
    check_number(alpha, "alpha")
    check_number(beta, "beta")
    check_drop(drop)
    left, right = _pair(a, b, "add")
    blocks, place = torch.cat((left.keys(), right.keys())).unique(return_inverse=True)
    of_a, of_b = place.split([len(left.col), len(right.col)])
    check_memory("add", len(blocks), left.edge**2 * left.values.element_size(), a.device)
    values = left.values.new_zeros(len(blocks), left.edge, left.edge)
    some = max(1, 8 * _ENTRIES // left.edge**2)
    for place, part in zip(of_a.split(some), left.values.split(some), strict=True):
        values[place] = part * alpha
    for place, part in zip(of_b.split(some), right.values.split(some), strict=True):
        values[place] += part * beta
    total = blocks_at(blocks, values, left.rows, left.columns, index_dtype(left, right))
    if drop:
        total = chosen(total, ~(total.with_norms().values < drop))
    return total.matrix()


def submatrix(a: Tensor, rows: Tensor, columns: Tensor | None = None) -> Tensor:
    """The matrix of some rows and columns, in any order, padded with zeros.

    Args:
        rows: indices of entries, not of blocks: int64, (R,), each at most once.
        columns: likewise, (C,); None: those of ``rows``.

    Returns:
        Entry (r, c) is ``a[rows[r], columns[c]]``. Blocks of zeros are left out.
    """
    blocks = _read(a, "a", "submatrix")
    place_of_row, rows = _places(rows, a, 0, "rows")
    place_of_column, columns = _places(rows if columns is None else columns, a, 1, "columns")
    edge = blocks.edge
    height, width = (-(-len(x) // edge) for x in (rows, columns))
    within = torch.arange(edge, device=a.device)
    pieces = []  # (result's block, place in it, value) of all entries
    step = max(1, _ENTRIES // edge**2)
    row_of, column_of = blocks.row_of(), blocks.col.long()

    def entries(start: int) -> tuple[Tensor, Tensor, Tensor]:
        values = blocks.values[start : start + step]
        row = place_of_row[row_of[start : start + step, None] * edge + within][:, :, None]
        column = place_of_column[column_of[start : start + step, None] * edge + within][:, None]
        key = (row // edge) * width + column // edge
        place = (row % edge) * edge + column % edge
        stays = (row >= 0) & (column >= 0) & (values != 0)
        return key[stays], place[stays], values[stays]

    starts = range(0, len(row_of), step)
    for start in starts:
        pieces.append(entries(start)[0].unique())
    keys = torch.cat(pieces).unique() if pieces else rows[:0]
    check_memory("submatrix", len(keys), edge**2 * blocks.values.element_size(), a.device)
    found = blocks.values.new_zeros(len(keys), edge * edge)
    for start in starts:
        key, place, value = entries(start)
        found[torch.searchsorted(keys, key), place] = value
    index = blocks.crow.dtype
    return blocks_at(keys, found.view(-1, edge, edge), height, width, index).matrix()


def permute(a: Tensor, order: Tensor) -> Tensor:
    """A square matrix with its rows and columns in another order: ``a[order][:, order]``.

    Args:
        order: (N,), a permutation of entries, as of :func:`sparse.spatial_order`. N is the
            size, or less by less than a block: rows behind are padding.
    """
    blocks = _read(a, "a", "permute")
    _check_index(order, "order")
    if a.shape[0] != a.shape[1] or not -blocks.edge < len(order) - a.shape[0] <= 0:
        raise RuntimeError(
            f"permute expects a square matrix and an order of its rows; got shape {tuple(a.shape)} "
            f"and {len(order)} indices"
        )
    if not torch.equal(order.sort().values, torch.arange(len(order), device=order.device)):
        raise ValueError(
            f"order must hold each number from 0 to {len(order) - 1} once; got another"
        )
    return submatrix(a, order)


def _check_index(indices: Any, name: str) -> None:
    check_tensor(indices, name)
    if indices.dim() != 1 or indices.dtype != torch.int64:
        raise TypeError(
            f"{name} must be int64 (1-d); got {dtype_name(indices.dtype)} of shape "
            f"{tuple(indices.shape)}"
        )


def _check_inside(indices: Tensor, size: int, name: str) -> None:
    if len(indices) and not (int(indices.min()) >= 0 and int(indices.max()) < size):
        raise ValueError(
            f"{name} must be from 0 to {size - 1}; got {int(indices.min())} to {int(indices.max())}"
        )


def _places(indices: Any, a: Tensor, side: int, name: str) -> tuple[Tensor, Tensor]:
    """The new place of each row or column, -1: it has none; and the indices on a's device."""
    _check_index(indices, name)
    indices, size = indices.to(a.device), a.shape[side]
    _check_inside(indices, size, name)
    if len(indices.unique()) != len(indices):
        raise ValueError(f"{name} must be distinct; got {len(indices)} of which some are equal")
    places = torch.full((size,), -1, device=indices.device)
    places[indices] = torch.arange(len(indices), device=indices.device)
    return places, indices


def blocks_at(keys: Tensor, values: Tensor, rows: int, columns: int, index: torch.dtype) -> Blocks:
    """Stores blocks at row * columns + column, ascending."""
    first = torch.arange(rows + 1, device=keys.device)
    crow = torch.searchsorted(keys // max(1, columns), first).to(index)
    return Blocks(crow, (keys % max(1, columns)).to(index), values, columns)
