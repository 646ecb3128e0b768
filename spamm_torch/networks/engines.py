"""Which engine a convolution gets: measured where an example is at hand, else from a table.

Candidates are "dense", "spamm" with nothing skipped, and "spamm" with the layer's setting where
that skips. Where a max pool follows that the call may compute, too, "spamm, pool" is one more.
Grouped convolutions are "dense" or, all groups in one product, "groups joined".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from .config import NOTHING_SKIPPED, SpAMMConfig
from .joined_groups import joined_setting
from .leaves import reason_not_to_skip
from .plan import DENSE, Engine
from .sites import Site
from .timing import Timing


@dataclass(frozen=True)
class Choice:
    """An engine, why it was chosen, and the times of the candidates by name."""

    engine: Engine
    reason: str
    times: tuple[tuple[str, Timing], ...] = ()


def candidates(site: Site, setting: SpAMMConfig | None) -> dict[str, Engine]:
    """The engines that this call of a convolution may get, by name; dense is the first."""
    found = {"dense": DENSE}
    if setting is None:
        return found
    if site.conv.groups > 1:
        if (joined := joined_setting(site.conv, site.images)) is not None:
            found["groups joined"] = replace(DENSE, joined=joined)
        return found
    found["spamm"] = Engine("spamm", setting if setting.skips_nothing else NOTHING_SKIPPED)
    if not setting.skips_nothing and reason_not_to_skip(site.conv) is None:
        found[f"spamm at {setting}"] = Engine("spamm", setting)
    if (pooling := with_pool(found["spamm"], site)) != found["spamm"]:
        found["spamm, pool"] = pooling
    return found


def with_pool(engine: Engine, site: Site) -> Engine:
    """The engine, computing the max pool behind the site, too, where it can."""
    can_pool = site.pool is not None and engine.setting == NOTHING_SKIPPED
    return replace(engine, pools=True) if can_pool else engine


def fastest(engines: Mapping[str, Engine], times: Mapping[str, Timing]) -> Choice:
    """The engine that is clearly faster than all before it, by times in the running network."""
    name = "dense"
    for other, time in times.items():
        if time.beats(times[name]):
            name = other
    least = min(times, key=lambda other: times[other].median)
    reason = "measured: fastest" if least == name else "measured: nothing is clearly faster"
    return Choice(engines[name], reason, tuple(times.items()))


# ---- From a table -------------------------------------------------------------------------------

# Where the op conv2d is known to be faster than the dense convolution with nothing skipped:
# (dtype, least channels on both sides). Hopper alone; docs/results/convolutions.md#conv_f32_h200.
_FASTER_ON_HOPPER = ((torch.float32, 64),)


def predict(conv: nn.Conv2d, setting: SpAMMConfig | None) -> Choice:
    """The engine for a convolution of which nothing is measured."""
    if setting is None or conv.groups > 1:
        return without_choice(conv, setting)
    if not setting.skips_nothing:
        if (reason := reason_not_to_skip(conv)) is not None:
            return Choice(DENSE, reason)
        return Choice(Engine("spamm", setting), "skips by its setting")
    least = min(conv.in_channels, conv.out_channels)
    weight = conv.weight
    if weight.is_cuda and torch.cuda.get_device_capability(weight.device)[0] == 9:
        for dtype, channels in _FASTER_ON_HOPPER:
            if weight.dtype == dtype and least >= channels:
                return Choice(Engine("spamm", setting), "table: faster than cuDNN on Hopper")
    return Choice(DENSE, "table: nothing is skipped")


def asked(setting: SpAMMConfig) -> Choice:
    """The engine for a convolution that an override names."""
    return Choice(Engine("spamm", setting), "override")


def without_choice(conv: nn.Conv2d, setting: SpAMMConfig | None) -> Choice:
    """Dense, for a convolution that has no other candidate."""
    if setting is None:
        return Choice(DENSE, "override: dense")
    return Choice(DENSE, reason_not_to_skip(conv) or "grouped: dense is fastest")
