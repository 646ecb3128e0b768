"""Convolution and linear layers that skip the block products that cannot matter.

Both modules are torch's own with a setting: exactly one of the knobs ``tau``, ``valid_ratio`` and
``max_error`` (see :mod:`spamm_torch.functional`), and the blocks it applies to. Parameters, their
initialisation and state dicts are those of torch's modules, so that weights move freely between the
dense and the approximate form. Training works: gradients are those of the dense layer.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from ._arguments import (
    EDGES,
    as_activation,
    check_block,
    check_knobs,
    check_pixel_block,
)
from ._info import NormMaps, as_multiplied, conv2d_norm_maps, multiplied_dtype
from .functional import conv2d, linear, norm_map

_ops = torch.ops.spamm_torch
for _name in ("conv2d", "linear"):
    torch.fx.wrap(_name)  # symbolic_trace records a layer's call as one node

Pair = int | tuple[int, int]
Block = int | Sequence[int]
PaddingMode = Literal["zeros", "reflect", "replicate", "circular"]
Device: TypeAlias = torch.device | str | int | None
Module = TypeVar("Module", bound="_SpAMM")
Other = TypeVar("Other", bound=nn.Module)


# ---- Common to the modules ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class PinnedNorms:
    """The norms of a weight, with the proof that they still are that weight's.

    Attributes:
        norms: the norm map. It, and the weight before it, are final: no kernel still writes them.
        weight: the tensor itself. Weak, so that a weight that was replaced does not stay in memory.
        version, address: of the weight when its norms were computed.
        memory: holds the weight's memory as long as the weight, so that no other gets its address.
    """

    norms: Tensor
    weight: "weakref.ref[Tensor] | None"  # None: nothing can be proven
    version: int = 0
    address: int = 0
    memory: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, weight: Tensor, norms: Tensor) -> "PinnedNorms":
        """Pins the norms just computed from ``weight``, and waits for them. Nothing can be proven
        of tensors made in inference mode, without versions, and of subclasses.
        """
        if type(weight) not in (nn.Parameter, Tensor) or weight.is_inference():
            return cls(norms, None)
        if weight.is_cuda:
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "freeze_ expects that no CUDA graph is captured, since it waits for the norms; "
                    "got a stream that captures (call freeze_ before)"
                )
            torch.cuda.current_stream(weight.device).synchronize()
        memory = [weight.detach()]
        reference = weakref.ref(weight, lambda _: memory.clear())
        return cls(norms, reference, weight._version, weight.data_ptr(), memory)

    def are_of(self, weight: Tensor) -> bool:
        """Tells whether ``weight`` is the one that was pinned, and unchanged. Compiled code guards
        on the tensor alone; a program that is exported takes the weight as an input.
        """
        pinned: Any = None if self.weight is None else self.weight()
        if pinned is not weight:
            return False
        if torch.compiler.is_compiling():
            return not torch.compiler.is_exporting()
        return weight._version == self.version and weight.data_ptr() == self.address


class _SpAMM(nn.Module):
    """The setting of a module, its pinned weight norms, and the way to its dense twin and back.

    A base before a class of torch.nn. ``tau`` may be a 0-d tensor: it then moves with the module,
    stays out of the state dict, and is never read on the host.
    """

    _dense: ClassVar[type[nn.Module]]  # the class of torch.nn
    _shape: ClassVar[tuple[str, ...]]  # the attributes that are its constructor's arguments

    weight: Tensor
    tau: float | Tensor | None
    valid_ratio: float | None
    max_error: float | None
    _pinned: PinnedNorms | None

    def __prepare_scriptable__(self) -> Any:
        raise RuntimeError(
            "torch.jit.script takes neither SpAMM layers nor converted models; got "
            f"{type(self).__name__} (call revert_ first)"
        )

    def _set(self, tau: Any, valid_ratio: Any, max_error: Any, **blocks: Any) -> None:
        self.tau, self.valid_ratio, self.max_error = tau, valid_ratio, max_error
        for name, value in blocks.items():
            setattr(self, name, value)
        self._blocks = tuple(blocks)
        self._pinned = None

    def _knobs(self) -> dict[str, Any]:
        return {"tau": self.tau, "valid_ratio": self.valid_ratio, "max_error": self.max_error}

    @classmethod
    def _arguments(cls, module: Any) -> dict[str, Any]:
        """The constructor's arguments that make a module of the same shape."""
        own = {name: getattr(module, name) for name in cls._shape}
        return {**own, "bias": module.bias is not None, "dtype": module.weight.dtype}

    @classmethod
    def from_dense(cls: type[Module], module: Any, **setting: Any) -> Module:
        """A layer that shares the very same Parameters with torch's own.

        ``setting`` is the constructor's: a knob, blocks. It raises as there. Training mode, device
        and dtype are the module's; its hooks are not copied. Raises TypeError for a module that
        computes differently from torch's own, or whose weight is not a Parameter.
        """
        _check_replaceable(module, cls)
        return _sharing(module, cls(**cls._arguments(module), device="meta", **setting))

    def to_dense(self) -> nn.Module:
        """torch's own module with the very same Parameters, in the same training mode."""
        return _sharing(self, self._dense(**self._arguments(self), device="meta"))

    def _weight_norms(self) -> Tensor:
        raise NotImplementedError

    def freeze_(self: Module) -> Module:
        """Pins the weight's norms, for serving: they are no longer computed in each call.

        The norms count for this weight as it is now: after a change each call computes them anew,
        until ``freeze_()`` is called again. Moving, casting, loading, copying and unpickling the
        module pin them again; ``train()`` and :meth:`unfreeze_` undo it. Call it yourself after
        changes that neither the weight's version counter nor its address tells: through ``.data``,
        by optimisers with ``fused=True``, by other processes. docs/serving.md has the rest.

        On CUDA it waits until the norms are computed, so that every stream may use them; it cannot
        be called while a CUDA graph is captured. Returns the module.
        """
        with torch.inference_mode(False), torch.no_grad():
            weight = self.weight
            self._pinned = PinnedNorms.of(weight, self._weight_norms())
        return self

    @property
    def is_frozen(self) -> bool:
        """Tells whether norms are pinned, and those of the weight as it is now."""
        return self._pinned is not None and self._pinned.are_of(self.weight)

    def unfreeze_(self: Module) -> Module:
        """Undoes :meth:`freeze_`. Returns the module."""
        self._pinned = None
        return self

    def _pinned_norms(self, weight: Tensor) -> Tensor | None:
        """The pinned norms where they are those of this weight as it will be multiplied."""
        pinned = self._pinned
        if pinned is None or not pinned.are_of(weight):
            return None
        return pinned.norms if multiplied_dtype(weight) == weight.dtype else None

    def _pin_again(self) -> None:
        if self._pinned is not None:
            self.freeze_()

    def train(self: Module, mode: bool = True) -> Module:
        """As of ``nn.Module``; training mode unpins the norms (:meth:`unfreeze_`)."""
        if mode:
            self.unfreeze_()
        return super().train(mode)

    def _apply(self: Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Module:
        super()._apply(fn, recurse)
        if isinstance(self.tau, Tensor):
            # On the CPU a threshold serves any device, and keeps the value that meta would lose.
            self.tau = self.tau.to("cpu" if self.weight.is_meta else self.weight.device)
        self._pin_again()
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._pin_again()

    def __getstate__(self) -> dict[str, Any]:
        # Proof does not outlive a copy of the weight: the copy computes norms of its own.
        return {**self.__dict__, "_pinned": self._pinned is not None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        is_pinned = state["_pinned"]
        super().__setstate__({**state, "_pinned": None})
        if is_pinned:
            self.freeze_()

    def extra_repr(self) -> str:
        shown = {**self._knobs(), **{name: getattr(self, name) for name in self._blocks}}
        shown = {n: f"{x.item():.6g}" if isinstance(x, Tensor) else x for n, x in shown.items()}
        parts = [f"{name}={value}" for name, value in shown.items() if value is not None]
        frozen = ["frozen"] if self.is_frozen else []
        return ", ".join([super().extra_repr(), *parts, *frozen])


def _check_replaceable(module: nn.Module, ours: type[_SpAMM]) -> None:
    """Raises TypeError unless a module computes as torch's own, or is ours already."""
    dense = ours._dense
    if not isinstance(module, dense):
        raise TypeError(f"from_dense expects a torch.nn.{dense.__name__}; got {type(module)}")
    methods = [name for name in ("forward", "_conv_forward") if hasattr(dense, name)]
    as_is = ours if isinstance(module, ours) else dense
    changed = [name for name in methods if getattr(type(module), name) is not getattr(as_is, name)]
    if changed:
        raise TypeError(
            f"from_dense expects a module that computes as torch.nn.{dense.__name__}; got "
            f"{type(module)}, which has its own {changed[0]}"
        )
    for name in ("weight", "bias"):
        tensor = getattr(module, name)
        if name == "bias" and tensor is None:
            continue
        if nn.parameter.is_lazy(tensor):
            hint = "run the module once"
        elif not isinstance(tensor, nn.Parameter):
            hint = "remove its parametrization or pruning first"
        else:
            continue
        raise TypeError(
            f"from_dense expects an initialised Parameter as {name}; got {type(tensor)} ({hint})"
        )


def _sharing(source: nn.Module, module: Other) -> Other:
    """Gives `module` the Parameters and the training mode of `source`."""
    module.weight = source.weight
    module.bias = source.bias
    module.training = source.training
    return module


# ---- The modules --------------------------------------------------------------------------------


class SpAMMConv2d(_SpAMM, nn.Conv2d):
    """``torch.nn.Conv2d`` that skips the block products that cannot matter.

    The convolution is weight matrix (out_channels x K) times im2col matrix (K x output pixels of
    all images), as :func:`spamm_torch.conv2d` has it.

    Which pixels share a block decides how well skipping preserves accuracy. By default a block
    holds images at one position of the picture: skipping then follows the position, which suits
    centred subjects. A ``tau`` is tuned to one pixel_block: keep the two together.

    Args:
        in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias,
            padding_mode, device, dtype: as of ``torch.nn.Conv2d``.
        tau, valid_ratio, max_error, block, pixel_block, activation, relu: as of
            :func:`spamm_torch.conv2d`. An activation is for layers that such a module follows. The
            dense twin has no such option, so that ``to_dense`` refuses.

    Attributes:
        activation: as the argument, "relu" of ``relu=True``; may be set.

    Raises as that function for a setting, now and not in the first call.
    """

    _dense = nn.Conv2d
    _shape = (
        *("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation"),
        *("groups", "padding_mode"),
    )

    block: Block | None
    pixel_block: Sequence[int] | None
    activation: str | None

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Pair,
        stride: Pair = 1,
        padding: Pair | str = 0,
        dilation: Pair = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: PaddingMode = "zeros",
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        tau: float | Tensor | None = None,
        valid_ratio: float | None = None,
        max_error: float | None = None,
        block: Block | None = None,
        pixel_block: Sequence[int] | None = None,
        activation: str | None = None,
        relu: bool = False,
    ) -> None:
        check_knobs(tau, valid_ratio, max_error)
        name = as_activation(activation, relu)
        if block is not None:
            check_block(block)
        if pixel_block is not None:
            check_pixel_block(pixel_block, block)
        super().__init__(
            *(in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias),
            *(padding_mode, device, dtype),
        )
        self._set(tau, valid_ratio, max_error, block=block, pixel_block=pixel_block)
        self.activation = None if name == "none" else name

    @classmethod
    def from_dense(cls, module: nn.Conv2d, **setting: Any) -> "SpAMMConv2d":
        """As of the base. With neither ``activation`` nor ``relu`` a SpAMMConv2d keeps its own
        activation ("none" or ``relu=False`` clears it).
        """
        if setting.get("relu") is None:
            if setting.get("activation") is None:
                setting["activation"] = getattr(module, "activation", None)
            setting["relu"] = False
        return super().from_dense(module, **setting)

    def to_dense(self) -> nn.Module:
        """torch's own module with the very same Parameters, in the same training mode.

        Raises ValueError where ``activation`` is set: ``nn.Conv2d`` cannot do the same.
        """
        if as_activation(self.activation) != "none":
            raise ValueError(
                "to_dense expects no activation, since nn.Conv2d has none; got "
                f"{self.activation!r} (clear it and put such a module behind this one)"
            )
        return super().to_dense()

    def extra_repr(self) -> str:
        has_own = self.activation not in (None, "none")
        return super().extra_repr() + (f", activation={self.activation!r}" if has_own else "")

    def _weight_norms(self) -> Tensor:
        return _ops.conv2d_weight_norm(
            self.weight, self.groups, block=self.block, pixel_block=self.pixel_block
        )

    def norm_maps(self, input: Tensor) -> NormMaps:
        """The norm maps of a call with this input: of the weight and of the im2col matrix."""
        mode = "constant" if self.padding_mode == "zeros" else self.padding_mode
        padded = nn.functional.pad(input, self._reversed_padding_repeated_twice, mode=mode)
        geometry: Any = (self.stride, (0, 0), self.dilation, self.groups)
        given: Any = (as_multiplied(padded), as_multiplied(self.weight), geometry)
        blocks: Any = (self.tau is not None, self.block, self.pixel_block, None)
        return conv2d_norm_maps(*given, *blocks)

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        padding: Any = self.padding
        if self.padding_mode != "zeros":
            input = nn.functional.pad(
                input, self._reversed_padding_repeated_twice, mode=self.padding_mode
            )
            padding = 0
        norm_weight = self._pinned_norms(weight)
        geometry: Any = (self.stride, padding, self.dilation, self.groups)
        options: dict[str, Any] = {"block": self.block, "pixel_block": self.pixel_block}
        options |= {"norm_weight": norm_weight, "activation": as_activation(self.activation)}
        options |= self._knobs()
        return conv2d(input, weight, bias, *geometry, **options)


def reason_not_to_skip(layer: nn.Conv2d) -> str:
    """The reason why skipping cannot pay in a convolution; "" where it may."""
    of = " a group" if layer.groups > 1 else ""
    for channels, side in ((layer.in_channels, "input"), (layer.out_channels, "output")):
        if (count := channels // layer.groups) < EDGES[0]:
            return f"{count} {side} channels{of} do not fill a block of {EDGES[0]}"
    return ""


class SpAMMLinear(_SpAMM, nn.Linear):
    """``torch.nn.Linear`` that skips the block products that cannot matter.

    The product is rows of the input (A) times weight.T (B); see :func:`spamm_torch.linear`. Rows of
    one block are tested together: what is skipped for a row depends on its neighbours in the batch.

    Args:
        in_features, out_features, bias, device, dtype: as of ``torch.nn.Linear``.
        tau, valid_ratio, max_error, block: as of :func:`spamm_torch.linear`.

    Attention: ``nn.MultiheadAttention`` multiplies with the weight of its ``out_proj`` itself, and
    ``nn.TransformerEncoderLayer`` in evaluation with those of ``linear1`` and ``linear2``, unless
    one of its modules has a hook: a SpAMMLinear there is not called, and skips nothing.

    Raises as that function for a setting, now and not in the first call.
    """

    _dense = nn.Linear
    _shape = ("in_features", "out_features")

    block: Block

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        tau: float | Tensor | None = None,
        valid_ratio: float | None = None,
        max_error: float | None = None,
        block: Block = 64,
    ) -> None:
        check_knobs(tau, valid_ratio, max_error)
        check_block(block)
        super().__init__(in_features, out_features, bias, device, dtype)
        self._set(tau, valid_ratio, max_error, block=block)

    def _weight_norms(self) -> Tensor:
        _, k, n = check_block(self.block)
        return norm_map(self.weight.t(), (k, n))

    def norm_maps(self, input: Tensor) -> NormMaps:
        """The norm maps of a call with this input: of its rows and of the transposed weight."""
        rows, weight = as_multiplied(input).reshape(-1, input.shape[-1]), as_multiplied(self.weight)
        m, k, n = block = check_block(self.block)
        norms = norm_map(weight.t(), (k, n))
        return NormMaps(norm_map(rows, (m, k)), norms, norms, block)

    def forward(self, input: Tensor) -> Tensor:
        """(..., out_features) for an input (..., in_features). A TransformerEncoder makes nested
        tensors, which are refused, unless it has ``enable_nested_tensor=False``.
        """
        weight = self.weight
        options = {**self._knobs(), "block": self.block}
        return linear(input, weight, self.bias, **options, norm_weight=self._pinned_norms(weight))
