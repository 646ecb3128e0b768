"""SpAMMChain: convolutions and max pools that pass their outputs' norms on, in one call of one op.

The op ``chain`` takes its layers as one list of integers: each layer's kind, then its settings. The
kinds are here; csrc/conv/chain.cpp decodes the list.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from ._arguments import ACTIVATIONS, as_activation, as_tau, check_block
from .nn import SpAMMConv2d, takes_ready_weights

_ops = torch.ops.spamm_torch

# The kinds of a layer, and of a convolution's knob.
CONVOLUTION, MAX_POOL = 0, 1
TAU, VALID_RATIO, MAX_ERROR = 0, 1, 2
_KNOBS = ("tau", "valid_ratio", "max_error")

_DEFAULT_EDGES = (0, 0, 0)  # of a block or pixel block that the op chooses

_LEAST_IMAGES = 64  # in one block of the norms that are passed on


class SpAMMChain(nn.Sequential):
    """Convolutions, and max pools between them, that pass the norms of their outputs on.

    Made by :func:`fuse_`; computes what an ``nn.Sequential`` of the same layers does. On Hopper, in
    float16 and bfloat16, the convolutions then need no pass over their inputs, and all layers are
    one call of one op, so that the host pays for Python once. That is so for batches of 64 images
    and more, without gradients and autocast. Otherwise, on other devices, under ``torch.compile``,
    ``torch.jit.trace`` and ``torch.func`` the layers run one by one. So they do where something was
    set on them from outside: hooks (on a layer or on all modules), a ``forward`` on the instance,
    replicas of ``nn.DataParallel``, and layers that :func:`fuse_` would not have chained. It keeps
    no state of its own between calls.

    Shapes: input (N, C, H, W), or what the first layer takes; output as of the last layer.
    """

    def forward(self, input: Tensor) -> Tensor:
        """The output of the last layer."""
        if not self._passes_norms_on(input):
            return super().forward(input)
        ready_weights = takes_ready_weights(input)
        convolutions, settings = [], []
        for layer in self._modules.values():
            if isinstance(layer, SpAMMConv2d):
                *operands, of_layer = _encode_convolution(layer, ready_weights)
                convolutions.append(operands)
            else:
                of_layer = _encode_max_pool(layer)
            settings += of_layer
        return _ops.chain.default(input, *map(list, zip(*convolutions, strict=True)), settings)

    def _passes_norms_on(self, input: Any) -> bool:
        layers = self._modules.values()
        return (
            not torch.compiler.is_compiling()
            and isinstance(input, Tensor)
            and input.dim() == 4
            and passes_norms_on(input)
            and not torch.is_grad_enabled()
            and not torch.is_autocast_enabled(input.device.type)
            and not torch_module._has_any_global_hook()
            # Neither vmap nor torch.jit.trace takes an op with lists of optional tensors.
            and torch._C._functorch.peek_interpreter_stack() is None
            and not torch._C._is_tracing()
            # Slices, and what was appended or changed since, may hold anything.
            and SpAMMConv2d in map(type, layers)
            and all(map(fits_a_chain, layers))
        )


def passes_norms_on(images: Tensor) -> bool:
    """Whether all layers of such a batch compute the norms of their output without a pass."""
    return fills_norm_block(images) and computes_output_norms(images.device, images.dtype)


def fills_norm_block(images: Tensor) -> bool:
    """Whether a batch has the images of a block of the norms that are passed on."""
    return images.shape[0] >= _LEAST_IMAGES


@functools.cache
def computes_output_norms(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether convolutions there compute the norms of their output without a pass over it."""
    return _ops.computes_output_norms(device, dtype)


# ---- What a chain may hold ----------------------------------------------------------------------


def fits_a_chain(layer: nn.Module) -> bool:
    """Whether the op computes what calling this layer would. Chains ask in every call."""
    own = layer.__dict__  # torch's look-up by attribute takes longer
    kind = type(layer)
    if kind is SpAMMConv2d:
        fits = (
            own["padding_mode"] == "zeros"
            and type(own["padding"]) is not str
            and "weight" in own["_parameters"]  # not in a replica of nn.DataParallel
        )
    else:
        fits = kind is nn.MaxPool2d and not own["return_indices"]
    return fits and reason_not_plain(layer) is None


