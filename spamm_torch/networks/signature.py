"""The form in which a forward is called: which of its arguments are traced, and what others are."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

_SIMPLE = (bool, int, float, str, type(None))
_GATHERS = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_EMPTY = inspect.Parameter.empty


class Signature:
    """Which arguments a traced forward takes, and the values of those that are held.

    Where no call is known the arguments without a default are traced, or the first one where all
    have defaults; the others keep theirs.

    Attributes:
        traced: names of the arguments that are traced, in the forward's order.
        held: values that others have in place of their defaults, by name.
        is_guessed: whether all arguments have defaults, and no call told which are given.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        traced: tuple[str, ...] | None = None,
        held: Mapping[str, Any] = {},
    ) -> None:
        parameters = list(inspect.signature(forward).parameters.values())[1:]  # without self
        parameters = [p for p in parameters if p.kind not in _GATHERS]
        self._defaults = {p.name: p.default for p in parameters}
        required = tuple(name for name, default in self._defaults.items() if default is _EMPTY)
        self.is_guessed = traced is None and not required
        self.traced = (required or tuple(self._defaults)[:1]) if traced is None else traced
        self.held = dict(held)
        self._by_position = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
        self._only_by_position = sum(p.kind is p.POSITIONAL_ONLY for p in parameters)
        # Arguments that are the first ones are passed by position, which takes the host less time.
        is_first = self._by_position[: len(self.traced)] == list(self.traced) and not held
        self._count = len(self.traced) if is_first else -1

    @classmethod
    def of_call(
        cls, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Signature:
        """The form of a call; without one that can be told, that of no call."""
        plain = cls(forward)
        given = plain._given(args, kwargs)
        if given is None:
            return plain
        traced = tuple(name for name in plain._defaults if isinstance(given.get(name), Tensor))
        others = {name: value for name, value in given.items() if name not in traced}
        held = {
            name: value
            for name, value in others.items()
            if not _is_same(value, plain._defaults[name])
        }
        if not traced or not all(type(value) in _SIMPLE for value in held.values()):
            return plain
        return cls(forward, traced, held)

    @property
    def form(self) -> tuple[tuple[str, ...], dict[str, Any]]:
        """What tells this form from others of the same forward."""
        return self.traced, self.held

    def bound(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...] | None:
        """The arguments that were traced, in order; None for a call of another form."""
        if not kwargs and len(args) == self._count:
            return args
        given = self._given(args, kwargs)
        if given is None or any(name not in given for name in self.traced):
            return None
        for name, default in self._defaults.items():
            if name not in self.traced:
                value = self.held.get(name, default)
                if not _is_same(given.get(name, default), value):
                    return None
        return tuple(given[name] for name in self.traced)

    def arguments(self, traced: tuple[Any, ...]) -> tuple[list[Any], dict[str, Any]]:
        """The arguments of a call of this form, by position and by name."""
        given = {**self.held, **dict(zip(self.traced, traced, strict=True))}
        missing = [name for name, d in self._defaults.items() if d is _EMPTY and name not in given]
        if missing:
            raise TypeError(f"{missing[0]} is not given")
        args = []
        for place, name in enumerate(self._by_position):
            if name not in given and place >= self._only_by_position:
                break
            args.append(given.pop(name, self._defaults[name]))
        return args, given

    def _given(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
        """The arguments of a call by name; None where there are others than the forward names."""
        if len(args) > len(self._by_position):
            return None
        given = {**dict(zip(self._by_position, args, strict=False)), **kwargs}
        if len(given) != len(args) + len(kwargs) or not given.keys() <= self._defaults.keys():
            return None
        return given


def _is_same(value: Any, default: Any) -> bool:
    return value is default or (
        type(value) is type(default) and isinstance(value, _SIMPLE) and value == default
    )
