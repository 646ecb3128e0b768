"""Serving: folds what surrounds SpAMM convolutions into them, and lets them share norms."""

import functools
import itertools
from collections import Counter, OrderedDict
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from ._arguments import check_block
from .functional import backend_for
from .nn import SpAMMConv2d, _SpAMM

_ops = torch.ops.spamm_torch

_LEAST_IMAGES = 64  # that one block of norms speaks of


@dataclass(frozen=True)
class Fusion:
    """What :func:`fuse_` did to one layer, or why it left it.

    Attributes:
        name: fully qualified, as it was before.
        action: "folded" (into the convolution before), "chained" (moved into a chain), "frozen"
            (its weight's norms pinned) or "left".
        detail: into what, or why.
    """

    name: str
    action: str
    detail: str


class FuseReport(tuple):
    """The :class:`Fusion` of every layer concerned, in the model's order; prints as a table."""

    def __str__(self):
        rows = [("layer", "action", "detail"), *((f.name, f.action, f.detail) for f in self)]
        widths = [max(len(row[column]) for row in rows) for column in range(2)]
        return "\n".join(
            f"{name:{widths[0]}}  {action:{widths[1]}}  {detail}" for name, action, detail in rows
        )


class SpAMMChain(nn.Sequential):
    """Convolutions, and max pools behind them, that leave their outputs' norms to each other.

    Made by :func:`fuse_`; computes what an ``nn.Sequential`` of the same layers does. On Hopper the
    convolutions then need no pass over their inputs, and all layers are one call of one op, so that
    the host pays for Python once. That is so for batches of 64 images and more, without gradients
    and autocast; otherwise, on other devices and under ``torch.compile`` the layers run one by one.
    So they do as soon as one of them has hooks, or was changed into something that :func:`fuse_`
    would not have chained. It keeps no state of its own between calls.
    """

    def forward(self, input):
        if not self._hands_on(input):
            return super().forward(input)
        settings = []
        convolutions = []
        for layer in self._modules.values():
            if isinstance(layer, SpAMMConv2d):
                *operands, of_layer = layer._in_chain()
                convolutions.append(operands)
            else:
                of_layer = _pool_settings(layer)
            settings += of_layer
        return _ops.chain.default(input, *map(list, zip(*convolutions, strict=True)), settings)

    def _hands_on(self, input):
        layers = self._modules.values()
        return (
            not torch.compiler.is_compiling()
            and isinstance(input, torch.Tensor)
            and input.dim() == 4
            and input.shape[0] >= _LEAST_IMAGES
            and not torch.is_grad_enabled()
            and not torch.is_autocast_enabled(input.device.type)
            and _leaves_norms(input.device, input.dtype)
            # Slices, and what was appended or changed since, may hold anything.
            and SpAMMConv2d in map(type, layers)
            and all(map(_fits_a_chain, layers))
        )


@functools.cache
def _leaves_norms(device, dtype):
    """Whether convolutions there leave norms without a pass over their output."""
    is_half = dtype in (torch.float16, torch.bfloat16)
    return is_half and device.type == "cuda" and backend_for(device, dtype).startswith("sm90")


def _fits_a_chain(layer):
    """Whether the chain op computes what this layer does. Chains ask in every call."""
    own = layer.__dict__  # torch's look-up by attribute takes longer
    kind = type(layer)
    if kind is SpAMMConv2d:
        fits = own["padding_mode"] == "zeros" and type(own["padding"]) is not str
    else:
        fits = kind is nn.MaxPool2d and not own["return_indices"]
    return fits and not _has_hooks(layer)


def _reason_to_leave(conv):
    """Why a chain cannot hold this convolution, or None."""
    if _fits_a_chain(conv):
        return None
    if type(conv) is not SpAMMConv2d:
        return f"a subclass, {type(conv).__name__}"
    if _has_hooks(conv):
        return "has hooks"
    return f"padding {conv.padding!r} of mode {conv.padding_mode!r} is made by torch"


