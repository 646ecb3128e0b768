"""Calls that the reference form does not serve, refused while it is looked at.

Such calls take the model's own forward, in which nothing is skipped. An accuracy that was found
with them would say that any setting costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..networks.example import describe
from ..networks.fused import fused_of


@contextmanager
def other_calls_refused(model: nn.Module) -> Iterator[None]:
    """Inside, calls that a generated forward of the model does not serve raise ValueError.

    Also those of copies that are made inside, and theirs only inside.
    """
    is_inside = True

    def refuse(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if is_inside:
            raise ValueError(
                "with a reference the model must be called, in evaluate too, with pictures of its "
                "size and type, in eval mode, without autocast and without hooks on layers; got "
                f"{_describe_call(args, kwargs)}{_circumstance(model)}"
            )

    for module in model.modules():
        fused = fused_of(module)
        if fused is not None:
            fused.on_other_call = refuse
    try:
        yield
    finally:
        is_inside = False


def _describe_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    values = pytree.tree_leaves((args, dict(kwargs)))
    tensors = [describe(value) for value in values if isinstance(value, Tensor)]
    return ", ".join(tensors) or "no tensor"


def _circumstance(model: nn.Module) -> str:
    """What beside the arguments keeps a call from being served, where that is seen."""
    if torch._C._is_any_autocast_enabled():
        return " under autocast"
    if any(module.training for module in model.modules()):
        return " in training mode"
    hooked = [
        name
        for name, module in model.named_modules()
        if name and (module._forward_hooks or module._forward_pre_hooks)
    ]
    return f" with a hook on {hooked[0]}" if hooked else ""
