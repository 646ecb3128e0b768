"""convert_ and revert_: layers of a model get the class that skips, and their own again."""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from .._arguments import check_module, dtype_name, is_number
from .._hints import BACKEND
from ..nn import SpAMMConv2d, _SpAMM, reason_not_to_skip
from .config import SpAMMConfig
from .report import FORMAT, ConvertReport, Row, close_names, geometry_of, shape_of

Model = TypeVar("Model", bound=nn.Module)


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
    wishes = _read_wishes(model, config, overrides, knobs)
    before = [(module, type(module), vars(module).copy()) for module in model.modules()]
    try:
        revert_(model)
        rows = [
            _convert(name, module, wishes.get(name, _Wish()))
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
_ATTRIBUTES = (*(field.name for field in fields(SpAMMConfig)), "activation", "_blocks", "_pinned")


@dataclass(frozen=True)
class Before:  # no tuple, which torch.export would replace by an equal one
    """The class that a layer had, and its attributes where the setting took their place."""

    kind: type[nn.Module]
    attributes: dict[str, Any]


def convert_layer(layer: nn.Conv2d, config: SpAMMConfig) -> None:
    """Makes a convolution skip by this setting."""
    twin = SpAMMConv2d.from_dense(layer, **config.to_dict())
    own = vars(layer)
    own[_RECORD] = Before(type(layer), {name: own[name] for name in _ATTRIBUTES if name in own})
    own.update({name: vars(twin)[name] for name in _ATTRIBUTES})
    layer.__class__ = SpAMMConv2d


def is_converted(module: nn.Module) -> bool:
    """Tells whether :func:`convert_layer` changed a module."""
    return _RECORD in vars(module)


def revert_layer(layer: nn.Module) -> None:
    """Undoes :func:`convert_layer`."""
    own = vars(layer)
    before: Before = own.pop(_RECORD)
    for name in _ATTRIBUTES:
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


def _convert(name: str, layer: Any, wish: "_Wish") -> Row:
    """Converts a layer as it is wished, and reports what was done."""
    if not isinstance(layer, nn.modules.conv._ConvNd):
        return Row(name, shape_of(layer), "left", reason=_OWN)
    row = Row(name, shape_of(layer), "left", geometry=geometry_of(layer))
    setting, reason, is_weighed = wish
    why_not = reason_not_to_convert(layer)
    if not why_not and is_weighed and setting is not None:
        why_not = reason_not_to_skip(layer)
    if why_not or setting is None:
        return replace(row, reason=why_not or reason)
    convert_layer(layer, setting)
    return replace(row, action="spamm", reason=reason, setting=setting)


# ---- Arguments and settings files ---------------------------------------------------------------


class _Wish(NamedTuple):
    """The setting that a layer is to get, None for none, and why; ``is_weighed``: unless skipping
    cannot pay there.
    """

    setting: SpAMMConfig | None = None
    reason: str = ""
    is_weighed: bool = False


def _read_wishes(
    model: nn.Module, config: Any, overrides: Any, knobs: dict[str, Any]
) -> dict[str, _Wish]:
    """The wish for each convolution by its first name. Raises as :func:`convert_`."""
    given = [name for name, value in knobs.items() if value is not None]
    if given and config is not None:
        raise ValueError(
            "config must come without tau, valid_ratio and max_error, which stand for one; got "
            f"config and {' and '.join(given)}"
        )
    convolutions = {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, nn.Conv2d)
    }
    if not convolutions:
        raise ValueError(
            "convert_ expects a model with nn.Conv2d layers; got "
            f"{type(model).__name__}, which has none in {len(list(model.modules()))} modules"
        )
    first: dict[nn.Module, str] = {}  # the first name of each: a module may have several
    for name, module in convolutions.items():
        first.setdefault(module, name)
    if isinstance(config, (str, os.PathLike)):
        if overrides:
            raise ValueError(
                "overrides must not come with a settings file, which names each layer's setting; "
                f"got both ({os.fspath(config)!r})"
            )
        return _read_file(config, {name: layer for layer, name in first.items()})
    if given:
        config = SpAMMConfig(**knobs)
    elif config is not None and not isinstance(config, SpAMMConfig):
        got = type(config).__name__
        if is_number(config):
            got = f"{config} (a threshold is tau={config} or SpAMMConfig(tau={config}))"
        raise TypeError(
            f"config must be a SpAMMConfig, the path of a settings file, or None; got {got}"
        )
    by_name = _read_overrides(overrides, convolutions)
    if config is None and not by_name:
        raise ValueError(
            "convert_ expects config, tau, valid_ratio, max_error or overrides; got none of them "
            f"({BACKEND})"
        )
    wishes = {}
    for module, name in first.items():
        wishes[name] = _Wish(config, "skips by its setting", is_weighed=True)
        if isinstance(module, SpAMMConv2d) and not is_converted(module):
            wishes[name] = _Wish(None, _OWN)
        elif config is None:
            wishes[name] = _Wish(None, "no setting names it")
    named = {first[convolutions[key]] for key in overrides if key in convolutions}
    for other, setting in by_name.items():
        name = first[convolutions[other]]
        wishes[name] = _Wish(setting, "override", is_weighed=name not in named)
    return wishes


