"""The calls of ops that a model's layers make, seen while it runs.

:func:`watch` enters a ``TorchFunctionMode``, which calls from Python of the library's functions and
ops pass, those of generated forwards too. Nothing is left in the model.
"""

import inspect
import sys
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .. import _arguments, functional
from .._arguments import Knobs, as_knobs
from .._info import NormMaps, as_multiplied, conv2d_norm_maps
from ..networks.config import SpAMMConfig
from ..networks.install import fused_of
from ..nn import _SpAMM

_ops = torch.ops.spamm_torch


@dataclass(frozen=True, eq=False)
class Call:
    """A call of :func:`spamm_torch.linear`; ``given``: its arguments by name."""

    given: Mapping[str, Any]

    @property
    def weight(self) -> Tensor:
        weight: Tensor = self.given["weight"]
        return weight

    @property
    def knobs(self) -> Knobs:
        tau = self.given.get("threshold")
        tau = self.given.get("tau") if tau is None else tau
        return as_knobs(tau, self.given.get("valid_ratio"), self.given.get("max_error"))

    def norm_maps(self) -> NormMaps:
        """The norm maps of the call, computed anew from its input."""
        m, k, n = block = _arguments.check_block(self.given.get("block", 64))
        input, weight = as_multiplied(self.given["input"]), as_multiplied(self.weight)
        norm_a = _ops.norm_map(input.reshape(-1, input.shape[-1]), (m, k))
        norm_b = self.given.get("norm_weight")
        if norm_b is None:
            norm_b = _ops.norm_map(weight.t(), (k, n))
        return NormMaps(norm_a, norm_b, norm_b, block)


@dataclass(frozen=True, eq=False)
class ConvCall(Call):
    """A call of one of the ops that convolve and skip."""

    op: Any

    @property
    def input(self) -> Tensor:
        found: Tensor = self.given["input"]
        return found

    def norm_maps(self) -> NormMaps:
        blocks = self.given.get("block"), self.given.get("pixel_block")
        return self.norm_maps_in(*blocks, _arguments.has_tau(self.knobs))

    def norm_maps_in(self, block: Any, pixel_block: Any, has_tau: bool = True) -> NormMaps:
        """The same in other blocks."""
        defaults = (("stride", 1), ("padding", 0), ("dilation", 1))
        stride, padding, dilation = (
            functional._both(self.given.get(name, default)) for name, default in defaults
        )
        operands = as_multiplied(self.input), as_multiplied(self.weight)
        geometry = stride, padding, dilation, self.given.get("groups", 1)
        rest: Any = has_tau, block, pixel_block, self.given.get("norm_weight")
        return conv2d_norm_maps(*operands, geometry, *rest)

    def skipping(self, setting: SpAMMConfig) -> Tensor:
        """The result with another setting, without norms."""
        result = self.op(**_with_setting(self.given, setting))
        found: Tensor = result[0] if isinstance(result, tuple) else result
        return found

    def dense(self) -> Tensor:
        """The result with nothing skipped, by torch's convolution."""
        given = {name: value for name, value in self.given.items() if name in _OF_DENSE}
        return _ops.dense_conv2d(self.input, **given)


OnCall: TypeAlias = Callable[[str, Call], None]


def of_convolutions(layers: Container[str], on_call: Callable[[str, ConvCall], None]) -> OnCall:
    """``on_call`` for the convolutions among these layers alone."""

    def of_call(layer: str, call: Call) -> None:
        if layer in layers and isinstance(call, ConvCall):
            on_call(layer, call)

    return of_call


@contextmanager
def watch(
    model: nn.Module,
    on_call: OnCall | None = None,
    settings: Mapping[str, SpAMMConfig] = {},
    before: OnCall | None = None,
) -> "Iterator[Watch]":
    """Inside, ``on_call(layer, call)`` is called after each call of a layer's op, and ``before``
    before it, without gradients. Layers are told apart by their weights: a shared one is the
    first's.

    Convolutions skip by ``settings``, by name, instead of their own. Calls in other threads, under
    ``torch.func`` and in captured graphs are not seen; compiled functions run uncompiled meanwhile.
    """
    is_there = "torch._dynamo" in sys.modules  # importing it takes seconds
    uncompiled: Any = torch.compiler.set_stance("force_eager") if is_there else nullcontext()
    with uncompiled, Watch(model, on_call, settings, before) as found:
        try:
            yield found
        finally:
            found.layers.clear()  # lets go of the weights


