"""A plan of the reference form, and the nodes of a graph that it alone looks at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..networks.plan import Plan, Site

# They have no weights: they take deviations as they are.
LINEAR_MODULES = (
    *(nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.Upsample, nn.UpsamplingNearest2d),
    *(nn.UpsamplingBilinear2d, nn.Identity, nn.Dropout, nn.Dropout2d, nn.PixelShuffle),
)


@dataclass
class ReferencePlan(Plan):
    """A plan in which every convolution computes deviations.

    Attributes:
        reference: the island's arguments for the reference picture.
    """

    reference: tuple[Tensor, ...]

    def _pays(self, site: Site) -> bool:
        return self.engines[site.name].kind != "left"

    def _replaces(self, module: nn.Module) -> bool:
        return type(module) in LINEAR_MODULES  # the result for the reference is held


_CONCATENATIONS = (torch.cat, torch.concat, torch.concatenate)


def concatenated(node: fx.Node) -> tuple[Sequence[Any], Any] | None:
    """The parts that a node concatenates, and the dimension; None for other nodes."""
    if node.op != "call_function" or node.target not in _CONCATENATIONS or not node.args:
        return None
    parts = node.args[0]
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    return (parts, dim) if isinstance(parts, (list, tuple)) else None


def concatenated_channels(node: fx.Node) -> Sequence[Any] | None:
    """The parts of a concatenation of channels; None for other nodes."""
    joined = concatenated(node)
    return joined[0] if joined is not None and joined[1] == 1 else None


def looks_at_shape(node: fx.Node) -> bool:
    """Whether a node asks a value for its shape, dtype or device alone."""
    if node.op == "call_method":
        return node.target in ("size", "dim")
    looks = node.op == "call_function" and node.target is getattr
    return looks and node.args[1] in ("shape", "dtype", "device", "ndim")
