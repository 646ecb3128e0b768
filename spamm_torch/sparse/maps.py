"""Norm maps of block-sparse matrices, which are ``torch.sparse_csr``, and plans of products."""

import math
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import get_ctx, register_fake
from torch.nn.functional import pad

from .._arguments import as_knobs, check_tensor, dtype_name, held_tau, norm_dtype
from .blocks import (
    Blocks,
    check_block_of,
    check_drop,
    check_memory,
    check_pair,
    free_bytes,
    index_dtype,
    is_sparse,
    read,
    read_map,
    remember,
)

_ops = torch.ops.spamm_torch
_MOST_STORED = 2**31 - 1
# A threshold that was found is the least product kept. So much lower it keeps, in a symmetric
# product, those at it also where the norm of a mirror image is a little less.
BELOW = {torch.float32: 1 - 2.0**-14, torch.float64: 1 - 2.0**-38}


def norm_map(a: Tensor, block: Any) -> Tensor:
    blocks = read(a, "a", "norm_map", has_op=True)
    check_block_of(block, blocks.edge)
    return blocks.with_norms().matrix()


def of_maps(function: str, norm_a: Tensor, norm_b: Tensor) -> tuple[Blocks, Blocks]:
    a, b = read_map(norm_a, "norm_a", function), read_map(norm_b, "norm_b", function)
    if a.columns != b.rows:
        raise RuntimeError(
            f"norm maps must be (MB, KB) and (KB, NB); got shapes {tuple(norm_a.shape)} and "
            f"{tuple(norm_b.shape)}"
        )
    return a, b


def tensors(a: Blocks, b: Blocks) -> tuple[Any, ...]:
    return *a[:3], *b[:3], b.columns


def find_tau(a: Blocks, b: Blocks, valid_ratio: float | None, max_error: float | None) -> Tensor:
    return _ops.bsr_find_tau(*tensors(a, b), valid_ratio=valid_ratio, max_error=max_error)


def valid_counts(a: Blocks, b: Blocks, tau: Tensor) -> Tensor:
    crow, col, first, *_ = _ops.bsr_plan(*tensors(a, b), tau, lists=False)
    index = index_dtype(a, b)
    return Blocks(crow.to(index), col.to(index), first.diff().int(), b.columns).matrix()


def valid_ratio(a: Blocks, b: Blocks, tau: Tensor) -> Tensor:
    return shares(a, b, lost(a, b, tau)[1])[0]


def lost(a: Blocks, b: Blocks, tau: Tensor) -> tuple[Tensor, Tensor]:
    """The error bound, and the numbers of valid products and of those of stored blocks."""
    return _ops.bsr_error_bound(*tensors(a, b), tau)


def shares(a: Blocks, b: Blocks, products: Tensor) -> tuple[Tensor, Tensor]:
    """The share of valid products among those of stored blocks, and among all."""
    valid, stored = products.double()
    found = torch.where(stored > 0, valid / stored, 1.0).to(a.values.dtype)
    whole = a.rows * a.columns * b.columns
    return found, (valid / whole if whole else torch.ones_like(valid)).to(a.values.dtype)


def error_bound(a: Blocks, b: Blocks, tau: Tensor) -> Tensor:
    return lost(a, b, tau)[0]


def threshold(
    maps: tuple[Blocks, Blocks], tau: Any, valid_ratio: Any, max_error: Any, share: float = 1.0
) -> Tensor:
    """The threshold that the one knob given means; of a ``max_error`` with this share of it."""
    held = held_tau(as_knobs(tau, valid_ratio, max_error))
    return find_tau(*maps, valid_ratio, max_error and max_error * share) if held is None else held


def given_maps(
    function: str,
    operands: tuple[Tensor, Tensor],
    blocks: tuple[Blocks, Blocks],
    norms: tuple[Tensor | None, Tensor | None],
) -> tuple[Blocks, Blocks]:
    """The norm maps of the operands: those that are given, checked, the others computed."""
    if operands[0] is operands[1] and norms[0] is norms[1]:
        return (_given_map(norms[0], "norm_a", operands[0], blocks[0], function),) * 2
    of_a, of_b = (
        _given_map(given, f"norm_{name}", x, found, function)
        for name, x, found, given in zip("ab", operands, blocks, norms, strict=True)
    )
    return of_a, of_b


