"""The changes that convert_ makes in a model: classes of modules, and their attributes.

A module with a generated forward stays the same object and gets a subclass of its class. A
convolution that skips by itself becomes a :class:`SpAMMConv2d`.
"""

import copy
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from .._state import in_eval_mode
from .._timing import Mark
from ..nn import SpAMMConv2d, _SpAMM
from .capture import Capture
from .config import Engine, SpAMMConfig
from .example import Signature
from .fused import Fused, Recipe
from .plan import Island, Site
from .proof import BAND
from .sites import find_sites

# ---- Modules with a generated forward -----------------------------------------------------------


class FusedModule:
    """The methods of a fused module; a base before the module's own class."""

    _spamm_fused: Fused | None = None
    _spamm_original: type[nn.Module]

    def _folded_anew(self, result: Any, is_stale: bool = True) -> Any:
        if is_stale and self._spamm_fused is not None:
            self._spamm_fused.renew()
        return result

    def train(self: Any, mode: bool = True) -> Any:
        """As of the module's class; back in eval mode, weights are folded anew."""
        is_stale = self.training and not mode
        return self._folded_anew(super().train(mode), is_stale)  # type: ignore[misc]

    def _apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._folded_anew(super()._apply(*args, **kwargs))  # type: ignore[misc]

    def load_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        """As of the module's class; then weights are folded anew."""
        return self._folded_anew(super().load_state_dict(*args, **kwargs))  # type: ignore[misc]

    __prepare_scriptable__ = _SpAMM.__prepare_scriptable__

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        new = _new(type(self))
        memo[id(self)] = new
        new.__setstate__(copy.deepcopy(_state(self), memo))
        if new._spamm_fused is not None:
            new._spamm_fused._proof.find_again()
        return new

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        state = dict(_state(self))
        fused = state.pop("_spamm_fused", None)
        recipe = None if fused is None else fused.recipe
        return _new, (self._spamm_original,), (state, recipe), None, None, _unpickle


def _new(kind: Any) -> Any:
    return kind.__new__(kind)


def _state(module: nn.Module) -> Any:
    """The attributes that a module's class gives to copies and pickles: all, or fewer."""
    made: Any = object.__reduce_ex__(module, 4)
    return made[2]


def _unpickle(module: nn.Module, state: tuple[dict[str, Any], Recipe | None]) -> None:
    attributes, recipe = state
    module.__setstate__(attributes)
    if recipe is not None:
        fuse_again(module, recipe)


def fuse_again(root: nn.Module, recipe: Recipe) -> None:
    """Gives a module, whose convolutions are as they were, the forward that it had."""

    def added_before(name: str, *_: Any) -> bool:
        return name in recipe.calls and "add" in recipe.calls[name][1]

    with in_eval_mode(root) as before:
        forms = {root: Signature(type(root).forward, *recipe.form)}
        islands = Capture(root, before, forms).islands
        found = [(island, find_sites(island, added_before)) for island in islands]
    for island, sites in found:
        fused = recipe.fused(island, [site for site in sites if site.name in recipe.calls])
        if fused is not None:
            attach(fused)


