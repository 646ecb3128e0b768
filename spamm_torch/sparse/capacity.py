"""Plans of a stated capacity, of which no step waits for the device: a CUDA graph may hold them."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .blocks import Blocks


def check_capacity(capacity: Any, most: int) -> None:
    if not isinstance(capacity, tuple) or [type(x) for x in capacity] != [int, int]:
        raise TypeError(f"capacity must be two integers, (blocks, products); got {capacity!r}")
    if not 1 <= capacity[0] <= most or capacity[1] < 1:
        raise ValueError(
            f"capacity must be 1 to {most} blocks and 1 product or more; got {capacity}"
        )


def lists_of(a: Blocks, b: Blocks, tau: Tensor, blocks: int, products: int) -> tuple[Tensor, ...]:
    """As the op ``bsr_plan``, with room for so many blocks and products of stored blocks; blocks of
    zeros fill what the result leaves. The last tensor is what there was no room for: blocks, and
    products.
    """
    none = a.rows * b.columns  # a key behind all
    counts = b.crow.long().diff()[a.col.long()]  # the products of each block of A
    ends, place = counts.cumsum(0), torch.arange(products, device=a.col.device)
    slot_a = torch.searchsorted(ends, place, right=True)
    row, col_a, norm_a, before = (
        pad(x, (0, 1)) for x in (a.row_of(), a.col, a.values, ends - counts)
    )
    slot_b = (b.crow.long()[col_a[slot_a].long()] + place - before[slot_a]).clamp(0, len(b.col))
    col_b, norm_b = (pad(x, (0, 1))[slot_b] for x in (b.col, b.values))
    total = counts.sum()
    valid = (place < total) & ~(norm_a[slot_a] * norm_b < tau.to(norm_b.dtype))
    key, order = torch.where(valid, row[slot_a] * b.columns + col_b, none).sort(stable=True)
    starts = (pad(key, (1, 0), value=-1).diff() > 0) & (key < none)
    number = starts.cumsum(0)  # of the block, from 1
    count = number[-1]

    def put(into: Tensor, at: Tensor, keys: Tensor, where: Tensor) -> Tensor:
        at = torch.where(where & (at < blocks), at, blocks)
        return pad(into, (0, 1)).scatter(0, at, keys)[:blocks]

    pattern = put(torch.full((blocks,), none, device=key.device), number - 1, key, starts)
    free = torch.arange(min(2 * blocks, none), device=key.device)
    is_free = pattern[torch.searchsorted(pattern, free).clamp(max=blocks - 1)] != free
    pattern = put(pattern, count + is_free.cumsum(0) - 1, free, is_free).sort().values
    crow = torch.searchsorted(pattern, torch.arange(a.rows + 1, device=key.device) * b.columns)
    last = torch.searchsorted(key, pattern[-1:], right=True)
    first = torch.cat((torch.searchsorted(key, pattern), last))
    slots = [x[order].int() for x in (slot_a, slot_b)]
    if not key.is_cuda:
        slots = [x[: int(last)] for x in slots]
    excess = torch.stack((count - blocks, total - products)).clamp(min=0)
    return crow, pattern % b.columns, first, *slots, excess
