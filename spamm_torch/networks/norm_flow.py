"""Which convolutions of an island take norms that the layer before computed.

A convolution that skips needs the norms of its input. Where the value comes straight from another
convolution of the op ``conv2d``, or from a max pool, that layer computes them with its output. They
travel in the generated code as second results; nothing is attached to tensors. From other layers
(additions that were not absorbed, means, dense convolutions) a convolution takes norms itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

from torch import fx

from ..chain import takes_norms
from .plan import Plan
from .sites import Site, may_write


@dataclass
class NormFlow:
    """Where norms come from and go to.

    Attributes:
        producers: the sites that compute the norms of what they return, by name.
        pools: the max pools that do.
        readers: the sites that take norms, by name.
    """

    producers: set[str] = field(default_factory=set)
    pools: set[fx.Node] = field(default_factory=set)
    readers: set[str] = field(default_factory=set)


def norm_flow(plan: Plan, of_few: bool = False) -> NormFlow:
    """The flow of norms in a plan, as if its device computed output norms.

    Args:
        plan: the island, its sites and their engines.
        of_few: for batches that do not fill a block of 64 images. Only a held tau keeps that block
            there, and a max pool is faster without norms.
    """
    flow = NormFlow()
    pools = {} if of_few else plan.pools
    by_last = {site.last: site for site in plan.fused}
    for site in plan.fused:
        if not _needs_norms(plan, site, of_few):
            continue
        value = site.nodes[0].args[0]
        if not isinstance(value, fx.Node) or _is_written(plan, value):
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
    setting = plan.engines[site.name].setting
    if setting is None or setting.skips_nothing or (of_few and setting.tau is None):
        return False
    conv = site.conv
    return takes_norms(
        SimpleNamespace(
            in_channels=conv.in_channels,
            groups=conv.groups,
            block=setting.block,
            pixel_block=setting.pixel_block,
        )
    )


def _is_written(plan: Plan, value: fx.Node) -> bool:
    return any(may_write(user, plan.island.module) for user in value.users)
