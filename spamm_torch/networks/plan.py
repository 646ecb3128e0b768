"""The engine of each convolution of an island, and the forward that is generated from these."""

from __future__ import annotations

import itertools
import linecache
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import fx

from .capture import Island
from .config import SpAMMConfig
from .pool import arguments_of, find_pools, max_pool2d
from .sites import Site

_ops = torch.ops.spamm_torch

Forward: TypeAlias = Callable[..., Any]

# By which name the generated code calls an op: looking one up in torch.ops takes time in each call.
_NAMES = {
    "torch.ops.spamm_torch.conv2d.default": "conv2d",
    "torch.ops.spamm_torch.dense_conv2d.default": "dense_conv2d",
}
_counter = itertools.count(1)  # of generated functions, each in a file of its own for tracebacks


@dataclass(frozen=True)
class Engine:
    """How a convolution is computed.

    Attributes:
        kind: "spamm" (the op conv2d), "dense" (the op dense_conv2d), or "left" (as it was).
        setting: of the op conv2d; None for the others.
    """

    kind: str
    setting: SpAMMConfig | None = None


DENSE = Engine("dense")
LEFT = Engine("left")


@dataclass
class Plan:
    """An island, its sites, and the engine of each; ``engines`` is by the sites' names."""

    island: Island
    sites: Sequence[Site]
    engines: Mapping[str, Engine]

    @property
    def fused(self) -> list[Site]:
        """The sites that the generated forward computes itself, in the order of its operands."""
        return [site for site in self.sites if self._pays(site)]

    @property
    def pools(self) -> list[fx.Node]:
        """The calls of max pools that the generated forward computes itself."""
        return find_pools(self.island)

    def _pays(self, site: Site) -> bool:
        engine = self.engines[site.name]
        return engine.kind == "spamm" or (engine.kind == "dense" and bool(site.absorbed))

    def generate(self) -> Forward:
        """The function ``forward(self, spamm_operands, *args)``.

        ``spamm_operands`` holds weight, bias and weight norms of each fused site, one after the
        other; bias and norms may be None.
        """
        graph = fx.Graph()
        operands = graph.placeholder("spamm_operands")
        copies: dict[fx.Node, fx.Node] = {}
        result = graph.graph_copy(self.island.graph, copies)
        graph.output(result)
        replaced: dict[fx.Node, fx.Node] = {}
        for place, site in enumerate(self.fused):
            self._replace(graph, operands, copies, replaced, place, site)
        for pool in self.pools:
            self._replace_pool(graph, copies[pool])
        return _compiled(graph)

    def _replace_pool(self, graph: fx.Graph, node: fx.Node) -> None:
        pool: Any = self.island.module.get_submodule(str(node.target))
        with graph.inserting_before(node):
            call = graph.call_function(max_pool2d, (node.args[0], *arguments_of(pool)))
        node.replace_all_uses_with(call)
        graph.erase_node(node)

    def _replace(
        self,
        graph: fx.Graph,
        operands: fx.Node,
        copies: Mapping[fx.Node, fx.Node],
        replaced: dict[fx.Node, fx.Node],
        place: int,
        site: Site,
    ) -> None:
        """Puts one call in the place of a site's nodes."""
        nodes = [copies[node] for node in site.nodes]
        residual = None if site.residual is None else copies[site.residual]
        with graph.inserting_before(nodes[-1]):
            own = [
                graph.call_function(operator.getitem, (operands, 3 * place + offset))
                for offset in range(3)
            ]
            call = self._call(graph, site, own, nodes[0].args[0], replaced.get(residual, residual))
        nodes[-1].replace_all_uses_with(call)
        replaced[nodes[-1]] = call
        for node in reversed(nodes):
            graph.erase_node(node)

    def _call(
        self, graph: fx.Graph, site: Site, operands: list[fx.Node], input: Any, residual: Any
    ) -> fx.Node:
        conv, engine = site.conv, self.engines[site.name]
        weight, bias, norms = operands
        geometry = (list(conv.stride), list(conv.padding), list(conv.dilation), conv.groups)
        options: dict[str, Any] = {"residual": residual, "activation": site.activation}
        setting = engine.setting
        if setting is None:
            op = _ops.dense_conv2d.default
        else:
            op = _ops.conv2d.default
            options |= setting.op_arguments()
            if not setting.skips_nothing:
                options["norm_weight"] = norms
        if options.get("norm_weight") is None:
            graph.erase_node(norms)
        given = {name: value for name, value in options.items() if value is not None}
        return graph.call_function(op, (input, weight, bias, *geometry), given)


def _compiled(graph: fx.Graph) -> Forward:
    """The function that the graph prints."""
    code = graph.python_code("self")
    names: dict[str, Any] = dict(code.globals)
    source = code.src
    for path, name in _NAMES.items():
        if f"{path}(" in source:
            free = f"_spamm_torch_{name}"
            source = source.replace(f"{path}(", f"{free}(")
            names[free] = getattr(_ops, name).default
    file = f"<spamm_torch generated {next(_counter)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    exec(compile(source, file, "exec"), names)
    return names["forward"]
