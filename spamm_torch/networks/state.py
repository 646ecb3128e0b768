"""Leaving a model as it was: its flags while it is traced or run, and all of it after a failure."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_REGISTERS = ("_modules", "_parameters", "_buffers")


class Snapshot:
    """The classes and attributes of all modules of a model, to go back to.

    Tensors are held, not copied: what is written into them is not undone.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = [
            (module, type(module), dict(module.__dict__), self._registers(module))
            for module in model.modules()
        ]
        self._sizes = [_sizes(module) for module, *_ in self._modules]

    @staticmethod
    def _registers(module: nn.Module) -> list[tuple[Any, dict[str, Any]]]:
        own = module.__dict__
        return [(own[name], dict(own[name])) for name in _REGISTERS if name in own]

    def changed(self) -> list[nn.Module]:
        """The modules to which something was set since, or whose lists and dicts have grown."""
        return [
            module
            for (module, _, attributes, _), sizes in zip(self._modules, self._sizes, strict=True)
            if not _are_same(module.__dict__, attributes) or _sizes(module) != sizes
        ]

    def restore(self) -> None:
        """Gives every module the class and the attributes that it had."""
        for module, kind, attributes, registers in self._modules:
            if type(module) is not kind:
                module.__class__ = kind
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for register, entries in registers:
                register.clear()
                register.update(entries)


def _are_same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(one[name] is other[name] for name in one)


def _sizes(module: nn.Module) -> list[int]:
    return [len(v) for v in module.__dict__.values() if isinstance(v, (list, dict, set))]


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
