"""The form in which calibrate looks at a model: as convert_ makes it from a settings file."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, TypeAlias

from torch import nn

from .._state import Snapshot
from ..networks.config import DENSE, LEFT, NOTHING_SKIPPED, Engine
from ..networks.conversion import Conversion
from ..networks.example import Example
from ..networks.install import fused_of, is_converted_layer
from ..networks.request import Request
from ..networks.sites import layer_of, reason_not_to_convert, reason_not_to_skip
from ..nn import SpAMMConv2d

PixelBlock: TypeAlias = tuple[int, int, int]

SPAMM = Engine("spamm", NOTHING_SKIPPED)
_WITH_POOL = replace(SPAMM, pools=True)  # where a max pool follows that the call can compute, too

IMAGES_FIRST = (64, 1, 1)
PIXEL_BLOCKS = (IMAGES_FIRST, (1, 8, 8))  # by position in the picture, and image by image


class Form:
    """A model that is not converted, and the ways to convert it.

    Attributes:
        model: the model.
        layers: the convolutions whose engine is to be chosen, by name, in the model's order.
        reasons: why some of them cannot skip, by name.
    """

    def __init__(self, model: nn.Module, example: Example, before: Snapshot | None = None) -> None:
        """``before``: the model as it is now."""
        self.model = model
        self._before = before or Snapshot(model)
        self.layers = _layers(model)
        self.reasons = _reasons(self.layers)
        # Every convolution gets an engine here, so that none is measured.
        named = {n: module for n, module in model.named_modules() if isinstance(module, nn.Conv2d)}
        own = {name for name, module in named.items() if isinstance(module, SpAMMConv2d)}
        request = Request(None, {}, frozenset(), dict.fromkeys(named.keys() - own, DENSE))
        conversion = Conversion(model, request, example, fuse=True)
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
        return {
            "each by its fastest": fastest,
            "all by conv2d": dict.fromkeys(fastest, _WITH_POOL),
        }

    @contextmanager
    def installed(self, engines: Mapping[str, Engine]) -> Iterator[None]:
        """The model with these engines; dense where none is named. SpAMM layers keep theirs."""
        with self._before.kept():
            self._model.engines = self._by_call(engines)
            yield

    def observed_layers(self) -> AbstractContextManager[None]:
        """The model so that calls of its layers can be observed."""
        return self.installed(dict.fromkeys(self.layers, SPAMM))

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


def check_model(model: nn.Module) -> None:
    """Raises ValueError unless a model is not converted and has a convolution that can skip."""
    for name, module in model.named_modules():
        if fused_of(module) is not None or is_converted_layer(module):
            raise ValueError(
                "calibrate expects a model that is not converted; got one whose "
                f"{name or type(model).__name__} is (call revert_ first)"
            )
    layers = _layers(model)
    if len(layers) == len(_reasons(layers)):
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
