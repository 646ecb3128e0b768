"""Which engine a convolution gets: measured where an example is at hand, else from a table.

Candidates are "dense", "spamm" with nothing skipped, and "spamm" with the layer's setting where
that skips. Where a max pool follows that the call may compute, too, "spamm, pool" is one more, and
the others are measured with the pool behind them. Another engine than dense must be faster by 3%.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from .config import NOTHING_SKIPPED, SpAMMConfig
from .fused import Source
from .leaves import reason_not_to_skip
from .plan import DENSE, Engine
from .pool import PAIRS, max_pool2d
from .sites import Site
from .timing import times_of

_ops = torch.ops.spamm_torch

_MUST_WIN = 1.03  # how many times as fast as dense another engine has to be


@dataclass(frozen=True)
class Choice:
    """An engine, why it was chosen, and the microseconds of the candidates."""

    engine: Engine
    reason: str
    times: tuple[tuple[str, float], ...] = ()


def candidates(conv: nn.Conv2d, setting: SpAMMConfig | None) -> dict[str, Engine]:
    """The engines that this convolution may get, by name; dense is always one."""
    found = {"dense": DENSE}
    if setting is None or conv.groups > 1:
        return found
    if setting.skips_nothing:
        found["spamm"] = Engine("spamm", setting)
        return found
    found["spamm"] = Engine("spamm", NOTHING_SKIPPED)
    if reason_not_to_skip(conv) is None:
        found[f"spamm at {setting}"] = Engine("spamm", setting)
    return found


def with_pool(engine: Engine, site: Site) -> Engine:
    """The engine, computing the max pool behind the site, too, where it can."""
    can_pool = site.pool is not None and engine.setting == NOTHING_SKIPPED
    return replace(engine, pools=True) if can_pool else engine


# ---- Measured -----------------------------------------------------------------------------------


class Measurements:
    """Measures sites; equal ones once."""

    def __init__(self) -> None:
        self._known: dict[Any, tuple[tuple[str, float], ...]] = {}

    def choose(self, site: Site, setting: SpAMMConfig | None, input: Tensor) -> Choice:
        """The fastest engine for a site, fused as it will be, on a real input."""
        engines = self._candidates(site.conv, setting)
        for name, engine in list(engines.items()):
            if (pooling := with_pool(engine, site)) != engine:
                engines[f"{name}, pool"] = pooling
        if len(engines) == 1:
            return Choice(DENSE, _reason_for_dense(site.conv, setting))
        if site.input_order is not None:
            ordered = input.index_select(-3, site.input_order.to(input.device))
            input = torch.empty_like(input).copy_(ordered)  # in the input's own memory format
        key = (
            site.activation,
            site.residual is None,
            site.pool is None,
            *_geometry(site.conv),
            _layout(input),
        )
        key += (tuple(engines.values()), site.name if setting != NOTHING_SKIPPED else "")
        if key not in self._known:
            with torch.no_grad():
                calls = [self._call(site, engine, input) for engine in engines.values()]
                times = times_of(calls, input.device)
            self._known[key] = tuple(zip(engines, times, strict=True))
        times_by_name = self._known[key]
        return Choice(*_fastest(engines, times_by_name), times_by_name)

    def _candidates(self, conv: nn.Conv2d, setting: SpAMMConfig | None) -> dict[str, Engine]:
        return candidates(conv, setting)

    def _call(self, site: Site, engine: Engine, input: Tensor) -> Any:
        """A call of the op as the generated forward makes it."""
        conv = site.conv
        weight, bias, norms = Source.of(site, engine).operands()
        geometry = (conv.stride, conv.padding, conv.dilation, conv.groups)
        options: dict[str, Any] = {"activation": site.activation}
        if engine.pools:
            options["norm_weight"] = norms
            return lambda: _ops.conv2d_max_pool(input, weight, bias, *geometry, **options)
        op = _ops.dense_conv2d
        if engine.setting is not None:
            op = _ops.conv2d
            options |= {**engine.setting.op_arguments(), "norm_weight": norms}
        if site.residual is not None:
            options["residual"] = torch.ones_like(op(input, weight, bias, *geometry, **options))
        if site.pool is not None:
            return lambda: max_pool2d(op(input, weight, bias, *geometry, **options), *PAIRS)
        return lambda: op(input, weight, bias, *geometry, **options)


def _fastest(
    engines: Mapping[str, Engine], times: Sequence[tuple[str, float]]
) -> tuple[Engine, str]:
    by_name = dict(times)
    name = min(by_name, key=lambda name: by_name[name])
    if name != "dense" and by_name[name] * _MUST_WIN > by_name["dense"]:
        name = "dense"
    return engines[name], f"measured: {name} is fastest"


def _geometry(conv: nn.Conv2d) -> tuple[Any, ...]:
    return (
        *(conv.in_channels, conv.out_channels, conv.kernel_size, conv.stride, conv.padding),
        *(conv.dilation, conv.groups),
    )


def _layout(input: Tensor) -> tuple[Any, ...]:
    return tuple(input.shape), input.stride(), input.dtype, input.device


# ---- From a table -------------------------------------------------------------------------------

# Where the op conv2d is known to be faster than the dense convolution with nothing skipped:
# (dtype, least channels on both sides). Hopper alone; docs/results/conv_f32_h200.md.
_FASTER_ON_HOPPER = ((torch.float32, 64),)


def predict(conv: nn.Conv2d, setting: SpAMMConfig | None) -> Choice:
    """The engine for a convolution of which nothing is measured."""
    if setting is None or conv.groups > 1:
        return Choice(DENSE, _reason_for_dense(conv, setting))
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


def _reason_for_dense(conv: nn.Conv2d, setting: SpAMMConfig | None) -> str:
    if setting is None:
        return "override: dense"
    return reason_not_to_skip(conv) or "grouped: dense is fastest"
