"""Products of block-sparse matrices over ranks: each holds some block rows of A and of B.

:func:`multiply` is one product of shards. :class:`Rows` are for many products of square matrices.

Patterns and norms of all of B travel first; then only those blocks of B that a rank's valid
products need. Blocks have the bits of one process, because each rank decides from the same norms.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from .._arguments import as_knobs, held_tau
from .._axis import Axis
from .._call import Call, agree
from .._rank_product import Settings
from .blocks import Blocks, check_block_of, check_pair, chosen, index_dtype, read, read_map
from .maps import Plan, found_tau, make_plan
from .matrices import blocks_at, identity
from .products import TO_DROP, SparseInfo, dropped, info_of, of_input

_ops = torch.ops.spamm_torch


def multiply(a: Any, b: Any, axis: Axis, knobs: dict[str, Any], block: Any, balance: Any) -> Tensor:
    """:func:`spamm_torch.distributed.mm` of block-sparse shards. A collective call."""

    def read_call(backends: str) -> Call:
        left, right = read(a, "a", "distributed.mm"), read(b, "b", "distributed.mm")
        check_pair(left, right)
        check_block_of(block, left.edge)
        if not left.values.is_cpu:
            raise RuntimeError(f"sparse_bsr shards must be on CPUs; got a on {a.device}")
        if balance:
            raise ValueError("balance is for dense shards; got sparse_bsr ones with balance=True")
        if "cpu:" not in backends:
            raise RuntimeError(f"sparse_bsr shards need a group on CPUs; got {backends}")
        checked = as_knobs(**knobs)
        if (tau := held_tau(checked)) is not None:
            checked["tau"], checked["threshold"] = tau.double().cpu(), None
        return Call(a, b, Settings(checked, (left.edge,) * 3, False), "sparse_bsr")

    call, rows = agree([axis], read_call)
    if (k := sum(rows_b for _, rows_b in rows)) != a.shape[1]:
        raise RuntimeError(
            f"the rows of b on all ranks must add up to the columns of a, {a.shape[1]}; got {k}"
        )
    left, right = read(a, "a", "distributed.mm"), read(b, "b", "distributed.mm")
    map_a, own_map = left.with_norms(), right.with_norms()
    map_b, stored = _gathered(own_map, axis)
    tau = call.settings.knobs["tau"]
    if tau is None:
        whole_a, _ = _gathered(map_a, axis)
        searched = (call.settings.knobs[name] for name in ("valid_ratio", "max_error"))
        tau = found_tau(whole_a, map_b, *searched)
    plan, values, _ = _multiplied(
        "distributed.mm", axis, (map_a, map_b), (left, right), stored, tau
    )
    index = index_dtype(left, right)
    return Blocks(plan.crow.to(index), plan.col.to(index), values, right.columns).matrix()


def _multiplied(
    function: str,
    axis: Axis,
    maps: tuple[Blocks, Blocks],
    operands: tuple[Blocks, Blocks],
    stored: list[int],
    tau: Tensor,
    *,
    added: Blocks | None = None,
    symmetric: bool = False,
    **scale: float,
) -> tuple[Plan, Tensor, Tensor]:
    """The plan of this rank's products, and its blocks of the result and their norms.

    ``maps`` are of its rows of A and of all of B, ``stored`` is the number of each rank's blocks.
    """
    left, right = operands
    planned: tuple[Any, ...] = (added, tau, symmetric, left.block_bytes())
    plan = _together(axis, lambda: make_plan(function, *maps, *planned))
    needed, slots_b = plan.slots_b.long().unique(return_inverse=True)
    values_b = _fetched(needed, right.values, stored, axis)
    lists = (plan.crow, plan.col, plan.first, plan.slots_a, slots_b.int())
    options = {"symmetric": symmetric, **of_input(added), **scale}
    return plan, *_ops.bsr_multiply(*lists, *left[:3], values_b, **options)


def _gathered(own: Blocks, axis: Axis) -> tuple[Blocks, list[int]]:
    """The norm map of all ranks' block rows, and how many blocks each rank stores."""
    sizes = axis.gather(torch.tensor([[own.rows, len(own.col)]]), [1] * axis.size)
    rows, stored = sizes.t().tolist()
    counts, col, norms = (
        axis.gather(x[:, None], lengths)[:, 0]
        for x, lengths in (
            (own.crow.long().diff(), rows),
            (own.col.long(), stored),
            (own.values, stored),
        )
    )
    return Blocks(pad(counts.cumsum(0), (1, 0)), col, norms, own.columns), stored


