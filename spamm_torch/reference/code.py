"""The code of the reference form, generated for an island: two functions.

In the reference form values are deviations d = x - M from the island's value for a reference
picture, M. A convolution with all that it absorbs becomes

    base = conv(M) + bias + (residual of the reference)
    d' = activation(conv(d) + (deviation of the residual) + base) - activation(base)

which is exact for any M, padding included, and zero where its inputs are. Sums, concatenations,
average pools and resampling are linear: they take deviations as they are. Everything else gets
x = d + M, and what it returns is a deviation again once a convolution asks for one.
"""

import operator
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from ..networks.calls import activated, upsample_nearest
from ..networks.generate import Forward, compiled
from ..networks.nodes import may_write, operands_of_add
from ..networks.plan import Shapes, Site
from . import layouts
from .layouts import LINEAR_MODULES, Layout, ReferencePlan
from .pixel_norms import PixelNormFlow, passed_on, pixel_norm_flow, regrouped, upsampled

_ops = torch.ops.spamm_torch

_LINEAR_FUNCTIONS = (F.avg_pool2d, F.adaptive_avg_pool2d, F.interpolate, F.pixel_shuffle)


Base: TypeAlias = Callable[..., list[Tensor]]
InLayouts: TypeAlias = list[tuple[int, nn.Conv2d, Layout]]


def generate_reference_code(
    plan: ReferencePlan, shapes: Shapes
) -> tuple[Forward, Forward | None, InLayouts, Base]:
    """The reference form of an island by its nodes' shapes; ValueError where it has none.

    First ``forward(self, operands, *args)``: the operands of a site are weight, base and weight
    norms; behind those of all sites come the held references. Then it with norms of pixels from
    layer to layer and sites in layouts of their own, whose operands are the last, or None; and
    place, convolution and layout of these. Last ``base(self, operands, *references)``, which reads
    weight and bias and returns the bases of all sites, then the references to hold.
    """
    places: dict[fx.Node, int] = {}
    flow = pixel_norm_flow(plan, shapes)
    with_norms = None
    if flow.readers or flow.layouts or flow.pools or flow.joins or flow.plain:
        with_norms, _ = _Generator(plan, shapes, flow, places).run()
    forward, base = _Generator(plan, shapes, PixelNormFlow(), places).run()
    sites = [(n, site.conv, flow.layouts.get(site.name)) for n, site in enumerate(plan.fused)]
    own = [(place, conv, layout) for place, conv, layout in sites if layout is not None]
    return forward, with_norms, own, base


