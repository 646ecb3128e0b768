"""Products over several processes: ranks of ``torch.distributed``, on CPUs and on GPUs.

Every rank holds some rows of A and some rows of B, and gets its rows of C. Norm maps travel first;
then only those blocks of B travel that a rank's valid products need. Results have the bits of
:func:`spamm_torch.mm` in one process, wherever the rows are cut, if the devices are of one model.
How to start, and what happens where a rank fails: docs/scaling.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch.distributed as dist
from torch import Tensor

from .. import functional
from .._arguments import check_bool, holds_dtensor
from ..sparse.blocks import is_sparse
from . import block_rows
from .axis import Axis, Cut
from .call import Call, agree, read_call
from .plan import ExchangePlan, exchange_plan
from .rank_product import Layout, Product, multiply

__all__ = ["ExchangePlan", "exchange_plan", "mm"]


def mm(
    a: Tensor,
    b: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    tau: float | Tensor | None = None,
    valid_ratio: float | None = None,
    max_error: float | None = None,
    block: int | Sequence[int] = 64,
    balance: bool = False,
) -> Tensor:
    """:func:`spamm_torch.mm` of A (M, K) and B (K, N), whose rows lie on the ranks of a group.

    A collective call: all ranks make it, with the same knob and block, and differentiate together.
    Method: as of :func:`mm_shards`.

    Args:
        a: this rank's rows of A (rows, K), in the order of ranks: any number of them, none too.
            float16, bfloat16, float32 or float64, on a device that the group's backends serve. Or a
            DTensor of any placements. Or ``torch.sparse_bsr``, as ``b`` and the result are then:
            block rows, with the columns of the whole, without ``balance`` and gradients.
        b: this rank's rows of B (rows, N); the rows of all ranks together are K. Or a DTensor on
            the mesh of ``a``.
        group: the ranks; None: all of them. None for DTensors, whose mesh says it.
        tau, valid_ratio, max_error: the knob, of the whole product; a tensor is read on the host.
        block: cuts that are no multiples of it cost a copy of ``a``, ``b`` and the result each.
        balance: cut A anew, so that all ranks have about the same work (:func:`row_cuts`). Rows of
            A travel there, and rows of C back.

    Returns:
        This rank's rows of C (rows of ``a``, N); for DTensors a DTensor. The same bits as in one
        process, if the devices are of one model. Gradients are dense, and cut as the operands are.

    Raises as :func:`spamm_torch.mm`; ValueError for a group or mesh without this rank, and for
    arguments that differ between ranks; RuntimeError for a stream that is being captured.

    If the arguments of one rank are wrong, or those of two ranks do not fit, all ranks raise the
    same line before anything else travels, and may go on with another call.
    """
    knobs: dict[str, Any] = {"tau": tau, "valid_ratio": valid_ratio, "max_error": max_error}
    if holds_dtensor(a, b):
        from . import dtensor  # not at the top: it takes half a second

        return dtensor.mm(a, b, knobs, block, balance, group=group)
    axis = axis_of(group)
    if axis.size == 1:
        check_bool(balance, "balance")
        return functional.mm(a, b, **knobs, block=block)
    if is_sparse(a, b):
        return block_rows.multiply(a, b, axis, knobs, block, balance)

    def read(backends: str) -> Call:
        return read_call(a, b, knobs, block, balance, backends, "tensors")

    call, sizes = agree([axis], read)
    rows_a, rows_b, *_ = zip(*sizes, strict=True)
    k, n = call.a.shape[1], call.b.shape[1]
    if sum(rows_b) != k:
        raise RuntimeError(
            f"the rows of b on all ranks must add up to the columns of a, {k}; got {sum(rows_b)}"
        )
    of_a, of_b = (Cut(axis, tuple(accumulate(of, initial=0))) for of in (rows_a, rows_b))
    layout = Layout(rows=of_a, depth_a=Cut.whole(k), depth_b=of_b, columns=Cut.whole(n))
    if call.needs_grad:
        return Product.apply(call.a, call.b, layout, call.settings)
    return multiply(call.a.detach(), call.b.detach(), layout, call.settings)


def axis_of(group: Any) -> Axis:
    """The ranks of a group. TypeError if it is none, ValueError if this rank is not in it."""
    if group is None:
        group = dist.group.WORLD
        if group is None:
            raise ValueError(
                "the ranks must have met in torch.distributed.init_process_group first; got none"
            )
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("group must contain this rank; got a group of other ranks")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"group must be a torch.distributed.ProcessGroup or None; got {type(group).__name__}"
        )
    return Axis(group)
