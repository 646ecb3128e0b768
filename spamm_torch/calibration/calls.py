"""The calls that layers make: what the ops multiply, seen while a model runs.

:func:`watch` enters a ``TorchFunctionMode``, which calls from Python of the library's functions and
ops pass. It sees the calls of generated forwards and chains as they are made, with folded weights.
Nothing is left in the model, and nothing costs time outside.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .. import functional
from .._arguments import (
    Knobs,
    as_activation,
    as_knobs,
    check_block,
    check_pixel_block,
    conv_block,
    has_tau,
    holds_dtensor,
)
from .._info import as_multiplied, conv2d_norm_maps, default_pixel_block
from ..chain import run_by_layers
from ..networks.fused import fused_of
from ..networks.leaves import Band, band_of
from ..nn import _SpAMM

_ops = torch.ops.spamm_torch

Geometry: TypeAlias = tuple[tuple[int, int], tuple[int, int], tuple[int, int], int]


class NormMaps(NamedTuple):
    """The norm maps of a product: of A, of B, and what of B decides what is skipped."""

    norm_a: Tensor
    norm_b: Tensor
    skip_norm_b: Tensor

    @property
    def products(self) -> int:
        """The number of block products."""
        return self.norm_a.numel() * self.norm_b.shape[-1]


@dataclass(frozen=True, eq=False)
class ConvCall:
    """A call of the op ``conv2d``, of checked arguments.

    Attributes:
        input, weight, bias, residual, norm_weight: tensors, as of :func:`spamm_torch.conv2d`.
        geometry: stride, padding, dilation (pairs) and groups.
        knobs: as the ops take them. block, pixel_block, activation: as the op's.
    """

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    geometry: Geometry
    knobs: Knobs
    block: Any = None
    pixel_block: Any = None
    norm_weight: Tensor | None = None
    residual: Tensor | None = None
    activation: str = "none"

    def norm_maps(self) -> NormMaps:
        """The norm maps of the call, computed anew from its input."""
        return self.norm_maps_in(self.block, self.pixel_block, has_tau(self.knobs))

    def norm_maps_in(self, block: Any, pixel_block: Any, has_tau: bool = True) -> NormMaps:
        """The same in other blocks."""
        return NormMaps(
            *conv2d_norm_maps(
                as_multiplied(self.input),
                as_multiplied(self.weight),
                self.geometry,
                has_tau,
                block,
                pixel_block,
                self.norm_weight,
            )
        )

    @property
    def pixel_edges(self) -> tuple[int, int, int]:
        """The pixel block: the one given, or the default."""
        if self.pixel_block is not None:
            return check_pixel_block(self.pixel_block)
        out_channels, in_channels = self.weight.shape[:2]
        groups = self.geometry[-1]
        n = conv_block(out_channels // groups, in_channels, self.block, None)[2]
        images = self.input.shape[0] if self.input.dim() == 4 else 1
        return default_pixel_block(has_tau(self.knobs), images, n)

    def again(self) -> Tensor:
        """The call itself, once more."""
        blocks = {"block": self.block, "pixel_block": self.pixel_block}
        return self.skipping(self.norm_weight, **_of_op(self.knobs), **blocks)

    def dense(self) -> Tensor:
        """The result with nothing skipped, by torch's convolution."""
        return _ops.dense_conv2d(
            *(self.input, self.weight, self.bias, *self.geometry),
            residual=self.residual,
            activation=self.activation,
        )

    def skipping(self, norm_weight: Tensor | None = None, **setting: Any) -> Tensor:
        """The result with another setting, in the op's arguments."""
        return _ops.conv2d(
            *(self.input, self.weight, self.bias, *self.geometry),
            **setting,
            norm_weight=norm_weight,
            residual=self.residual,
            activation=self.activation,
        )


