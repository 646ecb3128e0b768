"""fuse_: folds what surrounds SpAMM convolutions into them, and chains them, for serving."""

import copy
from collections import Counter, OrderedDict
from collections.abc import Mapping, MutableSequence
from dataclasses import dataclass
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor, nn

from ._table import table
from .chain import SpAMMChain, fits_a_chain, reason_not_plain, reason_not_to_chain, takes_norms
from .networks.fold import folded
from .nn import SpAMMConv2d, _SpAMM, unreached_layers


@dataclass(frozen=True)
class Fusion:
    """What :func:`fuse_` did to one layer, or why it left it.

    Attributes:
        name: fully qualified, as it was before.
        action: "folded" (into the layer before), "chained" (moved into a chain), "frozen" (its
            weight's norms pinned) or "left" (as it was).
        detail: into what, or why.
    """

    name: str
    action: str
    detail: str


class FuseReport(tuple[Fusion, ...]):
    """The :class:`Fusion` of every layer concerned, in the model's order; prints as a table."""

    def __str__(self) -> str:
        rows = [("layer", "action", "detail"), *((f.name, f.action, f.detail) for f in self)]
        return table(rows)


class LinearReLU(nn.Linear):
    """``nn.Linear`` and ``nn.ReLU`` in one: on CUDA, without gradients, one call of cuBLASLt.

    Made by :func:`fuse_`. Shapes, Parameters and state dict are those of ``nn.Linear``; NaN and
    infinities come through as in ``nn.ReLU``.
    """

    @classmethod
    def from_linear(cls, linear: nn.Linear) -> "LinearReLU":
        """The module that shares the very same Parameters with an ``nn.Linear`` that has a bias."""
        module = cls(linear.in_features, linear.out_features, device="meta")
        module.weight, module.bias, module.training = linear.weight, linear.bias, linear.training
        return module

    def forward(self, input: Tensor) -> Tensor:
        """(..., out_features) for an input (..., in_features)."""
        if self._is_one_call(input):
            return torch._addmm_activation(self.bias, input, self.weight.t())
        return super().forward(input).relu_()

    def _is_one_call(self, input: Tensor) -> bool:
        return (
            not torch.compiler.is_compiling()
            and not torch.is_grad_enabled()
            and input.is_cuda
            and input.dim() == 2
            and input.dtype == self.weight.dtype
            and not torch.is_autocast_enabled("cuda")
        )


