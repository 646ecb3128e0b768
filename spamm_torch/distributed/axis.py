"""A dimension of a matrix that is cut among ranks, and rows that travel between these ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad


class Axis:
    """The ranks among which a dimension is cut, in the order of their process group.

    Without a group it is this rank alone: the dimension is whole on every rank. Every method that
    takes a tensor is a collective call of the axis, and does nothing on an axis of one rank.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)

    def gather(self, own: Tensor, lengths: Sequence[int]) -> Tensor:
        """The rows of all ranks, in their order: own (lengths[rank], columns) from each."""
        if self.size == 1:
            return own
        longest = max(lengths)
        rows = own.new_empty(self.size * longest, own.shape[1])
        if rows.numel():
            padded = with_rows(own, longest).contiguous()
            dist.all_gather_into_tensor(rows, padded, group=self.group)
        if min(lengths) == longest:
            return rows
        parts = [part[:length] for part, length in zip(rows.split(longest), lengths, strict=True)]
        return torch.cat(parts)

    def gather_number(self, own: int, device: torch.device) -> list[int]:
        """A number of each rank, which travels on the device. Waits for it."""
        number = torch.tensor([[int(own)]], device=device)
        return self.gather(number, [1] * self.size).flatten().tolist()

    def broadcast(self, x: Tensor) -> None:
        """Replaces ``x`` on every rank by that of the first rank of the axis."""
        if self.size > 1:
            dist.broadcast(x, group_src=0, group=self.group)

    def sum(self, x: Tensor) -> None:
        """Replaces ``x`` on every rank by its sum over all ranks."""
        if self.size > 1:
            dist.all_reduce(x, group=self.group)


@dataclass(frozen=True)
class Cut:
    """The cuts of a dimension: rank r of the axis owns ``at[r]`` to ``at[r + 1]``."""

    axis: Axis
    at: tuple[int, ...]

    @classmethod
    def whole(cls, length: int) -> Cut:
        """A dimension that every rank has whole."""
        return cls(Axis(), (0, length))

    @property
    def length(self) -> int:
        return self.at[-1]

    @property
    def lengths(self) -> list[int]:
        return [end - begin for begin, end in pairwise(self.at)]

    def of(self, rank: int) -> slice:
        """The indices that a rank owns."""
        return slice(self.at[rank], self.at[rank + 1])

    @property
    def own(self) -> slice:
        return self.of(self.axis.rank)

    def aligned(self, edge: int) -> Cut:
        """The same cuts moved to the nearest multiples of ``edge``, but for those at the end."""
        nearest = (
            c if c == self.length else min((c + edge // 2) // edge * edge, self.length)
            for c in self.at
        )
        return Cut(self.axis, tuple(nearest))

    def in_blocks(self, edge: int) -> Cut:
        """Aligned cuts as numbers of blocks."""
        return Cut(self.axis, tuple(-(-c // edge) for c in self.at))


def with_rows(x: Tensor, rows: int) -> Tensor:
    """A matrix with rows of zeros at its end, ``rows`` in all; ``x`` itself if it has so many."""
    return x if x.shape[0] == rows else pad(x, (0, 0, 0, rows - x.shape[0]))


def recut(x: Tensor, now: Cut, then: Cut) -> Tensor:
    """The rows that this rank owns by ``then``, cut by ``now``. A collective call."""
    if now.at == then.at:
        return x
    axis = now.axis
    send = _overlaps(now.at[axis.rank], now.at[axis.rank + 1], then)
    receive = _overlaps(then.at[axis.rank], then.at[axis.rank + 1], now)
    rows = x.new_empty(sum(receive), x.shape[1])
    if x.shape[1]:
        dist.all_to_all_single(rows, x.contiguous(), receive, send, group=axis.group)
    return in_layout(rows, is_column_major(x))


def _overlaps(begin: int, end: int, cut: Cut) -> list[int]:
    """The number of the rows ``begin`` to ``end`` that each rank owns."""
    return [max(0, min(end, to) - max(begin, at)) for at, to in pairwise(cut.at)]


def is_column_major(x: Tensor) -> bool:
    return x.stride(0) == 1 and x.stride(1) != 1


def in_layout(x: Tensor, column_major: bool) -> Tensor:
    """``x`` with contiguous rows or columns: these decide the last bits of norms."""
    return x.t().contiguous().t() if column_major else x.contiguous()


def one_ahead(started: Iterable[Any]) -> Iterator[Any]:
    """The items of an iterator in their order, each when the one after it has been started."""
    return (item for item, _ in pairwise(chain(started, (None,))))


class Exchange:
    """One exchange of a matrix (K, columns) between the ranks of an axis, a shard of rows each.

    A unit is one block row in one stage, a range of columns. All ranks know from the norm maps
    which rank needs which units: no counts travel.
    """

    def __init__(self, own: Tensor, cut: Cut, edge: int, need: Tensor, stage_columns: int) -> None:
        """Prepares an exchange; nothing travels yet.

        ``own``: this rank's shard. ``cut``: of the matrix's block rows, of which the last may have
        fewer than ``edge`` rows. ``need``: bool (ranks, block rows, stages), on the CPU: which
        units each rank needs.
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
        self._arrive_from = [[int(of.sum()) for of in each.split(cut.lengths)] for each in arriving]
        self._sent, self._block_rows = self._on_device(
            leaving.nonzero()[:, 2], arriving.nonzero()[:, 1]
        )

    def stages(self) -> Iterator[tuple[slice, Callable[[Tensor], None]]]:
        """The columns of each stage, the fewest units first, and what waits for its units and
        writes them to their rows of a matrix; other rows stay. The next units travel meanwhile.
        """
        return one_ahead((self._columns(stage), self._start(stage)) for stage in self._order)

    def _columns(self, stage: int) -> slice:
        begin = stage * self._stage_columns
        return slice(begin, min(begin + self._stage_columns, self._units.shape[2]))

    def _start(self, stage: int) -> Callable[[Tensor], None]:
        """Sends this rank's units of a stage to the ranks that need them."""
        block_rows = self._block_rows[stage]
        source = self._units[:, :, self._columns(stage)]
        entries = source.new_empty(len(block_rows), *source.shape[1:])
        sent, counts = self._sent[stage], (self._arrive_from[stage], self._leave_to[stage])
        how: Any = {"group": self._axis.group, "async_op": True}
        work = dist.all_to_all_single(entries, source.index_select(0, sent), *counts, **how)

        def copy_to(out: Tensor) -> None:
            work.wait()
            out.unflatten(0, (-1, entries.shape[1])).index_copy_(0, block_rows, entries)

        return copy_to

    def _on_device(self, sent: Tensor, block_rows: Tensor) -> tuple[tuple[Tensor, ...], ...]:
        """Indices stage by stage where the units are, by one copy that waits for nothing."""
        lengths = [sum(counts) for counts in (*self._leave_to, *self._arrive_from)]
        together = torch.cat((sent, block_rows))
        if self._units.is_cuda:
            together = together.pin_memory().to(self._units.device, non_blocking=True)
        stages = together.split(lengths)
        return stages[: len(self._leave_to)], stages[len(self._leave_to) :]
