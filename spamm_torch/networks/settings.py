"""Reads what convert_ is to do: knobs, overrides and settings files, layer by layer."""

import difflib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import nn

from .._arguments import is_number
from .._hints import HINTS
from .._library import VERSION
from .config import Band, SpAMMConfig
from .report import FORMAT, geometry_of

# The setting of each layer in a file, if it skips, and its band.
File: TypeAlias = Mapping[str, tuple[SpAMMConfig | None, Band | None]]


@dataclass(frozen=True)
class Settings:
    """The checked arguments of :func:`convert_`; ``named``: names in full, whose setting is taken.
    ``file``: from a settings file, which stands for all others.
    """

    config: SpAMMConfig | None
    overrides: Mapping[str, SpAMMConfig | None]
    named: frozenset[str]
    file: File | None


def read_settings(model: nn.Module, config: Any, overrides: Any, knobs: dict[str, Any]) -> Settings:
    """Checks the arguments; raises as :func:`convert_`. Knobs that are given stand for a config."""
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
        layers = {name: layer for layer, name in first.items()}
        return Settings(None, {}, frozenset(), _read_file(config, layers))
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
            f"({HINTS['spamm_torch']['compile']})"
        )
    known_as = {name: first[module] for name, module in convolutions.items()}
    named = frozenset(known_as[key] for key in overrides if key in known_as)
    own = {known_as[name]: setting for name, setting in by_name.items()}
    return Settings(config, own, named, None)


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
    if close := inside[:3] or difflib.get_close_matches(key, names, 3, 0.4):
        return f" (close: {', '.join(close)})"
    more = f", ... ({len(names)} in all)" if len(names) > 5 else ""
    return f" (it has {', '.join(list(names)[:5])}{more})"


def _read_file(path: str | os.PathLike[str], convolutions: Mapping[str, nn.Conv2d]) -> File:
    """The settings of convolutions by name."""
    try:
        with open(path) as file:
            settings = json.load(file)
        version = settings["format"], settings["versions"]["spamm_torch"]
        entries = [
            (name, entry["shape"], entry["engine"], entry["setting"], entry.get("band"))
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
    found = {}
    for name, shape, engine, setting, band in entries:
        layer = convolutions.get(name)
        if layer is None:
            if engine == "left" or name.partition("#")[0] in convolutions:
                continue  # layers of other kinds, and further calls of one
            raise ValueError(
                f"the settings must be those of this model; got a layer {name!r}"
                f"{_close_names(name, convolutions)}"
            )
        if geometry_of(layer) != shape:
            raise ValueError(
                f"the settings must be those of this model; got {shape!r} for {name!r}, which is "
                f"{geometry_of(layer)!r}"
            )
        found[name] = _setting(name, engine, setting), _band(name, band)
    missing = [name for name in convolutions if name not in found]
    if missing:
        raise ValueError(
            f"the settings must be those of this model; got none for {missing[0]!r} "
            f"({len(missing)} layers are missing)"
        )
    return found


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


def _setting(name: str, engine: Any, setting: Any) -> SpAMMConfig | None:
    """The setting of a layer that skips; None for others, which the backend may fuse."""
    if engine in ("dense", "left"):
        return None
    if engine != "spamm" or not isinstance(setting, dict):
        raise ValueError(
            "the settings must have engines spamm, dense, left, spamm with a setting; got "
            f"{engine!r} with {setting!r} for {name!r}"
        )
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
