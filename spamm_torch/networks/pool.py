"""Max pooling in a generated forward, by the kernel that is faster.

The op ``max_pool2d`` gives torch's results bit for bit, and writes no indices. The op
``conv2d_max_pool`` gives those of the convolution and the pool, one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from .capture import Island
from .leaves import reason_not_plain
from .upsample import pair_of

_ops = torch.ops.spamm_torch
_conv2d, _conv2d_max_pool = _ops.conv2d.default, _ops.conv2d_max_pool.default
_max_pool2d = _ops.max_pool2d.default

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)  # of the op's own kernels
_ARGUMENTS = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")

# Kernel size, stride, padding, dilation, ceil mode.
Pooling: TypeAlias = tuple[Any, Any, Any, Any, bool]


PAIRS: Pooling = (2, 2, 0, 1, False)  # windows of 2 x 2 pixels, side by side


def find_pools(island: Island) -> dict[fx.Node, Pooling]:
    """The max pools of an island that return no indices, in the graph's order."""
    found = {node: pooling_of(node, island.module) for node in island.graph.nodes}
    return {node: pooling for node, pooling in found.items() if pooling is not None}


def pooling_of(node: fx.Node, root: nn.Module) -> Pooling | None:
    """What a node pools, if it is a max pool that returns no indices."""
    if node.op == "call_module" and len(node.args) == 1 and not node.kwargs:
        pool: Any = root.get_submodule(str(node.target))
        is_pool = type(pool) is nn.MaxPool2d and not pool.return_indices
        if not is_pool or reason_not_plain(pool) is not None:
            return None
        return (pool.kernel_size, pool.stride, pool.padding, pool.dilation, pool.ceil_mode)
    if node.op == "call_function" and node.target is F.max_pool2d:
        given: dict[str, Any] = dict(zip(_ARGUMENTS, node.args[1:], strict=False))
        given |= node.kwargs
        if given.pop("return_indices", False) or given.keys() - set(_ARGUMENTS):
            return None
        kernel = given["kernel_size"]
        stride = given.get("stride")
        rest = (given.get("padding", 0), given.get("dilation", 1), given.get("ceil_mode", False))
        return (kernel, kernel if stride is None else stride, *rest)
    return None


def is_of_pairs(pooling: Pooling) -> bool:
    """Whether windows are 2 x 2 pixels that lie side by side, and what sticks out is dropped."""
    kernel, stride, padding, dilation, ceil_mode = pooling
    edges = [*map(pair_of, (kernel, stride, padding, dilation))]
    return edges == [(2, 2), (2, 2), (0, 0), (1, 1)] and not ceil_mode


def conv2d_max_pool(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: int | Sequence[int],
    padding: int | Sequence[int],
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    *,
    norm_weight: Tensor | None,
    activation: str,
) -> Tensor:
    """The op ``conv2d_max_pool``, or two calls where a gradient is wanted or a single image came.

    Args:
        input: (N, C, H, W) or (C, H, W).
        norm_weight: the weight's norms, as the op ``conv2d_weight_norm`` returns them.
        weight, bias, stride, padding, dilation, groups, activation: as of the op ``conv2d``.
    """
    args = (input, weight, bias, stride, padding, dilation, groups)
    options = {"norm_weight": norm_weight, "activation": activation}
    if input.dim() == 4 and not (torch.is_grad_enabled() and input.requires_grad):
        return _conv2d_max_pool(*args, **options)
    return F.max_pool2d(_conv2d(*args, threshold=0.0, **options), 2)


def max_pool2d(
    input: Tensor, kernel_size: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool
) -> Tensor:
    """As ``torch.nn.functional.max_pool2d``, without a gradient."""
    pooling = (kernel_size, stride, padding, dilation, ceil_mode)
    if _op_is_faster(input):
        return _max_pool2d(input, *pooling)
    return F.max_pool2d(input, *pooling)


def _op_is_faster(input: Tensor) -> bool:
    return (
        not torch.compiler.is_compiling()  # Inductor makes a kernel of its own
        and not (torch.is_grad_enabled() and input.requires_grad)
        and input.is_cuda
        and input.dim() == 4
        and input.dtype in _DTYPES
        and input.is_contiguous(memory_format=torch.channels_last)
    )
