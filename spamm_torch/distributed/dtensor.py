"""Products of DTensors, by the public functions of ``torch.distributed.tensor``, whose import takes
half a second: this module is imported where there is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from .axis import Axis, Cut, in_layout, is_column_major
from .call import Call, agree, read_call
from .plan import chunk_cuts
from .rank_product import Layout, Settings, multiply

Role = Literal["rows", "columns", "whole"]


def mm(a: Any, b: Any, knobs: Any, block: Any, balance: Any = False, **refused: Any) -> Tensor:
    """:func:`spamm_torch.mm` of DTensors, without the ``refused`` arguments. A collective call."""
    mesh = (a if isinstance(a, DTensor) else b).device_mesh
    if mesh.get_coordinate() is None:
        raise ValueError(f"the mesh of a and b must contain this rank; got {mesh}")

    def read(backends: str) -> Call:
        for name, value in refused.items():
            if value is not None and value is not False:
                got = value if value is True else type(value).__name__
                raise ValueError(f"{name} must not be given for DTensors; got {got}")
        _check_operands(a, b)
        kind = " and ".join(f"a DTensor {tuple(x.shape)} of {x.placements}" for x in (a, b))
        return read_call(a, b, knobs, block, balance, backends, kind)

    call, _ = agree([Axis(mesh.get_group(dim)) for dim in range(mesh.ndim)], read)
    if call.needs_grad:
        return _Product.apply(call.a, call.b, call.settings)
    return _product(call.a.detach(), call.b.detach(), call.settings)


def _check_operands(a: Any, b: Any) -> None:
    for name, x in (("a", a), ("b", b)):
        if not isinstance(x, DTensor):
            raise TypeError(f"a and b must both be DTensors; got {name} of {type(x).__name__}")
    if a.device_mesh != b.device_mesh:
        raise ValueError(
            f"a and b must be on one device mesh; got {a.device_mesh} and {b.device_mesh}"
        )
    if a.dim() == b.dim() == 2 and a.shape[1] != b.shape[0]:
        raise RuntimeError(
            f"a's columns must match b's rows; got shapes {tuple(a.shape)} and {tuple(b.shape)}"
        )
    for name, x in (("a", a.detach()), ("b", b.detach())):
        expected, local = _chunk_shape(x), tuple(x.to_local().shape)
        if local != expected:
            raise ValueError(
                f"{name}'s shard must have shape {expected}, as torch.chunk cuts; got {local}"
            )


def _chunk_shape(x: DTensor) -> tuple[int, ...]:
    """The shape of this rank's shard by its placements, if all of them are of public kinds."""
    if not all(isinstance(placement, (Shard, Replicate, Partial)) for placement in x.placements):
        return tuple(x.to_local().shape)
    shape, mesh = list(x.shape), x.device_mesh
    for dim, placement in enumerate(x.placements):
        if isinstance(placement, Shard):
            cuts = chunk_cuts(shape[placement.dim], mesh.size(dim))
            rank = mesh.get_local_rank(dim)
            shape[placement.dim] = cuts[rank + 1] - cuts[rank]
    return tuple(shape)


class _Product(torch.autograd.Function):
    """Gradients are those without skipping, by DTensor's own products, placed as the operands."""

    @staticmethod
    def forward(ctx: Any, a: DTensor, b: DTensor, settings: Settings) -> Tensor:
        ctx.save_for_backward(a, b)
        return _product(a, b, settings)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[Tensor | None, Tensor | None, None]:
        a, b = ctx.saved_tensors
        grad_a = _placed_as(grad @ b.t(), a) if ctx.needs_input_grad[0] else None
        grad_b = _placed_as(a.t() @ grad, b) if ctx.needs_input_grad[1] else None
        return grad_a, grad_b, None


def _placed_as(grad: DTensor, operand: DTensor) -> DTensor:
    """The gradient of an operand. That of partial sums is the same for all of them."""
    placements = [Replicate() if p.is_partial() else p for p in operand.placements]
    return grad.redistribute(placements=placements)


# ---- Placements ---------------------------------------------------------------------------------


def _product(a: Any, b: Any, settings: Settings) -> Tensor:
    mesh = a.device_mesh
    roles = _roles(list(zip(a.placements, b.placements, strict=True)))
    axes = {role: Axis(mesh.get_group(dim)) for dim, role in enumerate(roles) if role != "whole"}
    c_placements = [_PLACEMENT[role] for role in roles]
    a_placements, b_placements = (
        [
            now if role == free and now == Replicate() else _PLACEMENT[role]  # it may stay whole
            for now, role in zip(x.placements, roles, strict=True)
        ]
        for x, free in ((a, "columns"), (b, "rows"))
    )
    (m, k), n = a.shape, b.shape[1]
    layout = Layout(
        rows=_chunks(m, axes.get("rows")),
        depth_a=_chunks(k, axes.get("columns") if Shard(1) in a_placements else None),
        depth_b=_chunks(k, axes.get("rows") if Shard(0) in b_placements else None),
        columns=_chunks(n, axes.get("columns")),
    )
    c = multiply(_shard(a, a_placements), _shard(b, b_placements), layout, settings)
    return DTensor.from_local(
        c, mesh, c_placements, run_check=False, shape=torch.Size((m, n)), stride=(n, 1)
    )


_PLACEMENT: dict[Role, Placement] = {"rows": Shard(0), "columns": Shard(1), "whole": Replicate()}


def _roles(placements: list[tuple[Placement, Placement]]) -> list[Role]:
    """The dimension of C that each dimension of the mesh cuts; rows and columns at most once."""
    free: list[Role] = ["rows", "columns"]
    roles: list[Role] = []
    for pair in placements:
        role: Role = "whole"
        if any(placement != Replicate() for placement in pair):
            by_columns = all(placement in (Replicate(), Shard(1)) for placement in pair)
            role = "columns" if by_columns else "rows"
            role = role if role in free else (free or ["whole"])[0]
        if role in free:
            free.remove(role)
        roles.append(role)
    return roles


def _chunks(length: int, axis: Axis | None) -> Cut:
    if axis is None:
        return Cut.whole(length)
    return Cut(axis, tuple(chunk_cuts(length, axis.size)))


def _shard(x: DTensor, placements: Sequence[Placement]) -> Tensor:
    if tuple(placements) == tuple(x.placements):
        return x.to_local()
    return in_layout(x.redistribute(placements=placements).to_local(), is_column_major(x))
