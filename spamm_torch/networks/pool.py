"""Max pooling in a generated forward, by the kernel that is faster.

The op ``max_pool2d`` gives torch's results bit for bit, and writes no indices.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from ..chain import reason_not_plain
from .capture import Island

_max_pool2d = torch.ops.spamm_torch.max_pool2d.default

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)  # of the op's own kernels
_ARGUMENTS = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")

# Kernel size, stride, padding, dilation, ceil mode.
Pooling: TypeAlias = tuple[Any, Any, Any, Any, bool]


def find_pools(island: Island) -> dict[fx.Node, Pooling]:
    """The max pools of an island that return no indices, in the graph's order."""
    found = {node: _pooling(island.module, node) for node in island.graph.nodes}
    return {node: pooling for node, pooling in found.items() if pooling is not None}


def _pooling(root: nn.Module, node: fx.Node) -> Pooling | None:
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