def reason_not_to_chain(conv: SpAMMConv2d) -> str | None:
    """Why a chain cannot hold this convolution, or None."""
    if fits_a_chain(conv):
        return None
    if type(conv) is not SpAMMConv2d:
        return f"a subclass, {type(conv).__name__}"
    if (reason := reason_not_plain(conv)) is not None:
        return reason
    if "weight" not in conv._parameters:
        return "its weight is not a Parameter"
    return f"padding {conv.padding!r} of mode {conv.padding_mode!r} is made by torch"


def takes_norms(conv: Any) -> bool:
    """Whether the norms of the layer before are those of this convolution's input blocks."""
    channels = conv.in_channels
    _, k, n = (0, 64, 64) if conv.block is None else check_block(conv.block)
    images_first = conv.pixel_block is None or tuple(conv.pixel_block) == (64, 1, 1)
    return conv.groups == 1 and (k == 64 or channels <= k < 64) and n == 64 and images_first


def reason_not_plain(module: nn.Module) -> str | None:
    """What else than its class's ``forward`` happens in a call of this very module, or None."""
    own = module.__dict__
    if (
        own["_forward_hooks"]
        or own["_forward_pre_hooks"]
        or own["_backward_hooks"]
        or own["_backward_pre_hooks"]
    ):
        return "has hooks"
    if "forward" in own or "_conv_forward" in own:
        return "has a forward of its own"
    return None


# ---- The layers as the op takes them ------------------------------------------------------------


def _encode_convolution(layer: Any, ready_weights: bool) -> tuple[Any, ...]:
    """Weight, bias, norms of the weight, knob, and the settings as integers.

    Of what a call costs on the host, Python's checks are the larger half; here the layer's settings
    were checked when it was made, and the input by the layer before.
    """
    if layer.tau is not None:
        kind, knob = TAU, layer._tau_argument()
    elif layer.valid_ratio is not None:
        kind, knob = VALID_RATIO, as_tau(layer.valid_ratio)
    else:
        kind, knob = MAX_ERROR, as_tau(layer.max_error)
    parameters = layer._parameters  # torch's look-up by attribute takes longer
    weight = parameters["weight"]
    pinned = layer._pinned
    is_pinned = pinned is not None and pinned.are_of_eager(weight)
    norms = pinned.norms if is_pinned else None
    block = _DEFAULT_EDGES if layer.block is None else check_block(layer.block)
    settings = (
        *(CONVOLUTION, *layer.stride, *layer.padding, *layer.dilation, layer.groups),
        ACTIVATIONS.index(as_activation(layer.activation)),
        *(is_pinned and ready_weights, kind),
        *(*block, *(layer.pixel_block or _DEFAULT_EDGES)),
    )
    return weight, parameters["bias"], norms, knob, settings


def run_by_layers(
    input: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    norm_weights: Sequence[Tensor | None],
    knobs: Sequence[Tensor],
    layers: Sequence[int],
) -> Tensor:
    """What the op ``chain`` computes, by one call of an op for each layer, bit for bit."""
    numbers = iter(layers)
    convolutions = zip(weights, biases, norm_weights, knobs, strict=True)
    norms = None

    def read(count: int) -> list[int]:
        return list(itertools.islice(numbers, count))

    for kind in numbers:
        if kind == MAX_POOL:
            geometry = [read(2) for _ in range(4)]
            input, norms = _ops.max_pool2d_with_norms(input, *geometry, bool(read(1)[0]))
            continue
        weight, bias, norm_weight, knob = next(convolutions)
        geometry = [read(2) for _ in range(3)]
        groups, activation, ready, knob_kind = read(4)
        block, pixel_block = read(3), read(3)
        input, norms = _ops.conv2d_with_norms(
            *(input, weight, bias, *geometry, groups),
            **{_KNOBS[knob_kind]: knob if knob_kind == TAU else knob.item()},
            block=block if any(block) else None,
            pixel_block=pixel_block if any(pixel_block) else None,
            norm_weight=norm_weight,
            norm_input=norms,
            activation=ACTIVATIONS[activation],
            weight_is_ready=bool(ready),
        )
    return input


def _encode_max_pool(layer: Any) -> tuple[int, ...]:
    """The settings as integers."""
    pairs = (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
    return (MAX_POOL, *itertools.chain(*map(_pair, pairs)), layer.ceil_mode)


def _pair(size: Any) -> tuple[int, ...]:
    size = (size,) if isinstance(size, int) else tuple(size)
    return size * (2 // len(size))
