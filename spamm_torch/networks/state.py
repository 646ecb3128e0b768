"""Leaving a model as it was: its flags while it is traced or run, and all of it after a failure."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_CONTAINERS = (list, dict, set)


class Snapshot:
    """The classes and attributes of all modules of a model, to go back to.

    Of lists, dicts and sets the entries are remembered, of everything else which object it is:
    what is written into a tensor is not undone.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = [
            (module, type(module), dict(module.__dict__), _contents(module))
            for module in model.modules()
        ]

    def changed(self) -> list[nn.Module]:
        """The modules to which something was set, or put into a list, dict or set, since."""
        return [
            module
            for module, _, attributes, contents in self._modules
            if not _are_same(module.__dict__, attributes)
            or any(len(container) != len(entries) for container, entries in contents)
        ]

    def restore(self) -> None:
        """Gives every module the class and the attributes that it had."""
        for module, kind, attributes, contents in self._modules:
            if type(module) is not kind:
                module.__class__ = kind
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for container, entries in contents:
                container.clear()
                (container.extend if isinstance(container, list) else container.update)(entries)


def _contents(module: nn.Module) -> list[tuple[Any, Any]]:
    """The containers among a module's attributes, each with its entries."""
    values = module.__dict__.values()
    return [(value, value.copy()) for value in values if isinstance(value, _CONTAINERS)]


def _are_same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(one[name] is other[name] for name in one)


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """All modules in eval mode, and afterwards each as it was, whatever a forward set meanwhile.

    The flags are set without ``train``, which models override with effects of their own.
    """
    before = Snapshot(model)
    for module in model.modules():
        module.training = False
    try:
        yield
    finally:
        before.restore()