def _pool_settings(layer):
    """A max pool as the chain op takes it."""
    pairs = (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
    return (1, *itertools.chain(*map(_pair, pairs)), layer.ceil_mode)


def _pair(size):
    size = (size,) if isinstance(size, int) else tuple(size)
    return size * (2 // len(size))


class LinearReLU(nn.Linear):
    """``nn.Linear`` and ``nn.ReLU`` in one: on CUDA, without gradients, one call of cuBLASLt.

    Made by :func:`fuse_`. Shapes, Parameters and state dict are those of ``nn.Linear``.
    """

    @classmethod
    def from_linear(cls, linear):
        """The module that shares the very same Parameters with an ``nn.Linear`` that has a bias."""
        module = cls(linear.in_features, linear.out_features, device="meta")
        module.weight, module.bias, module.training = linear.weight, linear.bias, linear.training
        return module

    def forward(self, input):
        if self._is_one_call(input):
            return torch._addmm_activation(self.bias, input, self.weight.t())
        return super().forward(input).relu_()

    def _is_one_call(self, input):
        return (
            not torch.compiler.is_compiling()
            and not torch.is_grad_enabled()
            and input.is_cuda
            and input.dim() == 2
            and input.dtype == self.weight.dtype
            and not torch.is_autocast_enabled("cuda")
        )


def fuse_(model):
    """Prepares a model with SpAMM convolutions for serving, in place.

    Within every ``nn.Sequential`` (subclasses with a ``forward`` of their own are left alone):

    * an ``nn.BatchNorm2d`` behind a :class:`SpAMMConv2d` is folded into its weight and bias,
    * an ``nn.ReLU`` behind it becomes its ``relu=True``,
    * SpAMMConv2d that then follow each other, and each ``nn.MaxPool2d`` before or behind one, move
      into one :class:`SpAMMChain` under the first one's name, where each leaves the norms of its
      output for the next: on Hopper the pass over the input for norms is saved,
    * an ``nn.ReLU`` behind an ``nn.Linear`` with a bias makes it a :class:`LinearReLU`.

    A dense convolution breaks a chain. Where it costs less to go on, make it a SpAMMConv2d with
    ``tau=0.0``, which skips nothing: in float16 and bfloat16 a network's first convolution, whose
    few input channels then have a kernel of their own on Hopper, is always such a case.

    What was folded or moved is gone from its place; the other layers keep their names. The norms of
    all SpAMM weights are pinned (``freeze_``). Everything else stays as it is: other layers, and
    layers that have hooks, are used in several places, or are of a subclass.

    Results: folding ReLU into a convolution and chaining do not change a bit of what is computed
    from the same norms. cuBLASLt may sum a product with ReLU in another order than one without.
    The norms that a convolution leaves are summed in another order than a pass over its output does
    and may differ in their last bits, so that a product whose norms multiply to ``tau`` but for
    those may be skipped in one case and kept in the other; those that a max pool leaves are the
    same. Folding a batch norm rounds the weight anew, and the norms are those of the folded weight:
    choose a ``tau`` on the fused model. Fold before casting to a half type.

    Load weights before: names in the state dict change where chains arise. The fused model holds no
    state that a call changes: threads may share it, and CUDA graphs capture it. ``train()`` unpins
    the norms; nothing unfolds.

    Args:
        model: an ``nn.Module``, it and all its modules in eval mode.

    Returns:
        A :class:`FuseReport`: what was done to which layer.

    Raises TypeError for what is no module, ValueError for a model in training mode.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"fuse_ expects an nn.Module; got {type(model).__name__}")
    training = next((name for name, module in model.named_modules() if module.training), None)
    if training is not None:
        where = f"module {training!r}" if training else type(model).__name__
        raise ValueError(f"fuse_ expects a model in eval mode; got {where} in training mode")
    places = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    fusions = []
    for name, module in list(model.named_modules()):
        if type(module).forward is nn.Sequential.forward:
            _Fuser(f"{name}." if name else "", module, places, fusions).run()
    for name, module in model.named_modules():
        if isinstance(module, _SpAMM):
            module.freeze_()
            fusions.append(Fusion(name, "frozen", "norms of the weight"))
    return FuseReport(fusions)


class _Fuser:
    """The fusions within one ``nn.Sequential``."""

    def __init__(self, prefix, sequential, places, fusions):
        self._prefix, self._sequential = prefix, sequential
        self._places, self._fusions = places, fusions

    def run(self):
        # Not named_children(), which leaves out a layer's second place.
        groups = self._chains(self._folded(dict(self._sequential._modules)))
        for name in list(self._sequential._modules):
            if name not in groups:
                del self._sequential._modules[name]
        for name, layers in groups.items():
            chain = SpAMMChain(OrderedDict(layers)).eval() if len(layers) > 1 else layers[name]
            self._sequential._modules[name] = chain

    def _folded(self, children):
        """The children that remain, with what follows convolutions folded into them."""
        kept, last = {}, None  # the name of the convolution that may still take something
        for name, layer in children.items():
            if last is not None and type(layer) in (nn.BatchNorm2d, nn.ReLU):
                into = kept[last]
                reason = _reason_not_to_fold(into, layer)
                if reason is None:
                    kept[last] = _fold(into, layer)
                    self._tell(name, "folded", f"into {self._prefix}{last}")
                    continue
                self._tell(name, "left", reason)
            last = None
            kept[name] = layer
            if type(layer) is nn.Linear and layer.bias is not None:
                if self._places[id(layer)] == 1 and not _has_hooks(layer):
                    last = name
            elif isinstance(layer, SpAMMConv2d):
                reason = self._reason_to_leave(layer)
                if reason is None:
                    last = name
                else:
                    self._tell(name, "left", reason)
        return kept

    def _chains(self, layers):
        """{name of the first: {name: layer}}: runs of layers that hand on norms, and the rest.

        A run is convolutions, and at most one pool before, between and behind them; `run` is the
        name of the one that may go on.
        """
        groups, run, previous = {}, None, None
        for name, layer in layers.items():
            is_pool = type(layer) is nn.MaxPool2d and _fits_a_chain(layer)
            may_chain = self._may_chain(layer)
            after_pool = type(previous) is nn.MaxPool2d
            joins = not after_pool if is_pool else may_chain and _takes_norms(layer)
            if run is not None and joins:
                groups[run][name] = layer
                self._tell(name, "chained", f"in {self._prefix}{run}")
            else:
                groups[name] = {name: layer}
                run = name if is_pool or may_chain else None
            previous = layer
        return groups

    def _may_chain(self, layer):
        return isinstance(layer, SpAMMConv2d) and self._reason_to_leave(layer) is None

    def _reason_to_leave(self, conv):
        if self._places[id(conv)] > 1:
            return "used in several places"
        return _reason_to_leave(conv)

    def _tell(self, name, action, detail):
        self._fusions.append(Fusion(f"{self._prefix}{name}", action, detail))


def _reason_not_to_fold(into, layer):
    if _has_hooks(layer):
        return "has hooks"
    if isinstance(into, nn.Linear):
        return None if type(layer) is nn.ReLU else "behind a linear layer"
    if into.relu:
        return "behind a ReLU"
    if isinstance(layer, nn.BatchNorm2d) and layer.running_mean is None:
        return "keeps no running statistics"
    return None


def _fold(into, layer):
    if isinstance(layer, nn.BatchNorm2d):
        return fuse_conv_bn_eval(into, layer)  # a copy: others may share the Parameters
    if isinstance(into, nn.Linear):
        return LinearReLU.from_linear(into)
    into.relu = True
    return into


def _takes_norms(conv):
    """Whether the norms that the layer before leaves are those of this convolution's blocks."""
    channels = conv.in_channels
    _, k, n = (0, 64, 64) if conv.block is None else check_block(conv.block)
    images_first = conv.pixel_block is None or tuple(conv.pixel_block) == (64, 1, 1)
    return conv.groups == 1 and (k == 64 or channels <= k < 64) and n == 64 and images_first


def _has_hooks(module):
    own = module.__dict__
    return bool(
        own["_forward_hooks"]
        or own["_forward_pre_hooks"]
        or own["_backward_hooks"]
        or own["_backward_pre_hooks"]
    )
