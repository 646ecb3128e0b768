"""Products of block-sparse matrices over ranks: each holds some block rows of A and of B.

Patterns and norms of all of B travel first; then only those blocks of B that a rank's valid
products need. Blocks have the bits of one process, because each rank decides from the same norms.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from .._arguments import as_knobs, held_tau
from .._axis import Axis
from .._call import Call, agree
from .._rank_product import Settings
from .blocks import Blocks, check_block_of, check_pair, index_dtype, read
from .maps import found_tau, make_plan

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
    plan = _together(
        axis,
        lambda: make_plan("distributed.mm", map_a, map_b, None, tau, False, left.block_bytes()),
    )
    needed, slots_b = plan.slots_b.long().unique(return_inverse=True)
    values_b = _fetched(needed, right.values, stored, axis)
    lists = (plan.crow, plan.col, plan.first, plan.slots_a, slots_b.int())
    values, _ = _ops.bsr_multiply(*lists, *left[:3], values_b)
    index = index_dtype(left, right)
    return Blocks(plan.crow.to(index), plan.col.to(index), values, right.columns).matrix()


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
