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
from torch import Tensor, nn

from ..networks.config import SpAMMConfig
from ..networks.example import Example
from ..networks.plan import Engine
from .calls import Call, ConvCall, OnCall, watch
from .form import Form
from .statistics import Candidate

_ops = torch.ops.spamm_torch


def thresholds_for(
    model: nn.Module,
    form: Form,
    inputs: Sequence[Example],
    exact: Mapping[str, Engine],
    wanted: Mapping[str, Candidate],
) -> dict[str, SpAMMConfig]:
    """The settings by which layers compute the wanted shares, all layers at once.

    Two passes over the inputs. In the first each call of a layer searches for its own threshold,
    and so every layer sees what it will see, but for the batches' differences. In the second the
    layers hold the means of these, and norm maps are pooled over all batches.

    Args:
        exact: the engines of the layers that are to skip nothing.
        wanted: of the others; their valid ratios and pixel blocks are kept, their taus are not.
    """

    least = form.exact.setting
    assert least is not None

    def held(candidate: Candidate, tau: Tensor) -> SpAMMConfig:
        number = tau.item()
        if not 0 < number < math.inf:  # where norms are none, there is nothing to skip by
            number = 0.0
        return replace(candidate.setting, tau=max(number, least.tau or 0.0))

    def run(settings: Mapping[str, SpAMMConfig], on_call: OnCall) -> None:
        engines = {name: Engine("spamm", setting) for name, setting in settings.items()}
        with form.installed({**exact, **engines}), watch(model, on_call):
            for example in inputs:
                example.call(model)

    own: dict[str, list[Tensor]] = {name: [] for name in wanted}

    def search(name: str, call: Call) -> None:
        if name in own and isinstance(call, ConvCall):
            maps = call.norm_maps()
            ratio = wanted[name].valid_ratio
            own[name].append(_ops.find_tau(maps.norm_a, maps.skip_norm_b, ratio))

    weight_norms: dict[str, Tensor] = {}
    skip_norms: dict[str, list[Tensor]] = {name: [] for name in wanted}

    def gather(name: str, call: Call) -> None:
        if name in skip_norms and isinstance(call, ConvCall):
            weight_norms[name], _, skip_norm = call.norm_maps()
            skip_norms[name].append(skip_norm)

    run({name: _searching(candidate) for name, candidate in wanted.items()}, search)
    means = {name: torch.stack(taus).mean() for name, taus in own.items()}
    run({name: held(wanted[name], tau) for name, tau in means.items()}, gather)
    return {
        name: held(
            candidate,
            _ops.find_tau(
                weight_norms[name], torch.cat(skip_norms[name], -1), candidate.valid_ratio
            ),
        )
        for name, candidate in wanted.items()
    }


def _searching(candidate: Candidate) -> SpAMMConfig:
    block = candidate.setting.pixel_block
    return SpAMMConfig(valid_ratio=candidate.valid_ratio, pixel_block=block)