def fuse_(model: nn.Module) -> FuseReport:
    """Prepares a model with SpAMM convolutions for serving, in place.

    Within every ``nn.Sequential`` (subclasses with a ``forward`` of their own are left alone):

    * an ``nn.BatchNorm2d`` behind a :class:`SpAMMConv2d` is folded into its weight and bias,
    * an ``nn.ReLU`` behind it becomes its ``relu=True``,
    * SpAMMConv2d that then follow each other, and each ``nn.MaxPool2d`` before or behind one, move
      into one :class:`SpAMMChain` under the first one's name, where each passes the norms of its
      output on to the next: on Hopper the pass over the input for norms is saved,
    * an ``nn.ReLU`` behind an ``nn.Linear`` with a bias makes it a :class:`LinearReLU`.

    A dense convolution breaks a chain. Where it costs less to go on, make it a SpAMMConv2d with
    ``tau=0.0``, which skips nothing: in float16 and bfloat16 a network's first convolution, whose
    few input channels then have a kernel of their own on Hopper, is always such a case.

    What was folded or moved is gone from its place; the other layers keep their names. The norms of
    all SpAMM weights are pinned (``freeze_``, which says when they rest). Everything else stays as
    it is: other layers, and layers that have hooks or a ``forward`` set on the instance, are used
    in several places, or are of a subclass. The report also names each SpAMM layer that its parent
    never calls (:func:`spamm_torch.unreached_layers`): it skips nothing where it is.

    Results: folding ReLU into a convolution and chaining do not change a bit of what is computed
    from the same norms. cuBLASLt may sum a product with ReLU in another order than one without.
    The output norms of a convolution are summed in another order than those of a pass over its
    output. They may differ in their last bits, so that a product whose norms multiply to just about
    ``tau`` may be skipped in one case and kept in the other; those of a max pool are the same.
    Folding a batch norm rounds the weight anew, and the norms are those of the folded weight:
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
    fusions: list[Fusion] = []
    # What is folded in inference mode could not be pinned.
    with torch.inference_mode(False), torch.no_grad():
        for name, module in list(model.named_modules()):
            if _runs_in_order(module):
                _Fuser(f"{name}." if name else "", module, places, fusions).run()
        fusions += _freeze(model)
    return FuseReport(fusions)


def _runs_in_order(module: nn.Module) -> TypeGuard[nn.Sequential]:
    return type(module).forward is nn.Sequential.forward and "forward" not in module.__dict__


def _freeze(model: nn.Module) -> list[Fusion]:
    """Pins the norms of every SpAMM layer that is called."""
    unreached = unreached_layers(model)
    fusions = []
    for name, module in model.named_modules():
        if not isinstance(module, _SpAMM):
            continue
        if name in unreached:
            fusions.append(Fusion(name, "left", unreached[name]))
        elif module.freeze_().is_frozen:
            fusions.append(Fusion(name, "frozen", "norms of the weight"))
        else:
            fusions.append(Fusion(name, "left", "its weight tells of no change: not pinned"))
    return fusions


class _Fuser:
    """The fusions within one ``nn.Sequential``."""

    def __init__(
        self,
        prefix: str,
        sequential: nn.Sequential,
        places: Mapping[int, int],
        fusions: MutableSequence[Fusion],
    ) -> None:
        self._prefix, self._sequential = prefix, sequential
        self._places, self._fusions = places, fusions

    def run(self) -> None:
        # Not named_children(), which leaves out a layer's second place.
        groups = self._chains(self._folded(self._sequential._modules))
        for name in list(self._sequential._modules):
            if name not in groups:
                del self._sequential._modules[name]
        for name, layers in groups.items():
            is_chain = len(layers) > 1
            self._sequential._modules[name] = (
                SpAMMChain(OrderedDict(layers)).eval() if is_chain else layers[name]
            )

    def _folded(self, children: Mapping[str, Any]) -> dict[str, nn.Module]:
        """The children that remain, with what follows convolutions folded into them."""
        kept: dict[str, nn.Module] = {}
        last = None  # the name of the layer that may still take something
        for name, layer in children.items():
            if last is not None and type(layer) in (nn.BatchNorm2d, nn.ReLU):
                into = kept[last]
                reason = _reason_not_to_fold(into, layer)
                if reason is None:
                    kept[last] = _fold(into, layer)
                    self._report(name, "folded", f"into {self._prefix}{last}")
                    continue
                self._report(name, "left", reason)
            last = None
            kept[name] = layer
            if type(layer) is nn.Linear and layer.bias is not None:
                if self._places[id(layer)] == 1 and reason_not_plain(layer) is None:
                    last = name
            elif isinstance(layer, SpAMMConv2d):
                reason = self._reason_to_leave(layer)
                if reason is None:
                    last = name
                else:
                    self._report(name, "left", reason)
        return kept

    def _chains(self, layers: Mapping[str, nn.Module]) -> dict[str, dict[str, nn.Module]]:
        """{name of the first: {name: layer}}: runs of layers that pass norms on, and the rest.

        A run is convolutions, and at most one pool before, between and behind them; `run` is the
        name of the one that may go on.
        """
        groups: dict[str, dict[str, nn.Module]] = {}
        run, previous = None, None
        for name, layer in layers.items():
            is_pool = type(layer) is nn.MaxPool2d and fits_a_chain(layer)
            may_chain = self._may_chain(layer)
            after_pool = type(previous) is nn.MaxPool2d
            joins = not after_pool if is_pool else may_chain and takes_norms(layer)
            if run is not None and joins:
                groups[run][name] = layer
                self._report(name, "chained", f"in {self._prefix}{run}")
            else:
                groups[name] = {name: layer}
                run = name if is_pool or may_chain else None
            previous = layer
        return groups

    def _may_chain(self, layer: nn.Module) -> bool:
        return isinstance(layer, SpAMMConv2d) and self._reason_to_leave(layer) is None

    def _reason_to_leave(self, conv: SpAMMConv2d) -> str | None:
        if self._places[id(conv)] > 1:
            return "used in several places"
        return reason_not_to_chain(conv)

    def _report(self, name: str, action: str, detail: str) -> None:
        self._fusions.append(Fusion(f"{self._prefix}{name}", action, detail))


def _reason_not_to_fold(into: Any, layer: nn.Module) -> str | None:
    if (reason := reason_not_plain(layer)) is not None:
        return reason
    if isinstance(into, nn.Linear):
        return None if type(layer) is nn.ReLU else "behind a linear layer"
    if into.activation not in (None, "none"):
        return "behind a ReLU" if into.relu else f"behind the activation {into.activation}"
    if isinstance(layer, nn.BatchNorm2d) and layer.running_mean is None:
        return "keeps no running statistics"
    return None


def _fold(into: Any, layer: nn.Module) -> nn.Module:
    if isinstance(layer, nn.BatchNorm2d):
        fused = copy.deepcopy(into)  # others may share the Parameters
        weight, bias = folded(into, layer)
        learns = into.weight.requires_grad
        fused.weight = nn.Parameter(weight, learns)
        fused.bias = nn.Parameter(cast(Tensor, bias), learns)
        return fused
    if isinstance(into, nn.Linear):
        return LinearReLU.from_linear(into)
    into.relu = True
    return into
