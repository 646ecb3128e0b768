"""The parts of a model that can be traced, as graphs of ``torch.fx``.

Tracing starts at the root. Layers of torch.nn, convolutions and batch norms of any class, and
modules with hooks or a ``forward`` of their own are nodes of the graph. A module that cannot be
traced (control flow that depends on data) becomes such a node as well; its inside is traced
apart. If the root itself cannot be traced its children are, one by one. So is a module that does
more than compute its result: writes to a buffer, stores an entry, counts, draws random numbers. It
stays as it is, since generated code would do nothing of this. Parameters and buffers are looked up
in each call, whatever values they had when they were traced.
"""

import functools
import inspect
import operator
import warnings
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import partialmethod
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.immutable_collections import immutable_dict, immutable_list
from torch.utils import _pytree as pytree

from .._effects import IN_PLACE, Watch, held_tensor_written, line_of
from .._state import Snapshot
from ..nn import _SpAMM
from .example import Signature
from .nodes import is_frozen_batch_norm, reason_not_plain
from .plan import Island

_PLAIN = (dict, list, tuple, torch.Size, immutable_dict, immutable_list)
_LEAVES = (
    nn.modules.conv._ConvNd,
    nn.modules.batchnorm._NormBase,
    nn.Linear,
    _SpAMM,
    torch.jit.ScriptModule,
)


class Capture:
    """The islands of a model in eval mode, and by name why others are none."""

    def __init__(
        self, model: nn.Module, before: Snapshot, forms: Mapping[nn.Module, Signature] = {}
    ) -> None:
        self.islands: list[Island] = []
        self.problems: dict[str, str] = {}
        self._before, self._forms = before, forms
        self._visited: set[int] = set()
        self._visit("", model)

    def _visit(self, name: str, module: nn.Module) -> None:
        if id(module) in self._visited or isinstance(module, _LEAVES):
            return
        self._visited.add(id(module))
        if not any(isinstance(inner, nn.Conv2d) for inner in module.modules()):
            return
        island = self._trace(name, module)
        if island is None:
            children = module.named_children()
            inside = {f"{name}.{child}" if name else child: m for child, m in children}
        else:
            self.islands.append(island)
            nodes = [node for node in island.graph.nodes if node.op == "call_module"]
            inside = {
                island.full_name(str(node.target)): module.get_submodule(str(node.target))
                for node in nodes
            }
        for inner_name, inner in inside.items():
            self._visit(inner_name, inner)

    def _trace(self, name: str, root: nn.Module) -> Island | None:
        """The island of this root, or None where the root itself cannot be traced."""
        problem = _reason_not_to_trace(root)
        opaque: set[int] = set()
        before = self._before
        while problem is None:
            signature = self._forms.get(root) or Signature(type(root).forward)
            tracer = _Tracer(opaque, signature)
            try:
                graph = tracer.trace_quietly(root)
                changed = before.changed()
            except Exception as error:  # anything may be raised by code that meets a proxy
                culprit = next((m for m in reversed(tracer.stack) if id(m) not in opaque), None)
                line = str(error).partition("\n")[0].partition(". ")[0]
                kind = type(error).__name__
                where = "; ".join(filter(None, (f"{kind}: {line}", line_of(error))))
                problem = f"cannot be traced ({where})"
                found = [culprit]
            else:
                before.restore()
                if not changed:
                    return Island(name, root, graph, signature, tracer.entered)
                tracer = _Tracer(opaque, signature)
                watch = Watch(changed[0], tracer.stack)
                watch.run(functools.partial(tracer.trace_quietly, root))
                culprit = None if id(watch.module) in opaque else watch.module
                problem = f"has an effect beside its result ({watch.line or changed[0].name})"
                same: Any = type(culprit)
                found = [module for module in root.modules() if type(module) is same]
            before.restore()
            if culprit is not None:  # it becomes a node, and may have its own problem
                opaque |= set(map(id, found))
                problem = None
        self.problems[name] = problem
        return None


def _reason_not_to_trace(root: nn.Module) -> str | None:
    """Why a generated forward could not stand for this module's own."""
    kind = type(root)
    if isinstance(root, torch.jit.ScriptModule):
        return "is a script (torch.jit)"
    if "forward" in root.__dict__:
        return "has a forward of its own on the instance"
    if kind.forward is nn.Module.forward or not inspect.isfunction(kind.forward):
        return f"has no forward ({kind.__name__})"
    for method in ("__deepcopy__", "__reduce__", "__reduce_ex__"):
        if getattr(kind, method, None) is not getattr(nn.Module, method, None):
            return f"is copied in its own way ({kind.__name__}.{method})"
    return None


