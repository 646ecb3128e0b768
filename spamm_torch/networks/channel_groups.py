"""Which channels of an island may be put in another order without a change of what it computes.

Channels of a value are ordered by the convolutions that compute it, which order the rows of their
weights, and by those that read it, which order the columns. Values that are added have one order;
pools and activations pass it on; a concatenation has the orders of its parts. Where a value is
flattened or averaged over the picture its channels are put back first. Everything else that reads a
value needs the model's own order, and keeps it for all that the value is tied to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from ..chain import reason_not_plain
from .capture import Island
from .sites import Site, concatenated_channels, looks_at_shape, operands_of_add

_PASSING_MODULES = (
    *(nn.ReLU, nn.ReLU6, nn.Hardswish, nn.SiLU, nn.LeakyReLU, nn.GELU, nn.Sigmoid, nn.Tanh),
    *(nn.Identity, nn.Dropout, nn.Dropout2d, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d),
    *(nn.AdaptiveMaxPool2d, nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d),
)
_PASSING_FUNCTIONS = (
    *(torch.relu, torch.relu_, F.relu, F.relu_, F.relu6, F.hardswish, F.silu, F.leaky_relu),
    *(F.max_pool2d, F.avg_pool2d, F.adaptive_avg_pool2d, F.adaptive_max_pool2d, F.interpolate),
    F.dropout,
)
_PASSING_METHODS = ("relu", "relu_", "contiguous")
_FLATTENING = (torch.flatten, torch.mean, torch.reshape)

Order: TypeAlias = tuple[int, ...]  # the channel that comes first, the second, ...
Layout: TypeAlias = "tuple[Group, ...]"


@dataclass(eq=False)
class Group:
    """Channels that are ordered together.

    Attributes:
        channels: how many.
        producers: the sites that compute them.
        readers: the sites that read them, each with the place of its first column.
        is_fixed: whether they must keep the model's own order.
    """

    channels: int
    producers: list[Site] = field(default_factory=list)
    readers: list[tuple[Site, int]] = field(default_factory=list)
    is_fixed: bool = False
    _same: Group | None = None

    def found(self) -> Group:
        """The group that this one was joined with, or itself."""
        return self if self._same is None else self._same.found()

    def join(self, other: Group) -> None:
        """Makes both one group."""
        one, two = self.found(), other.found()
        if one is two:
            return
        one.producers += two.producers
        one.readers += two.readers
        one.is_fixed |= two.is_fixed
        two._same = one


@dataclass
class ChannelGroups:
    """What :func:`find_groups` found.

    Attributes:
        outputs: the group of what each site computes, by the site's name.
        inputs: the groups of what each site reads, one behind the other; missing where its input
            has the model's own order.
        exits: the nodes before which channels are put back, with the groups of what they read.
    """

    outputs: dict[str, Group] = field(default_factory=dict)
    inputs: dict[str, Layout] = field(default_factory=dict)
    exits: dict[fx.Node, Layout] = field(default_factory=dict)

    def free(self) -> list[Group]:
        """The groups whose order is free."""
        groups = dict.fromkeys(group.found() for group in self.outputs.values())
        return [group for group in groups if not group.is_fixed]


def find_groups(island: Island, sites: Sequence[Site]) -> ChannelGroups:
    """The groups of an island whose generated forward computes these sites itself."""
    return _Walk(island, sites).run()


class _Walk:
    """The walk along an island's nodes."""

    def __init__(self, island: Island, sites: Sequence[Site]) -> None:
        self._nodes, self._root = list(island.graph.nodes), island.module
        self._sites = {site.last: site for site in sites}
        self._inside = {node for site in sites for node in site.nodes[:-1]}
        self._layouts: dict[fx.Node, Layout] = {}
        self._found = ChannelGroups()

    def run(self) -> ChannelGroups:
        for node in self._nodes:
            if node in self._sites:
                self._visit_site(self._sites[node])
            elif node not in self._inside:
                self._visit(node)
        return self._found

    def _visit_site(self, site: Site) -> None:
        group = Group(site.conv.out_channels, [site], is_fixed=site.conv.groups > 1)
        self._found.outputs[site.name] = group
        self._layouts[site.last] = (group,)
        read = site.nodes[0].args[0]
        layout = self._layouts.get(read) if isinstance(read, fx.Node) else None
        if layout is not None:
            self._found.inputs[site.name] = layout
            first = 0
            for part in layout:
                part.found().readers.append((site, first))
                first += part.channels
            if site.conv.groups > 1 or first != site.conv.in_channels:
                _fix(layout)
        if site.residual is not None:
            self._tie(site.last, site.residual)

    def _visit(self, node: fx.Node) -> None:
        read = [value for value in node.all_input_nodes if value in self._layouts]
        if not read:
            return
        added = operands_of_add(node)
        if added is not None:
            self._tie(*added)
            self._layouts[node] = self._layouts[read[0]]
        elif (parts := concatenated_channels(node)) and all(p in self._layouts for p in parts):
            self._layouts[node] = tuple(group for part in parts for group in self._layouts[part])
        elif len(read) == 1 and node.all_input_nodes == read and self._passes_on(node):
            self._layouts[node] = self._layouts[read[0]]
        elif len(read) == 1 and node.args[:1] == (read[0],) and self._flattens(node):
            self._found.exits[node] = self._layouts[read[0]]
        elif not looks_at_shape(node):
            for value in read:
                _fix(self._layouts[value])

    def _tie(self, one: fx.Node, other: fx.Node) -> None:
        """Gives two values one order; the model's own where one of them has to have that."""
        layouts = [self._layouts[node] for node in (one, other) if node in self._layouts]
        if len(layouts) == 2 and _sizes(layouts[0]) == _sizes(layouts[1]):
            for a, b in zip(*layouts, strict=True):
                a.join(b)
        else:
            for layout in layouts:
                _fix(layout)

    def _module(self, node: fx.Node) -> nn.Module | None:
        """The module that a node calls, if it does nothing but forward."""
        if node.op != "call_module":
            return None
        module = self._root.get_submodule(str(node.target))
        return module if reason_not_plain(module) is None else None

    def _passes_on(self, node: fx.Node) -> bool:
        """Whether a node computes each channel of its result from the same one of its input."""
        if node.op == "call_module":
            module = self._module(node)
            returns_pair = getattr(module, "return_indices", False)
            return type(module) in _PASSING_MODULES and not returns_pair
        if node.op == "call_method":
            return node.target in _PASSING_METHODS
        returns_pair = bool(node.kwargs.get("return_indices"))
        return node.target in _PASSING_FUNCTIONS and not returns_pair

    def _flattens(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            return type(self._module(node)) is nn.Flatten
        if node.op == "call_method":
            return node.target in ("flatten", "mean", "view", "reshape")
        return node.op == "call_function" and node.target in _FLATTENING


def _sizes(layout: Layout) -> list[int]:
    return [group.channels for group in layout]


def _fix(layout: Layout) -> None:
    for group in layout:
        group.found().is_fixed = True


# ---- Orders given to an island -----------------------------------------------------------------


def put_in_order(island: Island, groups: ChannelGroups, orders: Mapping[str, Order]) -> None:
    """Gives the sites of an island their orders, and the island what is to be put back.

    Args:
        island, groups: as of :func:`find_groups`.
        orders: of what sites compute, by name. One for a group is enough; those of channels that
            have to keep the model's order are left out.
    """
    chosen: dict[Group, Tensor] = {}
    for name, group in groups.outputs.items():
        order, group = orders.get(name), group.found()
        if order is not None and not group.is_fixed and len(order) == group.channels:
            chosen.setdefault(group, torch.tensor(order))

    def order_of(layout: Layout) -> Tensor | None:
        if not any(group.found() in chosen for group in layout):
            return None
        parts, first = [], 0
        for group in layout:
            own = chosen.get(group.found())
            parts.append(first + (torch.arange(group.channels) if own is None else own))
            first += group.channels
        return torch.cat(parts)

    for group in chosen:
        for site in group.producers:
            site.output_order = chosen[group]
        for site, _ in group.readers:
            site.input_order = order_of(groups.inputs[site.name])
    for node, layout in groups.exits.items():
        read = order_of(layout)
        if read is not None:
            island.put_back[node] = read.argsort()
