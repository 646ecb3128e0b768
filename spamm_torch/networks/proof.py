"""The proof that a generated forward still stands for its module's own.

Everything that modules hold counts, but a short list of names. Every eager call checks the proof,
once for the whole network. So functions of C compare numbers: no loop in Python runs over hundreds
of modules.
"""

import copy
import functools
import operator
import types
from collections.abc import Sequence
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._state import dict_version

BAND = "_spamm_band"  # the lowest and highest valid ratio of a batch in a layer's calibration
_UNREAD = frozenset(  # names that no call in eval mode without gradients reads
    (
        "training",  # which has a check of its own
        *("_backward_hooks", "_backward_pre_hooks", "_is_full_backward_hook"),
        *("_non_persistent_buffers_set", "_state_dict_hooks", "_state_dict_pre_hooks"),
        *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
        "_pinned",  # of a SpAMMConv2d: operands hold norms of their own
        *("_compiled_call_impl", "_spamm_fused", BAND),
    )
)
_OF_MODULES = frozenset(vars(nn.Module()))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")  # without gradients no others run
_PLAIN = (Tensor, nn.Parameter)
_PLAIN_SETTINGS = (type(None), bool, int, float, str)
_WITHOUT_SETTINGS = (nn.Module, Tensor, type, types.FunctionType, types.ModuleType)

_version = operator.attrgetter("_version")
_address = Tensor.data_ptr


class _State(NamedTuple):
    """The contents of dictionaries at these versions, and the tensors among them."""

    versions: list[int]
    held: list[dict[str, Any]]
    tensors: list[Tensor | None]


class Proof:
    """The modules' state (root first) when a forward was generated; ``sources`` are folded anew."""

    def __init__(self, modules: Sequence[nn.Module], sources: Sequence[nn.Module]) -> None:
        self._modules = list(modules)
        self._sources = list(sources)
        self._state = _State([], [], [])
        self.take()

    def take(self) -> None:
        """Takes modules as they are now for those that were."""
        self._had_hooks = list(map(bool, self._all_hooks()))
        self._find()
        self._kinds = list(map(type, self._modules))
        bases = dict.fromkeys(base for kind in self._kinds for base in kind.__mro__)
        own = [base for base in bases if issubclass(base, nn.Module) and base is not nn.Module]
        self._functions = list(map(_functions_of, own))
        self._entries = list(map(copy.copy, self._containers))
        versions = self._versions()
        held = list(map(dict, self._dicts))
        held[self._count].pop("forward", None)  # as of _what_counts
        self._state = _State(versions, held, self._tensors_of(held))

    def _find(self) -> None:
        """Finds the objects to compare, in the modules as they are now."""
        root = self._modules[0]
        owns = list(map(vars, self._modules))
        values = [
            value
            for own in owns
            for name, value in own.items()
            if name not in _OF_MODULES and name not in _UNREAD
        ]
        self._containers = [value for value in values if type(value) in (list, dict, set)]
        objects = [vars(value) for value in values if _has_settings(value)]
        registers: list[dict[str, Any]] = []
        folded = set(map(id, self._sources))
        for module in self._modules:
            both = (module._parameters, module._buffers)
            if id(module) not in folded:
                registers += [register for register in both if register or _is_of_users(module)]
        children = [m._modules for m in self._modules if m._modules or _is_of_users(m)]
        first: list[Any] = [r for m in self._sources for r in (m._parameters, m._buffers) if r]
        self._count = len(first)  # of registers whose tensors are folded
        self._dicts = [*first, *owns, *objects, *registers, *children]
        known = zip(self._all_hooks(), self._had_hooks, strict=True)
        self._hooks = [hooks for hooks, were_there in known if not were_there]
        # A convolution computes the same in both modes.
        self._modes = [
            vars(module)
            for module in self._modules
            if module is root or not isinstance(module, nn.Conv2d)
        ]

    def _all_hooks(self) -> list[Any]:
        """Those of all modules but the root, whose hooks run around the generated forward, too."""
        return [vars(module)[name] for module in self._modules[1:] for name in _HOOKS]

    def __getstate__(self) -> dict[str, Any]:
        kept = ("_modules", "_sources", "_kinds", "_functions", "_had_hooks", "_entries", "_state")
        return {name: self.__dict__[name] for name in kept}

    def find_again(self) -> None:
        """For a deep copy, when the modules of the copy are complete."""
        self._find()
        self._state = self._state._replace(versions=[-1] * len(self._state.held))

    # ---- Asked in every call --------------------------------------------------------------------

    def is_in_eval_mode(self) -> bool:
        """Whether all modules whose work the generated forward does are in eval mode."""
        return not any(map(operator.getitem, self._modes, repeat("training")))

    def fits(self) -> bool:
        """Whether no module has changed, and none got hooks since."""
        versions = self._versions()
        return (
            (versions == self._state.versions or self._still_fits(versions))
            and list(map(type, self._modules)) == self._kinds
            and not any(self._hooks)
            and self._hold_their_entries()
            and [getter(kind) for kind, getter, _ in self._functions]
            == [found for *_, found in self._functions]
        )

    def _hold_their_entries(self) -> bool:
        try:
            return self._containers == self._entries
        except Exception:  # other tensors in a list are compared element by element
            return False

    @property
    def tensors(self) -> list[Tensor | None]:
        """Those that are folded, as :meth:`fits` found them: the same list while none changes."""
        return self._state.tensors

    def places(self) -> list[tuple[nn.Module, str, Tensor | None]]:
        """Where each of the tensors is: in which module, by which name."""
        return [
            (module, name, tensor)
            for module in self._sources
            for register in (module._parameters, module._buffers)
            for name, tensor in register.items()
        ]

    def wants_gradient(self) -> bool:
        """Whether a tensor that is folded is to be learned."""
        return torch.is_grad_enabled() and any(
            tensor.requires_grad for tensor in self.tensors if tensor is not None
        )

    def _versions(self) -> list[int]:
        return list(map(dict_version, self._dicts))

    def _still_fits(self, versions: list[int]) -> bool:
        """Whether no change counts; changes are remembered: the next call compares numbers."""
        state = self._state
        if len(state.versions) != len(versions):
            return False
        held = list(state.held)
        for place, (old, new) in enumerate(zip(state.versions, versions, strict=True)):
            if old != new:
                now = self._what_counts(place)
                if not _are_same(held[place], now, place < self._count):
                    return False
                held[place] = now
        self._state = _State(versions, held, self._tensors_of(held))
        return True

    def _what_counts(self, place: int) -> dict[str, Any]:
        """The entries of a dictionary, without new attributes that no code of the classes knows."""
        now = dict(self._dicts[place])
        number = place - self._count  # of the module, if they are a module's attributes
        if 0 <= number < len(self._modules):
            new = now.keys() - self._state.held[place].keys()
            known = frozenset[str]().union(*map(_names_in, set(self._kinds))) if new else new
            for name in new - known:
                del now[name]
            if number == 0:  # on the root it does not count
                now.pop("forward", None)
        return now

    def _tensors_of(self, held: list[dict[str, Any]]) -> list[Tensor | None]:
        """The tensors that are folded; the list that there is already where it holds the same."""
        found = [tensor for register in held[: self._count] for tensor in register.values()]
        known = self._state.tensors
        is_known = len(found) == len(known) and all(map(operator.is_, found, known))
        return known if is_known else found


