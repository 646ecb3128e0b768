"""One rank's part of a product: its block of C, of operands whose shards lie on all ranks.

Norm maps travel first, then the units of B that the rank's rows of A need; in a mesh, likewise the
units of A that its columns of B need. Columns of C are computed stage by stage while the next
stage's units travel. K is never split, so that every sum has the bits of one device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .._arguments import Knobs, as_knobs, held_tau
from . import plan as planning
from .axis import Cut, Exchange, recut
from .plan import ROW_MULTIPLE

_ops = torch.ops.spamm_torch


@dataclass(frozen=True)
class Layout:
    """The cuts of A (M x K), B (K x N) and C (M x N) among the ranks of a mesh.

    ``rows`` cuts M and ``columns`` N. ``depth_a`` cuts K of A among the ranks with the same rows,
    ``depth_b`` K of B among those with the same columns. A line of ranks is a mesh of one column.
    """

    rows: Cut
    depth_a: Cut
    depth_b: Cut
    columns: Cut

    def aligned(self, block: tuple[int, int, int]) -> Layout:
        """The same with cuts at multiples of the block."""
        return self._each(block, Cut.aligned)

    def in_blocks(self, block: tuple[int, int, int]) -> Layout:
        """An aligned layout, counted in blocks."""
        return self._each(block, Cut.in_blocks)

    def _each(self, block: tuple[int, int, int], change: Callable[[Cut, int], Cut]) -> Layout:
        m, k, n = block
        depth_a, depth_b = (change(cut, k) for cut in (self.depth_a, self.depth_b))
        return Layout(change(self.rows, m), depth_a, depth_b, change(self.columns, n))


@dataclass(frozen=True)
class Settings:
    """The settings of a product, the same on all ranks; ``text``: the knob, to be compared."""

    knobs: Knobs
    block: tuple[int, int, int]
    balance: bool
    text: str

    @classmethod
    def of(cls, knobs: dict[str, Any], block: tuple[int, int, int], balance: bool) -> Settings:
        """The settings of knobs, checked here. A given tau becomes a scalar on the host, to be
        compared.
        """
        checked: Any = as_knobs(**knobs)
        if (tau := held_tau(checked)) is not None:
            checked["tau"], checked["threshold"] = tau.double().cpu(), None
        text = next(f"{name}={float(x)}" for name, x in checked.items() if x is not None)
        return cls(checked, block, balance, text)


def multiply(a: Tensor, b: Tensor, layout: Layout, settings: Settings) -> Tensor:
    """This rank's block of C, of shards of A and B, cut anywhere. All ranks call it together."""
    block = settings.block
    aligned = layout.aligned(block)
    a = _recut_both(a, (layout.rows, layout.depth_a), (aligned.rows, aligned.depth_a))
    b = _recut_both(b, (layout.depth_b, layout.columns), (aligned.depth_b, aligned.columns))
    maps = _Maps(a, b, aligned.in_blocks(block), block)
    tau = maps.threshold(settings.knobs)
    norm_a, rows = maps.norm_a, aligned.rows
    if settings.balance and rows.axis.size > 1:
        rows = maps.rows_by_work(tau, rows)
        a = recut(a, aligned.rows, rows)
        norm_a = maps.whole[0][rows.in_blocks(block[0]).own]
    part = _Part(norm_a, maps.norm_b, tau, replace(aligned, rows=rows), block)
    c = part.product(part.gather_a(a), b)
    return _recut_both(c, (rows, aligned.columns), (layout.rows, layout.columns))


def _recut_both(x: Tensor, now: tuple[Cut, Cut], then: tuple[Cut, Cut]) -> Tensor:
    """Moves the cuts of both dimensions."""
    x = recut(x, now[0], then[0])
    return recut(x.t(), now[1], then[1]).t()


