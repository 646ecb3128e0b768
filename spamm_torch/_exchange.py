"""Units of a matrix that travel between ranks, stage by stage: those that are needed, no others.

The matrix (K, columns) is cut by rows, one shard a rank. A unit is one block row in one stage; a
stage is a range of columns. All ranks know from the norm maps which rank needs which units, so each
derives what it sends and what arrives. No counts travel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ._axis import Cut, with_rows


@dataclass(frozen=True)
class Units:
    """The units of one stage that are on their way to this rank."""

    block_rows: Tensor  # int64, for each unit
    entries: Tensor  # (units, rows of a block, columns of the stage)
    work: dist.Work

    def copy_to(self, out: Tensor) -> None:
        """Waits for the units, and writes them to their rows of ``out`` (K, columns of the stage).

        K is a multiple of the block's rows here. Rows that are not needed stay as they are.
        """
        self.work.wait()
        by_block_rows = out.unflatten(0, (-1, self.entries.shape[1]))
        by_block_rows.index_copy_(0, self.block_rows, self.entries)


class Exchange:
    """One exchange of a matrix between the ranks of an axis."""

    def __init__(self, own: Tensor, cut: Cut, edge: int, need: Tensor, stage_columns: int) -> None:
        """Prepares an exchange; nothing travels yet.

        Args:
            own: this rank's shard, of any strides.
            cut: the matrix's block rows, and so their owners.
            edge: rows of a block. The last block row may have fewer.
            need: bool (ranks, block rows, stages), on the CPU: which units each rank needs.
            stage_columns: columns of a stage. The last stage may have fewer.
        """
        self._axis, self._stage_columns = cut.axis, stage_columns
        block_rows = cut.lengths[cut.axis.rank]
        self._units = with_rows(own, block_rows * edge).unflatten(0, (block_rows, edge))
        travels = need.clone()
        for rank in range(cut.axis.size):
            travels[rank, cut.of(rank)] = False
        self._order = travels.sum((0, 1)).argsort(stable=True).tolist()
        leaving = travels[:, cut.own].permute(2, 0, 1)  # (stages, ranks, own block rows)
        arriving = travels[cut.axis.rank].t()  # (stages, block rows)
        self._leave_to = leaving.sum(2).tolist()
        self._arrive_from = [
            [int(part.sum()) for part in stage.split(cut.lengths)] for stage in arriving
        ]
        self._sent, self._block_rows = self._on_device(
            leaving.nonzero()[:, 2], arriving.nonzero()[:, 1]
        )

    def stages(self) -> Iterator[tuple[slice, Units]]:
        """The columns and the units of each stage.

        The stage with the fewest units to wait for comes first. While the caller works on a stage,
        the units of the next one travel.
        """
        started = ((self._columns(stage), self._start(stage)) for stage in self._order)
        following = next(started, None)
        while following is not None:
            current, following = following, next(started, None)
            yield current

    def _columns(self, stage: int) -> slice:
        begin = stage * self._stage_columns
        return slice(begin, min(begin + self._stage_columns, self._units.shape[2]))

    def _start(self, stage: int) -> Units:
        """Sends this rank's units of a stage to the ranks that need them."""
        block_rows = self._block_rows[stage]
        source = self._units[:, :, self._columns(stage)]
        entries = source.new_empty(len(block_rows), *source.shape[1:])
        work = dist.all_to_all_single(
            entries,
            source.index_select(0, self._sent[stage]),
            self._arrive_from[stage],
            self._leave_to[stage],
            group=self._axis.group,
            async_op=True,
        )
        return Units(block_rows, entries, work)

    def _on_device(self, sent: Tensor, block_rows: Tensor) -> tuple[tuple[Tensor, ...], ...]:
        """Indices stage by stage where the units are, by one copy that waits for nothing."""
        lengths = [sum(counts) for counts in (*self._leave_to, *self._arrive_from)]
        together = torch.cat((sent, block_rows))
        if self._units.is_cuda:
            together = together.pin_memory().to(self._units.device, non_blocking=True)
        stages = together.split(lengths)
        return stages[: len(self._leave_to)], stages[len(self._leave_to) :]