class Origin:
    """The tensors that operands are made of: which, of what version, and where."""

    def __init__(self, tensors: list[Tensor | None]) -> None:
        self.tensors = tensors
        self._present = [tensor for tensor in tensors if tensor is not None]
        self.is_possible = all(
            type(tensor) in _PLAIN and not tensor.is_inference() for tensor in self._present
        )
        if self.is_possible:
            # They hold the memory, so that nothing else gets an address that is remembered. Numbers
            # of batches are not folded.
            self._memory = [tensor.detach() for tensor in self._present]
            self._placed = [tensor for tensor in self._present if tensor.dim()]
            self._marks = self._marks_now()

    def is_unchanged(self) -> bool:
        """Whether no tensor has been changed in place, or got other memory."""
        return self._marks_now() == self._marks

    def _marks_now(self) -> tuple[list[int], list[int]]:
        return list(map(_version, self._present)), list(map(_address, self._placed))


def _are_same(old: dict[str, Any], new: dict[str, Any], are_folded: bool) -> bool:
    """Whether all entries that calls read are the same; a tensor may be another one."""
    if are_folded and old.keys() == new.keys():
        return all(value is None or isinstance(value, Tensor) for value in new.values())
    names = (old.keys() | new.keys()) - _UNREAD
    if "track_running_stats" in names:  # a batch norm reads it in training alone
        names -= {"momentum"}
    return all(name in old and name in new and _is_same(old[name], new[name]) for name in names)


def _is_same(old: Any, new: Any) -> bool:
    return (
        old is new
        or (isinstance(old, Tensor) and isinstance(new, Tensor))
        or _is_equal_setting(old, new)
    )


def _is_equal_setting(old: Any, new: Any) -> bool:
    """Whether two settings are of one type and equal: torch.export puts equal tuples in place."""
    if type(old) is not type(new):
        return False
    if type(old) is tuple:
        return len(old) == len(new) and all(map(_is_equal_setting, old, new))
    return type(old) in _PLAIN_SETTINGS and bool(old == new)


@functools.cache
def _names_in(kind: type) -> frozenset[str]:
    """The names of a class's attributes, and those in the code of its functions."""
    names = set(dir(kind))
    found: list[Any] = [value for base in kind.__mro__ for value in vars(base).values()]
    while found:
        value = found.pop()
        if isinstance(value, str):
            names.add(value)
        elif isinstance(value, (tuple, frozenset)):
            found += value
        elif isinstance(value, types.CodeType):
            found += (*value.co_names, *value.co_consts)
        else:
            parts = (getattr(value, part, None) for part in ("__code__", "__func__", "fget"))
            found += [part for part in parts if part is not None]
    return frozenset(names)


def _has_settings(value: Any) -> bool:
    """Whether a module's attribute is an object that holds settings of its own."""
    own = getattr(value, "__dict__", None)
    return isinstance(own, dict) and not isinstance(value, _WITHOUT_SETTINGS)


def _is_of_users(module: nn.Module) -> bool:
    """Whether a forward may look for attributes that are not there yet; torch.nn's do not."""
    kind = type(module).__module__
    return not kind.startswith("torch.nn.") or kind.endswith(".container")


def _functions_of(kind: Any) -> tuple[Any, Any, Any]:
    """The functions and settings of a class itself: the class, their getter, and its result."""
    counts = (types.FunctionType, property, *_PLAIN_SETTINGS)
    found = vars(kind).items()
    own = [name for name, value in found if isinstance(value, counts) and name[:2] != "__"]
    getter = operator.attrgetter("__name__", *own)
    return kind, getter, getter(kind)
