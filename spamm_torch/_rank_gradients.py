"""Dense gradients of a product over ranks in a line, by collective calls over the same shards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ._axis import Cut
from ._rank_product import Layout, Settings, multiply

Gradients = tuple[Tensor | None, ...]


class Product(torch.autograd.Function):
    """The product with skipping; its gradients are those without, cut as the operands are.

    The backward pass is a collective call, too. It holds the shard of B of one other rank at a
    time, and the next one on its way.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, layout: Layout, settings: Settings) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.depth = layout.depth_b
        return multiply(a, b, layout, settings)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        a, b = ctx.saved_tensors
        needs_a, needs_b, *_ = ctx.needs_input_grad
        return (
            _Third.apply(None, b, grad, ctx.depth) if needs_a else None,
            _Third.apply(a, None, grad, ctx.depth) if needs_b else None,
            None,
            None,
        )


class _Third(torch.autograd.Function):
    """The one of three matrices that is None, from the shards of the others, without skipping.

    It is C = A @ B, A = C @ B.T or B = A.T @ C. The gradients of each are the others, so that
    gradients can be differentiated again.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor | None, b: Tensor | None, c: Tensor | None, depth: Cut) -> Any:
        ctx.save_for_backward(a, b, c)
        ctx.depth = depth
        if a is not None and b is not None:
            return _find_c(a, b, depth)
        return _find_a(b, c, depth) if a is None else _find_b(a, c, depth)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        matrices = [grad if x is None else x for x in ctx.saved_tensors]
        grads: list[Tensor | None] = [None] * 4
        for i, needed in enumerate(ctx.needs_input_grad[:3]):
            if needed:
                grads[i] = _Third.apply(*matrices[:i], None, *matrices[i + 1 :], ctx.depth)
        return tuple(grads)


def _find_c(a: Tensor, b: Tensor, depth: Cut) -> Tensor:
    c = a.new_zeros(a.shape[0], b.shape[1])
    for k, shard in _shards(b, depth):
        c.addmm_(a[:, k], shard)
    return c


def _find_a(b: Any, c: Any, depth: Cut) -> Tensor:
    a: Tensor = c.new_empty(c.shape[0], depth.length)
    for k, shard in _shards(b, depth):
        a[:, k] = c @ shard.t()
    return a


def _find_b(a: Tensor, c: Any, depth: Cut) -> Tensor:
    """This rank's rows; each rank sums up what all ranks' rows of A and C contribute to its own."""
    for rank in range(depth.axis.size):
        part = a[:, depth.of(rank)].t() @ c
        dist.reduce(part, group_dst=rank, group=depth.axis.group)
        if rank == depth.axis.rank:
            b = part
    return b


def _shards(own: Tensor, cut: Cut) -> Iterator[tuple[slice, Tensor]]:
    """Every rank's shard of a matrix and where it lies, while the next rank's shard travels."""

    def start(rank: int) -> tuple[slice, Tensor, dist.Work]:
        mine = rank == cut.axis.rank
        shard = own.contiguous() if mine else own.new_empty(cut.lengths[rank], own.shape[1])
        work = dist.broadcast(shard, group_src=rank, group=cut.axis.group, async_op=True)
        return cut.of(rank), shard, work

    started = map(start, range(cut.axis.size))
    following = next(started, None)
    while following is not None:
        (where, shard, work), following = following, next(started, None)
        work.wait()
        yield where, shard
