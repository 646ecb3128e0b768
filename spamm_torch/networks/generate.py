"""The forward that is generated for an island: the code that ``torch.fx`` prints for its graph."""

import itertools
import linecache
import operator
import re
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import fx, nn

from .calls import conv2d_max_pool, dense_conv2d, linear_relu, max_pool2d, upsample_nearest
from .plan import NormFlow, Plan, Site

_ops = torch.ops.spamm_torch

Forward: TypeAlias = Callable[..., Any]

# How a graph prints the ops. Generated code calls them by names of its own: looking one up in
# torch.ops takes time in each call.
_PRINTED_OP = re.compile(r"torch\.ops\.spamm_torch\.(\w+)\.default\(")

_counter = itertools.count(1)  # of generated functions, each in a file of its own for tracebacks


def generate(plan: Plan, flow: NormFlow | None = None) -> Forward:
    """The function ``forward(self, spamm_operands, *args)``, the operands being weight, bias, and
    the weight's norms or its packed copy, of each fused site; the last two may be None.
    """
    return _Generator(plan, flow or NormFlow()).run()


def _geometry(conv: nn.Conv2d, groups: int) -> tuple[Any, ...]:
    """The arguments behind the bias, in short: reading them takes a third of a small call."""
    of_both = map(tuple, (conv.stride, conv.padding, conv.dilation))
    stride, padding, dilation = (
        of_rows if of_rows == of_columns else [of_rows, of_columns]
        for of_rows, of_columns in of_both
    )
    rest = (dilation, groups)
    return (stride, padding) if rest == (1, 1) else (stride, padding, *rest)


class _Generator:
    """Puts one call in the place of each site's nodes, in a copy of the island's graph."""

    def __init__(self, plan: Plan, flow: NormFlow) -> None:
        self._plan, self._flow = plan, flow
        self._graph = fx.Graph()
        self._operands = self._graph.placeholder("spamm_operands")
        self._copies: dict[fx.Node, fx.Node] = {}
        result = self._graph.graph_copy(plan.island.graph, self._copies)
        self._graph.output(result)
        self._replaced: dict[fx.Node, fx.Node] = {}  # copies, by the nodes that took their place
        self._norms: dict[fx.Node, fx.Node] = {}  # of values, as they are now

    def run(self) -> Forward:
        plan, island = self._plan, self._plan.island
        for node, pooling in plan.pools.items():
            leaves_norms = node in self._flow.pools
            function = _ops.max_pool2d.default if leaves_norms else max_pool2d
            options = {"norms": True} if leaves_norms else {}
            self._replace([node], function, pooling, options, leaves_norms)
        for node, upsampling in island.upsamplings.items():
            self._replace([node], upsample_nearest, fx.map_arg(upsampling, self._now))
        for linear, relu in island.linear_relus.items():
            with self._graph.inserting_before(self._copies[linear]):
                layer = self._graph.create_node("get_attr", str(linear.target))
            self._replace([linear, relu], linear_relu, (layer,))
        for place, site in enumerate(plan.fused):
            self._replace_site(place, site)
        return compiled(self._graph)

    def _now(self, node: Any) -> Any:
        """The node of the new graph that computes the value of an island's node."""
        if not isinstance(node, fx.Node):
            return node
        copy = self._copies[node]
        return self._replaced.get(copy, copy)

    def _replace(
        self,
        nodes: Sequence[fx.Node],
        function: Any,
        args: Iterable[Any],
        options: Mapping[str, Any] = {},
        leaves_norms: bool = False,
    ) -> None:
        """Puts a call in the place of a chain of nodes; norms are its second result, if any."""
        copies = [self._copies[node] for node in nodes]
        with self._graph.inserting_before(copies[-1]):
            value = self._graph.call_function(function, (copies[0].args[0], *args), dict(options))
            if leaves_norms:
                both, value = value, self._graph.call_function(operator.getitem, (value, 0))
                self._norms[value] = self._graph.call_function(operator.getitem, (both, 1))
        for copy in reversed(copies):
            copy.replace_all_uses_with(value)
            self._replaced[copy] = value
            self._graph.erase_node(copy)

    def _replace_site(self, place: int, site: Site) -> None:
        nodes = self._plan.nodes(site)
        with self._graph.inserting_before(self._copies[nodes[-1]]):
            weight, bias, third = (
                self._graph.call_function(operator.getitem, (self._operands, 3 * place + offset))
                for offset in range(3)
            )
        options = self._options(site, self._copies[nodes[0]].args[0], third)
        groups = 1 if self._plan.engines[site.name].joined else site.conv.groups
        args = (weight, bias, *_geometry(site.conv, groups))
        leaves_norms = site.name in self._flow.producers
        self._replace(nodes, self._op(site), args, options, leaves_norms)

    def _op(self, site: Site) -> Any:
        if self._plan.engines[site.name].of_op is None:
            return dense_conv2d
        if self._plan.computes_pool(site):
            return conv2d_max_pool
        leaves_norms = site.name in self._flow.producers
        return (_ops.conv2d_with_norms if leaves_norms else _ops.conv2d).default

    def _options(self, site: Site, input: Any, third: fx.Node) -> dict[str, Any]:
        setting = self._plan.engines[site.name].of_op
        options: dict[str, Any] = {}
        if self._plan.computes_pool(site):
            options["norm_weight"] = third
        elif setting is None:
            options["packed"] = third
        else:
            options |= setting.op_arguments()
            options["norm_weight"] = third
            if site.name in self._flow.readers:
                options["norm_input"] = self._norms[input]
        if site.residual is not None:
            options["residual"] = self._now(site.residual)
        return {**options, "activation": site.activation}


def compiled(graph: fx.Graph) -> Forward:
    """The function that the graph prints."""
    _share_containers(graph)
    code = graph.python_code("self")
    names: dict[str, Any] = dict(code.globals)
    source = code.src
    for name in set(_PRINTED_OP.findall(source)):
        names[f"_spamm_torch_{name}"] = getattr(_ops, name).default
    source = _PRINTED_OP.sub(r"_spamm_torch_\1(", source)
    file = f"<spamm_torch generated {next(_counter)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    exec(compile(source, file, "exec"), names)
    forward = names["forward"]
    weakref.finalize(forward, linecache.cache.pop, file, None).atexit = False
    return forward


# ---- Containers ---------------------------------------------------------------------------------
# Looking up a child of an nn.Module takes the host most of a microsecond, and a layer may lie four
# containers deep: in a network of 150 layers that is as long as dozens of small kernels take. So
# generated code looks up each container once a call, not on the way to every module.


def _share_containers(graph: fx.Graph) -> None:
    """Rewrites calls of modules, and reads of attributes, of a graph that is to be printed."""
    containers: dict[str, fx.Node] = {}

    def attribute(path: str) -> fx.Node:
        """The module or tensor at a path such as ``features.0.weight``."""
        container, _, name = path.rpartition(".")
        own = "at_" + path.replace(".", "_")  # no name of the code around it, such as self
        if not container:
            return graph.create_node("get_attr", name, name=own)
        if container not in containers:
            containers[container] = attribute(container)
        arguments = (containers[container], name)
        return graph.create_node("call_function", getattr, arguments, name=own)

    for node in list(graph.nodes):
        if node.op not in ("call_module", "get_attr"):
            continue
        with graph.inserting_before(node):
            value = attribute(str(node.target))
            if node.op == "call_module":
                value = graph.call_method("__call__", (value, *node.args), dict(node.kwargs))
        node.replace_all_uses_with(value)
        graph.erase_node(node)