class _Proxy(fx.Proxy):
    """Records ``a += b`` as it is: fx would take ``a + b``. Attributes of tensors cannot be set."""

    def __setattr__(self, name: str, value: Any) -> None:
        if "node" in self.__dict__ and name not in ("node", "tracer"):
            raise TypeError(f"{name} of a tensor is set")
        super().__setattr__(name, value)

    def recorded(self, function: Callable[..., Any], other: Any) -> Any:
        return self.tracer.create_proxy("call_function", function, (self, other), {})


for _function in IN_PLACE - {operator.setitem}:
    setattr(_Proxy, f"__{_function.__name__}__", partialmethod(_Proxy.recorded, _function))


class _Held(_Proxy):
    """A Parameter or buffer, which keeps its shape whatever values it gets."""

    def __init__(self, node: fx.Node, tracer: fx.Tracer, tensor: Tensor) -> None:
        super().__init__(node, tracer)
        for name in ("shape", "ndim", "size", "dim", "numel", "nelement"):
            self.__dict__[name] = getattr(tensor, name)

    def __len__(self) -> int:
        shape: Any = self.shape
        return int(shape[0])


class _Tracer(fx.Tracer):
    """Traces a call of one form."""

    def __init__(self, opaque: set[int], signature: Signature) -> None:
        super().__init__()
        self._opaque, self._signature = opaque, signature
        self.stack: list[nn.Module] = []  # the modules being called; after an error, where it was
        self.entered: dict[str, nn.Module] = {}

    def trace_quietly(self, root: nn.Module) -> fx.Graph:
        """As ``trace``; the warnings of fx are about use, not about faults."""
        named = [*root.named_parameters(), *root.named_buffers()]
        self._held = {id(tensor): name for name, tensor in named}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self.trace(root)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        name = self._held.get(id(attr_val)) if isinstance(attr_val, Tensor) else None
        if name is None:
            return attr_val
        if name not in parameter_proxy_cache:
            parameter_proxy_cache[name] = self.create_proxy(
                *("get_attr", name, (), {}),
                proxy_factory_fn=lambda node: _Held(node, self, attr_val),
            )
        return parameter_proxy_cache[name]

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        written = held_tensor_written(node)
        if written is not None:
            raise TypeError(f"{written} is written to")
        return node

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return (
            id(module) in self._opaque
            or isinstance(module, _LEAVES)
            or is_frozen_batch_norm(module)
            or reason_not_plain(module) is not None
            or type(module).forward is getattr(nn.Module, "forward", None)
            or super().is_leaf_module(module, name)
        )

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self.stack.append(m)
        name = self.path_of_module(m)
        if not self.is_leaf_module(m, name):
            self.entered[name] = m
        result = super().call_module(m, forward, args, kwargs)
        self.stack.pop()
        return result

    def create_args_for_root(
        self, root_fn: Any, is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        names = self._signature.traced
        proxies = (self.create_proxy("placeholder", name, (), {}) for name in names)
        args, keywords = self._signature.arguments(tuple(proxies))
        return functools.partial(root_fn, **keywords), [self.root, *args]

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, Tensor):
            held = (*self.root.parameters(), *self.root.buffers(), *self.tensor_attrs)
            if not any(a is other for other in held):
                raise TypeError("a tensor is made while it runs")  # fx would keep it for ever
        kind = type(a)
        is_plain = kind in _PLAIN or hasattr(a, "_fields")
        if isinstance(a, (dict, list, tuple)) and not is_plain:
            return self._rebuilt(a)
        if is_dataclass(a) and (hasattr(a, "__post_init__") or not _is_by_fields(a)):
            raise TypeError(f"a {kind.__name__} is made, which more than its fields make")
        return super().create_arg(a)

    def _rebuilt(self, value: Any) -> fx.Node:
        """Makes a container of a class of its own in each call; fx would make a plain one."""
        kind = type(value)
        known = pytree.SUPPORTED_NODES.get(kind)
        if known is None:
            raise TypeError(f"a {kind.__name__} is made, which torch.utils._pytree does not know")
        children, context = known.flatten_fn(value)

        def rebuilt(children: list[Any]) -> Any:
            return known.unflatten_fn(children, context)

        rebuilt.__name__ = rebuilt.__qualname__ = f"make_{kind.__name__}"
        arguments = [self.create_arg(child) for child in children]
        return self.create_node("call_function", rebuilt, (arguments,), {})


def _is_by_fields(value: Any) -> bool:
    """Whether a dataclass holds nothing but what its class is called with."""
    own = fields(value)
    return all(field.init for field in own) and (
        getattr(value, "__dict__", {}).keys() <= {field.name for field in own}
    )
