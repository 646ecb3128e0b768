"""A part of a model that was traced, its calls of convolutions, and the engine of each call."""

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn

from .._arguments import check_block
from .config import Engine
from .example import Signature
from .nodes import Pooling, Upsampling, find_linear_relus, is_written, pooling_of, upsampling_of

_ops = torch.ops.spamm_torch

# The shapes and dtypes of a graph's values, by nodes.
Shapes: TypeAlias = dict[fx.Node, tuple[tuple[int, ...], torch.dtype]]

_EDGE = 64  # of the blocks of the norms that travel: images, and channels


@dataclass(eq=False)
class Island:
    """A part of a model that was traced.

    ``name``: fully qualified; empty for the model itself. ``module``: its root. ``graph``: what its
    ``forward`` calls, by names below the root. ``signature``: the form of the call that was traced.
    ``entered``: by such names the modules but the root that the trace went through.
    """

    name: str
    module: nn.Module
    graph: fx.Graph
    signature: Signature
    entered: dict[str, nn.Module]

    def full_name(self, below: str) -> str:
        """The name in the model of what the root calls ``below``."""
        return f"{self.name}.{below}" if self.name else below

    @cached_property
    def pools(self) -> dict[fx.Node, Pooling]:
        """The max pools that return no indices, in the graph's order."""
        nodes, root = self.graph.nodes, self.module
        return {node: found for node in nodes if (found := pooling_of(node, root)) is not None}

    @cached_property
    def upsamplings(self) -> dict[fx.Node, Upsampling]:
        """The nearest upsamplings, in the graph's order."""
        nodes, root = self.graph.nodes, self.module
        return {node: found for node in nodes if (found := upsampling_of(node, root)) is not None}

    @cached_property
    def linear_relus(self) -> dict[fx.Node, fx.Node]:
        """The linear layers whose only reader is a ReLU, and that ReLU."""
        return find_linear_relus(self.graph, self.module)


@dataclass(eq=False)
class Site:
    """A call of a convolution, and the nodes that it absorbs, the convolution's own first.

    ``name``: in the model; further calls of the same one have "#2" and so on behind it. ``node``:
    None for a convolution that no island calls. ``absorbed``: "bn", "add", and the activation's
    name. ``input_shape``: of the example's images. ``pool``: the max pool of 2 x 2 pixels that
    alone reads what the site computes, where a call that skips nothing may compute it, too.
    """

    name: str
    conv: nn.Conv2d
    node: fx.Node | None = None
    batch_norm: nn.Module | None = None
    residual: fx.Node | None = None
    activation: str = "none"
    nodes: list[fx.Node] = field(default_factory=list)
    absorbed: tuple[str, ...] = ()
    input_shape: tuple[int, ...] | None = None
    pool: fx.Node | None = None

    @property
    def input(self) -> fx.Node:
        """The node whose value the convolution takes."""
        value: Any = self.nodes[0].args[0]
        return value

    @property
    def last(self) -> fx.Node:
        """The node whose value the fused call returns."""
        return self.nodes[-1]


@dataclass
class Plan:
    """An island, its sites, and the engine of each; ``engines`` is by the sites' names."""

    island: Island
    sites: Sequence[Site]
    engines: Mapping[str, Engine]

    @cached_property
    def fused(self) -> list[Site]:
        """The sites that the generated forward computes itself, in the order of its operands."""
        return [site for site in self.sites if self._pays(site)]

    def _pays(self, site: Site) -> bool:
        engine = self.engines[site.name]
        works = bool(site.absorbed) or engine.joined is not None
        return engine.kind == "spamm" or (engine.kind == "dense" and works)

    def nodes(self, site: Site) -> list[fx.Node]:
        """The nodes whose work the site's call does, the convolution first."""
        pool = site.pool if self.engines[site.name].pools else None
        return site.nodes if pool is None else [*site.nodes, pool]

    def computes_pool(self, site: Site) -> bool:
        """Whether the site's call computes the max pool behind it."""
        return len(self.nodes(site)) > len(site.nodes)

    @cached_property
    def pools(self) -> dict[fx.Node, Pooling]:
        """The max pools that are calls of their own in the generated forward."""
        absorbed = {node for site in self.sites for node in self.nodes(site)}
        found = self.island.pools.items()
        return {node: pooling for node, pooling in found if node not in absorbed}

    def modules_replaced(self) -> list[nn.Module]:
        """The modules that the generated forward does not call, the root first."""
        island = self.island
        done = {*self.pools, *island.upsamplings}
        done |= set(itertools.chain(*island.linear_relus.items()))
        done |= set(itertools.chain(*map(self.nodes, self.fused)))
        called: set[nn.Module] = set()
        replaced = set(island.entered.values())
        for node in island.graph.nodes:
            if node.op == "call_module":
                module = island.module.get_submodule(str(node.target))
                is_done = node in done or self._replaces(module)
                (replaced if is_done else called).add(module)
        inside = {inner for module in called - replaced for inner in module.modules()} - replaced
        return [module for module in island.module.modules() if module not in inside]

    def _replaces(self, module: nn.Module) -> bool:
        """Whether the generated forward holds results of a module that it calls as well."""
        return False


@dataclass
class NormFlow:
    """The layers that compute norms with their output (``producers``, sites by name, and max
    ``pools``), and the sites behind them that skip by these (``readers``).
    """

    producers: set[str] = field(default_factory=set)
    pools: set[fx.Node] = field(default_factory=set)
    readers: set[str] = field(default_factory=set)


def norm_flow(plan: Plan, of_few: bool = False) -> NormFlow:
    """The flow of norms in a plan, as if its device computed output norms. ``of_few``: for batches
    that do not fill a block of 64 images: only a held tau keeps that block there, and a max pool is
    faster without norms.
    """
    flow = NormFlow()
    pools = {} if of_few else plan.pools
    by_last = {site.last: site for site in plan.fused}
    for site in plan.fused:
        if not _needs_norms(plan, site, of_few):
            continue
        value = site.input
        if is_written(value, plan.island.module):
            continue
        producer = by_last.get(value)
        if producer is not None and plan.engines[producer.name].kind == "spamm":
            flow.producers.add(producer.name)
        elif value in pools:
            flow.pools.add(value)
        else:
            continue
        flow.readers.add(site.name)
    return flow


def _needs_norms(plan: Plan, site: Site, of_few: bool) -> bool:
    """Whether the norms of the layer before are those of the blocks that this site reads."""
    setting = plan.engines[site.name].setting
    if setting is None or setting.skips_nothing or (of_few and setting.tau is None):
        return False
    channels = site.conv.in_channels
    _, k, n = (0, _EDGE, _EDGE) if setting.block is None else check_block(setting.block)
    images_first = setting.pixel_block is None or setting.pixel_block == (_EDGE, 1, 1)
    reads_them = (k == _EDGE or channels <= k < _EDGE) and n == _EDGE
    return site.conv.groups == 1 and reads_them and images_first


def fills_norm_block(images: Tensor) -> bool:
    """Whether a batch has the images of a block of the norms that travel."""
    return images.shape[0] >= _EDGE


@functools.cache
def computes_output_norms(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether convolutions there compute the norms of their output without a pass over it."""
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return False
    return str(_ops.backend_for(device, dtype, (_EDGE,) * 3)).startswith("sm90")
