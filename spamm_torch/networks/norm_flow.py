"""Which convolutions of an island take norms that the layer before computed.

A convolution that skips needs the norms of its input. Where the value comes straight from another
convolution of the op ``conv2d``, or from a max pool, that layer computes them with its output. They
travel in the generated code as second results; nothing is attached to tensors. From other layers
(additions that were not absorbed, means, dense convolutions) a convolution takes norms itself.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from .._arguments import check_block
from .plan import Plan
from .sites import Site, may_write

_ops = torch.ops.spamm_torch

_EDGE = 64  # of the blocks of the norms that travel: images, and channels


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
    """Whether the norms of the layer before are those of the blocks that this site reads."""
    setting = plan.engines[site.name].setting
    if setting is None or setting.skips_nothing or (of_few and setting.tau is None):
        return False
    channels = site.conv.in_channels
    _, k, n = (0, _EDGE, _EDGE) if setting.block is None else check_block(setting.block)
    images_first = setting.pixel_block is None or setting.pixel_block == (_EDGE, 1, 1)
    reads_them = (k == _EDGE or channels <= k < _EDGE) and n == _EDGE
    return site.conv.groups == 1 and reads_them and images_first


def _is_written(plan: Plan, value: fx.Node) -> bool:
    return any(may_write(user, plan.island.module) for user in value.users)


def fills_norm_block(images: Tensor) -> bool:
    """Whether a batch has the images of a block of the norms that travel."""
    return images.shape[0] >= _EDGE


@functools.cache
def computes_output_norms(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether convolutions there compute the norms of their output without a pass over it."""
    return _ops.computes_output_norms(device, dtype)
