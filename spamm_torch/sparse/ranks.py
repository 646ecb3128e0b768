"""Products of block-sparse matrices over ranks: each holds some block rows of A and of B.

:func:`multiply` is one product of shards. :class:`Rows` are for many products of square matrices.

Patterns and norms of all of B travel first; then only those blocks of B that a rank's valid
products need. Blocks have the bits of one process, because each rank decides from the same norms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from .._arguments import as_knobs
from .._axis import Axis
from .._call import Call, agree, check_served
from .._rank_product import Settings
from .._rounding import BELOW
from .blocks import Blocks, check_block_of, check_pair, index_dtype, read, read_map
from .maps import TO_DROP, Plan, dropped, find_tau, make_plan
from .matrices import blocks_at, identity
from .products import Recipe, SparseInfo, info_of
from .strips import Strips

_AT_ONCE = 4096  # blocks that are copied by way of other memory
_MOST_FAR = 0.25  # of a result's blocks, where it pays to compute these twice


def multiply(a: Any, b: Any, axis: Axis, knobs: dict[str, Any], block: Any, balance: Any) -> Tensor:
    """:func:`spamm_torch.distributed.mm` of block-sparse shards. A collective call."""

    def read_call(backends: str) -> Call:
        left, right = read(a, "a", "distributed.mm"), read(b, "b", "distributed.mm")
        check_pair(left, right)
        check_block_of(block, left.edge)
        check_served(a, backends)
        if balance:
            raise ValueError("balance is for dense shards; got sparse_bsr ones with balance=True")
        return Call(a, b, Settings.of(knobs, (left.edge,) * 3, False), "sparse_bsr")

    call, rows = agree([axis], read_call)
    if (k := sum(rows_b for _, rows_b in rows)) != a.shape[1]:
        raise RuntimeError(
            f"the rows of b on all ranks must add up to the columns of a, {a.shape[1]}; got {k}"
        )
    left, right = read(a, "a", "distributed.mm"), read(b, "b", "distributed.mm")
    of_a, of_b = (Rows.of(axis, each, left.edge) for each in zip(*rows, strict=True))
    left = of_a.whole_rows(left)
    map_a = left.with_norms()
    of_own_b = map_a if b is a else of_b.whole_rows(right).with_norms()
    map_b, stored = of_b.gathered(of_own_b)
    tau = call.settings.knobs["tau"]
    if tau is None:
        whole_a, _ = of_a.gathered(map_a)
        searched = (call.settings.knobs[name] for name in ("valid_ratio", "max_error"))
        tau = find_tau(whole_a, map_b, *searched)
    maps = map_a, map_b
    plan, values, _ = _multiplied("distributed.mm", axis, maps, (left, right), stored, tau)
    index = index_dtype(left, right)
    c = Blocks(plan.crow.to(index), plan.col.to(index), values, right.columns)
    return of_a.own_rows(c).matrix()


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
    drops: bool = False,
    **scale: float,
) -> tuple[Plan, Tensor | Strips, Tensor]:
    """The plan of this rank's products, and its blocks of the result and, if it drops, their norms.

    ``maps`` are of its rows of A and of all of B, ``stored`` is the number of each rank's blocks.
    Where blocks of a rank that drops do not fit in memory, those of all are yet to be made.
    """
    left, right = operands
    planned: tuple[Any, ...] = (added, tau, symmetric, left.block_bytes() * (2 if drops else 1))
    plan, fits = _planned(
        axis, lambda: make_plan(function, *maps, *planned, may_lack_lists=drops), left
    )
    if not fits:
        strips = Strips(function, plan, left, maps[1], added, **scale)
        numbers = strips.needed()
        blocks = _ask(numbers, right.values, stored, axis)()
        strips.take(maps[1].only(numbers)._replace(values=blocks), numbers)
        return plan, strips, strips.norms().values
    first, lengths = sum(stored[: axis.rank]), plan.first.diff()
    arrives = (plan.slots_b < first) | (plan.slots_b >= first + len(right.col))
    is_far = pad(arrives.cumsum(0), (1, 0))[plan.first].diff() > 0
    far = is_far.nonzero()[:, 0]
    # Most blocks of the result need none that arrive. They are computed where their operands lie,
    # the others from copies.
    apart = added is None and not symmetric and len(right.col) > 0
    apart = apart and len(far) < _MOST_FAR * plan.blocks
    part, of_a = (plan.only(far) if apart else plan), left
    needed, slots_b = part.slots_b.long().unique(return_inverse=True)
    part = part._replace(slots_b=slots_b.int())
    if apart and left.values.dtype == torch.float32:  # kernels would split all of A again
        used, slots_a = part.slots_a.long().unique(return_inverse=True)
        part, of_a = part._replace(slots_a=slots_a.int()), left.only(used)
    fetched = _ask(needed, right.values, stored, axis)
    options: dict[str, Any] = {"added": added, "norms": drops, **scale}
    if apart:
        # Kernels merge the lists of neighbours, so those of far blocks must be empty.
        stays = (~is_far).repeat_interleave(lengths).nonzero()[:, 0]
        near = plan._replace(
            first=pad((lengths * ~is_far).cumsum(0), (1, 0)),
            slots_a=plan.slots_a[stays],
            slots_b=plan.slots_b[stays] - first,
        )
        found = near.multiply(left, right, **options)
    of_part = part.multiply(of_a, maps[1].only(needed)._replace(values=fetched()), **options)
    if not apart:
        return plan, *of_part
    for x, of_far in zip(found, of_part, strict=True):
        x[far[: len(x)]] = of_far  # norms are none where nobody wants them
    return plan, *found


def _planned(axis: Axis, make: Callable[[], Plan], own: Blocks) -> tuple[Plan, bool]:
    """A plan, and whether those of all ranks have lists; an error on all where one does not fit."""
    problem = None
    try:
        plan = make()
    except torch.OutOfMemoryError as error:
        problem = error
    state = 2 if problem is not None else int(not plan.has_lists)
    states = axis.gather_number(state, own.col.device)
    if problem is not None:
        raise problem
    if 2 in states:
        raise torch.OutOfMemoryError(f"the rows of rank {states.index(2)} do not fit in its memory")
    return plan, not any(states)


def _ask(
    needed: Tensor, own: Tensor, stored: list[int], axis: Axis, order: Tensor | None = None
) -> Callable[[], Tensor]:
    """Has blocks travel from the ranks that own them, and returns what waits for them.

    ``needed`` are their numbers among those of all, ascending. ``order``: the place in the result
    of each; None: they stay in order. This rank's own blocks are copied once.
    """
    firsts = torch.tensor([0, *accumulate(stored)], device=needed.device)
    wanted = torch.searchsorted(needed, firsts).diff()
    counts = axis.gather(wanted[None], [1] * axis.size).tolist()
    arrive, leave = counts[axis.rank].copy(), [of[axis.rank] for of in counts]
    begin = sum(arrive[: axis.rank])
    end = begin + arrive[axis.rank]
    arrive[axis.rank] = leave[axis.rank] = 0
    asked, first = torch.cat((needed[:begin], needed[end:])), sum(stored[: axis.rank])
    numbers = needed.new_empty(sum(leave))
    dist.all_to_all_single(numbers, asked, leave, arrive, group=axis.group)
    arrived = own.new_empty(len(asked), *own.shape[1:])
    leaving, group = own[numbers - first], axis.group
    work = dist.all_to_all_single(arrived, leaving, arrive, leave, group=group, async_op=True)

    def fetched() -> Tensor:
        work.wait()
        blocks, kept = own.new_empty(len(needed), *own.shape[1:]), needed[begin:end] - first
        if order is None:
            blocks[:begin], blocks[end:] = arrived[:begin], arrived[begin:]
            torch.index_select(own, 0, kept, out=blocks[begin:end])
            return blocks
        blocks[torch.cat((order[:begin], order[end:]))] = arrived
        places = order[begin:end].split(_AT_ONCE)
        for place, numbers in zip(places, kept.split(_AT_ONCE), strict=True):
            blocks[place] = own[numbers]
        return blocks

    return fetched


# ---- Many products of square matrices -----------------------------------------------------------


@dataclass(frozen=True)
class Rows:
    """Which block rows of square matrices a rank holds: ``at[rank]`` to ``at[rank + 1]``.

    Inside, a matrix has all rows on every rank and stores blocks in the rank's own rows alone: so
    kernels choose as they do in one process. Its norm map is that of the whole matrix, on every
    rank: so all ranks decide alike.
    """

    axis: Axis
    at: tuple[int, ...]

    @classmethod
    def of(cls, axis: Axis, rows: Iterable[int], edge: int) -> Rows:
        """Of shards with so many rows."""
        return cls(axis, tuple(accumulate((own // edge for own in rows), initial=0)))

    @classmethod
    def agreed(
        cls, function: str, a: Tensor, axis: Axis, alike: dict[str, Any], check: Callable[[], Any]
    ) -> Rows:
        """Of shards; all ranks raise what ``check`` does on one, and where ``alike`` differ."""

        def read_call(backends: str) -> Call:
            blocks = read(a, "a", function)
            check_served(a, backends)
            check()
            text = ", ".join(f"{name}={x}" for name, x in alike.items())
            settings = Settings(as_knobs(0.0, None, None), (blocks.edge,) * 3, False, text)
            return Call(a, a, settings, "sparse_bsr")

        _, rows = agree([axis], read_call)
        if (total := sum(own for own, _ in rows)) != a.shape[1]:
            raise RuntimeError(
                f"the rows of all ranks must add up to the columns, {a.shape[1]}; got {total}"
            )
        return cls.of(axis, (own for own, _ in rows), read(a, "a", function).edge)

    @property
    def _own(self) -> tuple[int, int]:
        return self.at[self.axis.rank], self.at[self.axis.rank + 1]

    def whole_rows(self, own: Blocks) -> Blocks:
        """This rank's block rows as a matrix of all rows."""
        before, after = self._own[0], self.at[-1] - self._own[1]
        first, last = own.crow[:1], own.crow[-1:]
        return own._replace(crow=torch.cat((first.expand(before), own.crow, last.expand(after))))

    def own_rows(self, of: Blocks) -> Blocks:
        """This rank's block rows of such a matrix."""
        begin, end = self._own
        return of._replace(crow=of.crow[begin : end + 1].clone())

    def identity(self, size: int, like: Tensor) -> Tensor:
        one = read(identity(size, like=like), "a", "identity")
        return one.of_rows(*self._own).matrix()

    def norms(self, a: Tensor) -> Tensor:
        """The norm map of the whole."""
        return self.gathered(read(a, "a", "norm_map").with_norms())[0].matrix()

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
        tau = find_tau(map_a, map_b, None, max_error * (1.0 - TO_DROP))
        tau = tau * BELOW[tau.dtype] if symmetric else tau
        of_rows = left._replace(values=map_a.values[self._slice(map_a)])
        stored_b = map_b.crow[list(self.at)].diff().tolist()
        operands = ((of_rows, map_b), (left, right), stored_b)
        options: dict[str, Any] = {"added": input, "symmetric": symmetric, **scale}
        plan, made, norms = _multiplied("purify", self.axis, *operands, tau, drops=True, **options)
        of_rank = Blocks(plan.crow, plan.col, norms, right.columns)
        whole, place, stored = self._merged(of_rank)
        plan, alpha = plan._replace(norm_a=map_a, norm_b=map_b), scale.get("alpha", 1)
        kept, numbers, drop_bound, _ = dropped(plan, whole, math.inf, max_error, alpha)
        place = place[numbers]
        needed, order = place[self._slice(kept)].sort()
        if isinstance(made, Strips):  # makes those that stay, and counts them alone
            ends = torch.tensor([0, *accumulate(stored)], device=place.device)
            place = place.sort().values
            at = torch.searchsorted(place, ends).tolist()
            own = place[at[self.axis.rank] : at[self.axis.rank + 1]]
            made = made.values(of_rank.only(own - ends[self.axis.rank]))
            needed = torch.searchsorted(place, needed)
            stored = [end - begin for begin, end in pairwise(at)]
        blocks = _ask(needed, made, stored, self.axis, order)()
        c = kept.of_rows(*self._own)._replace(values=blocks)
        if input is not None and added is not a and added is not b:  # its bound is of all rows
            input = self.gathered(input.with_norms())[0]
        of = ((a, b, added), (left, right, input), (map_a, map_b), (alpha, scale.get("beta", 1)))
        recipe = Recipe.of(*of, symmetric)
        counted = (map_a, map_b, tau, drop_bound, kept.values, recipe)
        return c.matrix(), kept.matrix(), partial(info_of, *counted)

    def _slice(self, of: Blocks) -> slice:
        """This rank's blocks among those of all."""
        begin, end = (int(of.crow[at]) for at in self._own)
        return slice(begin, end)

    def gathered(self, own: Blocks) -> tuple[Blocks, list[int]]:
        """The norm map of all ranks' rows; each rank's number of blocks. Waits for the device."""
        rows = [end - begin for begin, end in pairwise(self.at)]
        counts = own.crow[slice(self._own[0], self._own[1] + 1)].long().diff()
        crow = pad(self.axis.gather(counts[:, None], rows)[:, 0].cumsum(0), (1, 0))
        stored = crow[list(self.at)].diff().tolist()
        own = own._replace(col=own.col.long())
        col, norms = (self.axis.gather(x[:, None], stored)[:, 0] for x in own[1:3])
        return Blocks(crow, col, norms, own.columns), stored

    def _merged(self, own: Blocks) -> tuple[Blocks, Tensor, list[int]]:
        """The norm map of all ranks' blocks, in whatever rows, in the order of rows.

        Also the place of each among those of the first rank, the second and so on, and the number
        of each rank's.
        """
        keys, norms = own.row_of() * own.columns + own.col, own.values
        stored = self.axis.gather_number(len(keys), keys.device)
        keys, norms = (self.axis.gather(x[:, None], stored)[:, 0] for x in (keys, norms))
        keys, place = keys.sort()
        whole = blocks_at(keys, norms[place], self.at[-1], own.columns, torch.int64)
        return whole, place, stored
