"""Convolutions that become :class:`SpAMMConv2d` in place: the same objects, of another class."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import nn

from ..nn import SpAMMConv2d
from .config import SpAMMConfig

Band: TypeAlias = tuple[float, float]  # the lowest and highest valid ratio of a batch

_RECORD = "_spamm_before"
_BAND = "_spamm_band"
_LEAST_CHANNELS = 32  # the smallest edge of a block


@dataclass(frozen=True)
class Before:
    """What :func:`revert_leaf` restores: the class, and attributes that were there or were not."""

    kind: type[nn.Module]
    attributes: dict[str, Any]
    added: tuple[str, ...]


def convert_leaf(conv: nn.Conv2d, config: SpAMMConfig, band: Band | None = None) -> None:
    """Makes a convolution skip by this setting. Parameters, names and hooks stay.

    ``band``: the valid ratios that it had when the setting was calibrated (:func:`band_of`).
    """
    own, values = conv.__dict__, _values(config).copy()
    if isinstance(conv, SpAMMConv2d):  # keeps the activation that it was given
        setting = (*config.setting(), "_pinned", "_tau_taken")
        values = {name: value for name, value in values.items() if name in setting}
    values[_BAND] = band
    before = {name: own[name] for name in values if name in own}
    own[_RECORD] = Before(type(conv), before, tuple(name for name in values if name not in own))
    own.update(values)
    if type(conv) is nn.Conv2d:
        conv.__class__ = SpAMMConv2d


@functools.cache
def _values(config: SpAMMConfig) -> dict[str, Any]:
    """What a :class:`SpAMMConv2d` of this setting has beside what an ``nn.Conv2d`` has."""
    template = SpAMMConv2d(1, 1, 1, device="meta", **config.setting())
    of_torch = nn.Conv2d(1, 1, 1, device="meta").__dict__
    return {name: value for name, value in template.__dict__.items() if name not in of_torch}


def band_of(layer: nn.Module) -> Band | None:
    """The lowest and highest valid ratio of a batch when a layer was calibrated, if it was."""
    return layer.__dict__.get(_BAND)


def is_converted_leaf(module: nn.Module) -> bool:
    return _RECORD in module.__dict__


def revert_leaf(conv: nn.Module) -> None:
    """Undoes :func:`convert_leaf`."""
    own = conv.__dict__
    before: Before = own.pop(_RECORD)
    for name in before.added:
        own.pop(name, None)
    own.update(before.attributes)
    conv.__class__ = before.kind


def reason_not_to_convert(conv: nn.Module) -> str | None:
    """Why this convolution cannot become a :class:`SpAMMConv2d`, or None."""
    kind = type(conv)
    if kind not in (nn.Conv2d, SpAMMConv2d):
        return f"a subclass, {kind.__name__}"
    weight = conv._parameters.get("weight")
    if not isinstance(weight, nn.Parameter):
        return "its weight is not a Parameter"
    if nn.parameter.is_lazy(weight):
        return "its weight is not initialised"
    if not weight.is_floating_point():
        return f"its weight is {str(weight.dtype).removeprefix('torch.')}"
    if "forward" in conv.__dict__ or "_conv_forward" in conv.__dict__:
        return reason_not_plain(conv)
    return None


def reason_not_to_skip(conv: nn.Conv2d) -> str | None:
    """Why skipping cannot pay in this convolution, or None."""
    inner, outer = conv.in_channels // conv.groups, conv.out_channels // conv.groups
    if conv.groups > 1 and inner == 1:
        return "depthwise: a block would be nearly empty"
    which = "input" if inner < _LEAST_CHANNELS else "output"
    if min(inner, outer) < _LEAST_CHANNELS:
        of = " a group" if conv.groups > 1 else ""
        return f"{min(inner, outer)} {which} channels{of} do not fill a block of 32"
    return None


def shape_of(layer: nn.Module) -> str:
    """A layer's shape in a few characters, as in "64 > 128, 3x3, /2"."""
    if isinstance(layer, nn.Linear):
        return f"{layer.in_features} > {layer.out_features}"
    if not isinstance(layer, nn.modules.conv._ConvNd):
        return ""
    parts = [
        f"{layer.in_channels} > {layer.out_channels}",
        "x".join(map(str, layer.kernel_size)),
    ]
    if set(layer.stride) != {1}:
        parts.append("/" + "x".join(map(str, dict.fromkeys(layer.stride))))
    if set(layer.dilation) != {1}:
        parts.append(f"dilation {'x'.join(map(str, dict.fromkeys(layer.dilation)))}")
    if layer.groups > 1:
        parts.append(f"groups {layer.groups}")
    return ", ".join(parts)


def geometry_of(conv: nn.modules.conv._ConvNd) -> str:
    """The shape with padding and bias, as in "64 > 128, 3x3, /2, padding 1x1, bias"."""
    padding = conv.padding if isinstance(conv.padding, str) else "x".join(map(str, conv.padding))
    mode = "" if conv.padding_mode == "zeros" else f" {conv.padding_mode}"
    bias = "" if conv.bias is None else ", bias"
    return f"{shape_of(conv)}, padding {padding}{mode}{bias}"


def reason_not_plain(module: nn.Module) -> str | None:
    """What else than its class's ``forward`` happens in a call of this very module, or None."""
    own = module.__dict__
    if (
        own["_forward_hooks"]
        or own["_forward_pre_hooks"]
        or own["_backward_hooks"]
        or own["_backward_pre_hooks"]
    ):
        return "has hooks"
    if "forward" in own or "_conv_forward" in own:
        return "has a forward of its own"
    return None
