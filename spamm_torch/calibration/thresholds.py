"""Thresholds front to back: each layer's, while the layers before it skip by theirs.

Skipping takes energy from a layer's output, so the layers behind it see smaller norms. With the
thresholds of undisturbed inputs they skip more than they are meant to, the layers behind them more
still, and the network falls off a cliff. So a layer is given a share of block products, and its
threshold is found for what it sees while the others skip.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..networks.config import SpAMMConfig
from ..networks.example import Example
from .calls import Call, ConvCall, OnCall, watch
from .form import Form
from .statistics import Candidate

_ops = torch.ops.spamm_torch


def thresholds_for(
    form: Form, inputs: Sequence[Example], wanted: Mapping[str, Candidate]
) -> dict[str, SpAMMConfig]:
    """The settings by which layers compute the wanted shares, all layers at once.

    Two passes over the inputs. In the first each call of a layer searches for its own threshold,
    and so every layer sees what it will see, but for the batches' differences. In the second the
    layers hold the means of these, and norm maps are pooled over all batches.

    Args:
        wanted: of layers that are to skip; their valid ratios and pixel blocks are kept, their taus
            are not. The others lose nothing.
    """

    least = form.exact.setting
    assert least is not None

    def held(candidate: Candidate, tau: Tensor) -> SpAMMConfig:
        number = tau.item()
        if not 0 < number < math.inf:  # where norms are none, there is nothing to skip by
            number = 0.0
        return replace(candidate.setting, tau=max(number, least.tau or 0.0))

    def run(settings: Mapping[str, SpAMMConfig], **on_call: OnCall) -> None:
        with watch(form.model, settings=settings, **on_call):
            for example in inputs:
                example.call(form.model)

    own: dict[str, list[Tensor]] = {name: [] for name in wanted}
    searched: dict[str, SpAMMConfig] = {}

    def search(name: str, call: Call) -> None:
        if name in own and isinstance(call, ConvCall):
            maps = call.norm_maps_in(None, wanted[name].setting.pixel_block)
            tau = _ops.find_tau(maps.norm_a, maps.skip_norm_b, wanted[name].valid_ratio)
            own[name].append(tau)
            searched[name] = held(wanted[name], tau)

    weight_norms: dict[str, Tensor] = {}
    skip_norms: dict[str, list[Tensor]] = {name: [] for name in wanted}

    def gather(name: str, call: Call) -> None:
        if name in skip_norms and isinstance(call, ConvCall):
            maps = call.norm_maps()
            weight_norms[name] = maps.norm_a
            skip_norms[name].append(maps.skip_norm_b)

    with form.observed_layers():
        run(searched, before=search)
        means = {name: torch.stack(taus).mean() for name, taus in own.items()}
        run({name: held(wanted[name], tau) for name, tau in means.items()}, on_call=gather)
    return {
        name: held(
            candidate,
            _ops.find_tau(
                weight_norms[name], torch.cat(skip_norms[name], -1), candidate.valid_ratio
            ),
        )
        for name, candidate in wanted.items()
    }
