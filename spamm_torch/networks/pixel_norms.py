"""Where norms of pixels travel in the reference form, and what layers without weights make of them.

A convolution of deviations skips by the norms of its input's pixels, (images, rows, columns, blocks
of 64 channels). The convolution or max pool before it leaves them with its output. Nearest
upsampling repeats them, and a concatenation puts them side by side. From other layers a convolution
takes norms itself.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from .._arguments import check_block
from .norm_flow import NormFlow
from .plan import Plan
from .shapes import Shapes
from .sites import Site, concatenated_channels, may_write
from .upsample import is_nearest

_CHANNELS = 64  # that share a norm
_ALIGNED = 8  # output channels of half types that the kernel with norms takes come in these


def pixel_norm_flow(plan: Plan, shapes: Shapes) -> NormFlow:
    """The flow of norms in the reference form, as if its device computed output norms.

    Args:
        plan: of an island with a reference.
        shapes: of the island's nodes for the reference.
    """
    return _Flow(plan, shapes).run()


class _Flow:
    def __init__(self, plan: Plan, shapes: Shapes) -> None:
        self._plan, self._shapes = plan, shapes
        self._by_last = {site.last: site for site in plan.fused}
        self._pools = plan.pools

    def run(self) -> NormFlow:
        flow = NormFlow()
        for site in self._plan.fused:
            value = site.nodes[0].args[0]
            sources = self._sources(value) if _skips_by_pixels(self._plan, site) else None
            if sources is None:
                continue
            flow.readers.add(site.name)
            for source in sources:
                producer = self._by_last.get(source)
                if producer is None:
                    flow.pools.add(source)
                else:
                    flow.producers.add(producer.name)
        return flow

    def _sources(self, value: Any) -> list[fx.Node] | None:
        """The convolutions and pools that leave the norms of a value; None where one does not."""
        root = self._plan.island.module
        if not isinstance(value, fx.Node) or any(may_write(user, root) for user in value.users):
            return None
        if (site := self._by_last.get(value)) is not None:
            return [value] if self._leaves_norms(site) else None
        if value in self._pools:
            return [value] if self._is_deviation(value.args[0]) else None
        passed = passed_on(value, root, self._shapes)
        found = [self._sources(operand) for operand in passed or ()]
        if not found or None in found:
            return None
        return [source for sources in found for source in sources or ()]

    def _leaves_norms(self, site: Site) -> bool:
        return _skips_by_pixels(self._plan, site) and site.conv.out_channels % _ALIGNED == 0

    def _is_deviation(self, value: Any) -> bool:
        return value in self._by_last


def _skips_by_pixels(plan: Plan, site: Site) -> bool:
    """Whether the norms that a site skips by are made of those of single pixels."""
    setting, conv = plan.engines[site.name].setting, site.conv
    if setting is None or setting.skips_nothing or conv.groups > 1 or setting.pixel_block is None:
        return False
    k = _CHANNELS if setting.block is None else check_block(setting.block)[1]
    return setting.pixel_block[0] == 1 and (k == _CHANNELS or conv.in_channels <= k < _CHANNELS)


def passed_on(node: fx.Node, root: nn.Module, shapes: Shapes) -> tuple[fx.Node, ...] | None:
    """The operands whose norms :func:`norms_after` makes the node's from; None for other nodes."""
    if is_nearest(node, root):
        first = node.args[0]
        if not isinstance(first, fx.Node) or {first, node} - shapes.keys():
            return None
        before, after = shapes[first][0], shapes[node][0]
        is_whole = len(after) == 4 and all(
            b % a == 0 for a, b in zip(before[2:], after[2:], strict=True)
        )
        return (first,) if is_whole else None
    if (parts := concatenated_channels(node)) is not None:
        nodes = tuple(part for part in parts if isinstance(part, fx.Node) and part in shapes)
        return nodes if len(nodes) == len(parts) and _may_join(nodes, shapes) else None
    return None


def _may_join(parts: Sequence[fx.Node], shapes: Shapes) -> bool:
    channels = _channels(parts, shapes)
    return sum(channels) <= _CHANNELS or all(count % _CHANNELS == 0 for count in channels[:-1])


def _channels(parts: Sequence[fx.Node], shapes: Shapes) -> list[int]:
    return [shapes[part][0][1] for part in parts]


def norms_after(
    graph: fx.Graph, node: fx.Node, norms: Sequence[fx.Node], shapes: Shapes
) -> fx.Node:
    """Adds to a graph what makes the norms of a node from those of what it passes on."""
    if concatenated_channels(node) is not None:
        join = together_in_a_block if shapes[node][0][1] <= _CHANNELS else side_by_side
        return graph.call_function(join, (list(norms),))
    return graph.call_function(upsampled, (norms[0], list(shapes[node][0][2:])))


def upsampled(norms: Tensor, size: Sequence[int]) -> Tensor:
    """Norms (images, rows, columns, blocks) of a picture whose pixels are repeated up to a size."""
    return F.interpolate(norms.permute(0, 3, 1, 2), size=tuple(size)).permute(0, 2, 3, 1)


def side_by_side(norms: Sequence[Tensor]) -> Tensor:
    """Norms of concatenated channels; all parts but the last fill their blocks."""
    return torch.cat(list(norms), 3)


def together_in_a_block(norms: Sequence[Tensor]) -> Tensor:
    """Norms of concatenated channels that share one block."""
    return functools.reduce(torch.hypot, norms)