def _given_map(
    norms: Tensor | None, name: str, operand: Tensor, of: Blocks, function: str
) -> Blocks:
    """The norm map of an operand: the one that is given, checked, or computed."""
    is_dense = not is_sparse(operand)
    if norms is None and not is_dense:
        return of.with_norms()
    if norms is None:  # of blocks as they are: padding would change the order of sums
        norms = _ops.norm_map(operand.detach(), (of.edge, of.edge))
    dtype = norm_dtype(of.values.dtype)
    if is_dense:
        check_tensor(norms, name)
        if norms.shape != (of.rows, of.columns):
            raise RuntimeError(
                f"{name} must have shape {[of.rows, of.columns]}; got {list(norms.shape)}"
            )
        found = of._replace(values=norms.flatten())
    else:
        found = read_map(norms, name, function)
        if norms.device != of.values.device:
            raise RuntimeError(
                f"{name} must be on the operands' device {of.values.device}; got {norms.device}"
            )
        if found.rows != of.rows or not found.has_pattern_of(of):
            raise RuntimeError(
                f"{name} must have the pattern of its matrix, {len(of.col)} stored blocks in "
                f"{of.rows} x {of.columns}; got another, of {len(found.col)} in "
                f"{found.rows} x {found.columns}"
            )
    if found.values.dtype != dtype:
        raise TypeError(
            f"{name} must be {dtype_name(dtype)} for {dtype_name(of.values.dtype)} operands; got "
            f"{dtype_name(found.values.dtype)}"
        )
    return found


# ---- Plans --------------------------------------------------------------------------------------


class Plan(NamedTuple):
    """The pattern of a product and its valid products, as :func:`spamm_torch.sparse.plan` makes it.

    Attributes:
        norm_a, norm_b: norm maps of the operands, whose patterns a call must have.
        input: pattern of what is added; None for a plan of mm.
        tau: the threshold.
        symmetric: whether only blocks on and above the diagonal are computed.
        crow, col, first, slots_a, slots_b: as the op ``bsr_plan`` returns them.
        excess: with a capacity, how many blocks and products it had no room for, int64 (2,).
        max_error: the knob, if it was that; drops: whether a share of it is left for dropping.
        indices: copies of the operands' indices, which those of a call are held against.
        places: the sizes of these patterns, and where in memory their indices were.
    """

    norm_a: Blocks
    norm_b: Blocks
    input: Blocks | None
    tau: Tensor
    symmetric: bool
    crow: Tensor
    col: Tensor
    first: Tensor
    slots_a: Tensor
    slots_b: Tensor
    excess: Tensor | None = None
    max_error: float | None = None
    drops: bool = False
    indices: Tensor | None = None
    places: tuple[Any, ...] = ()

    @property
    def blocks(self) -> int:
        """The number of blocks of the result."""
        return len(self.col)

    @property
    def products(self) -> int:
        """The number of block products that are computed; on CUDA its room, with a capacity."""
        return len(self.slots_a)

    @property
    def has_lists(self) -> bool:
        """Tells whether products are listed, and not only counted. May wait for the device."""
        return len(self.slots_a) > 0 or int(self.first[-1]) == 0

    def multiply(
        self,
        a: Blocks,
        b: Blocks,
        added: Blocks | None = None,
        *,
        norms: bool = True,
        differs: Tensor | None = None,
        **scale: float,
    ) -> tuple[Tensor, Tensor]:
        """The blocks of alpha * a @ b + beta * added, and with ``norms`` their norms.

        Each holds a NaN if ``differs``, of :func:`check_plan`, says that it is not of the plan.
        """
        options: dict[str, Any] = {"crow_b": b.crow, "col_b": b.col, "norms": norms}
        options["tau"] = self.tau
        if added is not None:
            names = ("crow_input", "col_input", "values_input")
            options |= dict(zip(names, added[:3], strict=True))
        lists, options = self[5:10], options | {"symmetric": self.symmetric, **scale}
        found = _ops.bsr_multiply(*lists, *a[:3], b.values, **options)
        if self.excess is not None:
            overflows = self.excess > 0
            for x in found:
                x.masked_fill_(overflows.any(), math.nan)
        if differs is not None:
            for x in (found[0][:, 0, 0], found[1]):
                x.masked_fill_(differs, math.nan)
        return found

    def only(self, numbers: Tensor, products: int | None = None) -> "Plan":
        """The plan of some of the result's blocks, by their numbers, which ascend.

        ``products``: their number, if it is known.
        """
        lengths = self.first.diff()[numbers]
        first = pad(lengths.cumsum(0), (1, 0))
        moved = self.first[numbers] - first[:-1]
        moved = moved.repeat_interleave(lengths, output_size=products)
        products = torch.arange(len(moved), device=moved.device) + moved
        crow, col, *_ = Blocks(self.crow, self.col, self.col, self.norm_b.columns).only(numbers)
        slots = (self.slots_a[products], self.slots_b[products])
        return Plan(*self[:5], crow, col, first, *slots)

    def __repr__(self) -> str:
        return f"Plan(blocks={self.blocks}, products={self.products}, tau={self.tau.item():.3g})"


