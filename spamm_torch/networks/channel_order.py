"""The order of channels that gathers norms: large ones beside each other.

A block of 64 channels has the norm of all of them together. Where channels with large and small
norms are mixed, all blocks are alike and none can be skipped; in order of their norms the first
blocks hold most of the result and the last ones hardly any of it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from .channel_groups import ChannelGroups, Group, Order
from .fold import folded
from .sites import Site


def orders_by_norms(
    groups: ChannelGroups, skipping: Collection[str], inputs: Mapping[str, Tensor]
) -> dict[str, Order]:
    """The order of the channels that each site computes, the largest norm first.

    A channel counts by what it adds to the layers that read it, if channels were independent: its
    norm in their input times the norm of its weights there, relative to the sum over all channels.

    Args:
        groups: of an island.
        skipping: names of the sites that skip. Groups that no such site computes or reads are left
            as they are.
        inputs: inputs of sites, by name. Where there is none, the norms of the weights that compute
            a channel stand for it.

    Returns:
        {name of a site: the order of its output channels}, for those that get one.
    """
    orders: dict[str, Order] = {}
    for group in groups.free():
        touching = [*group.producers, *(site for site, _ in group.readers)]
        if any(site.name in skipping for site in touching):
            order = _energies(group, inputs).argsort(descending=True, stable=True)
            found = tuple(order.tolist())
            orders |= {site.name: found for site in group.producers}
    return orders


def _energies(group: Group, inputs: Mapping[str, Tensor]) -> Tensor:
    """What each channel counts: squared norms, in float64 on the CPU."""
    computed = torch.zeros(group.channels, dtype=torch.float64)
    for site in group.producers:
        computed += _share(_squares(_weight(site), 0))
    read = torch.zeros_like(computed)
    for site, first in group.readers:
        columns = slice(first, first + group.channels)
        values = computed
        if site.name in inputs:
            values = _squares(inputs[site.name], -3)[columns]
        read += _share(values * _squares(_weight(site), 1)[columns])
    return read if group.readers else computed


def _weight(site: Site) -> Tensor:
    return folded(site.conv, site.batch_norm)[0]


def _squares(tensor: Tensor, dim: int) -> Tensor:
    """The sums of squares along all other dimensions."""
    kept = dim % tensor.dim()
    others = [d for d in range(tensor.dim()) if d != kept]
    wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    return torch.linalg.vector_norm(tensor, dim=others, dtype=wide).double().square().cpu()


def _share(values: Tensor) -> Tensor:
    """The values relative to their sum; zeros where that is none or no number."""
    total = values.sum()
    return values / total if 0 < total < torch.inf else torch.zeros_like(values)
