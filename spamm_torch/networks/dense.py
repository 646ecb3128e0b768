"""A dense convolution in a generated forward: the op, or torch's own calls for a compiler.

The op ``dense_conv2d`` calls cuDNN's convolution with bias, residual and ReLU in one kernel. What
else it applies takes kernels of its own, which Inductor joins with their neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from .activations import activated

_ops = torch.ops.spamm_torch


def dense_conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: int | Sequence[int],
    padding: int | Sequence[int],
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    residual: Tensor | None = None,
    activation: str = "none",
) -> Tensor:
    """``torch.ops.spamm_torch.dense_conv2d``, in parts where a compiler makes more of them."""
    geometry = (stride, padding, dilation, groups)
    in_parts = torch.compiler.is_compiling() and input.is_cuda
    if not in_parts or _is_one_kernel(weight, groups, activation):
        options = {"residual": residual, "activation": activation}
        return _ops.dense_conv2d.default(input, weight, bias, *geometry, **options)
    output = F.conv2d(input, weight, bias, *geometry)
    if residual is not None:
        output = output + residual
    return output if activation == "none" else activated(output, activation)


def _is_one_kernel(weight: Tensor, groups: int, activation: str) -> bool:
    """Whether cuDNN's fused call takes such a weight (csrc/cuda/conv/dense_conv2d.cpp)."""
    in_units = all(channels * weight.itemsize % 16 == 0 for channels in weight.shape[:2])
    return activation == "relu" and groups == 1 and in_units and weight.dtype.itemsize == 2
