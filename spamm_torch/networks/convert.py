"""convert_ and revert_: layers of a model get the class that skips, and their own again."""

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import nn

from .._arguments import check_module, dtype_name
from .._hints import with_hints
from ..nn import SpAMMConv2d, _SpAMM
from .config import BAND, SpAMMConfig
from .report import ConvertReport, Row, geometry_of, shape_of
from .settings import Settings, read_settings

Model = TypeVar("Model", bound=nn.Module)


@with_hints
def convert_(
    model: nn.Module,
    config: SpAMMConfig | str | os.PathLike[str] | None = None,
    *,
    tau: float | None = None,
    valid_ratio: float | None = None,
    max_error: float | None = None,
    overrides: Mapping[str, SpAMMConfig | None] = {},
) -> ConvertReport:
    """Makes the convolutions of a model skip, in place. :func:`revert_` undoes it.

    An ``nn.Conv2d`` becomes a :class:`SpAMMConv2d` by its class. Nothing else changes: module
    objects, names, hooks, Parameters and the state dict's keys stay, and the model's own forward
    runs. ``torch.compile(model, backend="spamm_torch")`` fuses what follows a convolution with it.

    Args:
        model: an ``nn.Module``, in any mode; an ``nn.Conv2d`` itself, too. A converted model is
            converted anew from what it was.
        config: what layers skip: a :class:`SpAMMConfig`, or the path of a settings file, as
            :func:`calibrate` and this function's report write it. Layers that cannot pay stay
            dense: those with fewer than 32 channels (of a group) on a side. A
            :class:`SpAMMConv2d` keeps its own setting.
        tau, valid_ratio, max_error: one of them stands for a ``config`` of it alone.
        overrides: settings of layers by fully qualified name or ``"re:..."``, a regular expression
            for whole names. None leaves a layer as it is. A setting under a full name is taken
            whatever the layer's channels. Later keys win.

    Returns:
        A :class:`ConvertReport`: a row for each convolution.

    Raises:
        TypeError: a model that is no module, an argument of another type.
        ValueError: no setting, several knobs, or a knob and a ``config``; an override that names no
            convolution or comes with a settings file; a settings file of another model, of another
            format or none at all; a model without ``nn.Conv2d``; settings that no layer can have.
        RuntimeError: a layer whose class something else changed after an earlier conversion.

    After any error the model is as it was.

    Example:
        >>> report = convert_(model, tau=0.1)
        >>> [(row.name, row.action) for row in report]
        [('0', 'spamm')]
        >>> model = revert_(model)
    """
    check_module(model, "convert_")
    knobs = {"tau": tau, "valid_ratio": valid_ratio, "max_error": max_error}
    settings = read_settings(model, config, overrides, knobs)
    before = [(module, type(module), vars(module).copy()) for module in model.modules()]
    try:
        revert_(model)
        rows = [
            _convert(name, module, settings)
            for name, module in model.named_modules()
            if isinstance(module, (nn.modules.conv._ConvNd, _SpAMM))
        ]
    except BaseException:
        for module, kind, attributes in before:
            module.__class__ = kind
            vars(module).clear()
            vars(module).update(attributes)
        raise
    return ConvertReport(rows, device=device_name(model))


def revert_(model: Model) -> Model:
    """Undoes :func:`convert_`, bit for bit; a model that is not converted stays as it is.

    Args:
        model: an ``nn.Module``, or a part of a converted model.

    Returns:
        The model.

    Raises:
        TypeError: a model that is no module.
        RuntimeError: a layer whose class something else changed after ``convert_``
            (``fully_shard``, a parametrization): undo that first. Nothing is changed then.
    """
    check_module(model, "revert_")
    layers = [(name, module) for name, module in model.named_modules() if is_converted(module)]
    for name, layer in layers:
        if type(layer) is not SpAMMConv2d:
            raise RuntimeError(
                "a converted model expects layers of the class that convert_ gave them; got "
                f"{name or 'one'}, which is {type(layer).__name__} by now (undo that first)"
            )
    for _, layer in layers:
        revert_layer(layer)
    return model


