"""The functions of spamm_torch.sparse."""

import importlib
from typing import Any

import torch
from torch import Tensor

from .._arguments import EDGES, check_number, check_tensor, dtype_name
from .blocks import (
    Blocks,
    all_blocks,
    check_drop,
    check_memory,
    check_pair,
    chosen,
    index_dtype,
    places_of,
    read,
    total,
)

_ENTRIES = 2**22  # that permute handles at a time


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
    """
    check_tensor(a, "a")
    _check_edge(block)
    check_drop(drop)
    if a.dim() != 2:
        raise RuntimeError(f"from_dense expects a matrix (2-d); got shape {tuple(a.shape)}")
    blocks = all_blocks(a, block)
    norms = blocks.with_norms().values
    return chosen(blocks, ~(norms < drop) & (norms != 0)).matrix()


def to_dense(a: Tensor, shape: tuple[int, int] | None = None) -> Tensor:
    """A block-sparse matrix as a dense one, (M, N) or the first rows and columns of ``shape``."""
    blocks = read(a, "a", "to_dense")
    if shape is not None and not all(0 <= s <= n for s, n in zip(shape, a.shape, strict=True)):
        raise RuntimeError(f"shape must be at most {tuple(a.shape)}; got {tuple(shape)}")
    entries = blocks.edge**2 * blocks.values.element_size()
    check_memory("to_dense", blocks.rows * blocks.columns, entries, a.device)
    dense = blocks.dense()
    return dense if shape is None else dense[: shape[0], : shape[1]]


def from_scipy(a: Any, block: int = 64) -> Tensor:
    """A sparse matrix or array of scipy, of any format and size, padded with zeros."""
    _check_edge(block)
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
    return read(Blocks(crow, col, values, columns).matrix(), "a", "from_scipy").matrix()


def to_scipy(a: Tensor, shape: tuple[int, int] | None = None) -> Any:
    """As ``scipy.sparse.bsr_array``, sharing memory; with ``shape``, cropped as ``csr_array``."""
    bsr_array = importlib.import_module("scipy.sparse").bsr_array  # the library does without
    crow, col, values, _ = read(a, "a", "to_scipy")
    found = bsr_array(tuple(x.numpy(force=True) for x in (values, col, crow)), shape=tuple(a.shape))
    if shape is None:
        return found
    found = found.tocsr()
    found.resize(*shape)
    return found


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
    index = torch.int64
    if like is not None:
        blocks = read(like, "like", "identity")
        block, dtype, index = blocks.edge, dtype or blocks.values.dtype, blocks.crow.dtype
        device = like.device if device is None else device
    _check_edge(block)
    rows = -(-size // block)
    values = torch.eye(block, dtype=dtype, device=device).repeat(rows, 1, 1)
    if rows:
        values[-1].diagonal()[size - (rows - 1) * block :] = 0
    offsets = torch.arange(rows + 1, dtype=index, device=device)
    return Blocks(offsets, offsets[:-1], values, rows).matrix()


def _check_edge(block: Any) -> None:
    if type(block) is not int or block not in EDGES:
        raise ValueError(f"block must be 32, 64 or 128; got {block!r}")


# ---- Numbers ------------------------------------------------------------------------------------


def diagonal(a: Tensor) -> Tensor:
    """The entries (i, i), as many as the smaller side has."""
    blocks = read(a, "a", "diagonal")
    wanted = torch.arange(min(blocks.rows, blocks.columns), device=a.device) * (blocks.columns + 1)
    at = places_of(wanted, blocks.keys())
    if not len(blocks.col):
        return blocks.values.new_zeros(len(wanted) * blocks.edge)
    stored = blocks.values.diagonal(dim1=1, dim2=2)[at]
    return torch.where((at >= 0)[:, None], stored, 0).flatten()


def trace(a: Tensor) -> Tensor:
    """The sum of the diagonal, 0-d float64."""
    return diagonal(a).sum(dtype=torch.float64)


def norm(a: Tensor) -> Tensor:
    """The Frobenius norm, 0-d float64: nothing vanishes or overflows before the norm does."""
    return total(read(a, "a", "norm").with_norms().values)


def inner(a: Tensor, b: Tensor) -> Tensor:
    """The sum of a[i, j] * b[i, j], 0-d float64: tr(A^T B), of any two patterns."""
    left, right = read(a, "a", "inner"), read(b, "b", "inner")
    check_pair(left, right)
    if a.shape != b.shape:
        raise RuntimeError(
            f"inner expects two matrices of one shape; got {tuple(a.shape)} and {tuple(b.shape)}"
        )
    place = places_of(left.keys(), right.keys())
    both = (place >= 0).nonzero()[:, 0]
    found = left.values.new_zeros((), dtype=torch.float64)
    for part in both.split(max(1, _ENTRIES // left.edge**2)):
        pair = (left.values[part].double(), right.values[place[part]].double())
        found += (pair[0] * pair[1]).sum()
    return found


# ---- Matrices -----------------------------------------------------------------------------------


def transpose(a: Tensor) -> Tensor:
    """The transpose."""
    blocks = read(a, "a", "transpose")
    row, column = blocks.row_of(), blocks.col.long()
    keys, order = (column * blocks.rows + row).sort()
    values = blocks.values.mT[order].contiguous()
    return blocks_at(keys, values, blocks.columns, blocks.rows, blocks.crow.dtype).matrix()


def add(
    a: Tensor, b: Tensor, *, alpha: float = 1, beta: float = 1, drop: float | None = None
) -> Tensor:
    """alpha * a + beta * b, of any two patterns.

    Args:
        a, b: of one shape, block and dtype.
        drop: leave out blocks of the sum whose norm is below this; None: none, not even of zeros.
    """
    check_number(alpha, "alpha")
    check_number(beta, "beta")
    check_drop(drop)
    left, right = read(a, "a", "add"), read(b, "b", "add")
    check_pair(left, right)
    if a.shape != b.shape:
        raise RuntimeError(
            f"add expects two matrices of one shape; got {tuple(a.shape)} and {tuple(b.shape)}"
        )
    keys = [left.keys(), right.keys()]
    blocks, place = torch.cat(keys).unique(return_inverse=True)
    of_a, of_b = place.split([len(key) for key in keys])
    check_memory("add", len(blocks), left.edge**2 * left.values.element_size(), a.device)
    values = left.values.new_zeros(len(blocks), left.edge, left.edge)
    some = max(1, 8 * _ENTRIES // left.edge**2)  # at a time: no copy of a whole matrix
    for place, part in zip(of_a.split(some), left.values.split(some), strict=True):
        values[place] = part * alpha
    for place, part in zip(of_b.split(some), right.values.split(some), strict=True):
        values[place] += part * beta
    found = blocks_at(blocks, values, left.rows, left.columns, index_dtype(left, right))
    if drop:
        found = chosen(found, ~(found.with_norms().values < drop))
    return found.matrix()


def submatrix(a: Tensor, rows: Tensor, columns: Tensor | None = None) -> Tensor:
    """The matrix of some rows and columns, in any order, padded with zeros.

    Args:
        rows: indices of entries, not of blocks: int64, (R,), each at most once.
        columns: likewise, (C,); None: those of ``rows``.

    Returns:
        Entry (r, c) is ``a[rows[r], columns[c]]``. Blocks without an entry other than 0 are left
        out.
    """
    blocks = read(a, "a", "submatrix")
    rows = rows.to(a.device)
    columns = rows if columns is None else columns.to(a.device)
    place_of_row = _places(rows, a.shape[0], "rows")
    place_of_column = _places(columns, a.shape[1], "columns")
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
        wanted = (row >= 0) & (column >= 0) & (values != 0)
        return key[wanted], place[wanted], values[wanted]

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
        order: (N,), a permutation of entries, as of :func:`spamm_torch.spatial_order`. N is the
            size, or less by less than a block: rows behind are padding.
    """
    blocks = read(a, "a", "permute")
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


def _places(indices: Tensor, size: int, name: str) -> Tensor:
    """Where each row or column goes; -1 where it is not wanted."""
    if indices.dim() != 1 or indices.dtype != torch.int64:
        raise TypeError(
            f"{name} must be int64 (1-d); got {dtype_name(indices.dtype)} of shape "
            f"{tuple(indices.shape)}"
        )
    if len(indices) and not (int(indices.min()) >= 0 and int(indices.max()) < size):
        raise ValueError(
            f"{name} must be from 0 to {size - 1}; got {int(indices.min())} to {int(indices.max())}"
        )
    if len(indices.unique()) != len(indices):
        raise ValueError(f"{name} must be distinct; got {len(indices)} of which some are equal")
    places = torch.full((size,), -1, device=indices.device)
    places[indices] = torch.arange(len(indices), device=indices.device)
    return places


def blocks_at(keys: Tensor, values: Tensor, rows: int, columns: int, index: torch.dtype) -> Blocks:
    """Of blocks at row * columns + column, ascending."""
    first = torch.arange(rows + 1, device=keys.device)
    crow = torch.searchsorted(keys // max(1, columns), first).to(index)
    return Blocks(crow, (keys % max(1, columns)).to(index), values, columns)
