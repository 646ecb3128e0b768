"""Leaving a model as it was: all that a forward may change is remembered, compared and put back."""

import collections
import functools
import itertools
import operator
import pickle
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_DEPTH = 3  # containers and objects inside one another, from a module's attribute on
_MOST_BYTES = 2**24  # of a tensor whose values are kept; of larger ones a change is only noticed
_FOREIGN = frozenset({*sys.stdlib_module_names, "torch", "numpy", "spamm_torch"})
_CONTAINERS = (collections.OrderedDict, dict, list, set, collections.deque)
_SIMPLE = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device})
_CODE = (types.FunctionType, staticmethod, classmethod, property, types.MemberDescriptorType)
_MISSING = object()
_HOOKS = frozenset(name for name in vars(nn.Module()) if name.endswith("_hooks"))

# A number that changes with every change of a dictionary. Python 3.13.0 does not tell torch of
# attributes that are set. There each call has a new number, and contents are compared.
dict_version: Callable[[dict[Any, Any]], int] = torch._C._dynamo.guards.dict_version
if sys.version_info[:3] == (3, 13, 0):
    dict_version = functools.partial(next, itertools.count())


def is_own(module_name: Any) -> bool:
    """Tells whether a module is part of a user's model: not of Python, torch or this library."""
    return str(module_name).partition(".")[0] not in _FOREIGN


class Place:
    """Something that a forward may change; ``owner``: the module from which it was reached."""

    def __init__(self, owner: nn.Module | None, name: str) -> None:
        self.owner, self.name = owner, name

    def is_changed(self) -> bool:
        raise NotImplementedError

    def restore(self) -> None:
        raise NotImplementedError


class _Container(Place):
    """A dict, list, set or deque: which objects are in it, in their order."""

    def __init__(self, owner: nn.Module | None, name: str, container: Any) -> None:
        super().__init__(owner, name)
        self._container = container
        self._kind = next(kind for kind in _CONTAINERS if isinstance(container, kind))
        self._entries = self._now()
        self._version = dict_version(container) if isinstance(container, dict) else None

    def _now(self) -> Any:
        is_dict = isinstance(self._container, dict)
        return dict(dict.items(self._container)) if is_dict else list(self._container)

    def is_changed(self) -> bool:
        container, entries = self._container, self._entries
        version = None if self._version is None else dict_version(container)
        if version is not None and version == self._version:
            return False
        if len(container) != len(entries):
            return True
        if isinstance(container, dict):
            if not all(map(operator.is_, container, entries)):
                return True
            container, entries = dict.values(container), entries.values()
        if not all(map(operator.is_, container, entries)):
            return True
        self._version = version
        return False

    def restore(self) -> None:
        kind: Any = self._kind  # a subclass may forbid these
        kind.clear(self._container)
        (getattr(kind, "extend", None) or kind.update)(self._container, self._entries)


class _Names(Place):
    """Some attributes of a Python module, a class, a closure's cell or an object with slots."""

    def __init__(self, owner: nn.Module | None, name: str, of: Any, names: Iterable[str]) -> None:
        super().__init__(owner, name)
        self._of, self._names = of, tuple(names)
        self._values = self._now()

    def _now(self) -> list[Any]:
        if isinstance(self._of, type):  # without inherited ones
            return [vars(self._of).get(name, _MISSING) for name in self._names]
        return [_attribute(self._of, name) for name in self._names]

    def is_changed(self) -> bool:
        return not all(map(operator.is_, self._now(), self._values))

    def restore(self) -> None:
        for name, now, before in zip(self._names, self._now(), self._values, strict=True):
            if before is _MISSING and now is not _MISSING:
                delattr(self._of, name)
            elif before is not now:
                setattr(self._of, name, before)


def _attribute(of: Any, name: str) -> Any:
    try:
        return getattr(of, name)
    except (AttributeError, ValueError):  # a cell may be empty
        return _MISSING


