"""A dimension of a matrix that is cut among ranks, and rows that travel between these ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

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

    def broadcast(self, x: Tensor, source: int = 0) -> None:
        """Replaces ``x`` on every rank by that of the rank ``source`` of the axis."""
        if self.size > 1:
            dist.broadcast(x, group_src=source, group=self.group)

    def sum(self, x: Tensor) -> None:
        """Replaces ``x`` on every rank by its sum over all ranks."""
        if self.size > 1:
            dist.all_reduce(x, group=self.group)


@dataclass(frozen=True)
class Cut:
    """Where a dimension is cut: rank r of the axis owns ``at[r]`` to ``at[r + 1]``."""

    axis: Axis
    at: tuple[int, ...]

    @classmethod
    def by_lengths(cls, axis: Axis, lengths: Sequence[int]) -> Cut:
        return cls(axis, tuple(accumulate(lengths, initial=0)))

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
    """The rows that this rank owns by ``then``, of a matrix whose rows are cut by ``now``.

    A collective call of the cuts' axis, unless the cuts are equal.
    """
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
    """How many of the rows ``begin`` to ``end`` each rank owns."""
    return [max(0, min(end, to) - max(begin, at)) for at, to in pairwise(cut.at)]


def is_column_major(x: Tensor) -> bool:
    return x.stride(0) == 1 and x.stride(1) != 1


def in_layout(x: Tensor, column_major: bool) -> Tensor:
    """``x`` with contiguous rows, or with contiguous columns.

    The last bits of a norm depend on whether a block is read by rows or by columns. So a matrix
    keeps its layout when it travels.
    """
    return x.t().contiguous().t() if column_major else x.contiguous()