class _Maps:
    """The norm maps that this rank needs: of its rows of A and of its columns of B, all of K."""

    def __init__(self, a: Tensor, b: Tensor, blocks: Layout, block: tuple[int, int, int]) -> None:
        m, k, n = block
        norm_a, norm_b = _ops.norm_map(a, (m, k)), _ops.norm_map(b, (k, n))
        self._rows, self._columns, self._edge = blocks.rows, blocks.columns, m
        self.norm_a = _gather_columns(norm_a, blocks.depth_a)
        self.norm_b = blocks.depth_b.axis.gather(norm_b, blocks.depth_b.lengths)

    @cached_property
    def whole(self) -> tuple[Tensor, Tensor]:
        """The maps of all of A and of all of B."""
        return (
            self._rows.axis.gather(self.norm_a, self._rows.lengths),
            _gather_columns(self.norm_b, self._columns),
        )

    def threshold(self, knobs: Knobs) -> Tensor:
        """The threshold, with the same bits on all ranks."""
        tau, valid_ratio, max_error = knobs["tau"], knobs["valid_ratio"], knobs["max_error"]
        if tau is not None:
            # Thread blocks keep pace with each other at a tau of 0, and would wait for those that
            # NCCL's kernels keep from running. A tau below 0 skips nothing, too.
            return torch.full_like(tau, -1.0) if tau == 0 else tau
        axes = self._rows.axis, self._columns.axis
        tau = _ops.find_tau(*self.whole, valid_ratio, max_error=max_error)
        for axis in axes:  # of different devices, say
            axis.broadcast(tau)
        return tau

    def rows_by_work(self, tau: Tensor, rows: Cut) -> Cut:
        """Cuts of A's rows that give all ranks about the same work."""
        multiple = max(1, ROW_MULTIPLE // self._edge)
        cuts = _ops.row_work(*self.whole, tau, rows.axis.size, multiple)[1]
        return Cut(rows.axis, tuple(min(cut * self._edge, rows.length) for cut in cuts))


def _gather_columns(own: Tensor, cut: Cut) -> Tensor:
    return cut.axis.gather(own.t(), cut.lengths).t().contiguous()


@dataclass(frozen=True)
class _Part:
    """The product on this rank, by norms of its own block rows and of its own block columns."""

    _norm_a: Tensor
    _norm_b: Tensor
    _tau: Tensor
    _layout: Layout
    _block: tuple[int, int, int]

    @cached_property
    def _blocks(self) -> Layout:
        return self._layout.in_blocks(self._block)

    def gather_a(self, a: Tensor) -> Tensor:
        """This rank's rows of A with all of K; undefined where no unit is needed."""
        owners, edge = self._blocks.depth_a, self._block[1]
        if owners.axis.size == 1:
            return a
        need, stage_rows = self._needed(owners, self._blocks.rows, self._block[0], of_a=True)
        panel = a.new_empty(a.shape[0], owners.length * edge)
        panel[:, self._layout.depth_a.own] = a
        for rows, copy_to in Exchange(a.t(), owners, edge, need, stage_rows).stages():
            copy_to(panel[rows].t())
        return panel[:, : self._layout.depth_a.length]

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        """This rank's block of C, of its rows of A and its shard of B."""
        owners, depth = self._blocks.depth_b, self._layout.depth_b.length
        _, edge, n = self._block
        c = a.new_empty(a.shape[0], b.shape[1])
        if owners.axis.size == 1:
            self._multiply(a, b, self._norm_b, c)
            return c
        need, stage_columns = self._needed(owners, self._blocks.columns, n, of_a=False)
        # One buffer for all stages: a stage is copied into it after the one before is multiplied.
        # Blocks that travel meanwhile arrive in memory of their own.
        # Its rows hold whole blocks, so that each starts at an aligned address.
        width = min(stage_columns, self._norm_b.shape[1] * n)
        buffer = b.new_empty(owners.length * edge, width)
        for columns, copy_to in Exchange(b, owners, edge, need, stage_columns).stages():
            stage = buffer[:, : columns.stop - columns.start]
            copy_to(stage)
            norms = self._norm_b[:, columns.start // n : -(-columns.stop // n)]
            self._multiply(a, stage[:depth], norms, c[:, columns], own_rows=b[:, columns])
        return c

    def _multiply(
        self, a: Tensor, b: Tensor, norm_b: Tensor, out: Tensor, own_rows: Tensor | None = None
    ) -> None:
        """own_rows: this rank's rows of b, which b itself need not hold."""
        maps, layout = (self._norm_a, norm_b, self._tau), self._layout
        own: Any = {"own_rows": own_rows, "first_own_row": layout.depth_b.own.start}
        whole = layout.rows.length, layout.columns.length
        _ops.multiply_part(a, b, *maps, self._block, out, whole=whole, **own)

    def _needed(self, owners: Cut, across: Cut, edge: int, *, of_a: bool) -> tuple[Tensor, int]:
        """The units that each rank of the owners' axis needs, and the columns of a stage: units of
        B for the rows of ranks, units of A for their columns. ``across`` cuts the columns of B, or
        the rows of A, into blocks of ``edge``. Waits for the device.
        """
        norm, other = (self._norm_a.t(), self._norm_b.t()) if of_a else (self._norm_b, self._norm_a)
        users = self._blocks.columns if of_a else self._blocks.rows
        largest = other.amax(0) if len(other) else other.new_zeros(other.shape[1])
        largest = owners.axis.gather(largest[None], [1] * owners.axis.size)
        stage = planning.stage_blocks(max(across.lengths), edge)
        need = planning.needed_units(largest, norm, self._tau, stage).cpu()
        multiplies = torch.tensor([length > 0 for length in users.lengths])
        return need & multiplies[:, None, None], stage * edge


class Product(torch.autograd.Function):
    """The product with skipping. In the backward pass, collective too, each rank has all of B."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, layout: Layout, settings: Settings) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.depth = layout.depth_b
        return multiply(a, b, layout, settings)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (a, b), depth = ctx.saved_tensors, ctx.depth
        grad_a = grad_b = None
        if ctx.needs_input_grad[0]:
            grad_a = grad @ depth.axis.gather(b, depth.lengths).t()
        if ctx.needs_input_grad[1]:  # sums of what all ranks' rows contribute
            whole = a.t() @ grad
            depth.axis.sum(whole)
            grad_b = whole[depth.own].clone()
        return grad_a, grad_b, None, None