class _Generator:
    """Writes both functions, node by node; ``places``: of held references among the operands."""

    def __init__(
        self, plan: ReferencePlan, shapes: Shapes, flow: PixelNormFlow, places: dict[fx.Node, int]
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
        # In the forward, by the island's nodes: norms, and of how many columns together.
        self._norms: dict[fx.Node, tuple[fx.Node, int]] = {}
        self._pools, self._upsamplings = plan.pools, plan.island.upsamplings
        in_phases = [
            site
            for site in plan.fused
            if site.name in flow.layouts and flow.layouts[site.name].in_phases
        ]
        # Upsampling and concatenations that nothing reads as they are: the convolutions behind
        # take what is before.
        passing = [*in_phases, *(site for site in plan.fused if site.name in flow.parts)]
        readers = {site.nodes[0] for site in passing}
        inputs = {site.input for site in passing}
        self._passed_by = {node for node in inputs if readers.issuperset(node.users)}

    def run(self) -> tuple[Forward, Base]:
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
            both = (self._deviation_of(node), self._held_reference(node))
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

    def _norms_of(self, node: fx.Node, columns: int = 1) -> fx.Node:
        """The norms of a deviation's pixels, ``columns`` together, of a value that has them."""
        if node not in self._norms:
            operand = passed_on(node, self._upsamplings, self._shapes)
            assert operand is not None
            args = (self._norms_of(operand), list(self._shapes[node][0][2:]))
            self._norms[node] = self._forward.call_function(upsampled, args), 1
        norms, own = self._norms[node]
        if own == columns:
            return norms
        channels = self._shapes[node][0][1]
        return self._forward.call_function(regrouped, (norms, channels, own, columns))

    def _take_both(self, node: fx.Node, both: fx.Node) -> None:
        """A node's deviation and its norms, the two results of a call."""
        self._deviation[node] = self._forward.call_function(operator.getitem, (both, 0))
        self._norms[node] = self._forward.call_function(operator.getitem, (both, 1)), 1

    # ---- Nodes ----------------------------------------------------------------------------------

    def _convolve(self, place: int, site: Site) -> None:
        layout = self._flow.layouts.get(site.name)
        value, norms = self._call(place, site, layout or Layout())
        if site.name in self._flow.plain:
            self._plain[site.last] = value
        else:
            self._deviation[site.last] = value
            if norms is not None:
                columns = 1 if layout is None else layout.columns
                if layout is not None and layout.in_phases:
                    columns = layouts.columns_of_phases(site.conv.out_channels)
                self._norms[site.last] = norms, columns
        self._convolve_reference(place, site)

    def _call(self, place: int, site: Site, layout: Layout) -> tuple[fx.Node, fx.Node | None]:
        """A site's deviations, and their norms where they are written."""
        weight, base, norms = self._operands_of(place, site)
        setting = self._plan.engines[site.name].setting
        options: dict[str, Any] = {} if setting is None else setting.op_arguments()
        geometry = _geometry(site.conv)
        if layout != Layout():
            options |= layout.options()
            geometry = layout.geometry(site.conv)
        if setting is None or setting.skips_nothing:
            self._forward.erase_node(norms)
        else:
            options["norm_weight"] = norms
        nodes = self._flow.parts.get(site.name) or [self._read_by(site, layout)]
        if site.name in self._flow.readers or site.name in self._flow.parts:
            options["norm_parts"] = [self._norms_of(node, layout.columns) for node in nodes]
        if site.residual is not None:
            options["residual"] = self._together(self._deviation_of(site.residual), layout)
        options["activation"] = site.activation
        parts = [self._together(self._deviation_of(node), layout) for node in nodes]
        if site.name in self._flow.plain:  # the sum of both is x
            options["residual"] = self._forward.call_function(
                layouts.one_for_each, (base, parts[0])
            )
        if layout.in_phases:
            options["in_phases"] = True
        leaves_norms = (
            layout.in_phases or site.name in self._flow.producers or site.name in self._flow.parts
        )
        if leaves_norms:
            options["norms"] = True
        both = self._forward.call_function(
            _ops.conv2d_deviation.default, (parts, weight, base, *geometry), options
        )
        result = self._forward.call_function(operator.getitem, (both, 0))
        left = self._forward.call_function(operator.getitem, (both, 1)) if leaves_norms else None
        if layout.columns > 1:
            result = self._forward.call_function(layouts.columns_apart, (result, layout.columns))
        return result, left

    def _read_by(self, site: Site, layout: Layout) -> fx.Node:
        """The value that a site's call takes: for phases, the one before the upsampling."""
        value = site.input
        if not layout.in_phases:
            return value
        before = passed_on(value, self._upsamplings, self._shapes)
        assert before is not None
        return before

    def _operands_of(self, place: int, site: Site) -> list[fx.Node]:
        """Weight, base and weight norms."""
        first = 3 * place
        if site.name in self._flow.layouts:  # the last operands; how many others there are is open
            names = [other.name for other in self._plan.fused if other.name in self._flow.layouts]
            first = 3 * (names.index(site.name) - len(names))
        places = range(first, first + 3)
        return [self._forward.call_function(operator.getitem, (self._operands, p)) for p in places]

    def _together(self, value: fx.Node, layout: Layout) -> fx.Node:
        if layout.columns == 1:
            return value
        return self._forward.call_function(layouts.columns_together, (value, layout.columns))

    def _convolve_reference(self, place: int, site: Site) -> None:
        weight, bias = (
            self._base.call_function(operator.getitem, (self._weights, 3 * place + offset))
            for offset in range(2)
        )
        options: dict[str, Any] = {}
        if site.residual is not None:
            options["residual"] = self._reference[site.residual]
        args = (self._reference[site.input], weight, bias, *_geometry(site.conv))
        base = self._base.call_function(_ops.dense_conv2d.default, args, options)
        self._bases[place] = base
        self._reference[site.last] = self._base.call_function(activated, (base, site.activation))

    def _pass_on(self, node: fx.Node) -> None:
        """Copies a node. A linear one takes deviations where all of its operands are deviations."""
        if node in self._flow.pools:
            self._pool(node)
            return
        if node in self._flow.joins:
            parts = layouts.concatenated_channels(node)
            assert parts is not None
            given = [self._deviation_of(part) for part in parts]
            join = _ops.join_deviations.default
            self._take_both(node, self._forward.call_function(join, (given,)))
            return
        if node in self._passed_by:
            return
        operands = self._operands_of_linear(node)
        is_linear = bool(operands) and self._deviation.keys() >= set(operands)
        values = self._deviation if is_linear else self._plain
        # Whoever looks at a shape takes the form that is there.
        either = self._plain | self._deviation
        form = either.__getitem__ if is_linear or layouts.looks_at_shape(node) else self._plain_of
        if node in self._upsamplings:
            args = fx.map_arg((node.args[0], *self._upsamplings[node]), form)
            values[node] = self._forward.call_function(upsample_nearest, args)
        else:
            values[node] = self._forward.node_copy(node, form)

    def _pool(self, node: fx.Node) -> None:
        """A max pool in deviations, which leaves norms."""
        operand = node.args[0]
        assert isinstance(operand, fx.Node)
        *sizes, ceil_mode = self._pools[node]
        both = self._forward.call_function(
            _ops.max_pool2d_deviation.default,
            (
                *(self._deviation_of(operand), self._held_reference(operand)),
                *([size, size] if isinstance(size, int) else list(size) for size in sizes),
                ceil_mode,
            ),
            {"norm_input": self._norms[operand][0]} if operand in self._norms else {},
        )
        self._take_both(node, both)

    def _operands_of_linear(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """The tensors that a linear node without weights takes; none for other nodes."""
        if (added := operands_of_add(node)) is not None:
            return added
        if (joined := layouts.concatenated(node)) is not None:
            parts, dim = joined
            if isinstance(dim, int) and dim != 0:
                return tuple(part for part in parts if isinstance(part, fx.Node))
            return ()
        if node.op == "call_module":
            module = self._root.get_submodule(str(node.target))
            known = type(module) in LINEAR_MODULES
        else:
            known = node.op == "call_function" and node.target in _LINEAR_FUNCTIONS
        first = node.args[0] if node.args else None
        return (first,) if known and isinstance(first, fx.Node) else ()


def _geometry(conv: nn.Conv2d) -> tuple[Any, ...]:
    return (list(conv.stride), list(conv.padding), list(conv.dilation), conv.groups)


def _check_writes(
    nodes: Iterable[fx.Node], inside: set[fx.Node], lasts: set[fx.Node], root: nn.Module
) -> None:
    """Raises where a node writes to a value that is read later: its two forms would differ."""
    order = {node: place for place, node in enumerate(nodes)}
    for node in order:
        if node in inside or node in lasts or not may_write(node, root):
            continue
        for operand in node.all_input_nodes:
            if any(order[user] > order[node] for user in operand.users):
                raise ValueError(f"{node.name} changes a tensor in place that is read later")