@functools.cache
def fused_class(original: Any) -> Any:
    """The subclass that a module of this class gets."""

    @functools.wraps(original.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        fused = self._spamm_fused
        # A replica of nn.DataParallel shares what its original carries, on another device.
        if fused is not None and fused.root is self:
            if not self.training:
                traced = fused.signature.bound(args, kwargs)
                if traced is not None and fused.serves(traced):
                    return fused.run(traced)
            if not torch.compiler.is_compiling():
                fused.forget_what_may_change()
        if fused is not None and fused.on_other_call is not None:
            fused.on_other_call(args, kwargs)
        return original.forward(self, *args, **kwargs)

    kept = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
    attributes = {"forward": forward, "_spamm_original": original, **kept}
    return type(original.__name__, (FusedModule, original), attributes)


def attach(fused: Fused) -> None:
    """Gives a module its generated forward."""
    module: Any = fused.root
    kind: Any = type(module)
    module.__class__ = fused_class(kind)
    module.__dict__["_spamm_fused"] = fused
    if fused.is_stale():
        fused.prove_again()  # the convolutions are of another class since it was made


def detach(module: nn.Module) -> None:
    """Undoes :func:`attach`."""
    kind: Any = type(module)
    module.__class__ = kind._spamm_original
    del module.__dict__["_spamm_fused"]


def fused_of(module: nn.Module) -> Fused | None:
    """The generated forward that :func:`attach` gave a module, or None."""
    return module.__dict__.get("_spamm_fused")


# ---- Convolutions that skip by themselves -------------------------------------------------------

_RECORD = "_spamm_before"


@dataclass(frozen=True)
class Before:  # no tuple, which torch.export would replace by an equal one
    """The state that :func:`revert_layer` restores: class, attributes, and names of added ones."""

    kind: type[nn.Module]
    attributes: dict[str, Any]
    added: tuple[str, ...]


def convert_layer(conv: nn.Conv2d, config: SpAMMConfig) -> None:
    """Makes a convolution skip by this setting."""
    own, values = conv.__dict__, _values(config).copy()
    if isinstance(conv, SpAMMConv2d):  # keeps the activation that it was given
        setting = (*config.setting(), "_pinned")
        values = {name: value for name, value in values.items() if name in setting}
    before = {name: own[name] for name in values if name in own}
    own[_RECORD] = Before(type(conv), before, tuple(name for name in values if name not in own))
    own.update(values)
    if type(conv) is nn.Conv2d:
        conv.__class__ = SpAMMConv2d


@functools.cache
def _values(config: SpAMMConfig) -> dict[str, Any]:
    """The attributes of a :class:`SpAMMConv2d` of this setting that an ``nn.Conv2d`` has not."""
    template = SpAMMConv2d(1, 1, 1, device="meta", **config.setting())
    of_torch = nn.Conv2d(1, 1, 1, device="meta").__dict__
    return {name: value for name, value in template.__dict__.items() if name not in of_torch}


def is_converted_layer(module: nn.Module) -> bool:
    return _RECORD in module.__dict__


def revert_layer(conv: nn.Module) -> None:
    """Undoes :func:`convert_layer`."""
    own = conv.__dict__
    before: Before = own.pop(_RECORD)
    for name in before.added:
        own.pop(name, None)
    own.update(before.attributes)
    conv.__class__ = before.kind


def revert_module(module: nn.Module) -> None:
    """Undoes whatever of :func:`attach` and :func:`convert_layer` was done to a module."""
    if fused_of(module) is not None:
        detach(module)
    if is_converted_layer(module):
        revert_layer(module)
    module.__dict__.pop(BAND, None)


# ---- A whole model ------------------------------------------------------------------------------

# The generated forward of an island with these engines; None where it would compute nothing.
Fuse: TypeAlias = Callable[[Island, Sequence[Site], Mapping[str, Engine]], Fused | None]


class Installation:
    """A model whose engines can be set. ``keeps_layers``: those in islands keep their class."""

    def __init__(
        self,
        islands: Mapping[Island, Sequence[Site]],
        sites: Sequence[Site],
        fuse: Fuse,
        keeps_layers: bool = False,
    ) -> None:
        self.islands, self.sites, self._fuse = islands, sites, fuse
        self._alone = [site for site in sites if site.node is None or not keeps_layers]
        self._engines: Mapping[str, Engine] = {}

    @property
    def engines(self) -> Mapping[str, Engine]:
        """The engine of each call, by name. Setting them changes the model; LEFT is as it was."""
        return self._engines

    @engines.setter
    def engines(self, engines: Mapping[str, Engine]) -> None:
        self._set(engines, self._alone)

    def _set(self, engines: Mapping[str, Engine], converted: Sequence[Site]) -> None:
        self._engines = dict(engines)
        for site in self._alone:
            if is_converted_layer(site.conv):
                revert_layer(site.conv)
        for site in self.sites:
            site.conv.__dict__.pop(BAND, None)
        for site in self.sites:
            if (band := engines[site.name].band) is not None:
                site.conv.__dict__[BAND] = band
        for site in converted:
            setting = engines[site.name].setting
            if setting is not None and not is_converted_layer(site.conv):
                convert_layer(site.conv, setting)
        for island, sites in self.islands.items():
            fused = self._fuse(island, sites, self._engines)
            if fused_of(island.module) is not None:
                detach(island.module)
            if fused is not None:
                attach(fused)

    def try_out(self, engines: Mapping[str, Engine]) -> None:
        """Sets the engines for calls of generated forwards. Convolutions that these compute keep
        their class, so that nothing has to be proven anew between forms.
        """
        self._set(engines, [site for site in self._alone if site.node is None])

    @property
    def fused(self) -> list[Fused]:
        """The generated forwards that the model has now."""
        found = (fused_of(island.module) for island in self.islands)
        return [fused for fused in found if fused is not None]

    @property
    def changes_anything(self) -> bool:
        """Whether the model is another one now than it was."""
        return bool(self.fused) or any(is_converted_layer(site.conv) for site in self._alone)

    @contextmanager
    def marked(self, mark: Mark) -> Iterator[None]:
        """Inside, ``mark`` is called with the name of each call of a convolution before it runs."""
        computed = {name for fused in self.fused for name in fused.names}
        watched = {site.conv for site in self.sites if site.name in computed}
        called: dict[nn.Conv2d, list[str]] = {}  # of which no generated forward notices hooks
        for site in self.sites:
            if site.conv not in watched:
                called.setdefault(site.conv, []).append(site.name)
        handles = []
        for conv, names in called.items():
            following = itertools.cycle(names)
            handles.append(conv.register_forward_pre_hook(lambda *_, n=following: mark(next(n))))
        try:
            for fused in self.fused:
                fused.watch_operands(mark)
            yield
        finally:
            for fused in self.fused:
                fused.operands = list(fused.operands)
            for handle in handles:
                handle.remove()
