"""A block-sparse matrix or its norm map as plain tensors, which ops take, and what may be one."""

import functools
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.weak import WeakTensorKeyDictionary

from .._arguments import DTYPES, EDGES, check_alike, check_number, check_tensor, dtype_name

_ops = torch.ops.spamm_torch
_SPARSE = {torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}


def is_sparse(*tensors: Any) -> bool:
    """Tells whether one of them has a sparse layout."""
    for x in tensors:  # noqa: SIM110  any() takes the host three times as long
        if getattr(x, "layout", None) in _SPARSE:
            return True
    return False


class Blocks(NamedTuple):
    """A pattern as of ``torch.sparse_bsr``, and the values (edge, edge) or norms of its blocks."""

    crow: Tensor
    col: Tensor
    values: Tensor
    columns: int

    @property
    def rows(self) -> int:
        return len(self.crow) - 1

    @property
    def edge(self) -> int:
        return self.values.shape[-1] if self.values.dim() > 1 else 1

    def block_bytes(self) -> int:
        """The bytes of a stored block, its norm and its places in a plan included."""
        return self.edge**2 * self.values.element_size() + 32

    def row_of(self) -> Tensor:
        """The block row of each stored block."""
        rows = torch.arange(self.rows, device=self.col.device)
        return rows.repeat_interleave(self.crow.diff().long(), output_size=len(self.col))

    def keys(self) -> Tensor:
        """The place of each stored block among all, row by row: they ascend."""
        return self.row_of() * self.columns + self.col

    def has_pattern_of(self, other: "Blocks") -> bool:
        """Tells whether the same blocks are stored. Waits for the device but for one in memory."""
        return (
            self.columns == other.columns
            and _has_same(self.crow, other.crow)
            and _has_same(self.col, other.col)
        )

    def only(self, numbers: Tensor) -> "Blocks":
        """Some of the stored blocks, by their numbers, which ascend."""
        crow = torch.searchsorted(numbers, self.crow.long()).to(self.crow.dtype)
        return Blocks(crow, self.col[numbers], self.values[numbers], self.columns)

    def of_rows(self, begin: int, end: int) -> "Blocks":
        """With the blocks of these block rows alone. Waits for the device."""
        first, last = self.crow[[begin, end]].tolist()
        crow = self.crow.clamp(first, last) - first
        return Blocks(crow, self.col[first:last], self.values[first:last], self.columns)

    def with_norms(self) -> "Blocks":
        """The norm map."""
        rows = self.values.reshape(-1, self.edge)
        return self._replace(values=_ops.norm_map(rows, (self.edge, self.edge)).flatten())

    def matrix(self) -> Tensor:
        """As ``torch.sparse_bsr``, or ``torch.sparse_csr`` of norms."""
        _quiet()
        make = torch.sparse_csr_tensor if self.values.dim() == 1 else torch.sparse_bsr_tensor
        size = (self.rows * self.edge, self.columns * self.edge)
        options: Any = {"check_invariants": False, "device": self.values.device}
        matrix = make(self.crow, self.col, self.values, size=size, **options)
        remember(matrix)
        return matrix

    def dense(self) -> Tensor:
        """With zeros where nothing is stored."""
        edge = self.edge
        whole = self.values.new_zeros(self.rows, edge, self.columns, edge)
        values = self.values.reshape(-1, edge, edge)
        whole.transpose(1, 2)[self.row_of(), self.col.long()] = values
        return whole.reshape(self.rows * edge, self.columns * edge)


def _has_same(x: Tensor, y: Tensor) -> bool:
    if x.shape != y.shape or (x.dtype == y.dtype and x.data_ptr() == y.data_ptr()):
        return x.shape == y.shape
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a call in a CUDA graph must have the pattern in memory of its plan; got another"
        )
    return torch.equal(x.long(), y.long())