class Watch(TorchFunctionMode):
    """The mode of :func:`watch`. ``unknown``: the number of calls whose weight is no layer's."""

    def __init__(
        self,
        model: nn.Module,
        on_call: OnCall | None,
        settings: Mapping[str, SpAMMConfig],
        before: OnCall | None,
    ) -> None:
        super().__init__()
        self._model, self._settings = model, settings
        self._on_call, self._before = on_call, before
        self.layers: dict[int, tuple[Tensor, str]] = {}  # by the identity of weights, kept alive
        self.unknown = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return func(*args, **kwargs)
        if self._before is not None:
            self._tell(self._before, _call(func, args, kwargs))
        if self._settings and (func in _OPS or func is functional.conv2d):
            setting = self._settings.get(self._layer_of(args[1]) or "")
            if setting is not None and func is functional.conv2d:
                kwargs = kwargs | setting.setting()
            elif setting is not None:
                kwargs = _with_setting(kwargs, setting)
        result = func(*args, **kwargs)
        if self._on_call is not None:  # now: the function's own checks come before ours
            self._tell(self._on_call, _call(func, args, kwargs))
        return result

    def _tell(self, on_call: OnCall, call: Call | None) -> None:
        if call is None:
            return
        layer = self._layer_of(call.weight)
        if layer is None:
            self.unknown += 1
            return
        with torch.no_grad():
            on_call(layer, call)

    def _layer_of(self, weight: Tensor) -> str | None:
        known = self.layers.get(id(weight))
        if known is None:  # folded weights may be new
            for tensor, name in _weights(self._model):
                self.layers.setdefault(id(tensor), (tensor, name))
            known = self.layers.get(id(weight))
        return None if known is None else known[1]


def spamm_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers of a model that skip, or may, by qualified name: SpAMM modules and fused calls."""
    fused = {conv for conv, _ in _fused_weights(model)}
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, _SpAMM) or module in fused
    }


def _fused_weights(model: nn.Module) -> Iterator[tuple[nn.Module, Tensor | None]]:
    for module in model.modules():
        fused = fused_of(module)
        if fused is not None:
            yield from fused.spamm_weights()


def _weights(model: nn.Module) -> Iterator[tuple[Tensor, str]]:
    """The weights that ops get, their own and folded ones, with their layers' names."""
    layers = spamm_layers(model)
    names = {module: name for name, module in layers.items()}
    own = ((module, getattr(module, "weight", None)) for module in names)
    for module, weight in (*own, *_fused_weights(model)):
        if weight is not None:
            yield weight, names[module]


# ---- Reading calls ------------------------------------------------------------------------------

_SETTING = ("tau", "threshold", "valid_ratio", "max_error", "block", "pixel_block")
_OF_DENSE = (
    *("weight", "bias", "stride", "padding", "dilation", "groups"),
    *("residual", "activation"),
)
_PYTHON = {
    function: tuple(inspect.signature(function).parameters)
    for function in (functional.conv2d, functional.linear)
}
_OPS = {
    form: packet.default
    for packet in (_ops.conv2d, _ops.conv2d_with_norms)
    for form in (packet, packet.default)
}


def _with_setting(given: Mapping[str, Any], setting: SpAMMConfig) -> dict[str, Any]:
    """The arguments of an op with this setting in the place of its own."""
    others = {name: value for name, value in given.items() if name not in _SETTING}
    return others | setting.op_arguments()


def _call(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call | None:
    """The call of a function that is one of ours and skips; None for others."""
    if func in _PYTHON:
        given = {**dict(zip(_PYTHON[func], args, strict=False)), **kwargs}
        if func is functional.conv2d:
            return _conv_call(given)
        has_shards = _arguments.holds_dtensor(given["input"], given["weight"])
        return None if has_shards else Call(given)
    op = _OPS.get(func)
    if op is None:
        return None
    names = [argument.name for argument in op._schema.arguments]
    return ConvCall({**dict(zip(names, args, strict=False)), **kwargs}, op)


def _conv_call(given: dict[str, Any]) -> ConvCall:
    """The call of the op that a call of :func:`spamm_torch.conv2d` comes to."""
    input, padding = given["input"], given.get("padding", 0)
    if isinstance(padding, str):
        stride, dilation = (functional._both(given.get(name, 1)) for name in ("stride", "dilation"))
        input, padding = functional._explicit_padding(
            input, given["weight"], stride, padding, dilation
        )
    knobs = as_knobs(*(given.get(name) for name in ("tau", "valid_ratio", "max_error")))
    names = ("weight", "bias", "stride", "dilation", "groups", "norm_weight", "residual")
    others = {name: given[name] for name in names if name in given}
    for name in ("block", "pixel_block"):
        if given.get(name) is not None:
            others[name] = getattr(_arguments, f"check_{name}")(given[name])
    activation = _arguments.as_activation(given.get("activation"), given.get("relu", False))
    others |= {"padding": padding, "activation": activation}
    return ConvCall({"input": input, **knobs, **others}, _ops.conv2d.default)
