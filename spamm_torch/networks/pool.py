"""Max pooling in a generated forward, by the kernel that is faster.

The op ``max_pool2d_with_norms`` gives torch's results bit for bit. Its kernel has 64 images in a
thread block: measured on an H200, it takes 0.3 to 0.55 of the time of torch's from 32 images on,
and longer below.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from ..chain import _computes_output_norms, reason_not_plain
from .capture import Island

_ops = torch.ops.spamm_torch

_LEAST_IMAGES = 32


def find_pools(island: Island) -> list[fx.Node]:
    """The calls of ``nn.MaxPool2d`` in an island that :func:`max_pool2d` may replace."""
    pools = []
    for node in island.graph.nodes:
        if node.op != "call_module" or len(node.args) != 1 or node.kwargs:
            continue
        module = island.module.get_submodule(str(node.target))
        is_pool = type(module) is nn.MaxPool2d and not module.return_indices
        if is_pool and reason_not_plain(module) is None:
            pools.append(node)
    return pools


def arguments_of(pool: nn.MaxPool2d) -> tuple[Any, ...]:
    """What :func:`max_pool2d` takes behind the input."""
    pairs = (pool.kernel_size, pool.stride, pool.padding, pool.dilation)
    return (*pairs, pool.ceil_mode)


def max_pool2d(
    input: Tensor, kernel_size: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool
) -> Tensor:
    """As ``torch.nn.functional.max_pool2d``, without a gradient."""
    if _op_is_faster(input):
        options = {"padding": padding, "dilation": dilation, "ceil_mode": ceil_mode}
        output, _ = _ops.max_pool2d_with_norms(input, kernel_size, stride, **options)
        return output
    return F.max_pool2d(input, kernel_size, stride, padding, dilation, ceil_mode)


def _op_is_faster(input: Tensor) -> bool:
    return (
        not torch.compiler.is_compiling()  # Inductor makes a kernel of its own
        and input.is_cuda
        and input.dim() == 4
        and input.shape[0] >= _LEAST_IMAGES
        and input.is_contiguous(memory_format=torch.channels_last)
        and _computes_output_norms(input.device, input.dtype)
    )
