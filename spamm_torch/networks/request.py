"""Reads the arguments of convert_: overrides and settings files, layer by layer."""

import difflib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from .._arguments import is_number
from .._hints import HINTS
from .._library import VERSION
from .config import DENSE, LEFT, NOTHING_SKIPPED, Band, Engine, SpAMMConfig
from .report import FORMAT, geometry_of

_KINDS = ("spamm", "dense", "left")


@dataclass(frozen=True)
class Request:
    """The checked arguments of :func:`convert_`; ``named``: names in full, whose setting is taken.
    ``engines``: of calls by name, from a settings file.
    """

    config: SpAMMConfig | None
    overrides: Mapping[str, SpAMMConfig | None]
    named: frozenset[str]
    engines: Mapping[str, Engine]

    def setting_of(self, layer: str) -> SpAMMConfig | None:
        """The setting by which a layer may skip; None where it is to stay dense."""
        if layer in self.overrides:
            return self.overrides[layer]
        return self.config or NOTHING_SKIPPED


def read_request(model: nn.Module, config: Any, overrides: Any, knobs: dict[str, Any]) -> Request:
    """Checks the arguments; raises as :func:`convert_`. Knobs that are given stand for a config."""
    given = [name for name, value in knobs.items() if value is not None]
    if given and config is not None:
        raise ValueError(
            "config must come without tau, valid_ratio and max_error, which stand for one; got "
            f"config and {' and '.join(given)}"
        )
    if given:
        config = SpAMMConfig(**knobs)
    convolutions = {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, nn.Conv2d)
    }
    engines: Mapping[str, Engine] = {}
    if isinstance(config, (str, os.PathLike)):
        if overrides:
            raise ValueError(
                "overrides must not come with a settings file, which names each layer's engine; "
                f"got both ({os.fspath(config)!r})"
            )
        engines = _read_settings(config, convolutions)
        config = None
    elif config is not None and not isinstance(config, SpAMMConfig):
        got = type(config).__name__
        if is_number(config):
            got = f"{config} (a threshold is tau={config} or SpAMMConfig(tau={config}))"
        raise TypeError(
            f"config must be a SpAMMConfig, the path of a settings file, or None; got {got}"
        )
    by_name = _read_overrides(overrides, convolutions)
    first: dict[nn.Module, str] = {}  # the first name of each: a module may have several
    for name, module in convolutions.items():
        first.setdefault(module, name)
    known_as = {name: first[module] for name, module in convolutions.items()}
    named = frozenset(known_as[key] for key in overrides if key in known_as)
    own = {known_as[name]: setting for name, setting in by_name.items()}
    return Request(config, own, named, engines)


def _read_overrides(
    overrides: Any, convolutions: Mapping[str, nn.Module]
) -> dict[str, SpAMMConfig | None]:
    if not isinstance(overrides, Mapping):
        raise TypeError(
            f"overrides must be a dict from names to settings; got {type(overrides).__name__}"
        )
    by_name: dict[str, SpAMMConfig | None] = {}
    for key, value in overrides.items():
        if not isinstance(key, str):
            raise TypeError(f"overrides must have names as keys; got {key!r}")
        if value is not None and not isinstance(value, SpAMMConfig):
            raise TypeError(
                f"overrides must hold a SpAMMConfig or None; got {type(value).__name__} for {key!r}"
            )
        by_name |= dict.fromkeys(_matches(key, convolutions), value)
    return by_name


def _matches(key: str, convolutions: Mapping[str, nn.Module]) -> list[str]:
    """The convolutions that a key names; the name itself goes before patterns that match it too."""
    if not key.startswith("re:"):
        if key not in convolutions:
            raise ValueError(
                "overrides must name convolutions of the model; got "
                f"{key!r}{_close_names(key, convolutions)}"
            )
        return [key]
    try:
        pattern = re.compile(key[3:])
    except re.error as error:
        raise ValueError(
            f"overrides must hold regular expressions behind re:; got {key!r} ({error})"
        ) from None
    found = [name for name in convolutions if pattern.fullmatch(name)]
    if not found:
        raise ValueError(
            "overrides must name convolutions of the model; got "
            f"{key!r}, which matches none of {len(convolutions)}"
        )
    return found


