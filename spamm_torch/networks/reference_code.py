"""The code of the reference form, generated for an island: two functions.

In the reference form values are deviations d = x - M from what the island computes for a reference
picture, M. A convolution with what it absorbs becomes

    base = conv(M) + bias + (residual of the reference)
    d' = activation(conv(d) + (deviation of the residual) + base) - activation(base)

which is exact for any M, padding included, and zero where its inputs are. Sums, concatenations,
average pools and resampling are linear: they take deviations as they are. Everything else gets
x = d + M, and what it returns is a deviation again once a convolution asks for one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from .activations import activated
from .generate import Forward, compiled
from .plan import Plan
from .shapes import Shapes
from .sites import Site, looks_at_shape, may_write, operands_of_add

_ops = torch.ops.spamm_torch

_CONCATENATIONS = (torch.cat, torch.concat, torch.concatenate)
_LINEAR_MODULES = (
    *(nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.Upsample, nn.UpsamplingNearest2d),
    *(nn.UpsamplingBilinear2d, nn.Identity, nn.Dropout, nn.Dropout2d, nn.PixelShuffle),
)
_LINEAR_FUNCTIONS = (F.avg_pool2d, F.adaptive_avg_pool2d, F.interpolate, F.pixel_shuffle)


@dataclass(frozen=True)
class ReferenceCode:
    """Two generated functions, whose operands are three for each site of the plan, and more.

    Attributes:
        forward: ``forward(self, operands, *args)``, the island's forward. The operands of a site
            are weight, base and weight norms; behind those of all sites come the held references.
        base: ``base(self, operands, *references)`` returns the bases of all sites, then the
            references to hold. It reads weight and bias in the place of weight and base.
    """

    forward: Forward
    base: Callable[..., list[Tensor]]


def generate_reference_code(plan: Plan, shapes: Shapes) -> ReferenceCode:
    """The reference form of an island.

    Args:
        plan: the island, its sites and their engines.
        shapes: of the island's nodes for the reference.

    Raises:
        ValueError: an island that has no reference form; says why.
    """
    return _Generator(plan, shapes).run()


class _Generator:
    """Walks through the island's nodes and writes both functions along the way."""

    def __init__(self, plan: Plan, shapes: Shapes) -> None:
        self._plan, self._shapes = plan, shapes
        self._root = plan.island.module
        self._sites = {site.last: (place, site) for place, site in enumerate(plan.fused)}
        self._inside = {node for site in plan.fused for node in site.nodes[:-1]}
        self._forward, self._base = fx.Graph(), fx.Graph()
        self._operands, self._weights = (
            graph.placeholder("spamm_operands") for graph in (self._forward, self._base)
        )
        self._plain: dict[fx.Node, fx.Node] = {}  # values in the forward, by the island's nodes
        self._deviation: dict[fx.Node, fx.Node] = {}
        self._reference: dict[fx.Node, fx.Node] = {}  # values in the base
        self._bases: dict[int, fx.Node] = {}  # by the place of the site, not as they are computed
        self._held: dict[fx.Node, tuple[fx.Node, fx.Node]] = {}  # as in the base, in the forward

    def run(self) -> ReferenceCode:
        nodes = list(self._plan.island.graph.nodes)
        _check_writes(nodes, self._inside, set(self._sites), self._root)
        for node in nodes:
            if node in self._inside:
                continue
            if node.op == "output":
                self._forward.output(fx.map_arg(node.args[0], self._plain_of))
            elif node in self._sites:
                self._convolve(*self._sites[node])
            else:
                self._pass_on(node)  # first: it may hold what this node writes to
                self._reference[node] = self._base.node_copy(node, self._reference.__getitem__)
        bases = [self._bases[place] for place in range(len(self._sites))]
        self._base.output([*bases, *(held for held, _ in self._held.values())])
        return ReferenceCode(compiled(self._forward), compiled(self._base))

    # ---- Forms of a value -----------------------------------------------------------------------

    def _plain_of(self, node: fx.Node) -> fx.Node:
        """x = d + M."""
        if node not in self._plain:
            both = (self._deviation[node], self._held_reference(node))
            self._plain[node] = self._forward.call_function(operator.add, both)
        return self._plain[node]

    def _deviation_of(self, node: fx.Node) -> fx.Node:
        """d = x - M."""
        if node not in self._deviation:
            both = (self._plain[node], self._held_reference(node))
            self._deviation[node] = self._forward.call_function(operator.sub, both)
        return self._deviation[node]

    def _held_reference(self, node: fx.Node) -> fx.Node:
        """M as an operand of the forward. A copy: what runs behind may write to the original."""
        if node not in self._held:
            shape, dtype = self._shapes.get(node, ((), None))
            if len(shape) < 2 or shape[0] != 1 or dtype is None or not dtype.is_floating_point:
                raise ValueError(f"{node.name} is not one tensor of floats for each picture")
            held = self._base.call_function(torch.clone, (self._reference[node],))
            place = 3 * len(self._sites) + len(self._held)
            operand = self._forward.call_function(operator.getitem, (self._operands, place))
            self._held[node] = held, operand
        return self._held[node][1]

    # ---- Nodes ----------------------------------------------------------------------------------

    def _convolve(self, place: int, site: Site) -> None:
        conv = site.conv
        geometry: tuple[Any, ...] = (
            list(conv.stride),
            list(conv.padding),
            list(conv.dilation),
            conv.groups,
        )
        weight, base, norms = (
            self._forward.call_function(operator.getitem, (self._operands, 3 * place + offset))
            for offset in range(3)
        )
        options: dict[str, Any] = {}
        setting = self._plan.engines[site.name].setting
        if setting is not None:
            options |= setting.op_arguments()
        if setting is None or setting.skips_nothing:
            self._forward.erase_node(norms)
        else:
            options["norm_weight"] = norms
        if site.residual is not None:
            options["residual"] = self._deviation_of(site.residual)
        options["activation"] = site.activation
        args = (self._deviation_of(_input_of(site)), weight, base, *geometry)
        self._deviation[site.last] = self._forward.call_function(
            _ops.conv2d_deviation.default, args, options
        )
        self._convolve_reference(place, site, geometry)

    def _convolve_reference(self, place: int, site: Site, geometry: tuple[Any, ...]) -> None:
        weight, bias = (
            self._base.call_function(operator.getitem, (self._weights, 3 * place + offset))
            for offset in range(2)
        )
        options: dict[str, Any] = {}
        if site.residual is not None:
            options["residual"] = self._reference[site.residual]
        args = (self._reference[_input_of(site)], weight, bias, *geometry)
        base = self._base.call_function(_ops.dense_conv2d.default, args, options)
        self._bases[place] = base
        self._reference[site.last] = self._base.call_function(activated, (base, site.activation))

    def _pass_on(self, node: fx.Node) -> None:
        """Copies a node, which takes deviations if it is linear and all it takes are."""
        operands = self._operands_of_linear(node)
        is_linear = bool(operands) and all(operand in self._deviation for operand in operands)
        values = self._deviation if is_linear else self._plain
        if is_linear or looks_at_shape(node):
            copy = self._forward.node_copy(node, self._either)
        else:
            copy = self._forward.node_copy(node, self._plain_of)
        values[node] = copy

    def _either(self, node: fx.Node) -> fx.Node:
        """A value in the form in which it is there; both have one shape."""
        return self._deviation.get(node) or self._plain[node]

    def _operands_of_linear(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """The tensors that a linear node without weights takes; none for other nodes."""
        if (added := operands_of_add(node)) is not None:
            return added
        if node.op == "call_function" and node.target in _CONCATENATIONS:
            tensors = node.args[0] if node.args else None
            dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
            if isinstance(tensors, (list, tuple)) and isinstance(dim, int) and dim != 0:
                return tuple(value for value in tensors if isinstance(value, fx.Node))
            return ()
        if node.op == "call_module":
            module = self._root.get_submodule(str(node.target))
            known = type(module) in _LINEAR_MODULES
        else:
            known = node.op == "call_function" and node.target in _LINEAR_FUNCTIONS
        first = node.args[0] if node.args else None
        return (first,) if known and isinstance(first, fx.Node) else ()


def _input_of(site: Site) -> fx.Node:
    """What the site's convolution takes."""
    node = site.nodes[0].args[0]
    assert isinstance(node, fx.Node)
    return node


def _check_writes(
    nodes: Iterable[fx.Node], inside: set[fx.Node], lasts: set[fx.Node], root: nn.Module
) -> None:
    """Raises where a node writes to a value that another one reads later: the two forms of a value
    would then differ.
    """
    order = {node: place for place, node in enumerate(nodes)}
    for node in order:
        if node in inside or node in lasts or not may_write(node, root):
            continue
        for operand in node.all_input_nodes:
            if any(order[user] > order[node] for user in operand.users):
                raise ValueError(f"{node.name} changes a tensor in place that is read later")
