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
                "evaluate must call the model with pictures of the reference's size and type, in "
                f"eval mode, without autocast and hooks; got {_describe_call(args, kwargs)}"
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
    what = ", ".join(tensors) or "no tensor"
    return f"{what} under autocast" if torch._C._is_any_autocast_enabled() else what
