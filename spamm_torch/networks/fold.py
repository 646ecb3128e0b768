"""A convolution's weight and bias with the batch norm behind it folded in."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights


def folded(conv: nn.Conv2d, batch_norm: Any) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of the convolution that computes both; of the convolution's dtype.

    Args:
        conv: the convolution.
        batch_norm: a batch norm in eval mode that keeps running statistics, or None. Its tensors
            may be of another dtype than the weight's.

    Returns:
        Without a batch norm the Parameters' own memory, else new tensors in the weight's memory
        format, rounded once from float32 (float64 for float64).

    Source of the rule: ``torch.nn.utils.fusion``.
    """
    weight, bias = conv.weight.detach(), None if conv.bias is None else conv.bias.detach()
    if batch_norm is None:
        return weight, bias
    wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
    operands: list[Any] = [  # torch's own annotations know no missing statistics
        None if tensor is None else tensor.detach().to(wide)
        for tensor in (
            *(weight, bias, batch_norm.running_mean, batch_norm.running_var),
            *(batch_norm.weight, batch_norm.bias),
        )
    ]
    weight_, bias_, mean, variance, scale, shift = operands
    both = fuse_conv_bn_weights(weight_, bias_, mean, variance, batch_norm.eps, scale, shift)
    new_weight, new_bias = (tensor.detach().to(weight.dtype) for tensor in both)
    return new_weight, new_bias
