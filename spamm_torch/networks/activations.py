"""The activations that the ops compute, as functions of torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": torch.clone,
    "relu": F.relu,
    "relu6": F.relu6,
    "hardswish": F.hardswish,
    "silu": F.silu,
    "leaky_relu": F.leaky_relu,
}


def activated(values: Tensor, activation: str) -> Tensor:
    """The activation of this name, in memory of its own."""
    return _FUNCTIONS[activation](values)
