"""Convolutions of deviations from a reference, as the code of the reference form calls them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

_ops = torch.ops.spamm_torch

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": torch.clone,
    "relu": F.relu,
    "relu6": F.relu6,
    "hardswish": F.hardswish,
    "silu": F.silu,
    "leaky_relu": F.leaky_relu,
}


def activated(base: Tensor, activation: str) -> Tensor:
    """The activation of this name, in memory of its own."""
    return _ACTIVATIONS[activation](base)


def conv2d(input: Tensor, weight: Tensor, base: Tensor, *geometry: Any, **options: Any) -> Tensor:
    """activation(conv(input) + residual + base) - activation(base), by the op ``conv2d``.

    Args:
        input: deviations, (N, C, H, W).
        weight: as of the op.
        base: (1, C', H', W'), what the layer computes for the reference before its activation.
        geometry: stride, padding, dilation, groups.
        options: of the op.
    """
    return _finished(_ops.conv2d, input, weight, base, geometry, options)


def dense_conv2d(
    input: Tensor, weight: Tensor, base: Tensor, *geometry: Any, **options: Any
) -> Tensor:
    """The same by the op ``dense_conv2d``."""
    return _finished(_ops.dense_conv2d, input, weight, base, geometry, options)


def _finished(
    op: Any, input: Tensor, weight: Tensor, base: Tensor, geometry: Any, options: dict[str, Any]
) -> Tensor:
    activation = options.pop("activation")
    sums = op(input, weight, None, *geometry, **options)
    if activation == "none":
        return sums
    return activated(sums + base, activation) - activated(base, activation)