def _together(axis: Axis, make: Any) -> Any:
    """What ``make`` returns; on all ranks an error where it does not fit in one rank's memory."""
    problem = found = None
    try:
        found = make()
    except torch.OutOfMemoryError as error:
        problem = error
    flags = axis.gather(torch.tensor([[int(problem is not None)]]), [1] * axis.size)
    if problem is not None:
        raise problem
    if flags.any():
        rank = int(flags.flatten().argmax())
        raise torch.OutOfMemoryError(f"the rows of rank {rank} do not fit in its memory")
    return found


def _fetched(needed: Tensor, own: Tensor, stored: list[int], axis: Axis) -> Tensor:
    """Blocks of B from the ranks that own them, by their numbers among those of all, ascending."""
    ends = torch.tensor(stored).cumsum(0)
    wanted = torch.bincount(torch.searchsorted(ends, needed, right=True), minlength=axis.size)
    asked = torch.empty_like(wanted)
    dist.all_to_all_single(asked, wanted, group=axis.group)
    numbers = needed.new_empty(int(asked.sum()))
    to, of = wanted.tolist(), asked.tolist()
    dist.all_to_all_single(numbers, needed, of, to, group=axis.group)
    first = int(ends[axis.rank]) - stored[axis.rank]
    blocks = own.new_empty(len(needed), *own.shape[1:])
    dist.all_to_all_single(blocks, own[numbers - first], to, of, group=axis.group)
    return blocks


# ---- Many products of square matrices -----------------------------------------------------------


@dataclass(frozen=True)
class _Settings(Settings):
    """Of a function: its arguments that all ranks have alike, as a text."""

    text: str

    def knob_text(self) -> str:
        return self.text


