"""mm and addmm of block-sparse matrices. docs/block_sparse.md has the meaning."""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._prims_common import is_expandable_to

from .._arguments import check_tensor
from . import maps
from .blocks import (
    Blocks,
    all_blocks,
    check_block_of,
    check_device,
    check_drop,
    check_pair,
    index_dtype,
    is_sparse,
    read,
    remember,
)
from .strips import Strips

_ops = torch.ops.spamm_torch


class SparseInfo(NamedTuple):
    """The products and blocks that a block-sparse call left out, for ``return_info=True``.

    All but ``block`` are 0-d tensors of the norms' dtype.

    Attributes:
        tau: the threshold: given, or found for the ``valid_ratio`` or ``max_error`` of the call.
        valid_ratio: the share of the products of stored blocks that were computed.
        error_bound: a proven bound of the Frobenius norm of the result's error, from skipping and
            dropping together: ``abs(alpha) * skip_bound + drop_bound``.
        block: the blocks (m, k, n).
        valid_ratio_of_all: as ``valid_ratio``, of all products that dense storage would have.
        skip_bound: of what skipping loses, before ``alpha``, as :func:`spamm_torch.error_bound`.
        drop_bound: of what dropping loses: the norm of all blocks that were dropped.
    """

    tau: Tensor
    valid_ratio: Tensor
    error_bound: Tensor
    block: tuple[int, int, int]
    valid_ratio_of_all: Tensor
    skip_bound: Tensor
    drop_bound: Tensor


def product(
    function: str,
    a: Tensor,
    b: Tensor,
    knob: dict[str, Any],
    *,
    return_norms: bool,
    return_info: bool,
    **options: Any,
) -> Any:
    """mm and addmm where an operand is block-sparse; a dense one makes the result dense."""
    if return_info and options["plan"] is not None:
        raise TypeError(
            "a plan may have been made of other norms: expected no return_info; got True"
        )
    options["norms"] = return_norms
    c, map_c, is_dense, info, _ = multiplied(function, a, b, knob, **options)
    results: list[Any] = []
    if is_dense:
        results.append(c.dense()[: a.shape[0], : b.shape[1]].contiguous())
        if return_norms:  # its own: blocks at the edge are summed up as they are there
            results.append(_ops.norm_map(results[0], (c.edge,) * 2))
    else:
        results.append(c.matrix())
        if return_norms:
            results.append(map_c.matrix())
    if return_info:
        results.append(info())
    return results[0] if len(results) == 1 else tuple(results)


def multiplied(
    function: str,
    a: Tensor,
    b: Tensor,
    knob: dict[str, Any],
    *,
    block: Any,
    norm_a: Tensor | None,
    norm_b: Tensor | None,
    symmetric: bool,
    drop: float | None,
    plan: maps.Plan | None = None,
    input: Tensor | None = None,
    beta: float = 1,
    alpha: float = 1,
    below: float = 1.0,
    norms: bool = True,
    **refused: Any,
) -> tuple[Blocks, Blocks, bool, Any, Tensor | None]:
    """The result's blocks and norms, whether it is to be dense, and what counts what was left out;
    None of a plan.

    Counting takes as long as planning: it is the caller's choice, and can wait. ``norms``: of the
    result, which are always there with ``drop``. Last, of float32 and float64 with ``drop``, the
    result's trace and norm, on the host. ``below`` is a factor of the threshold.
    """
    if given := [name for name, value in refused.items() if value is not None]:
        raise TypeError(f"{function} of block-sparse matrices takes no {given[0]}; got one")
    check_drop(drop)
    names = {"a": a, "b": b} if input is None else {"a": a, "b": b, "input": input}
    left, right, added, is_dense = _operands(function, names, block)
    if is_dense and (drop is not None or plan is not None):
        raise TypeError(f"{function} takes drop and plan for a sparse_bsr result; got a dense one")
    added = None if beta == 0 else added
    norm_maps = partial(maps.given_maps, function, (a, b), (left, right), (norm_a, norm_b))
    differs = drop_bound = sums = None
    info: Any = None
    pair: tuple[Blocks, Blocks] | None = None
    if plan is None:
        max_error = knob["max_error"]
        pair = norm_maps()
        info = partial(info_of, pair)
        share = 1.0 - maps.TO_DROP if drop else 1.0  # of max_error that skipping may use
        tau = maps.threshold(pair, **knob, share=share)
        tau = tau if below == 1 else tau * below
        rest: tuple[Any, ...] = added, tau, symmetric, left.block_bytes() * (2 if drop else 1)
        plan = maps.make_plan(function, *pair, *rest, may_lack_lists=bool(drop))
        maps.warn_where_none_stays(knob["valid_ratio"], plan, 6)
        remember(a, b, None if added is None else input)
    else:
        if given := [name for name, value in knob.items() if value is not None]:
            raise ValueError(f"a plan has its own threshold: expected no {given[0]}; got one")
        differs = maps.check_plan(plan, left, right, added, symmetric)
        max_error = plan.max_error if plan.drops or plan.max_error is None else 0.0
        pair = norm_maps() if drop and max_error else None
    if drop and not plan.has_lists:
        in_strips = Strips(function, plan, left, right, added, beta=beta, alpha=alpha)
        c, values, drop_bound = in_strips.product(drop, max_error)
    else:
        scale: dict[str, Any] = {"beta": beta, "alpha": alpha, "norms": norms or bool(drop)}
        values, found = plan.multiply(left, right, added, differs=differs, **scale)
        c = Blocks(plan.crow, plan.col, found, right.columns)
        if drop:
            summed = values if values.dtype == found.dtype else None
            of_now = plan if pair is None else plan._replace(norm_a=pair[0], norm_b=pair[1])
            c, numbers, drop_bound, sums = maps.dropped(of_now, c, drop, max_error, alpha, summed)
            if len(numbers) < len(values):
                values = values[numbers]
    index = index_dtype(left, right)
    map_c = c._replace(crow=c.crow.to(index), col=c.col.to(index))
    c = map_c._replace(values=values)
    return c, map_c, is_dense, info and partial(info, plan.tau, drop_bound, left.edge, alpha), sums