def make_plan(
    function: str,
    norm_a: Blocks,
    norm_b: Blocks,
    input: Blocks | None,
    tau: Tensor,
    symmetric: bool,
    block_bytes: int,
    *,
    may_lack_lists: bool = False,
) -> Plan:
    """The plan; torch.OutOfMemoryError, or one without lists, where these do not fit in memory."""
    added = {} if input is None else {"crow_input": input.crow, "col_input": input.col}
    device = norm_a.values.device
    fits = {
        "block_bytes": block_bytes,
        "free_bytes": None if device.type == "cuda" else free_bytes(device),
    }
    maps = tensors(norm_a, norm_b)
    crow, col, first, *slots = _ops.bsr_plan(*maps, tau, symmetric=symmetric, **added, **fits)
    if not may_lack_lists and not len(slots[0]) and (products := int(first[-1])):
        check_memory(function, len(col), block_bytes, device, products)
        raise torch.OutOfMemoryError(f"{function} needs lists of {products:,} products; none fit")
    index = index_dtype(norm_a, norm_b)
    if index == torch.int32 and len(col) > _MOST_STORED:
        raise RuntimeError(
            f"{function} expects int64 indices for a result of {len(col)} blocks; got int32"
        )
    return Plan(norm_a, norm_b, input, tau, symmetric, crow, col, first, *slots)


def warn_where_none_stays(valid_ratio: float | None, made: Plan, level: int) -> None:
    """Warns where a ratio has left none of the products that there are; waits only then.
    ``level``: of the caller's caller, as of ``warnings.warn``.
    """
    if valid_ratio is None or made.products or not made.has_lists:
        return
    if stored := int(lost(made.norm_a, made.norm_b, made.tau)[1][1]):
        warnings.warn(
            f"valid_ratio {valid_ratio:g} of {stored} products of stored blocks is nearest to none "
            "of them: all are skipped",
            stacklevel=level,
        )


def _indices_of(*of: Blocks | None) -> list[Tensor]:
    return [index for x in of if x is not None for index in (x.crow, x.col)]


def _places_of(*of: Blocks | None) -> tuple[Any, ...]:
    """The size of each pattern, and the place in memory of its indices."""
    return tuple(
        x and (x.rows, x.columns, len(x.col), x.crow.data_ptr(), x.col.data_ptr()) for x in of
    )


def _kept(plan: Plan) -> Plan:
    """The plan with copies of all that its operands may change."""
    own = _indices_of(*plan[:3])
    indices = torch.cat(own)
    copies = iter(indices.split([len(x) for x in own]))
    norm_a, norm_b, input = (
        None if x is None else x._replace(crow=next(copies), col=next(copies)) for x in plan[:3]
    )
    if input is not None:
        input = input._replace(values=input.col)
    kept = {"norm_a": norm_a, "norm_b": norm_b, "input": input, "indices": indices}
    return plan._replace(**kept, places=_places_of(*plan[:3]))


