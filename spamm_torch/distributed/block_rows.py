"""Products of block-sparse matrices over ranks: each holds some block rows of A and of B.

:func:`multiply` is one product of shards. :class:`Rows` are for many products of square matrices.

Patterns and norms of all of B travel first; then only those blocks of B that a rank's valid
products need. Blocks have the bits of one process, because each rank decides from the same norms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from .._arguments import as_knobs
from ..sparse.blocks import Blocks, check_block_of, check_pair, index_dtype, read, read_map
from ..sparse.maps import BELOW, TO_DROP, Plan, dropped, find_tau, make_plan
from ..sparse.matrices import blocks_at, identity
from ..sparse.products import SparseInfo, info_of
from ..sparse.strips import Strips
from .axis import Axis
from .call import Call, agree, check_served
from .rank_product import Settings

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
        stored = len(left.col), len(right.col)
        return Call(a, b, Settings.of(knobs, (left.edge,) * 3, False), "sparse_bsr", stored)

    norms: list[Blocks] = []

    def find_norms() -> None:
        norms.extend(read(x, "a", "").with_norms() for x in ((a,) if b is a else (a, b)))

    call, sizes = agree([axis], read_call, find_norms)
    rows_a, rows_b, stored_a, stored = zip(*sizes, strict=True)
    if (k := sum(rows_b)) != a.shape[1]:
        raise RuntimeError(
            f"the rows of b on all ranks must add up to the columns of a, {a.shape[1]}; got {k}"
        )
    left, right = read(a, "a", "distributed.mm"), read(b, "b", "distributed.mm")
    of_a, of_b = (Rows.of(axis, each, left.edge) for each in (rows_a, rows_b))
    left, right = of_a.whole_rows(left), of_b.whole_rows(right)
    map_a = of_a.whole_rows(norms[0])
    map_b = of_b.gathered(of_b.whole_rows(norms[-1]), stored)
    tau = call.settings.knobs["tau"]
    if tau is None:
        whole_a = of_a.gathered(map_a, stored_a)
        searched = (call.settings.knobs[name] for name in ("valid_ratio", "max_error"))
        tau = find_tau(whole_a, map_b, *searched)
    maps = map_a, map_b
    plan, values, _ = _product("distributed.mm", axis, maps, (left, right), stored, tau)
    index = index_dtype(left, right)
    c = Blocks(plan.crow.to(index), plan.col.to(index), values, right.columns)
    return of_a.own_rows(c).matrix()


def _product(
    function: str,
    axis: Axis,
    maps: tuple[Blocks, Blocks],
    operands: tuple[Blocks, Blocks],
    stored: Sequence[int],
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
    needs, problem = right.col[:0], None
    counts: tuple[Tensor, ...] = ()
    first, total, own = sum(stored[: axis.rank]), sum(stored), stored[axis.rank]
    elsewhere = right.col.new_ones(total, dtype=torch.uint8)
    elsewhere[first : first + own] = 0
    try:
        plan = make_plan(function, *maps, *planned, may_lack_lists=drops)
        state, needs = int(not plan.has_lists), plan.slots_b
    except torch.OutOfMemoryError as error:
        state, problem = 2, error
    if state == 0 and added is None and not symmetric:
        # Most blocks of the result need none that arrive. They are computed where their operands
        # lie, the others, the far ones, from copies. The host need not know yet how many there are.
        arrives, lengths = elsewhere.index_select(0, plan.slots_b), plan.first.diff()
        is_near = pad(arrives.cumsum(0), (1, 0))[plan.first].diff() == 0
        is_near &= is_near.sum() > (1 - _MOST_FAR) * plan.blocks
        of_near = is_near.repeat_interleave(lengths, output_size=plan.products)
        needs = torch.where(of_near, total, plan.slots_b)
        used = _marks(torch.where(of_near, len(left.col), plan.slots_a), len(left.col))
        near = of_near.nonzero_static(size=plan.products)[:, 0]
        # Kernels merge the lists of neighbours, so those of far blocks must be empty.
        near_first, places_a = (pad(x.cumsum(0), (1, 0)) for x in (lengths * is_near, used))
        counts = is_near.sum(0, keepdim=True), near_first[-1:], places_a[-1:]
        near = near_first, plan.slots_a[near], plan.slots_b[near] - first
    asked = _Asked(needs, stored, axis, state, counts)
    if 2 in asked.states:
        text = f"the rows of rank {asked.states.index(2)} do not fit in its memory"
        raise problem or torch.OutOfMemoryError(text)
    if any(asked.states):
        strips = Strips(function, plan, left, maps[1], added, **scale)
        numbers, blocks = _Asked(strips.needed(), stored, axis).fetch(right.values)()
        strips.take(maps[1].only(numbers)._replace(values=blocks), numbers)
        return plan, strips, strips.norms().values
    fetched, part, of_a = asked.fetch(right.values), plan, left
    options: dict[str, Any] = {"added": added, "norms": drops, **scale}
    near_blocks, products, rows = asked.counts or (0, 0, 0)
    if near_blocks:
        lists = near[0], *(x[:products] for x in near[1:])
        found = Plan(*plan[:7], *lists).multiply(left, right, **options)
        far = (~is_near).nonzero_static(size=plan.blocks - near_blocks)[:, 0]
        part = plan.only(far, plan.products - products)
        if left.values.dtype == torch.float32:  # kernels would split all of A again
            part = part._replace(slots_a=places_a[part.slots_a].int())
            of_a = left.only(used.nonzero_static(size=rows)[:, 0])
    part = part._replace(slots_b=asked.places[part.slots_b].int())
    needed, copies = fetched()
    of_part = part.multiply(of_a, maps[1].only(needed)._replace(values=copies), **options)
    if not near_blocks:
        return plan, *of_part
    for x, of_far in zip(found, of_part, strict=True):
        x[far[: len(x)]] = of_far  # norms are none where nobody wants them
    return plan, *found


def _marks(numbers: Tensor, size: int) -> Tensor:
    """1 at each of the numbers, 0 elsewhere. A number of ``size`` is left out."""
    return numbers.new_zeros(size + 1, dtype=torch.uint8).index_fill_(0, numbers.long(), 1)[:size]


class _Asked:
    """Blocks that ranks ask each other for. ``needs``: those that this one needs, by their numbers
    among those of all ranks; a number behind all of these counts for nothing.

    A collective call. The host waits once, for all that it has to know: also the ``states`` of
    ranks, and ``counts`` of this one. ``places`` are those of needed blocks among these.
    """

    def __init__(
        self, needs: Tensor, stored: Sequence[int], axis: Axis, state: int = 0, counts: Any = ()
    ) -> None:
        self._marks = marks = _marks(needs, sum(stored))
        self._axis, self._first, size = axis, sum(stored[: axis.rank]), axis.size
        said = marks.new_full((1,), state)
        sent = torch.cat([x for part in marks.split([*stored]) for x in (said, part)])
        asked = marks.new_empty(size * (1 + stored[axis.rank]))
        lengths = [len(asked) // size] * size, [1 + n for n in stored]
        dist.all_to_all_single(asked, sent, *lengths, group=axis.group)
        states, self._asked = asked.view(size, -1).split((1, stored[axis.rank]), 1)
        self._asked[axis.rank] = 0  # stays where it is
        self.places = pad(marks.cumsum(0), (1, 0))
        ends = [self.places[at : at + 1] for at in accumulate(stored, initial=0)]
        found = torch.cat((states.sum(1), self._asked.sum(1), *ends, *counts)).tolist()
        self.states, self._leave, ends = found[:size], found[size : 2 * size], found[2 * size :]
        self._arrive = [end - begin for begin, end in pairwise(ends[: size + 1])]
        self.counts = ends[size + 1 :]

    def fetch(
        self, own: Tensor, order: Tensor | None = None
    ) -> Callable[[], tuple[Tensor, Tensor]]:
        """Has blocks travel, and returns what waits for them: their numbers, ascending, and they.

        ``order``: the place in the result of each; None: they stay in order. This rank's own blocks
        are copied once.
        """
        arrive, rank = [*self._arrive], self._axis.rank
        begin, end = sum(arrive[:rank]), sum(arrive[: rank + 1])
        arrive[rank] = 0
        leaving = own[self._asked.nonzero_static(size=sum(self._leave))[:, 1]]
        arrived = own.new_empty(sum(arrive), *own.shape[1:])
        how: Any = {"group": self._axis.group, "async_op": True}
        work = dist.all_to_all_single(arrived, leaving, arrive, self._leave, **how)

        def fetched() -> tuple[Tensor, Tensor]:
            needed = self._marks.nonzero_static(size=sum(self._arrive))[:, 0]
            blocks, kept = own.new_empty(len(needed), *own.shape[1:]), needed[begin:end]
            kept = kept - self._first
            work.wait()
            if order is None:
                blocks[:begin], blocks[end:] = arrived[:begin], arrived[begin:]
                torch.index_select(own, 0, kept, out=blocks[begin:end])
                return needed, blocks
            blocks[torch.cat((order[:begin], order[end:]))] = arrived
            places = order[begin:end].split(_AT_ONCE)
            for place, numbers in zip(places, kept.split(_AT_ONCE), strict=True):
                blocks[place] = own[numbers]
            return needed, blocks

        return fetched


@dataclass(frozen=True)
class Rows:
    """The block rows of square matrices that a rank holds: ``at[rank]`` to ``at[rank + 1]``.

    Inside, a matrix has all rows on every rank and stores blocks in the rank's own rows alone: so
    kernels choose as they do in one process. Its norm map is that of the whole matrix, on every
    rank: so all ranks decide alike.
    """

    axis: Axis
    at: tuple[int, ...]

    @classmethod
    def of(cls, axis: Axis, rows: Iterable[int], edge: int) -> Rows:
        """The rows of shards with so many rows."""
        return cls(axis, tuple(accumulate((own // edge for own in rows), initial=0)))

    @classmethod
    def agreed(
        cls, function: str, a: Tensor, axis: Axis, alike: dict[str, Any], check: Callable[[], Any]
    ) -> Rows:
        """The rows of shards; all ranks raise what ``check`` does on one, and unequal ``alike``."""

        def read_call(backends: str) -> Call:
            blocks = read(a, "a", function)
            check_served(a, backends)
            check()
            text = ", ".join(f"{name}={x}" for name, x in alike.items())
            settings = Settings(as_knobs(0.0, None, None), (blocks.edge,) * 3, False, text)
            return Call(a, a, settings, "sparse_bsr")

        _, sizes = agree([axis], read_call)
        if (total := sum(own for own, *_ in sizes)) != a.shape[1]:
            raise RuntimeError(
                f"the rows of all ranks must add up to the columns, {a.shape[1]}; got {total}"
            )
        return cls.of(axis, (own for own, *_ in sizes), read(a, "a", function).edge)

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
        return self.gathered(read(a, "a", "norm_map").with_norms()).matrix()

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
        plan, made, norms = _product("purify", self.axis, *operands, tau, drops=True, **options)
        of_rank = Blocks(plan.crow, plan.col, norms, right.columns)
        whole, place, stored = self._merge(of_rank)
        plan, alpha = plan._replace(norm_a=map_a, norm_b=map_b), scale.get("alpha", 1)
        kept, numbers, drop_bound, _ = dropped(plan, whole, math.inf, max_error, alpha)
        place = place[numbers]
        needed, order = place[self._slice(kept)].sort()
        if isinstance(made, Strips):  # makes those that stay, and counts them alone
            marks = _marks(place, sum(stored))
            stay = marks.split(stored)
            made = made.values(of_rank.only(stay[self.axis.rank].nonzero()[:, 0]))
            needed, stored = (marks.cumsum(0) - 1)[needed], [int(each.sum()) for each in stay]
        blocks = _Asked(needed, stored, self.axis).fetch(made, order)()[1]
        c = kept.of_rows(*self._own)._replace(values=blocks)
        counted = partial(info_of, (map_a, map_b), tau, drop_bound, left.edge, alpha)
        return c.matrix(), kept.matrix(), counted

    def _slice(self, of: Blocks) -> slice:
        """This rank's blocks among those of all."""
        begin, end = (int(of.crow[at]) for at in self._own)
        return slice(begin, end)

    def gathered(self, own: Blocks, stored: Sequence[int] = ()) -> Blocks:
        """All ranks' rows of a matrix or of its norm map. Waits for each rank's number of blocks if
        it is not given.
        """
        stored = stored or self.axis.gather_number(len(own.col), own.col.device)
        counts = own.crow[self._own[0] : self._own[1] + 1].diff()
        lengths = [*zip((y - x for x, y in pairwise(self.at)), stored, strict=True)]
        pattern = torch.cat((counts, own.col)).long()[:, None]
        parts = self.axis.gather(pattern, [*map(sum, lengths)])[:, 0].split([*chain(*lengths)])
        crow = pad(torch.cat(parts[::2]).cumsum(0), (1, 0))
        values = self.axis.gather(own.values[..., None].flatten(1), stored)
        values = values.view(-1, *own.values.shape[1:])
        return Blocks(crow, torch.cat(parts[1::2]), values, own.columns)

    def _merge(self, own: Blocks) -> tuple[Blocks, Tensor, list[int]]:
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