def _close_names(key: str, names: Mapping[str, Any]) -> str:
    inside = [name for name in names if name.startswith(f"{key}.")]
    close = inside[:3] or difflib.get_close_matches(key, names, 3, 0.4)
    return f" (close: {', '.join(close)})" if close else f" (it has {len(names)} convolutions)"


def _read_settings(
    path: str | os.PathLike[str], convolutions: Mapping[str, nn.Conv2d]
) -> dict[str, Engine]:
    """The engines of calls by name."""
    try:
        with open(path) as file:
            settings = json.load(file)
        version = settings["format"], settings["versions"]["spamm_torch"]
        entries = [
            (name, entry["shape"], entry["engine"], entry["setting"], entry.get)
            for name, entry in settings["layers"].items()
        ]
        reference = settings.get("reference")
    except OSError as error:
        raise ValueError(f"config must be a settings file that can be read; got {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(
            f"config must be a settings file as a report saves it; got {os.fspath(path)!r}"
        ) from None
    _check_version(*version)
    if reference is not None:
        raise ValueError(
            f"the settings must come without a reference; got one of shape {reference} (make them "
            f"anew: {HINTS['convert_']['reference']})"
        )
    engines = {}
    for name, shape, kind, setting, get in entries:
        layer = convolutions.get(name.partition("#")[0])
        if layer is None:
            if kind == "left":  # linear layers are listed as well
                continue
            raise ValueError(
                f"the settings must be those of this model; got a layer {name!r}"
                f"{_close_names(name, convolutions)}"
            )
        if geometry_of(layer) != shape:
            raise ValueError(
                f"the settings must be those of this model; got {shape!r} for {name!r}, which is "
                f"{geometry_of(layer)!r}"
            )
        more = get("band"), get("pool", False)
        engines[name] = _engine(name, layer.groups > 1, kind, setting, *more)
    missing = [name for name in convolutions if name not in engines]
    if missing:
        raise ValueError(
            f"the settings must be those of this model; got none for {missing[0]!r} "
            f"({len(missing)} layers are missing)"
        )
    return engines


def _check_version(file_format: Any, version: Any) -> None:
    """Raises for settings of another release: its taus may mean something else."""
    if file_format != FORMAT:
        raise ValueError(
            f"the settings must be of format {FORMAT}; got format {file_format!r} (make them anew)"
        )
    if _release(version) != _release(VERSION):
        raise ValueError(
            f"the settings must be of spamm_torch {'.'.join(_release(VERSION))}; got those of "
            f"{version!r} (make them anew)"
        )


def _release(version: Any) -> list[str]:
    return str(version).split(".")[:2]


def _engine(name: str, is_grouped: bool, kind: Any, setting: Any, band: Any, pools: Any) -> Engine:
    may_have_setting = kind == "spamm" or (kind == "dense" and is_grouped)
    is_right = isinstance(setting, dict) if setting is not None else kind != "spamm"
    if kind not in _KINDS or not is_right or (setting is not None and not may_have_setting):
        raise ValueError(
            f"the settings must have engines {', '.join(_KINDS)}, spamm with a setting; got "
            f"{kind!r} with {setting!r} for {name!r}"
        )
    if not isinstance(pools, bool) or (pools and setting != NOTHING_SKIPPED.to_dict()):
        raise ValueError(
            f"the settings must have true as pool where {NOTHING_SKIPPED} alone is set, or none; "
            f"got {pools!r} with {setting!r} for {name!r}"
        )
    if kind == "spamm":
        return Engine("spamm", _setting(name, setting), _band(name, band), pools)
    if setting is not None:
        return replace(DENSE, joined=_setting(name, setting))
    return DENSE if kind == "dense" else LEFT


def _setting(name: str, setting: dict[str, Any]) -> SpAMMConfig:
    try:
        return SpAMMConfig.from_dict(setting)
    except TypeError as error:
        raise ValueError(
            f"the settings must be as a report saves them; got {setting!r} for {name!r} ({error})"
        ) from None


def _band(name: str, band: Any) -> Band | None:
    if band is None:
        return None
    are_two = isinstance(band, list) and len(band) == 2 and all(map(is_number, band))
    if not are_two or not 0 <= band[0] <= band[1] <= 1:
        raise ValueError(
            "the settings must have bands of two valid ratios, 0 <= low <= high <= 1; got "
            f"{band!r} for {name!r}"
        )
    return band[0], band[1]