def check_plan(
    plan: Plan, a: Blocks, b: Blocks, input: Blocks | None, symmetric: bool
) -> Tensor | None:
    """Raises unless the plan was made for these patterns.

    On CUDA, if indices are where those of the plan were, a 0-d tensor says whether they differ: to
    raise would wait for the device.
    """
    if not isinstance(plan, Plan):
        raise TypeError(f"plan must be one of spamm_torch.sparse.plan; got {type(plan).__name__}")
    if (plan.input is None) != (input is None):
        what = "addmm, with its input" if input else "mm, without input"
        raise RuntimeError(f"plan must be one of {what}; got another")
    if plan.symmetric != symmetric:
        raise RuntimeError(f"plan must have the call's symmetric, {symmetric}; got the other")
    if a.values.is_cuda and _places_of(a, b, input) == plan.places:
        return (torch.cat(_indices_of(a, b, input)) != plan.indices).any()
    for name, of, got in zip(("a", "b", "input"), plan[:3], (a, b, input), strict=True):
        if of is not None and got is not None and not of.has_pattern_of(got):
            raise RuntimeError(
                f"plan must be of the pattern of {name}: expected {len(of.col)} stored blocks in "
                f"{of.rows} x {of.columns}; got {len(got.col)} in {got.rows} x {got.columns}"
                + (", in other places" if len(of.col) == len(got.col) else "")
            )
    return None


def rounded_up(number: Tensor, dtype: torch.dtype) -> Tensor:
    x = number.to(dtype)
    return torch.where(x < number, torch.nextafter(x, torch.full_like(x, math.inf)), x)


# The share of max_error for dropping. Dropped blocks are lost in full, of the bound of skipping
# only a part is: with halves SP2 of 300 waters loses 8 times the energy, at nearly the same work.
TO_DROP = 0.1


def dropped(
    plan: Plan,
    c: Blocks,
    below: float,
    max_error: float | None,
    alpha: float,
    values: Tensor | None = None,
) -> tuple[Blocks, Tensor, Tensor, Tensor]:
    """The blocks of a norm map that stay: with their norms, their numbers, and the bound of others.

    Blocks below a number go; with a ``max_error`` only so many as it allows, the smallest first.
    Last, with the blocks' ``values``, the trace and norm of what stays, on the host. Waits once.
    """
    share: dict[str, Any] = {}
    if max_error is not None:
        share = {"share": abs(alpha) * TO_DROP * max_error}
        share |= {"norm_a": plan.norm_a.values, "norm_b": plan.norm_b.values}
    share |= {"symmetric": plan.symmetric, "values": values}
    crow, col, norms, *others = _ops.bsr_drop(*c[:3], below=below, **share)
    return Blocks(crow, col, norms, c.columns), *others


def plan(
    a: Tensor,
    b: Tensor,
    *,
    tau: float | Tensor | None = None,
    valid_ratio: float | None = None,
    max_error: float | None = None,
    input: Tensor | None = None,
    symmetric: bool = False,
    norm_a: Tensor | None = None,
    norm_b: Tensor | None = None,
    capacity: tuple[int, int] | None = None,
    drop: float | None = None,
) -> Plan:
    """The pattern and the products of ``mm(a, b)``, or of ``addmm(input, a, b)``, to be reused.

    ``mm(a, b, plan=plan)`` computes the products of the plan, whatever the values are by then; it
    has no ``return_info``. The patterns of a call must be those of the plan, which
    keeps copies of them. Others are refused. On CUDA, where a look at them waits, indices that were
    changed in place give a result with a NaN in each block.

    Args:
        a, b: block-sparse. tau, valid_ratio, max_error: the knob; exactly one.
        input: of addmm. symmetric, norm_a, norm_b: as of mm.
        capacity: (blocks of the result, products of stored blocks) to make room for, of mm without
            ``symmetric``. Nothing then waits for the device: a CUDA graph may hold the plan and its
            product. Blocks of zeros fill what is left. Where there is no room, the product is NaN,
            and ``excess`` of the plan says how much is missing. Columns are not checked.
        drop: what calls will drop below: a ``max_error`` then keeps its share for that. Without it
            a call with this plan drops nothing of the bound.

    Returns:
        A :class:`Plan` with ``blocks`` and ``products``: how many of the result there are, and how
        many are computed. It holds 8 bytes a product, 24 a block, and a copy of all indices.

    Raises:
        torch.OutOfMemoryError: it and the result do not fit in memory.

    Example:
        >>> x = sparse.from_dense(a, drop=1e-9)
        >>> kept = plan(x, x, max_error=1e-6)
        >>> c = spamm_torch.mm(x, x, plan=kept)  # in a loop, as long as the pattern stays
    """
    check_drop(drop)
    left = read(a, "a", "plan", has_op=True)
    right = left if b is a else read(b, "b", "plan", has_op=True)
    added = None if input is None else read(input, "input", "plan", has_op=True)
    check_pair(left, right)
    if a.shape[1] != b.shape[0]:
        raise RuntimeError(
            f"a's columns must match b's rows; got shapes {tuple(a.shape)} and {tuple(b.shape)}"
        )
    maps = given_maps("plan", (a, b), (left, right), (norm_a, norm_b))
    held = threshold(maps, tau, valid_ratio, max_error, 1.0 - TO_DROP if drop else 1.0)
    if capacity is not None:
        _check_capacity(capacity, left.rows * right.columns)
        if added is not None or symmetric:
            raise ValueError("capacity is for plans of mm without symmetric; got another plan")
        made = Plan(*maps, None, held, False, *_lists_of(*maps, held, *capacity))
    else:
        made = make_plan("plan", *maps, added, held, symmetric, left.block_bytes())
        warn_where_none_stays(valid_ratio, made, 3)
        remember(a, b, input)
    return _kept(made)._replace(max_error=max_error, drops=bool(drop))


