"""The plan of a product over several devices: cuts by work, and which units of operands travel.

Everything here follows from norm maps and a threshold. Nothing travels, and no operand is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from .._arguments import as_tau, check_block, check_integer, check_tensor, dtype_name, is_integer
from .._output import table
from ..sparse.blocks import Blocks, is_sparse
from ..sparse.maps import make_plan, of_maps

_ops = torch.ops.spamm_torch

ROW_MULTIPLE = 128  # cuts by work are multiples of it: the height of the kernels' tallest tiles
WORK_UNIT = 1000  # the op row_work counts in thousandths of a valid block product


def row_cuts(
    norm_a: Tensor,
    norm_b: Tensor,
    tau: float | Tensor,
    parts: int,
    *,
    block: int | Sequence[int] = 64,
) -> list[int]:
    """Cuts the rows of A, and so of C, into parts of about equal work.

    The work of rows is their number of valid block products, plus 0.006 times their number of all
    block products: the time of a product is linear in its valid products, and 0.006 was fitted to
    float16 on an H200. Among all cuts into contiguous parts, the largest part's work is smallest:
    found by bisection over it (Pinar and Aykanat, "Fast optimal load balancing algorithms for 1D
    partitioning", 2004). Waits for the device.

    Args:
        norm_a, norm_b, tau: norm maps without batches, and a threshold, as :func:`valid_counts`.
        parts: how many parts, > 0.
        block: the maps' block.

    Returns:
        parts + 1 ascending row numbers: part p owns the rows cuts[p] to cuts[p + 1]. They are
        multiples of max(m, 128) but for the last, which is MB * m. It sticks out of an A whose rows
        do not fill the last block, where a slice ends with A. Parts are empty where the rows are
        too few.

    Raises as that function, and for ``parts`` ValueError or TypeError.
    """
    check_tensor(norm_a, "norm_a")
    check_tensor(norm_b, "norm_b")
    check_integer(parts, "parts")
    m = check_block(block)[0]
    multiple = max(m, ROW_MULTIPLE) // m
    if parts <= 0:
        raise ValueError(f"parts must be positive; got {parts}")
    return [m * cut for cut in _ops.row_work(norm_a, norm_b, as_tau(tau), parts, multiple)[1]]


def stage_blocks(block_columns: int, edge: int) -> int:
    """The block columns of a stage, of all that are ``edge`` wide, as csrc/shards/plan.h says."""
    return int(max(-(-block_columns * edge // 4096) * 256, 2048) // edge)


def needed_units(largest: Tensor, norms: Tensor, tau: Tensor, stage: int) -> Tensor:
    """The units that parts need: bool (parts, KB, stages). ``largest`` (parts, KB): of each part's
    norms in each column of A's map. ``norms`` (KB, NB): B's map. ``stage``: block columns of one.

    A unit is needed if its largest norm, times the largest in the part's column, is valid. Rounding
    is monotone, so this is so exactly if some block product of the part with the unit is valid.
    """
    columns = norms.shape[1]
    stages = -(-columns // stage)
    whole = pad(norms, (0, stages * stage - columns)).unflatten(1, (stages, stage))
    return ~(largest[:, :, None] * whole.amax(2) < tau.to(norms.dtype))


# ---- Exchange plans -----------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ExchangePlan:
    """The units of A and B that travel between the ranks of a product. Prints as a table.

    Made by :func:`exchange_plan`. Ranks stand in the mesh row by row.

    Attributes:
        mesh_shape: (rows, columns) of the mesh of ranks; (ranks, 1) where it is a line.
        send: send[source][destination] is the number of bytes that travel between two ranks.
        dense_send: the same without skipping.
        work: each rank's work, in valid block products; see :func:`row_cuts`.
        dtype: of the maps, and of the operands whose bytes are counted.
    """

    mesh_shape: tuple[int, int]
    send: list[list[int]]
    dense_send: list[list[int]]
    work: list[float]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """The bytes of operands that travel. Norm maps are not among them."""
        return sum(map(sum, self.send))

    @property
    def dense_bytes(self) -> int:
        """The bytes that would travel without skipping."""
        return sum(map(sum, self.dense_send))

    @property
    def imbalance(self) -> float:
        """The largest rank's work over the mean: at least 1, and 1 where there is no work."""
        total = sum(self.work)
        return max(self.work) * len(self.work) / total if total else 1.0

    def __str__(self) -> str:
        lines = [["rank", "work", "sends", "dense"]]
        for rank, work in enumerate(self.work):
            sends = (_bytes_text(sum(of[rank])) for of in (self.send, self.dense_send))
            lines.append([str(rank), f"{work:.0f}", *sends])
        share = f" ({self.bytes / self.dense_bytes:.1%})" if self.dense_bytes else ""
        return (
            f"{table(lines, str.rjust)}\n"
            f"{_bytes_text(self.bytes)} of {_bytes_text(self.dense_bytes)}{share} travel in "
            f"{dtype_name(self.dtype)}; largest work {self.imbalance:.3f} of the mean"
        )


def exchange_plan(
    norm_a: Tensor,
    norm_b: Tensor,
    tau: float | Tensor,
    cuts: Sequence[int],
    mesh_shape: Sequence[int] | None = None,
    *,
    b_cuts: Sequence[int] | None = None,
    block: int | Sequence[int] = 64,
) -> ExchangePlan:
    """Tells which units of A and B would travel in a product over several ranks, and who does what
    work.

    A unit, one block row of B in one stage of neighbouring block columns, travels to a rank of a
    line that does not own it if one of its block products with the rank's rows of A is valid. In a
    mesh, A is cut along K and travels along mesh rows likewise; B travels along mesh columns. Of
    block-sparse matrices each stored block of B is a unit, and the ranks stand in a line.

    Pure: of no process group, and nothing travels. Blocks that stick out of a matrix are counted
    whole, for the maps do not tell. Waits for the device.

    Args:
        norm_a, norm_b, tau: norm maps without batches, and a threshold, as :func:`valid_counts`.
        cuts: ascending row numbers from 0 to A's number of rows, as from :func:`row_cuts`:
            one more than the mesh has rows, multiples of the block's m but for the last.
        mesh_shape: (rows, columns) of a mesh of ranks; None: a line of len(cuts) - 1 ranks.
            Columns of C, and A's of K, are cut along the mesh's columns as ``torch.chunk`` cuts
            their blocks.
        b_cuts: the same for B's rows (K), multiples of the block's k; None: as ``torch.chunk``
            cuts the blocks.
        block: the maps' block.

    Bytes are of operands of the maps' dtype; half types, whose norms are float32, send half.

    Raises as that function; ValueError for cuts or a mesh that do not fit.
    """
    stored = of_maps("exchange_plan", norm_a, norm_b) if is_sparse(norm_a, norm_b) else None
    if stored is None:
        _check_maps(norm_a, norm_b)
    (m, k, n), threshold = check_block(block), as_tau(tau)
    itemsize = norm_a.element_size()
    mesh_rows, mesh_columns = _mesh(mesh_shape, cuts)
    (rows, depth), columns = norm_a.shape, norm_b.shape[1]
    row_blocks = _block_cuts(cuts, rows, m, mesh_rows, "cuts")
    column_blocks = chunk_cuts(columns, mesh_columns)
    a_blocks = chunk_cuts(depth, mesh_columns)
    b_blocks = chunk_cuts(depth, mesh_rows)
    if b_cuts is not None:
        b_blocks = _block_cuts(b_cuts, depth, k, mesh_rows, "b_cuts")
    if stored is not None:
        if mesh_columns != 1 or not m == k == n:
            raise ValueError(
                "norm maps of block-sparse matrices need one block edge and a line of ranks; got "
                f"block {(m, k, n)} and mesh_shape {(mesh_rows, mesh_columns)}"
            )
        *moved, work = _stored_exchange(*stored, threshold, row_blocks, b_blocks)
        along_columns, along_rows = [tuple(moved)], []
    else:
        # All ranks have stages of one length, that of the ranks with the most blocks.
        most, most_rows = (
            max(end - begin for begin, end in pairwise(at)) for at in (column_blocks, row_blocks)
        )
        stage, row_stage = stage_blocks(most, n), stage_blocks(most_rows, m)
        b_panels = [norm_b[:, begin:end] for begin, end in pairwise(column_blocks)]
        # First, for it checks the maps: in valid block products, in the ranks' order.
        units = torch.stack([_ops.row_work(norm_a, b, threshold)[0].cpu() for b in b_panels], 1)
        of_ranks = [units[begin:end].sum(0) for begin, end in pairwise(row_blocks)]
        work = (torch.cat(of_ranks).double() / WORK_UNIT).tolist()
        a_panels = [norm_a[begin:end].t() for begin, end in pairwise(row_blocks)]
        along_columns = [
            _exchange(norm_a, panel, threshold, row_blocks, b_blocks, stage) for panel in b_panels
        ]
        along_rows = [
            _exchange(norm_b.t(), panel, threshold, column_blocks, a_blocks, row_stage)
            for panel in a_panels
        ]
    ranks = torch.arange(mesh_rows * mesh_columns).view(mesh_rows, mesh_columns)
    send, dense_send = torch.zeros(2, ranks.numel(), ranks.numel(), dtype=torch.int64)
    for group, (blocks, dense_blocks), block_bytes in (
        *((ranks[:, c], moved, k * n * itemsize) for c, moved in enumerate(along_columns)),
        *((ranks[r], moved, m * k * itemsize) for r, moved in enumerate(along_rows)),
    ):
        send[group[:, None], group] += blocks * block_bytes
        dense_send[group[:, None], group] += dense_blocks * block_bytes
    return ExchangePlan(
        mesh_shape=(mesh_rows, mesh_columns),
        send=send.tolist(),
        dense_send=dense_send.tolist(),
        work=work,
        dtype=norm_a.dtype,
    )


def _exchange(
    norms: Tensor, other: Tensor, tau: Tensor, cuts: list[int], owners: list[int], stage: int
) -> tuple[Tensor, Tensor]:
    """The blocks of ``other`` (KB, columns) that travel between ranks with parts of ``norms``
    (rows, KB): [source, destination], with skipping and without.

    Rank p computes with the block rows cuts[p] to cuts[p + 1] of ``norms``, and owns the block rows
    owners[p] to owners[p + 1] of ``other``; without rows it needs nothing.
    """
    parts = [norms[begin:end] for begin, end in pairwise(cuts)]
    largest = [part.amax(0) if len(part) else norms.new_zeros(norms.shape[1]) for part in parts]
    has_rows = torch.tensor([len(part) > 0 for part in parts])[:, None, None]
    need = needed_units(torch.stack(largest), other, tau, stage).cpu() & has_rows
    columns = other.shape[1]
    widths = torch.tensor(
        [min(stage, columns - first) for first in range(0, columns, stage)], dtype=torch.int64
    )
    everything = has_rows.expand_as(need)
    return _transfers(need, widths, owners), _transfers(everything, widths, owners)


def _transfers(need: Tensor, widths: Tensor | int, owners: list[int]) -> Tensor:
    """[source, destination]: the number of needed blocks that others own."""
    blocks = (need * widths).sum(2)  # (ranks, KB)
    moved = torch.stack([blocks[:, begin:end].sum(1) for begin, end in pairwise(owners)])
    return moved.fill_diagonal_(0)


# ---- Cuts, arguments and texts ------------------------------------------------------------------


def chunk_cuts(blocks: int, parts: int) -> list[int]:
    """The cuts of ``torch.chunk``: equal parts, but for the last that are not empty."""
    size = -(-blocks // parts)
    return [min(part * size, blocks) for part in range(parts + 1)]


def _check_maps(norm_a: Tensor, norm_b: Tensor) -> None:
    """Checks the shapes of the maps, which the plan reads before an op checks them."""
    check_tensor(norm_a, "norm_a")
    check_tensor(norm_b, "norm_b")
    if norm_a.dim() != 2 or norm_b.dim() != 2 or norm_a.shape[1] != norm_b.shape[0]:
        raise RuntimeError(
            "norm maps must be 2-d: (MB, KB) and (KB, NB); got shapes "
            f"{list(norm_a.shape)} and {list(norm_b.shape)}"
        )


def _block_cuts(cuts: Sequence[int], blocks: int, edge: int, parts: int, name: str) -> list[int]:
    """Cuts as block numbers; ValueError unless they cut all blocks into parts of whole blocks."""
    several = isinstance(cuts, Sequence) and not isinstance(cuts, str)
    numbers = list(cuts) if several else []
    fit = (
        len(numbers) == parts + 1
        and all(map(is_integer, numbers))
        and numbers == sorted(numbers)
        and numbers[0] == 0
        and -(-numbers[-1] // edge) == blocks
        and all(cut % edge == 0 or cut == numbers[-1] for cut in numbers)
    )
    if not fit:
        raise ValueError(
            f"{name} must be {parts + 1} ascending numbers from 0 into the last of {blocks} blocks "
            f"of {edge}, multiples of {edge} but for the last; got {cuts!r}"
        )
    return [-(-int(cut) // edge) for cut in numbers]


def _mesh(mesh_shape: Sequence[int] | None, cuts: Sequence[int]) -> tuple[int, int]:
    """The mesh's rows and columns; ValueError unless they are two positive integers."""
    if mesh_shape is None:
        if not isinstance(cuts, Sequence) or len(cuts) < 2:
            raise ValueError(f"cuts must be at least two row numbers; got {cuts!r}")
        return len(cuts) - 1, 1
    edges = tuple(mesh_shape) if isinstance(mesh_shape, Sequence) else ()
    if len(edges) != 2 or not all(is_integer(edge) and edge > 0 for edge in edges):
        raise ValueError(f"mesh_shape must be two positive integers; got {mesh_shape!r}")
    return int(edges[0]), int(edges[1])


def _bytes_text(count: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


# ---- Stored blocks of B that travel in a product of block-sparse shards --------------------------


def _stored_exchange(
    a: Blocks, b: Blocks, tau: Tensor, cuts: list[int], owners: list[int]
) -> tuple[Tensor, Tensor, list[float]]:
    """The numbers of stored blocks of B that travel, without skipping too, and the work."""
    plan = make_plan("exchange_plan", a, b, None, tau, False, 0)
    ranks = len(cuts) - 1
    of_row = torch.repeat_interleave(torch.arange(ranks), torch.tensor(cuts).diff())
    row_of_c = Blocks(plan.crow, plan.col, plan.col, b.columns).row_of()
    of_product = of_row.to(row_of_c.device)[row_of_c].repeat_interleave(plan.first.diff())
    stored, device = len(b.col), a.col.device
    need = torch.zeros(ranks, stored, dtype=torch.bool, device=device)
    need[of_product, plan.slots_b.long()] = True
    columns = torch.zeros(ranks, a.columns, dtype=torch.bool, device=device)
    columns[of_row.to(device)[a.row_of()], a.col.long()] = True
    ends = b.crow[torch.tensor(owners, device=device)].tolist()
    units, all_units = (of.cpu()[:, :, None] for of in (need, columns[:, b.row_of()]))
    work = torch.bincount(of_product, minlength=ranks).double().tolist()
    return _transfers(units, 1, ends), _transfers(all_units, 1, ends), work
