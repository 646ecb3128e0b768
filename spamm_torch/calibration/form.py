"""The form in which calibrate looks at a model: as convert_ makes it from a settings file."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .._state import Snapshot
from ..networks.config import DENSE, LEFT, NOTHING_SKIPPED, Engine, lossless
from ..networks.conversion import Conversion
from ..networks.example import Example, describe
from ..networks.install import fused_of, is_converted_layer
from ..networks.request import Request
from ..networks.sites import layer_of, reason_not_to_convert, reason_not_to_skip
from ..nn import SpAMMConv2d
from ..reference import ReferenceConversion

PixelBlock: TypeAlias = tuple[int, int, int]

SPAMM = Engine("spamm", NOTHING_SKIPPED)
_WITH_POOL = replace(SPAMM, pools=True)  # where a max pool follows that the call can compute, too

IMAGES_FIRST = (64, 1, 1)
PIXEL_BLOCKS = (IMAGES_FIRST, (1, 8, 8))  # by position in the picture, and image by image

_NEARLY_ZERO = 1e-30  # a product of norms below the rounding of any sum that counts


class Form:
    """A model that is not converted, and the ways to convert it.

    Attributes:
        model: the model. picture: the reference of the reference form, or None.
        layers: the convolutions whose engine is to be chosen, by name, in the model's order.
        reasons: why some of them cannot skip, by name.
        exact: the engine that computes a layer by the op ``conv2d`` without a loss. In the
            reference form it skips zeros.
        observed: the engine of a layer while its calls are observed: that of one that skips, but
            without a loss.
        pixel_blocks: those in which layers may skip.
    """

    def __init__(
        self,
        model: nn.Module,
        example: Example,
        picture: Tensor | None = None,
        before: Snapshot | None = None,
    ) -> None:
        """``before``: the model as it is now."""
        self.model, self.picture = model, picture
        self._before = before or Snapshot(model)
        self.layers = _layers(model)
        self.exact = self.observed = SPAMM
        self.pixel_blocks: tuple[PixelBlock, ...] = PIXEL_BLOCKS
        self.reasons: Mapping[str, str] = {}
        if picture is None:
            self.reasons = _reasons(self.layers)
        else:  # Layers of few channels may skip, too: zeros cost no accuracy.
            setting = lossless(picture.dtype)
            assert setting.pixel_block is not None
            self.exact, self.pixel_blocks = Engine("spamm", setting), (setting.pixel_block,)
            # Its tau is not that of zeros alone: such layers get another layout and other blocks.
            self.observed = Engine("spamm", replace(setting, tau=_NEARLY_ZERO))
        # Every convolution gets an engine here, so that none is measured.
        named = {n: module for n, module in model.named_modules() if isinstance(module, nn.Conv2d)}
        own = {name for name, module in named.items() if isinstance(module, SpAMMConv2d)}
        request = Request(None, {}, frozenset(), dict.fromkeys(named.keys() - own, DENSE))
        conversion: Conversion
        if picture is None:
            conversion = Conversion(model, request, example, fuse=True)
        else:
            conversion = ReferenceConversion(model, request, example, picture)
        with self._before.kept():
            conversion.run()
        self._conversion, self._model = conversion, conversion.installation
        self._given = self._model.engines  # of SpAMM layers, and of calls that cannot be converted
        free = (name for name, engine in self._given.items() if engine != LEFT)
        self._calls = [name for name in free if layer_of(name) not in own]

    def bases(self, fastest: Mapping[str, Engine]) -> dict[str, Mapping[str, Engine]]:
        """The engines of layers that lose nothing, by name, in each way that may be the fastest:
        ``fastest`` of each layer alone, or all by conv2d: in a small network a layer finds its
        input in the L2 cache, and a max pool can be part of the call.
        """
        found: dict[str, Mapping[str, Engine]] = {"each by its fastest": fastest}
        if self.picture is None:
            found["all by conv2d"] = dict.fromkeys(fastest, _WITH_POOL)
        return found

    @contextmanager
    def installed(self, engines: Mapping[str, Engine]) -> Iterator[None]:
        """The model with these engines; dense where none is named. SpAMM layers keep theirs."""
        with self._before.kept():
            self._model.engines = self._by_call(engines)
            with nullcontext() if self.picture is None else other_calls_refused(self.model):
                yield

    def observed_layers(self) -> AbstractContextManager[None]:
        """The model so that calls of its layers can be observed."""
        return self.installed(dict.fromkeys(self.layers, self.observed))

    def settings(self, engines: Mapping[str, Engine]) -> dict[str, Any]:
        """The settings that install these engines, as ``convert_`` takes them from a file."""
        request = Request(None, {}, frozenset(), self._by_call(engines))
        with self._before.kept():
            return self._conversion.run_again(request).to_dict()

    def prepare(self, engines: Mapping[str, Engine] | None) -> None:
        """Sets these engines of layers; None: as the model was."""
        left = dict.fromkeys(self._given, LEFT)
        self._model.try_out(left if engines is None else self._by_call(engines))

    def kept(self) -> AbstractContextManager[None]:
        """Afterwards the model is as it was before."""
        return self._before.kept()

    def _by_call(self, engines: Mapping[str, Engine]) -> dict[str, Engine]:
        found = {call: engines.get(layer_of(call), DENSE) for call in self._calls}
        return {**self._given, **found}


def check_model(model: nn.Module, has_reference: bool) -> None:
    """Raises ValueError unless a model is not converted and has a convolution that can skip."""
    for name, module in model.named_modules():
        if fused_of(module) is not None or is_converted_layer(module):
            raise ValueError(
                "calibrate expects a model that is not converted; got one whose "
                f"{name or type(model).__name__} is (call revert_ first)"
            )
    layers = _layers(model)
    if len(layers) == (0 if has_reference else len(_reasons(layers))):
        raise ValueError(
            "calibrate expects a model with convolutions that can skip; got "
            f"{type(model).__name__}, which has none ({len(layers)} others)"
        )


def _layers(model: nn.Module) -> dict[str, nn.Conv2d]:
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Conv2d
        and module.groups == 1
        and reason_not_to_convert(module) is None
    }


def _reasons(layers: Mapping[str, nn.Conv2d]) -> dict[str, str]:
    """Why some of these layers cannot skip, by name."""
    reasons = {name: reason_not_to_skip(layer) for name, layer in layers.items()}
    return {name: reason for name, reason in reasons.items() if reason is not None}


# ---- Calls that the reference form does not serve -----------------------------------------------


@contextmanager
def other_calls_refused(model: nn.Module) -> Iterator[None]:
    """Inside, calls that no generated forward serves raise ValueError: they would skip nothing."""
    is_inside = True

    def refuse(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if is_inside:
            values = pytree.tree_leaves((args, dict(kwargs)))
            tensors = [describe(value) for value in values if isinstance(value, Tensor)]
            raise ValueError(
                "with a reference the model must be called, in evaluate too, with pictures of its "
                "size and type, in eval mode, without autocast and without hooks on layers; got "
                f"{', '.join(tensors) or 'no tensor'}{_circumstance(model)}"
            )

    for module in model.modules():
        fused = fused_of(module)
        if fused is not None:
            fused.on_other_call = refuse
    try:
        yield
    finally:
        is_inside = False


def _circumstance(model: nn.Module) -> str:
    """The circumstance that keeps a call from being served, where one is found."""
    if torch._C._is_any_autocast_enabled():
        return " under autocast"
    if any(module.training for module in model.modules()):
        return " in training mode"
    hooked = [
        name
        for name, module in model.named_modules()
        if name and (module._forward_hooks or module._forward_pre_hooks)
    ]
    return f" with a hook on {hooked[0]}" if hooked else ""