@functools.cache
def _quiet() -> None:
    """Lets torch say once, unheard, that its BSR tensors are in beta state."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        index = torch.zeros(2, dtype=torch.int32, device="cpu")
        values = torch.zeros(0, 1, 1, device="cpu")
        options: Any = {"check_invariants": False, "device": "cpu"}
        torch.sparse_bsr_tensor(index, index[:0], values, size=(1, 1), **options)


# ---- Arguments ----------------------------------------------------------------------------------


def read(
    x: Any, name: str, function: str, *, has_op: bool = False, dense_too: bool = True
) -> Blocks:
    """The blocks of a ``torch.sparse_bsr`` matrix, checked.

    ``has_op``: an op checks that columns ascend. ``dense_too``: a dense matrix may stand here.
    """
    _check_layout(x, name, function, torch.sparse_bsr, dense_too)
    values = x.values()
    if x.dim() != 2 or values.dim() != 3:
        raise RuntimeError(
            f"{function} expects block-sparse matrices (2-d); got shape {tuple(x.shape)} for {name}"
        )
    height, width = values.shape[1:]
    if height != width or height not in EDGES:
        raise ValueError(
            f"{name} must have square blocks of 32, 64 or 128; got blocks of {height} x {width}"
        )
    if x.dtype not in DTYPES:
        raise TypeError(
            f"{name} must be float16, bfloat16, float32 or float64; got {dtype_name(x.dtype)}"
        )
    check_no_gradient(x, name)
    columns = x.shape[1] // max(1, width)
    found = Blocks(x.crow_indices(), x.col_indices(), values.detach(), columns)
    if not has_op:
        _check_pattern(x, found, name, function)
    return found


# On CUDA, where a look at indices waits: matrices whose columns ascend, and their versions then.
_ascending = WeakTensorKeyDictionary()


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version


def remember(*matrices: Any) -> None:
    """Notes that the columns of block-sparse matrices ascend; others are left alone."""
    for x in matrices:
        if x is not None and x.is_cuda and x.layout == torch.sparse_bsr:
            _ascending[x] = _version(x)


def _check_pattern(x: Tensor, blocks: Blocks, name: str, function: str) -> None:
    """RuntimeError unless columns ascend in each row; on CUDA once until ``x`` is written to."""
    if x.is_cuda:
        if _ascending.get(x) == _version(x):
            return
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{function} in a CUDA graph expects a matrix whose columns were checked before, "
                f"in any call; got {name}, which is new or was written to"
            )
    _ops.bsr_check(blocks.crow, blocks.col, blocks.columns, name)
    remember(x)


def check_no_gradient(x: Tensor, name: str) -> None:
    if torch.is_grad_enabled() and x.requires_grad:
        raise RuntimeError(
            "block-sparse matrices have no gradient here: expected tensors that require none, or "
            f"no_grad; got {name}, which requires one"
        )


def read_map(x: Any, name: str, function: str) -> Blocks:
    """A norm map of :func:`spamm_torch.norm_map` of a block-sparse matrix."""
    _check_layout(x, name, function, torch.sparse_csr)
    if x.dim() != 2 or x.dtype not in (torch.float32, torch.float64):
        raise TypeError(
            f"{name} must be a matrix of float32 or float64 norms; got {dtype_name(x.dtype)} of "
            f"shape {tuple(x.shape)}"
        )
    return Blocks(x.crow_indices(), x.col_indices(), x.values().detach(), x.shape[1])


def _check_layout(
    x: Any, name: str, function: str, layout: torch.layout, dense_too: bool = True
) -> None:
    if not isinstance(x, Tensor):
        check_tensor(x, name)
    if x.layout != layout:
        got = str(x.layout).removeprefix("torch.")
        if layout == torch.sparse_csr:
            raise TypeError(
                f"{function} expects two dense norm maps, or two of sparse_bsr matrices, which are "
                f"sparse_csr; got {got} for {name}"
            )
        if x.layout == torch.strided:
            raise TypeError(
                f"{function} expects sparse_bsr; got a dense tensor for {name}: "
                f"spamm_torch.sparse.from_dense({name}, 64)"
            )
        kinds = "dense or sparse_bsr" if dense_too else "sparse_bsr"
        raise TypeError(
            f"{function} expects {kinds}; got {got}: spamm_torch.sparse.from_sparse({name}, 64)"
        )
    check_device(x, name)


def check_device(x: Tensor, name: str) -> None:
    if x.device.type not in ("cpu", "cuda"):
        raise RuntimeError(f"block-sparse matrices run on CPUs and CUDA; got {name} on {x.device}")


def check_pair(a: Blocks, b: Blocks, what: str = "a and b") -> None:
    """Raises unless two matrices have one device, one dtype and one block."""
    check_alike(a.values, b.values, what)
    if a.edge != b.edge:
        raise ValueError(f"{what} must have blocks of one size; got {a.edge} and {b.edge}")


def check_block_of(block: Any, edge: int) -> None:
    """ValueError for a block that is neither the default, 64, nor that of the matrices."""
    if block not in (64, edge, (edge,) * 2, (edge,) * 3, [edge] * 2, [edge] * 3):
        raise ValueError(f"block must be that of the matrices, {edge}; got {block!r}")


def check_drop(drop: Any) -> None:
    if drop is None:
        return
    check_number(drop, "drop")
    if not drop >= 0:
        raise ValueError(f"drop must be at least 0; got {drop}")


def index_dtype(*of: Blocks) -> torch.dtype:
    """int32 where all indices are, else int64."""
    narrow = all(x.crow.dtype == torch.int32 for x in of)
    return torch.int32 if narrow else torch.int64


def free_bytes(device: torch.device) -> int | None:
    """Memory that the process may still take, as the system says; None if it does not."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        found = [int(x.split()[1]) * 1024 for x in lines if x.startswith("MemAvailable")]
        folder = Path("/sys/fs/cgroup")
        if (most := (folder / "memory.max")).exists() and most.read_text().strip() != "max":
            used = int((folder / "memory.current").read_text())
            found.append(int(most.read_text()) - used)
        return max(0, min(found))
    except (OSError, ValueError, IndexError):
        return None