def device_name(model: nn.Module) -> str:
    """The device of the first Parameter, a GPU by its name."""
    first = next(model.parameters(), None)
    if first is None or not first.is_cuda:
        return "cpu" if first is None else first.device.type
    return torch.cuda.get_device_name(first.device)


# ---- Layers -------------------------------------------------------------------------------------

_RECORD = "_spamm_before"
_OWN = "skips by its own setting"
_LEAST_CHANNELS = 32  # the smallest edge of a block


@dataclass(frozen=True)
class Before:  # no tuple, which torch.export would replace by an equal one
    """The class that a layer had, and its attributes where the setting took their place."""

    kind: type[nn.Module]
    attributes: dict[str, Any]
    added: tuple[str, ...]


def convert_layer(layer: nn.Conv2d, config: SpAMMConfig) -> None:
    """Makes a convolution skip by this setting."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the setting was asked for, for this very layer
        twin = SpAMMConv2d.from_dense(layer, **config.setting())
    own = vars(layer)
    names = (*config.setting(), "activation", "_blocks", "_pinned")
    added = tuple(name for name in names if name not in own)
    own[_RECORD] = Before(type(layer), {name: own[name] for name in names if name in own}, added)
    own.update({name: vars(twin)[name] for name in names})
    layer.__class__ = SpAMMConv2d


def is_converted(module: nn.Module) -> bool:
    """Tells whether :func:`convert_layer` changed a module."""
    return _RECORD in vars(module)


def revert_layer(layer: nn.Module) -> None:
    """Undoes :func:`convert_layer`."""
    own = vars(layer)
    before: Before = own.pop(_RECORD)
    for name in (*before.added, BAND):
        own.pop(name, None)
    own.update(before.attributes)
    layer.__class__ = before.kind


def reason_not_to_convert(layer: nn.Module) -> str:
    """The reason why a layer cannot become a :class:`SpAMMConv2d`; "" where it can."""
    if type(layer) not in (nn.Conv2d, SpAMMConv2d):
        is_2d = isinstance(layer, nn.Conv2d)
        name = type(layer).__name__
        return f"a subclass, {name}" if is_2d else f"{name}: only nn.Conv2d is converted"
    for name in ("weight", "bias"):
        if getattr(layer, name) is not None and name not in layer._parameters:
            return f"its {name} is not a Parameter"
    weight: Any = layer.weight
    if not weight.is_floating_point():
        return f"its weight is {dtype_name(weight.dtype)}"
    has_own = {"forward", "_conv_forward"} & vars(layer).keys()
    return "it has a forward of its own" if has_own else ""


def reason_not_to_skip(layer: nn.Conv2d) -> str:
    """The reason why skipping cannot pay in a convolution; "" where it may."""
    of = " a group" if layer.groups > 1 else ""
    for channels, side in ((layer.in_channels, "input"), (layer.out_channels, "output")):
        if (count := channels // layer.groups) < _LEAST_CHANNELS:
            return f"{count} {side} channels{of} do not fill a block of {_LEAST_CHANNELS}"
    return ""


def _convert(name: str, layer: Any, settings: Settings) -> Row:
    """Converts a layer as the settings say, and reports what was done."""
    if not isinstance(layer, nn.modules.conv._ConvNd):
        return Row(name, shape_of(layer), "left", reason=_OWN)
    row = Row(name, shape_of(layer), "left", geometry=geometry_of(layer))
    setting, reason, band = settings.config, "skips by its setting", None
    is_weighed = settings.file is None and name not in settings.named
    if settings.file is not None:
        (setting, band), reason = settings.file.get(name, (None, None)), "settings file"
    elif name in settings.overrides:
        setting, reason = settings.overrides[name], "override"
    elif isinstance(layer, SpAMMConv2d):
        setting, reason = None, _OWN
    elif setting is None:
        reason = "no setting names it"
    why_not = reason_not_to_convert(layer)
    if not why_not and is_weighed and setting is not None:
        why_not = reason_not_to_skip(layer)
    if why_not or setting is None:
        return replace(row, reason=why_not or reason)
    convert_layer(layer, setting)
    if band is not None:
        vars(layer)[BAND] = band
    return replace(row, action="spamm", reason=reason, setting=setting, band=band)