@dataclass(frozen=True, eq=False)
class DeviationCall(ConvCall):
    """A call of the op ``conv2d_deviation``, of the reference form.

    Attributes:
        base: as of the op. norm_input: norms that the layer before left, in blocks of one image.
        leaves_norms: whether the call leaves norms of its output, too.
    """

    base: Tensor | None = None
    norm_input: Tensor | None = None
    leaves_norms: bool = False

    def dense(self) -> Tensor:
        return _ops.conv2d_deviation(*self._operands, **self._epilogue)

    def skipping(self, norm_weight: Tensor | None = None, **setting: Any) -> Tensor:
        options = {**setting, **self._epilogue, "norm_weight": norm_weight}
        options["norm_input"] = self.norm_input
        if self.leaves_norms:
            return _ops.conv2d_deviation_with_norms(*self._operands, **options)[0]
        return _ops.conv2d_deviation(*self._operands, **options)

    @property
    def _operands(self) -> tuple[Any, ...]:
        return self.input, self.weight, self.base, *self.geometry

    @property
    def _epilogue(self) -> dict[str, Any]:
        return {"residual": self.residual, "activation": self.activation}


@dataclass(frozen=True, eq=False)
class LinearCall:
    """A call of :func:`spamm_torch.linear`, of checked arguments."""

    input: Tensor
    weight: Tensor
    knobs: Knobs
    block: Any
    norm_weight: Tensor | None = None

    def norm_maps(self) -> NormMaps:
        """The norm maps of the call, computed anew."""
        m, k, n = check_block(self.block)
        input, weight = as_multiplied(self.input), as_multiplied(self.weight)
        norm_a = _ops.norm_map(input.reshape(-1, input.shape[-1]), (m, k))
        norm_b = self.norm_weight
        if norm_b is None:
            norm_b = _ops.norm_map(weight.t(), (k, n))
        return NormMaps(norm_a, norm_b, norm_b)


@dataclass(frozen=True, eq=False)
class _PartsCall:
    """A call of the op ``conv2d_deviation_parts``: its arguments by name."""

    given: Mapping[str, Any]

    @property
    def weight(self) -> Tensor:
        weight: Tensor = self.given["weight"]
        return weight

    def joined(self) -> DeviationCall:
        """The call of the parts' concatenation. Phases stay where they are."""
        parts = self.given["parts"]
        given = {**self.given, "input": parts[0] if len(parts) == 1 else torch.cat(parts, 1)}
        return DeviationCall(**_conv_arguments(given), base=given["base"], leaves_norms=True)


Call: TypeAlias = ConvCall | LinearCall


OnCall: TypeAlias = Callable[[str, Call], None]


@contextmanager
def watch(model: nn.Module, on_call: OnCall) -> Iterator[Watch]:
    """Inside, ``on_call(layer, call)`` is called after each call of a layer's op.

    Calls in other threads, under ``torch.func`` and in captured graphs are not seen. Compiled
    functions run uncompiled meanwhile. Calls whose weight is no layer's are counted.

    Args:
        model: its layers are told apart by their weights. Those that share a weight count as one,
            under the name of the first.
        on_call: called with the layer's qualified name and a :data:`Call`, without gradients.
    """
    uncompiled: AbstractContextManager[Any] = nullcontext()
    if "torch._dynamo" in sys.modules:  # importing it takes seconds
        uncompiled = torch.compiler.set_stance("force_eager")
    with uncompiled, Watch(model, on_call) as found:
        try:
            yield found
        finally:
            found.forget_layers()


class Watch(TorchFunctionMode):
    """The mode of :func:`watch`.

    Attributes:
        unknown: the number of calls whose weight is no layer's.
    """

    def __init__(self, model: nn.Module, on_call: OnCall) -> None:
        super().__init__()
        self._model, self._on_call = model, on_call
        self._layers: dict[int, tuple[Tensor, str]] = {}  # by the identity of weights, kept alive
        self.unknown = 0

    def forget_layers(self) -> None:
        """Lets go of the weights."""
        self._layers.clear()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return func(*args, **kwargs)
        if func is _ops.chain.default:
            with self:
                return run_by_layers(*args)
        result = func(*args, **kwargs)  # first: its checks come before ours
        call = _call(func, args, kwargs)
        if call is not None:
            layer = self._layer_of(call.weight)
            if layer is None:
                self.unknown += 1
            else:
                with torch.no_grad():
                    self._on_call(layer, call.joined() if isinstance(call, _PartsCall) else call)
        return result

    def _layer_of(self, weight: Tensor) -> str | None:
        known = self._layers.get(id(weight))
        if known is None:  # folded weights may be new
            for tensor, name in _weights(self._model):
                self._layers.setdefault(id(tensor), (tensor, name))
            known = self._layers.get(id(weight))
        return None if known is None else known[1]