# ---- Plans of a stated capacity ------------------------------------------------------------------


def _check_capacity(capacity: Any, most: int) -> None:
    if not isinstance(capacity, tuple) or [type(x) for x in capacity] != [int, int]:
        raise TypeError(f"capacity must be two integers, (blocks, products); got {capacity!r}")
    if not 1 <= capacity[0] <= most or capacity[1] < 1:
        raise ValueError(
            f"capacity must be 1 to {most} blocks and 1 product or more; got {capacity}"
        )


def _lists_of(a: Blocks, b: Blocks, tau: Tensor, blocks: int, products: int) -> tuple[Tensor, ...]:
    """As the op ``bsr_plan``, with room for so many blocks and products, without waiting. Blocks of
    zeros fill what the result leaves. The last tensor: how many blocks and products had no room.
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


# ---- Shapes of the ops' results ------------------------------------------------------------------


@register_fake("spamm_torch::bsr_plan")
def _(crow_a: Tensor, *_: Any, lists: bool = True, **__: Any) -> tuple[Tensor, ...]:
    blocks = get_ctx().new_dynamic_size()
    products = get_ctx().new_dynamic_size() if lists else 0
    crow = crow_a.new_empty(crow_a.shape, dtype=torch.int64)
    slots = [crow.new_empty((products,), dtype=torch.int32) for _ in range(2)]
    return crow, crow.new_empty((blocks,)), crow.new_empty((blocks + 1,)), *slots


@register_fake("spamm_torch::bsr_multiply")
def _(
    crow: Tensor, col: Tensor, *others: Tensor, norms: bool = True, **_: Any
) -> tuple[Tensor, Tensor]:
    values_a = others[5]
    values = values_a.new_empty((col.shape[0], *values_a.shape[1:]))
    shape = col.shape if norms else (0,)
    return values, values.new_empty(shape, dtype=norm_dtype(values.dtype))


@register_fake("spamm_torch::bsr_find_tau")
def _(crow_a: Tensor, col_a: Tensor, norm_a: Tensor, *_: Any, **__: Any) -> Tensor:
    return norm_a.new_empty(())


@register_fake("spamm_torch::bsr_error_bound")
def _(crow_a: Tensor, col_a: Tensor, norm_a: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return norm_a.new_empty(()), norm_a.new_empty((2,), dtype=torch.int64)


@register_fake("spamm_torch::bsr_drop")
def _(
    crow: Tensor, col: Tensor, norms: Tensor, values: Tensor | None = None, **_: Any
) -> tuple[Tensor, ...]:
    stay = get_ctx().new_dynamic_size()
    index = [crow.new_empty(shape, dtype=torch.int64) for shape in (crow.shape, (stay,), (stay,))]
    sums = torch.empty(0 if values is None else 2, dtype=torch.float64, device="cpu")
    return index[0], index[1], norms.new_empty((stay,)), index[2], norms.new_empty(()), sums