def check_memory(
    function: str, blocks: int, block_bytes: int, device: torch.device, products: int = 0
) -> None:
    """torch.OutOfMemoryError where so many blocks and listed products do not fit in memory."""
    needed = blocks * block_bytes + 8 * products
    if (
        device.type == "cuda"
        and needed < torch.cuda.get_device_properties(device).total_memory / 16
    ):
        return  # the question would take longer than the answer is worth: torch says it, too
    free = free_bytes(device)
    if free is not None and needed > free:
        fit = int(free / needed * blocks)
        listed = f" and {products:,} products" if products else ""
        raise torch.OutOfMemoryError(
            f"{function} needs {needed:,} bytes for {blocks:,} blocks{listed}; got {free:,} bytes "
            f"of free memory, in which about {fit:,} blocks would fit"
        )


# ---- Making them --------------------------------------------------------------------------------


def all_blocks(x: Tensor, edge: int, name: str = "a") -> Blocks:
    """A dense matrix with all of its blocks, padded with zeros."""
    check_no_gradient(x, name)
    rows, columns = (-(-length // edge) for length in x.shape)
    padded = pad(x.detach(), (0, columns * edge - x.shape[1], 0, rows * edge - x.shape[0]))
    values = padded.reshape(rows, edge, columns, edge).transpose(1, 2).reshape(-1, edge, edge)
    crow = torch.arange(rows + 1, device=x.device) * columns
    col = torch.arange(columns, device=x.device).repeat(rows)
    return Blocks(crow, col, values, columns)


def places_of(numbers: Tensor, keys: Tensor) -> Tensor:
    """The places of numbers among keys that ascend; -1: not there."""
    if not len(keys):
        return torch.full_like(numbers, -1, dtype=torch.int64)
    places = torch.searchsorted(keys, numbers).clamp(max=len(keys) - 1)
    return torch.where(keys[places] == numbers, places, -1)


def chosen(c: Blocks, stays: Tensor) -> Blocks:
    """Some of the stored blocks. Waits for the device, for their number."""
    return c.only(stays.nonzero()[:, 0])


def total(norms: Tensor) -> Tensor:
    """The norm of a matrix from those of its blocks, 0-d float64, without overflow."""
    wide = norms.double()
    largest = wide.max() if len(wide) else wide.new_zeros(())
    scale = torch.where((largest > 0) & largest.isfinite(), largest, 1.0)
    return torch.linalg.vector_norm(wide / scale) * scale