@dataclass(frozen=True)
class Rows:
    """Which block rows of square matrices a rank holds: ``at[rank]`` to ``at[rank + 1]``.

    Inside, a matrix is N x N on every rank and stores blocks in the rank's own rows alone. Its norm
    map is that of the whole matrix, on every rank: so all ranks decide alike.
    """

    axis: Axis
    at: tuple[int, ...]

    @classmethod
    def agreed(
        cls, function: str, a: Tensor, axis: Axis, alike: dict[str, Any], check: Callable[[], Any]
    ) -> Rows:
        """Of a matrix whose block rows lie on the ranks. A collective call.

        What ``check`` raises, all ranks raise. So they do where the arguments ``alike`` differ.
        """

        def read_call(backends: str) -> Call:
            blocks = read(a, "a", function)
            if not blocks.values.is_cpu or "cpu:" not in backends:
                raise RuntimeError(
                    f"{function} over ranks expects sparse_bsr on CPUs and a group on CPUs; got a "
                    f"on {a.device} and {backends}"
                )
            check()
            text = ", ".join(f"{name}={x}" for name, x in alike.items())
            settings = _Settings(as_knobs(0.0, None, None), (blocks.edge,) * 3, False, text)
            return Call(a, a, settings, "sparse_bsr")

        _, rows = agree([axis], read_call)
        if (total := sum(own for own, _ in rows)) != a.shape[1]:
            raise RuntimeError(
                f"the rows of all ranks must add up to the columns, {a.shape[1]}; got {total}"
            )
        edge = read(a, "a", function).edge
        return cls(axis, tuple(accumulate((own // edge for own, _ in rows), initial=0)))

    @property
    def _own(self) -> tuple[int, int]:
        return self.at[self.axis.rank], self.at[self.axis.rank + 1]

    def embedded(self, a: Tensor) -> Tensor:
        """This rank's block rows as a matrix of N rows."""
        blocks = read(a, "a", "purify")
        before, after = self._own[0], self.at[-1] - self._own[1]
        first, last = blocks.crow[:1], blocks.crow[-1:]
        crow = torch.cat((first.expand(before), blocks.crow, last.expand(after)))
        return blocks._replace(crow=crow).matrix()

    def shard(self, a: Tensor) -> Tensor:
        """This rank's block rows of such a matrix."""
        blocks = read(a, "a", "purify")
        begin, end = self._own
        return blocks._replace(crow=blocks.crow[begin : end + 1].clone()).matrix()

    def identity(self, size: int, like: Tensor) -> Tensor:
        one = read(identity(size, like=like), "a", "identity")
        begin, end = self._own
        row = one.row_of()
        return chosen(one, (row >= begin) & (row < end)).matrix()

    def norms(self, a: Tensor) -> Tensor:
        """The norm map of the whole."""
        return self._whole(read(a, "a", "norm_map").with_norms())[0].matrix()

    def product(
        self,
        a: Tensor,
        b: Tensor,
        maps: tuple[Tensor, Tensor],
        max_error: float,
        *,
        added: Tensor | None = None,
        symmetric: bool,
        **scale: float,
    ) -> tuple[Tensor, Tensor, Callable[[], SparseInfo]]:
        """As ``addmm`` with ``drop=math.inf``; ``scale`` is its alpha and beta. A collective call.

        Of a symmetric product a rank computes the blocks of its rows on and above the diagonal, and
        gets the others of its rows from their mirror images on the ranks before it.

        Returns:
            The product, its norm map, and what counts what was left out.
        """
        left, right = read(a, "a", "mm"), read(b, "b", "mm")
        input = None if added is None else read(added, "input", "addmm")
        map_a, map_b = (read_map(x, "norms", "mm") for x in maps)
        tau = found_tau(map_a, map_b, None, max_error * (1.0 - TO_DROP))
        of_rows = left._replace(values=map_a.values[self._slice(map_a)])
        stored_b = map_b.crow[list(self.at)].diff().tolist()
        operands = ((of_rows, map_b), (left, right), stored_b)
        options: dict[str, Any] = {"added": input, "symmetric": symmetric, **scale}
        plan, values, norms = _multiplied("purify", self.axis, *operands, tau, **options)
        whole, place, stored = self._whole(Blocks(plan.crow, plan.col, norms, right.columns))
        plan, alpha = plan._replace(norm_a=map_a, norm_b=map_b), scale.get("alpha", 1)
        kept, numbers, drop_bound = dropped(plan, whole, math.inf, max_error, alpha)
        needed, order = place[numbers[self._slice(kept)]].sort()
        blocks = _fetched(needed, values, stored, self.axis)[order.argsort()]
        own = self._slice(kept)
        crow = kept.crow.clamp(own.start, own.stop) - own.start
        c = Blocks(crow, kept.col[own], blocks, right.columns)
        of = (map_a, map_b, tau, alpha, drop_bound, left.edge)
        return c.matrix(), kept.matrix(), partial(info_of, *of)

    def _slice(self, of: Blocks) -> slice:
        """This rank's blocks among those of all."""
        begin, end = (int(of.crow[at]) for at in self._own)
        return slice(begin, end)

    def _whole(self, own: Blocks) -> tuple[Blocks, Tensor, list[int]]:
        """The norm map of all ranks' blocks, in the order of rows.

        Also the place of each among those of the first rank, the second and so on, and the number
        of each rank's.
        """
        keys, norms = own.row_of() * own.columns + own.col, own.values
        number = torch.tensor([[len(keys)]])
        stored = self.axis.gather(number, [1] * self.axis.size).flatten().tolist()
        keys, norms = (self.axis.gather(x[:, None], stored)[:, 0] for x in (keys, norms))
        keys, place = keys.sort()
        return blocks_at(keys, norms[place], own.rows, own.columns, torch.int64), place, stored