def _operands(
    function: str, names: dict[str, Any], block: Any
) -> tuple[Blocks, Blocks, Blocks | None, bool]:
    """a, b and input as blocks, and whether the result is dense: where a or b is."""
    for name, x in names.items():
        if not is_sparse(x):
            check_tensor(x, name)
    dense = {name for name, x in names.items() if not is_sparse(x)}
    found: dict[str, Blocks] = {}
    for name in (name for name in names if name not in dense):
        again = name == "b" and names["b"] is names["a"]
        found[name] = found["a"] if again else read(names[name], name, function, has_op=True)
    edge = next(iter(found.values())).edge
    check_block_of(block, edge)
    for name in ("a", "b"):
        if names[name].dim() != 2:
            shape = tuple(names[name].shape)
            raise RuntimeError(
                f"{function} expects two matrices (2-d); got shape {shape} for {name}"
            )
    shape_a, shape_b = (tuple(names[name].shape) for name in ("a", "b"))
    if shape_a[1] != shape_b[0]:
        raise RuntimeError(f"a's columns must match b's rows; got shapes {shape_a} and {shape_b}")
    shape, is_dense = (shape_a[0], shape_b[1]), bool(dense & {"a", "b"})
    if "input" in names:
        kinds = ("sparse_bsr", "dense")
        if ("input" in dense) != is_dense:
            raise TypeError(
                f"{function} expects an input that is {kinds[is_dense]}, as the result is; got one "
                f"that is {kinds[not is_dense]}"
            )
        added = names["input"]
        if added.shape != shape:
            if not is_dense or not is_expandable_to(added.shape, shape):
                raise RuntimeError(
                    f"input must have the product's shape {shape}; got {tuple(added.shape)}"
                )
            names = names | {"input": added.expand(shape)}
    for name in dense:
        check_device(names[name], name)
        found[name] = all_blocks(names[name], edge, name)
    check_pair(found["a"], found["b"])
    if "input" in found:
        check_pair(found["input"], found["a"], "input and the operands")
    return found["a"], found["b"], found.get("input"), is_dense


def info_of(
    pair: tuple[Blocks, Blocks],
    tau: Tensor,
    drop_bound: Tensor | None,
    edge: int,
    alpha: float,
) -> SparseInfo:
    """The info of a product, from the norm maps of its operands."""
    skip_bound, products = maps.lost(*pair, tau)
    drop_bound = torch.zeros_like(skip_bound) if drop_bound is None else drop_bound
    tau = tau.to(skip_bound.dtype)
    if tau.device != skip_bound.device:  # by value: a copy would wait
        tau = torch.full_like(skip_bound, tau.item())
    skipped = abs(alpha) * skip_bound.double() if alpha else 0.0  # not 0 times inf
    bound = maps.rounded_up(skipped + drop_bound.double(), tau.dtype)
    ratio, of_all = maps.shares(*pair, products)
    return SparseInfo(tau, ratio, bound, (edge,) * 3, of_all, skip_bound, drop_bound)
