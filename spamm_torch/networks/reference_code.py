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
from .norm_flow import NormFlow
from .pixel_norms import (
    norms_after,
    passed_on,
    pixel_norm_flow,
)
from .plan import Plan
from .shapes import Shapes
from .sites import Site, concatenated, looks_at_shape, may_write, operands_of_add
from .upsample import upsample_nearest

_ops = torch.ops.spamm_torch

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
        forward_with_norms: the same, with norms of pixels from layer to layer; None if no layer
            would take them.
        base: ``base(self, operands, *references)`` returns the bases of all sites, then the
            references to hold. It reads weight and bias in the place of weight and base.
    """

    forward: Forward
    forward_with_norms: Forward | None
    base: Callable[..., list[Tensor]]


def generate_reference_code(plan: Plan, shapes: Shapes) -> ReferenceCode:
    """The reference form of an island.

    Args:
        plan: the island, its sites and their engines.
        shapes: of the island's nodes for the reference.

    Raises:
        ValueError: an island that has no reference form; says why.
    """
    places: dict[fx.Node, int] = {}
    flow = pixel_norm_flow(plan, shapes)
    with_norms = None
    if flow.readers:
        with_norms, _ = _Generator(plan, shapes, flow, places).run()
    forward, base = _Generator(plan, shapes, NormFlow(), places).run()
    return ReferenceCode(forward, with_norms, base)


class _Generator:
    """Walks through the island's nodes and writes both functions along the way.

    ``places`` tells where among the operands the references are that others hold already. Those
    that this one adds are put there, too.
    """

    def __init__(
        self, plan: Plan, shapes: Shapes, flow: NormFlow, places: dict[fx.Node, int]
    ) -> None:
        self._plan, self._shapes, self._flow, self._places = plan, shapes, flow, places
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
        self._held: dict[fx.Node, fx.Node] = {}  # references in the base
        self._norms: dict[fx.Node, fx.Node] = {}  # in the forward, by the island's nodes
        self._pools, self._upsamplings = plan.pools, plan.upsamplings

    def run(self) -> tuple[Forward, Callable[..., list[Tensor]]]:
        nodes = list(self._plan.island.graph.nodes)
        _check_writes(nodes, self._inside, set(self._sites), self._root)
        for node in nodes:
            if node in self._inside:
                continue
            if node.op == "output":
                self._forward.output(fx.map_arg(node.args[0], self._plain_of))
                continue
            if node in self._sites:
                self._convolve(*self._sites[node])
            else:
                self._pass_on(node)  # first: it may hold what this node writes to
                self._reference[node] = self._base.node_copy(node, self._reference.__getitem__)
            if node in self._places:
                self._hold(node)
        bases = [self._bases[place] for place in range(len(self._sites))]
        self._base.output([*bases, *(self._held[node] for node in self._places)])
        return compiled(self._forward), compiled(self._base)

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
        """M as an operand of the forward."""
        if node not in self._places:
            shape, dtype = self._shapes.get(node, ((), None))
            if len(shape) < 2 or shape[0] != 1 or dtype is None or not dtype.is_floating_point:
                raise ValueError(f"{node.name} is not one tensor of floats for each picture")
            self._places[node] = len(self._places)
            self._hold(node)
        place = 3 * len(self._sites) + self._places[node]
        return self._forward.call_function(operator.getitem, (self._operands, place))

    def _hold(self, node: fx.Node) -> None:
        """Keeps M in the base. A copy: what runs behind may write to the original."""
        self._held[node] = self._base.call_function(torch.clone, (self._reference[node],))

    def _norms_of(self, node: fx.Node) -> fx.Node:
        """The norms of a deviation's pixels, of a value from which the flow passes them on."""
        if node not in self._norms:
            operands = passed_on(node, self._root, self._shapes)
            assert operands is not None
            norms = [self._norms_of(operand) for operand in operands]
            self._norms[node] = norms_after(self._forward, node, norms, self._shapes)
        return self._norms[node]

    def _with_norms(self, node: fx.Node, both: fx.Node) -> fx.Node:
        """The first result; the second is remembered as the node's norms."""
        value = self._forward.call_function(operator.getitem, (both, 0))
        self._norms[node] = self._forward.call_function(operator.getitem, (both, 1))
        return value

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
        if site.name in self._flow.readers:
            options["norm_input"] = self._norms_of(_input_of(site))
        if site.residual is not None:
            options["residual"] = self._deviation_of(site.residual)
        options["activation"] = site.activation
        args = (self._deviation_of(_input_of(site)), weight, base, *geometry)
        if site.name in self._flow.producers:
            both = self._forward.call_function(
                _ops.conv2d_deviation_with_norms.default, args, options
            )
            self._deviation[site.last] = self._with_norms(site.last, both)
        else:
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
        if node in self._flow.pools:
            self._pool(node)
            return
        operands = self._operands_of_linear(node)
        is_linear = bool(operands) and all(operand in self._deviation for operand in operands)
        values = self._deviation if is_linear else self._plain
        form = self._either if is_linear or looks_at_shape(node) else self._plain_of
        if node in self._upsamplings:
            args = fx.map_arg((node.args[0], *self._upsamplings[node]), form)
            values[node] = self._forward.call_function(upsample_nearest, args)
        else:
            values[node] = self._forward.node_copy(node, form)

    def _pool(self, node: fx.Node) -> None:
        """A max pool in deviations, which leaves norms."""
        operand = node.args[0]
        assert isinstance(operand, fx.Node)
        kernel, stride, padding, dilation, ceil_mode = self._pools[node]
        both = self._forward.call_function(
            _ops.max_pool2d_deviation.default,
            (
                *(self._deviation_of(operand), self._held_reference(operand)),
                *(_pair(kernel), _pair(stride), _pair(padding), _pair(dilation), ceil_mode),
            ),
        )
        self._deviation[node] = self._with_norms(node, both)

    def _either(self, node: fx.Node) -> fx.Node:
        """A value in the form in which it is there; both have one shape."""
        return self._deviation.get(node) or self._plain[node]

    def _operands_of_linear(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """The tensors that a linear node without weights takes; none for other nodes."""
        if (added := operands_of_add(node)) is not None:
            return added
        if (joined := concatenated(node)) is not None:
            parts, dim = joined
            if isinstance(dim, int) and dim != 0:
                return tuple(part for part in parts if isinstance(part, fx.Node))
            return ()
        if node.op == "call_module":
            module = self._root.get_submodule(str(node.target))
            known = type(module) in _LINEAR_MODULES
        else:
            known = node.op == "call_function" and node.target in _LINEAR_FUNCTIONS
        first = node.args[0] if node.args else None
        return (first,) if known and isinstance(first, fx.Node) else ()


def _pair(size: Any) -> list[int]:
    return [size, size] if isinstance(size, int) else list(size)


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