def _read_overrides(
    overrides: Any, convolutions: Mapping[str, nn.Module]
) -> dict[str, SpAMMConfig | None]:
    items = dict(overrides).items() if isinstance(overrides, Mapping) else [(overrides, None)]
    by_name: dict[str, SpAMMConfig | None] = {}
    for key, value in items:
        if not isinstance(key, str) or not isinstance(value, SpAMMConfig | None):
            raise TypeError(
                "overrides must be a dict from names to a SpAMMConfig or None; got "
                f"{key!r}: {value!r}"
            )
        try:
            pattern = key[3:] if key.startswith("re:") else re.escape(key)
            found = [name for name in convolutions if re.fullmatch(pattern, name)]
        except re.error as error:
            raise ValueError(
                f"overrides must hold regular expressions behind re:; got {key!r} ({error})"
            ) from None
        if not found:
            raise ValueError(
                "overrides must name convolutions of the model; got "
                f"{key!r}{close_names(key, convolutions)}"
            )
        by_name |= dict.fromkeys(found, value)
    return by_name


def _read_file(
    path: str | os.PathLike[str], convolutions: Mapping[str, nn.Module]
) -> dict[str, _Wish]:
    """The wishes in a settings file."""
    try:
        with open(path) as file:
            settings = json.load(file)
        file_format = settings["format"]
        layers = settings["layers"].items()
        entries = [(name, entry["shape"], entry["setting"]) for name, entry in layers]
    except OSError as error:
        raise ValueError(f"config must be a settings file that can be read; got {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(
            f"config must be a settings file as a report saves it; got {os.fspath(path)!r}"
        ) from None
    if file_format != FORMAT:  # their taus may mean something else
        raise ValueError(
            f"the settings must be of format {FORMAT}; got format {file_format!r} (make them anew)"
        )
    expected = {name: geometry_of(layer) for name, layer in convolutions.items()}
    found, shapes = {}, dict.fromkeys(expected)
    for name, shape, setting in entries:
        if setting is None and name not in expected:
            continue  # a layer of another kind
        shapes[name] = shape
        try:
            config = None if setting is None else SpAMMConfig(**setting)
        except TypeError as error:
            raise ValueError(
                f"the settings must be as a report saves them; got {setting!r} for {name!r} "
                f"({error})"
            ) from None
        found[name] = _Wish(config, "settings file")
    for name, shape in shapes.items():
        if shape != (here := expected.get(name)):
            raise ValueError(
                f"the settings must be those of this model; got {shape or 'none'} for {name!r}, "
                f"which is {here or f'none of its layers{close_names(name, expected)}'}"
            )
    return found
