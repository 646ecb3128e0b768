"""The parts of a model that can be traced, as graphs of ``torch.fx``.

Tracing starts at the root. Layers of torch.nn, convolutions and batch norms of any class, and
modules with hooks or a ``forward`` of their own are nodes of the graph. A module that cannot be
traced (control flow that depends on data) becomes such a node as well; what is inside it is traced
apart. If the root itself cannot be traced its children are, one by one.
"""

from __future__ import annotations

import collections
import functools
import inspect
import operator
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..chain import reason_not_plain
from ..nn import _SpAMM
from .state import Snapshot

_LEAVES = (
    nn.modules.conv._ConvNd,
    nn.modules.batchnorm._NormBase,
    nn.Linear,
    _SpAMM,
    torch.jit.ScriptModule,
)


@dataclass(eq=False)
class Island:
    """A part of a model that was traced.

    Attributes:
        name: its fully qualified name; empty for the model itself.
        module: its root.
        graph: what ``module.forward`` calls; targets are names below the root.
        entered: the modules that the trace went through, which the graph no longer calls, by their
            names below the root. The root is not among them.
        reference: its arguments for a reference picture, if its forward is to compute deviations
            from what it computes for these; None otherwise.
        put_back: nodes before which the channels of what they read are put back into the model's
            own order, each with the place of every channel.
    """

    name: str
    module: nn.Module
    graph: fx.Graph
    entered: dict[str, nn.Module]
    reference: tuple[Tensor, ...] | None = None
    put_back: dict[fx.Node, Tensor] = field(default_factory=dict)

    def full_name(self, below: str) -> str:
        """The name in the model of what the root calls ``below``."""
        return f"{self.name}.{below}" if self.name else below


@dataclass
class Captured:
    """What tracing found: the islands, and why modules could not be traced, by name."""

    islands: list[Island]
    problems: dict[str, str]


def capture(model: nn.Module) -> Captured:
    """Traces a model that is in eval mode. It is the caller's to restore what a trace changes."""
    captured = Captured([], {})
    _Capture(captured).visit("", model)
    return captured


class _Capture:
    """The walk over a model."""

    def __init__(self, captured: Captured) -> None:
        self._captured = captured
        self._visited: set[int] = set()

    def visit(self, name: str, module: nn.Module) -> None:
        if id(module) in self._visited or isinstance(module, _LEAVES):
            return
        self._visited.add(id(module))
        if not any(isinstance(inner, nn.Conv2d) for inner in module.modules()):
            return
        island = self._trace(name, module)
        if island is None:
            inside = {f"{name}.{child}" if name else child: m for child, m in _children(module)}
        else:
            self._captured.islands.append(island)
            nodes = [node for node in island.graph.nodes if node.op == "call_module"]
            inside = {
                island.full_name(str(node.target)): module.get_submodule(str(node.target))
                for node in nodes
            }
        for inner_name, inner in inside.items():
            self.visit(inner_name, inner)

    def _trace(self, name: str, root: nn.Module) -> Island | None:
        """The island of this root, or None where the root itself cannot be traced."""
        problem = _reason_not_to_trace(root)
        opaque: set[int] = set()
        before = Snapshot(root)
        while problem is None:
            tracer = _Tracer(opaque)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of fx: they are about use, not about faults
                    graph = tracer.trace(root)
                changed = before.changed()
                before.restore()
                if not changed:
                    return Island(name, root, graph, tracer.entered)
                seen = set(map(id, changed))
                if root in changed or seen <= opaque:
                    problem = "sets attributes when it is called"
                opaque |= seen
            except Exception as error:  # anything may be raised by code that meets a proxy
                culprit = next((m for m in reversed(tracer.stack) if id(m) not in opaque), None)
                before.restore()
                line = str(error).partition("\n")[0].partition(". ")[0]
                if culprit is None:
                    problem = f"cannot be traced ({type(error).__name__}: {line})"
                else:
                    opaque.add(id(culprit))
        self._captured.problems[name] = problem
        return None


def _children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, child) for name, child in module._modules.items() if child is not None]


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
    """Records ``a += b`` as what it is; fx alone takes it for ``a = a + b``, and other names of the
    same tensor would keep the old value.
    """


def _record_in_place(name: str) -> None:
    function = getattr(operator, name)

    def method(self: fx.Proxy, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    setattr(_Proxy, f"__{name}__", method)


for _name in ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior"):
    _record_in_place(_name)


class _Tracer(fx.Tracer):
    """Traces with the arguments that have no default; the others keep their defaults."""

    def __init__(self, opaque: set[int]) -> None:
        super().__init__(param_shapes_constant=True)
        self._opaque = opaque
        self.stack: list[nn.Module] = []  # the modules being called; after an error, where it was
        self.entered: dict[str, nn.Module] = {}

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

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
        args: list[Any] = [self.root]
        keywords: dict[str, Any] = {}
        for parameter in list(inspect.signature(root_fn).parameters.values())[1:]:
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                continue
            is_keyword = parameter.kind is parameter.KEYWORD_ONLY
            if parameter.default is not parameter.empty:
                value = parameter.default
            elif is_keyword:
                raise TypeError(f"{parameter.name} is a keyword without a default")
            else:
                value = self.create_proxy("placeholder", parameter.name, (), {})
            if is_keyword:
                keywords[parameter.name] = value
            else:
                args.append(value)
        return functools.partial(root_fn, **keywords), args

    def create_arg(self, a: Any) -> Any:
        if type(a) is collections.OrderedDict:  # which fx would make a plain dict
            items = [(key, self.create_arg(value)) for key, value in a.items()]
            return self.create_node("call_function", collections.OrderedDict, (items,), {})
        if isinstance(a, Tensor) and not self._is_held(a):
            raise TypeError("a tensor is made while it runs")  # fx would keep this one for ever
        return super().create_arg(a)

    def _is_held(self, tensor: Tensor) -> bool:
        """Whether a tensor is an attribute of a module, which the generated code looks up."""
        held = (*self.root.parameters(), *self.root.buffers(), *self.tensor_attrs)
        return any(tensor is other for other in held)


def is_frozen_batch_norm(module: nn.Module) -> bool:
    """Whether it is a batch norm whose statistics and scales are buffers, as detectors have it."""
    return type(module).__name__ == "FrozenBatchNorm2d" and hasattr(module, "running_var")
