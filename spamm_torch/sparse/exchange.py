"""Stored blocks of B that travel between ranks in a product of block-sparse shards."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from .blocks import Blocks
from .maps import make_plan


def exchange(
    a: Blocks, b: Blocks, tau: Tensor, cuts: list[int], owners: list[int]
) -> tuple[Tensor, Tensor, Tensor, list[float]]:
    """Which stored blocks of B each rank needs, and how many travel.

    Rank p computes the block rows cuts[p] to cuts[p + 1] of A, and owns the block rows owners[p] to
    owners[p + 1] of B.

    Returns:
        bool (ranks, stored blocks of B); int64 [source, destination], the number of blocks that
        travel, and that would without skipping; and each rank's valid products. All on the CPU.
    """
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
    everything = columns[:, b.row_of()]
    moved, all_moved = (_moved(of.cpu(), ends) for of in (need, everything))
    work = torch.bincount(of_product, minlength=ranks).tolist()
    return need.cpu(), moved, all_moved, [float(of) for of in work]


def _moved(need: Tensor, ends: list[int]) -> Tensor:
    """[source, destination]: the number of needed blocks that others own."""
    parts = [need[:, begin:end].sum(1) for begin, end in pairwise(ends)]
    return torch.stack(parts).fill_diagonal_(0)
