"""The form of a model's calls, and its calls on the example input."""

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .._state import Place, Snapshot

_MOST_CALLS = 8  # of one module that are kept

_SIMPLE = (bool, int, float, str, type(None))
_GATHERS = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_EMPTY = inspect.Parameter.empty


class Signature:
    """Which arguments a traced forward takes, and the values of those that are held. Where no call
    is known those without a default are traced, or the first one where all have defaults.

    ``traced``: names, in the forward's order. ``held``: values in place of defaults, by name.
    ``is_guessed``: all arguments have defaults, and no call told which are given.
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
        # Arguments that are the first ones are passed by position, which takes the host less time.
        is_first = self._by_position[: len(self.traced)] == list(self.traced) and not held
        self._count = len(self.traced) if is_first else -1

    @classmethod
    def of_call(
        cls, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> "Signature":
        """The form of a call; where it cannot be held, the form of a forward that nobody called."""
        plain = cls(forward)
        given = plain._given(args, kwargs)
        if given is None:
            return plain
        traced = tuple(name for name in plain._defaults if isinstance(given.get(name), Tensor))
        held = {
            name: value
            for name, value in given.items()
            if name not in traced and not _is_same(value, plain._defaults[name])
        }
        if not traced or not all(type(value) in _SIMPLE for value in held.values()):
            return plain
        return cls(forward, traced, held)

    @property
    def form(self) -> tuple[tuple[str, ...], dict[str, Any]]:
        """The parts that tell this form from others of the same forward."""
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
        for name, default in self._defaults.items():
            if given.setdefault(name, default) is _EMPTY:
                raise TypeError(f"{name} is not given")
        return [given.pop(name) for name in self._by_position], given

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


class Call(NamedTuple):
    """A call of a module: its arguments, and its result."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any


class Example:
    """The arguments of a call: a tuple of all, a dict by name, or the only one. ``name``: of it."""

    def __init__(self, value: Any, name: str = "example_input") -> None:
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}
        if isinstance(value, dict):
            self.kwargs = value
        else:
            self.args = value if isinstance(value, tuple) else (value,)
        self._value, self._name = value, name

    def call(self, model: nn.Module) -> Any:
        """The model's result; the caller sets modes. The model may write to what it is given."""
        return model(*copied(self.args), **copied(self.kwargs))

    def check_values(self) -> None:
        """Raises ValueError for tensors without entries, with NaN, or of infinities alone."""
        for value in pytree.tree_leaves((self.args, self.kwargs)):
            if not isinstance(value, Tensor) or value.is_meta or value.layout != torch.strided:
                continue
            if value.numel() == 0:
                raise ValueError(f"{self._name} must not be empty; got {describe(value)}")
            if bool(value.isnan().any()) or not bool(value.isfinite().any()):
                raise ValueError(
                    f"{self._name} must hold finite numbers; got {describe(value)} with NaN, or "
                    "with infinities alone"
                )

    def record(
        self,
        model: nn.Module,
        before: Snapshot,
        watched: Sequence[nn.Module],
        times: int = 2,
        forms: dict[nn.Module, Signature] | None = None,
    ) -> tuple[dict[nn.Module, list[Call]], list[Place]]:
        """Runs the model, in eval mode, twice in a row, and puts it back. Returns copies of calls
        of watched modules, and the places that changed; ``forms`` takes how modules are called.
        """
        calls: dict[nn.Module, list[Call]] = {module: [] for module in watched}

        def look(module: nn.Module, args: Any, kwargs: Any) -> None:
            if forms is not None and module not in forms:
                forms[module] = Signature.of_call(type(module).forward, args, kwargs)

        with before.kept(), torch.no_grad():
            handles = [hook for module, found in calls.items() for hook in _watch(module, found)]
            for module in model.modules() if forms is not None else ():
                if inspect.isfunction(type(module).forward):
                    handles.append(module.register_forward_pre_hook(look, with_kwargs=True))
            try:
                for _ in range(times):
                    self.call(model)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # whatever the model raises for a wrong input
                raise ValueError(
                    f"{self._name} must be what the model takes; got {describe(self._value)} "
                    f"({first_line(error)})"
                ) from error
            finally:
                for handle in handles:
                    handle.remove()
            return calls, before.changed()


def _watch(module: nn.Module, calls: list[Call]) -> list[Any]:
    """Hooks that note the first calls of a module; it may write to its arguments."""
    begun: list[tuple[Any, Any]] = []

    def before(_: Any, args: Any, kwargs: Any) -> None:
        if len(begun) < _MOST_CALLS:
            begun.append((copied(args), copied(kwargs)))

    def after(_: Any, args: Any, kwargs: Any, result: Any) -> None:
        if len(calls) < len(begun):
            calls.append(Call(*begun[len(calls)], copied(result)))

    return [
        module.register_forward_pre_hook(before, with_kwargs=True),
        module.register_forward_hook(after, with_kwargs=True),
    ]


def copied(value: Any) -> Any:
    """The value with copies of its tensors."""
    return pytree.tree_map(_copy, value)


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if is_dataclass(value) and not isinstance(value, type):  # one that pytree does not know
        value = copy.copy(value)
        for each in fields(value):
            object.__setattr__(value, each.name, copied(getattr(value, each.name)))
    return value


def first_line(error: Exception) -> str:
    """An error's type, and the first line of its text."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def describe(value: Any) -> str:
    """A value's type, and its shape where it is a tensor."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and {str(value.dtype)[6:]}"
    return f"a {type(value).__name__}"