def spamm_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers of a model that skip, or may, by qualified name: SpAMM modules and fused calls."""
    fused = {conv for conv, _ in _fused_weights(model)}
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, _SpAMM) or module in fused
    }


def bands_of(model: nn.Module) -> dict[str, Band | None]:
    """The valid ratios that the layers of a model had when they were calibrated, by name."""
    by_layer: dict[nn.Module, Band | None] = {}
    for module in model.modules():
        fused = fused_of(module)
        if fused is not None:
            by_layer |= fused.bands()
    layers = spamm_layers(model)
    return {name: band_of(layer) or by_layer.get(layer) for name, layer in layers.items()}


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


def _of_op(knobs: Knobs) -> dict[str, Any]:
    """Knobs without those that are None: not every op takes a tensor as tau."""
    return {name: value for name, value in knobs.items() if value is not None}


# ---- Reading calls ------------------------------------------------------------------------------

_GEOMETRY = ("stride", "padding", "dilation", "groups")
_CONVOLUTION = ("input", "weight", "bias", *_GEOMETRY)
_DEVIATION = ("input", "weight", "base", *_GEOMETRY)  # of the reference form
_PARTS = ("parts", *_DEVIATION[1:-1])  # without groups
_LINEAR = ("input", "weight", "bias")
_TAKEN_AS_THEY_ARE = ("block", "pixel_block", "norm_weight", "residual")
_KNOBS = ("threshold", "valid_ratio", "max_error")  # without one the op skips nothing
_CONVOLUTIONS = (
    functional.conv2d,
    *(_ops.conv2d, _ops.conv2d.default),
    *(_ops.conv2d_with_norms, _ops.conv2d_with_norms.default),
)

_WITH_NORMS = (_ops.conv2d_deviation_with_norms, _ops.conv2d_deviation_with_norms.default)
_DEVIATIONS = (_ops.conv2d_deviation, _ops.conv2d_deviation.default, *_WITH_NORMS)
_OF_PARTS = (_ops.conv2d_deviation_parts, _ops.conv2d_deviation_parts.default)


def _call(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call | _PartsCall | None:
    """What a function is called with, if it is one of ours."""
    if func is functional.linear:
        return _linear_call({**dict(zip(_LINEAR, args, strict=False)), **kwargs})
    if func in _CONVOLUTIONS:
        given = {**dict(zip(_CONVOLUTION, args, strict=False)), **kwargs}
        return ConvCall(**_conv_arguments(given))
    if func in _OF_PARTS:
        return _PartsCall({**dict(zip(_PARTS, args, strict=False)), **kwargs})
    if func in _DEVIATIONS:
        given = {**dict(zip(_DEVIATION, args, strict=False)), **kwargs}
        if all(given.get(knob) is None for knob in _KNOBS):
            return None
        return DeviationCall(
            **_conv_arguments(given),
            base=given["base"],
            norm_input=given.get("norm_input"),
            leaves_norms=func in _WITH_NORMS,
        )
    return None


def _linear_call(given: dict[str, Any]) -> LinearCall | None:
    if holds_dtensor(given["input"], given["weight"]):
        return None
    knobs = as_knobs(*(given.get(name) for name in ("tau", "valid_ratio", "max_error")))
    block = given.get("block", 64)
    return LinearCall(given["input"], given["weight"], knobs, block, given.get("norm_weight"))


def _conv_arguments(given: dict[str, Any]) -> dict[str, Any]:
    """The attributes of a :class:`ConvCall`."""
    input, padding, dilation = given["input"], given.get("padding", 0), given.get("dilation", 1)
    stride, weight = functional._both(given.get("stride", 1)), given["weight"]
    dilation = functional._both(dilation)
    if isinstance(padding, str):
        input, padding = functional._explicit_padding(input, weight, stride, padding, dilation)
    if given.get("threshold") is not None:
        given = {**given, "tau": given["threshold"]}
    return {
        "input": input,
        "weight": weight,
        "bias": given.get("bias"),
        "geometry": (stride, functional._both(padding), dilation, given.get("groups", 1)),
        "knobs": as_knobs(*(given.get(name) for name in ("tau", "valid_ratio", "max_error"))),
        "activation": as_activation(given.get("activation"), given.get("relu", False)),
        **{name: given.get(name) for name in _TAKEN_AS_THEY_ARE},
    }