class _Values(Place):
    """The values of a tensor: by its version and address, and a copy where it is small."""

    def __init__(self, owner: nn.Module | None, name: str, tensor: Tensor) -> None:
        super().__init__(owner, name)
        self._tensor, self._data = tensor, tensor.data
        is_kept = not isinstance(tensor, nn.Parameter) and tensor.nbytes <= _MOST_BYTES
        self._copy: Any = self._data.clone() if is_kept else None
        self._mark = self._now()

    def _now(self) -> Any:
        version = None if self._tensor.is_inference() else self._tensor._version
        return version, _address(self._tensor)

    def is_changed(self) -> bool:
        if self._mark != self._now():
            return True
        has_version = self._mark[0] is not None or self._copy is None
        return not (has_version or torch.equal(self._data, self._copy))

    def restore(self) -> None:
        with torch.no_grad(), torch.inference_mode(self._tensor.is_inference()):
            if _address(self._tensor) != self._mark[1]:
                self._tensor.data = self._data
            if self._copy is not None:
                self._tensor.copy_(self._copy)
        self._mark = self._now()


def _address(tensor: Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # without storage
        return 0


class RandomStates(Place):
    """The states that random numbers are drawn from, on the host and a CUDA device if given."""

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__(None, "a state of random numbers")
        self._device = device if device is not None and device.type == "cuda" else None
        self._states = self._now()

    def _now(self) -> tuple[Any, ...]:
        numpy: Any = sys.modules.get("numpy")  # which torch does without
        state = None if numpy is None else pickle.dumps(numpy.random.get_state())
        of_torch = [torch.get_rng_state()]
        of_torch += [] if self._device is None else [torch.cuda.get_rng_state(self._device)]
        return random.getstate(), state, *(x.numpy(force=True).tobytes() for x in of_torch)

    def is_changed(self) -> bool:
        return self._states != self._now()

    def restore(self) -> None:
        of_python, of_numpy, *states = self._states
        random.setstate(of_python)
        if of_numpy is not None:
            sys.modules["numpy"].random.set_state(pickle.loads(of_numpy))
        own, *of_cuda = (torch.frombuffer(bytearray(x), dtype=torch.uint8) for x in states)
        torch.set_rng_state(own)
        for state in of_cuda:
            torch.cuda.set_rng_state(state, self._device)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside, the same numbers are drawn each time; outside, nothing of it is seen."""
        before = RandomStates(self._device)
        self.restore()
        try:
            yield
        finally:
            before.restore()


class Snapshot:
    """All that the forwards of a model may change, as :class:`_Finder` finds it, to go back to."""

    def __init__(self, model: nn.Module) -> None:
        self._classes = [(module, type(module)) for module in model.modules()]
        self._places = _Finder(model).places

    def changed(self) -> list[Place]:
        """The places that are no longer as they were."""
        return [place for place in self._places if place.is_changed()]

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Puts everything back when the block inside ends."""
        try:
            yield
        finally:
            self.restore()

    def restore(self) -> None:
        """Puts everything back."""
        for module, kind in self._classes:
            if type(module) is not kind:
                module.__class__ = kind
        for place in self.changed():
            place.restore()


class _Finder:
    """The walk over what a model reaches, the nearest first."""

    def __init__(self, model: nn.Module) -> None:
        self.places: list[Place] = [RandomStates()]
        modules = list(model.modules())
        self._seen = set(map(id, modules))
        self._names: dict[types.ModuleType, set[str]] = collections.defaultdict(set)
        self._queue = collections.deque[tuple[Any, nn.Module | None, str, int]]()
        for module in modules:
            self._put(module.__dict__, module, "an attribute", 0)
            kind = type(module)
            if is_own(kind.__module__):
                self._put(kind, module, kind.__name__, 0)
                self._put(getattr(kind, "forward", None), module, "forward", 0)
        while self._queue:
            self._visit(*self._queue.popleft())
        for file, names in self._names.items():
            self.places.append(_Names(None, f"a global of {file.__name__}", file, names))

    def _put(self, value: Any, owner: nn.Module | None, name: str, depth: int) -> None:
        if type(value) not in _SIMPLE and id(value) not in self._seen and depth <= _DEPTH:
            self._seen.add(id(value))
            self._queue.append((value, owner, name, depth))

    def _visit(self, value: Any, owner: nn.Module | None, name: str, depth: int) -> None:
        if isinstance(value, Tensor):
            if value.layout is torch.strided and not nn.parameter.is_lazy(value):
                self.places.append(_Values(owner, name, value))
        elif isinstance(value, (*_CONTAINERS, tuple)):
            if not isinstance(value, tuple):
                self.places.append(_Container(owner, name, value))
            entries = dict.items(value) if isinstance(value, dict) else [(name, x) for x in value]
            for key, entry in entries:
                is_attribute = depth == 0 and isinstance(key, str)
                if is_attribute and key in _HOOKS:  # state of hooks is no part of the model
                    self.places.append(_Container(None, key, entry))
                else:
                    self._put(entry, owner, key if is_attribute else name, depth + 1)
        elif isinstance(value, types.FunctionType):
            self._visit_code(value, owner, depth)
        elif isinstance(value, types.MethodType):
            self._put(value.__func__, owner, name, depth + 1)
            self._put(value.__self__, owner, name, depth + 1)
        elif isinstance(value, functools.partial):
            self._put(value.func, owner, name, depth + 1)
            self._put(value.args, owner, name, depth + 1)
        elif isinstance(value, type):
            if is_own(value.__module__):
                self._visit_class(value, owner, depth)
        elif is_own(type(value).__module__) or isinstance(value, types.SimpleNamespace):
            self._visit_object(value, owner, name, depth)

    def _visit_object(self, value: Any, owner: nn.Module | None, name: str, depth: int) -> None:
        kind = type(value)
        self._put(getattr(value, "__dict__", None), owner, name, depth)
        slots: list[str] = []
        for base in kind.__mro__:
            named = base.__dict__.get("__slots__") or ()
            named = [named] if isinstance(named, str) else named
            slots += [slot for slot in named if not slot.startswith("__")]
        if slots:
            self.places.append(_Names(owner, name, value, slots))
            for slot in slots:
                self._put(getattr(value, slot, None), owner, name, depth + 1)
        self._put(kind, owner, name, depth)
        for method in vars(kind).values():
            if isinstance(method, types.FunctionType):
                self._put(method, owner, name, depth + 1)

    def _visit_class(self, kind: type, owner: nn.Module | None, depth: int) -> None:
        held = {
            name: value
            for name, value in vars(kind).items()
            if not name.startswith("__") and name != "_abc_impl" and not isinstance(value, _CODE)
        }
        if held:
            self.places.append(_Names(owner, next(iter(held)), kind, held))
        for name, value in held.items():
            self._put(value, owner, name, depth + 1)
        for base in kind.__bases__:
            self._put(base, owner, base.__name__, depth)

    def _visit_code(self, function: Any, owner: nn.Module | None, depth: int) -> None:
        for cell in function.__closure__ or ():
            self.places.append(_Names(owner, "a closure", cell, ("cell_contents",)))
            self._put_inner(_attribute(cell, "cell_contents"), owner, "a closure", depth)
        module = sys.modules.get(function.__globals__.get("__name__", ""))
        if module is not None and is_own(module.__name__):
            names = _names_of(function.__code__)
            self._visit_names(module, names, owner, depth)
            for name in names & vars(type(owner)).keys():
                self._put_inner(vars(type(owner))[name], owner, name, depth)

    def _visit_names(
        self, module: types.ModuleType, names: frozenset[str], owner: nn.Module | None, depth: int
    ) -> None:
        for name in names & vars(module).keys():
            value = vars(module)[name]
            self._names[module].add(name)
            if isinstance(value, types.ModuleType):
                if is_own(value.__name__) and value not in self._names:
                    self._visit_names(value, names, owner, depth)
            else:
                self._put_inner(value, owner, name, depth)

    def _put_inner(self, value: Any, owner: nn.Module | None, name: str, depth: int) -> None:
        """A value that code names; code is followed as far as it goes."""
        is_code = isinstance(value, types.FunctionType)
        self._put(value, owner, name, depth if is_code else depth + 1)


@functools.cache
def _names_of(code: types.CodeType) -> frozenset[str]:
    """The names that code uses, and the code inside it."""
    inner = [_names_of(each) for each in code.co_consts if isinstance(each, types.CodeType)]
    return frozenset(code.co_names).union(*inner)


@contextmanager
def in_eval_mode(model: nn.Module, known: Snapshot | None = None) -> Iterator[Snapshot]:
    """All modules in eval mode inside. Gives that state to go back to; ``known``: if it holds."""
    modes = [(module, module.training) for module in model.modules() if module.training]
    for module, _ in modes:
        module.training = False
    before = Snapshot(model) if known is None or known.changed() else known
    try:
        yield before
    finally:
        before.restore()
        for module, mode in modes:
            module.training = mode
