"""The arguments of a forward: those that were traced, and those that kept their defaults."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

_SIMPLE = (bool, int, float, str, type(None))


class Signature:
    """Which arguments a traced forward takes: all without a default."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        parameters = list(inspect.signature(forward).parameters.values())[1:]  # without self
        gathers = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        self._defaults = {p.name: p.default for p in parameters if p.kind not in gathers}
        self._count = sum(default is inspect.Parameter.empty for default in self._defaults.values())

    def bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
        """The arguments that were traced, in order; None where another one is not its default."""
        if not kwargs and len(args) == self._count:
            return args
        if len(args) > len(self._defaults):
            return None
        given = {**dict(zip(self._defaults, args, strict=False)), **kwargs}
        if len(given) != len(args) + len(kwargs) or not given.keys() <= self._defaults.keys():
            return None
        traced = []
        for name, default in self._defaults.items():
            if default is inspect.Parameter.empty:
                if name not in given:
                    return None
                traced.append(given[name])
            elif name in given and not _is_same(given[name], default):
                return None
        return tuple(traced)


def _is_same(value: Any, default: Any) -> bool:
    return value is default or (
        type(value) is type(default) and isinstance(value, _SIMPLE) and value == default
    )
