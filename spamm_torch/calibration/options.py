"""The options of each layer, measured without labels: shares of products, errors, times, taus.

A layer's error is that of its own output, while no other layer skips. The same error costs more at
the model's output in one layer than in another: so that is measured, too. Layers that skip change
the inputs of those behind them: so thresholds are found anew, front to back.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import fmean, linear_regression
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from .._arguments import norm_dtype
from .._info import share_of_valid
from .._output import Progress
from .._timing import Mark, Timing, times_of_parts
from ..networks.config import NOTHING_SKIPPED, SpAMMConfig
from ..networks.convert import (
    convert_layer,
    is_converted,
    reason_not_to_convert,
    revert_layer,
)
from ..nn import SpAMMConv2d, reason_not_to_skip
from .inputs import batch_size, call, tensors_of
from .search import Option
from .stats import ModelStats, observed, record_stats

_ops = torch.ops.spamm_torch

Settings: TypeAlias = Mapping[str, SpAMMConfig]
Options: TypeAlias = Mapping[str, Option]
Choices: TypeAlias = Mapping[str, Sequence[Option]]

RATIOS = (0.85, 0.7, 0.55, 0.42, 0.3, 0.18)
PIXEL_BLOCKS = ((64, 1, 1), (1, 8, 8))  # by position in the picture, and image by image
_MEASURED = 128  # inputs whose errors are measured
EXACT = Option(None, 0.0, 1.0, 0.0, 0.0, math.inf)  # conv2d with nothing skipped


class Trial(NamedTuple):
    """A layer by a setting, or the whole model (layer "") in a named form: one thing to time, with
    its share of block products that are computed.
    """

    layer: str
    what: str
    valid_ratio: float = 1.0


class Bench:
    """A model whose layers are measured, on inputs; times are on the first.

    ``layers``: the convolutions that can become a :class:`SpAMMConv2d` by their class, without
    those of groups, since blocks hold the channels of one.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.layers: dict[str, nn.Conv2d] = {
            name: module
            for name, module in model.named_modules()
            if type(module) is nn.Conv2d
            if module.groups == 1 and not reason_not_to_convert(module)
        }

    def set_inputs(self, inputs: Sequence[Any], progress: Progress) -> None:
        """Gives it what it measures on."""
        self._inputs, self.progress = inputs, progress
        self._device = next(self.model.parameters()).device
        before = itertools.accumulate(map(batch_size, inputs), initial=0)
        pairs = zip(inputs, before, strict=False)
        self._measured = [value for value, count in pairs if count < _MEASURED]

    @contextmanager
    def installed(self, settings: Settings) -> Iterator[None]:
        """Inside, the layers with a setting are SpAMM layers by their class."""
        layers = [self.layers[name] for name in settings]
        try:
            for layer, setting in zip(layers, settings.values(), strict=True):
                convert_layer(layer, setting)
            yield
        finally:
            for layer in filter(is_converted, layers):
                revert_layer(layer)

    def statistics(self, settings: Settings) -> list[ModelStats]:
        """The statistics of each batch with these settings."""
        found = []
        with self.installed(settings):
            for value in self._inputs if settings else []:
                with record_stats(self.model) as stats:
                    call(self.model, value)
                found.append(stats)
        return found

    def thresholds(self, wanted: Options) -> dict[str, SpAMMConfig]:
        """The settings by which layers compute the wanted shares, all at once.

        Layers behind those that skip get less energy. So each call searches for its own threshold,
        and every layer sees what it will see; the means are held. Norms that are no numbers give 0.
        """
        found = self.statistics({name: option.searching for name, option in wanted.items()})
        taus = {name: fmean(stats[name].held for stats in found) for name in wanted}
        return {
            name: option._replace(tau=taus[name] if 0 < taus[name] < math.inf else 0.0).setting
            for name, option in wanted.items()
        }

    def errors(self) -> dict[str, tuple[float, list[Option]]]:
        """The multiplications of each layer that is called, for one input, and its options, whose
        time is that share of these and whose output error is the layer's own. Norms that are no
        numbers give no option.
        """
        sizes: dict[str, float] = defaultdict(float)
        found: dict[str, dict[Any, Any]] = defaultdict(lambda: defaultdict(float))

        def compare(name: str, input: Tensor) -> None:
            layer = self.layers[name]
            exact = SpAMMConv2d.from_dense(layer, tau=0.0)(input)
            sizes[name] += exact.numel() * layer.weight[0].numel() / count
            for block in () if reason_not_to_skip(layer) else PIXEL_BLOCKS:
                skipping = SpAMMConv2d.from_dense(layer, tau=0.0, pixel_block=block)
                norm_a, _, norm_b, *_ = skipping.norm_maps(input)
                for ratio in RATIOS:
                    skipping.tau = tau = _ops.find_tau(norm_a, norm_b, ratio)
                    error = _squares([skipping(input).sub_(exact)])
                    share = share_of_valid(norm_a, norm_b, tau)
                    row = [torch.ones_like(error), tau, share, error, _squares([exact])]
                    found[name][block, ratio] += torch.stack([x.double() for x in row])

        count = sum(map(batch_size, self._measured))
        with observed(self.layers, compare):
            for value in self.progress.over("errors of layers, batches", self._measured):
                call(self.model, value)
        return {name: (size, _options(found[name], size)) for name, size in sizes.items()}

    def with_output_errors(self, options: Choices) -> dict[str, list[Option]]:
        """The options with their error at the model's output, each by itself: behind an error of a
        tenth, a pooling or a ReLU may leave nothing. Without a floating output other than zero, the
        layer's own error stands.
        """

        def outputs(settings: Settings) -> list[Tensor]:
            with self.installed(dict.fromkeys(options, NOTHING_SKIPPED) | dict(settings)):
                found = tensors_of([call(self.model, value) for value in self._measured])
            return [x.double() for x in found if x.is_floating_point()]

        def measured(name: str, option: Option) -> Option:
            if not option.tau:
                return option
            pairs = zip(outputs({name: option.searching}), exact, strict=True)
            error = float(_squares([a - b for a, b in pairs])) / size
            return option._replace(output_error=error) if error < math.inf else option

        exact = outputs({})
        size = float(_squares(exact)) or math.nan
        layers = self.progress.over("errors at the output, layers", list(options))
        return {name: [measured(name, option) for option in options[name]] for name in layers}

    def times(self, options: Choices) -> dict[str, tuple[float, list[Option]]]:
        """The time of each layer, dense, and the options that are faster, ``conv2d`` with nothing
        skipped among them. Each layer is timed where it stands in the model: there it computes once
        more by each engine, and before that once, so that all find the same cache.
        """
        engines: dict[str, dict[Trial, Any]] = {}
        for name, given in options.items():
            layer = self.layers[name]
            engines[name] = {Trial(name, "dense"): _dense(layer)}
            by_block = ([x for x in given if x.pixel_block == block] for block in PIXEL_BLOCKS)
            timed = [of[n] for of in by_block if of for n in sorted({0, len(of) // 2, len(of) - 1})]
            for each in (EXACT, *timed):
                trial = Trial(name, str(each.pixel_block), each.valid_ratio)
                engines[name][trial] = SpAMMConv2d.from_dense(layer, **each.setting.to_dict())

        def run(mark: Mark) -> None:
            def compute(name: str, input: Tensor) -> None:
                next(iter(engines[name].values()))(input)
                for trial, engine in engines[name].items():
                    mark(trial)
                    engine(input)
                mark("")

            self.progress.at("times of layers")
            with observed({name: self.layers[name] for name in engines}, compute, before=True):
                call(self.model, self._inputs[0])

        times = times_of_parts(run, self._device)
        return {
            name: _faster(options[name], [(trial, times[trial]) for trial in of])
            for name, of in engines.items()
            if of.keys() <= times.keys()  # called on this input
        }

    def model_times(self, forms: Mapping[Trial, Settings]) -> list[Timing]:
        """The time of the whole model with each of these settings, in turns."""

        def run(mark: Mark) -> None:
            for trial, settings in forms.items():
                self.progress.at("times of the whole model")
                with self.installed(settings):
                    mark(trial)
                    call(self.model, self._inputs[0])
                    mark("")

        times = times_of_parts(run, self._device)
        return [times[trial] for trial in forms]


def _options(found: Mapping[Any, Tensor], size: float) -> list[Option]:
    options: dict[Any, Option] = {}
    for (block, _), sums in found.items():
        tau, ratio, error, output = (sums[1:] / sums[0]).tolist()
        error /= output or 1.0
        if 0 < tau < math.inf and ratio < 1 and error < math.inf:  # ties leave fewer ratios
            options[block, ratio] = Option(block, tau, ratio, error, error, size * ratio)
    return list(options.values())


def _squares(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of squares, without overflow of half types."""
    norms = [torch.linalg.vector_norm(x, dtype=norm_dtype(x.dtype)).double() for x in tensors]
    return torch.stack(norms).square().sum() if norms else torch.zeros(())


def _dense(layer: nn.Conv2d) -> Callable[[Tensor], Any]:
    """A layer's computation by the op that skips nothing."""
    if layer.padding_mode != "zeros" or isinstance(layer.padding, str):
        return lambda input: nn.Conv2d.forward(layer, input)
    given = layer.weight, layer.bias, layer.stride, layer.padding, layer.dilation
    return lambda input: _ops.dense_conv2d(input, *given)


def _faster(
    options: Sequence[Option], timed: Sequence[tuple[Trial, Timing]]
) -> tuple[float, list[Option]]:
    """The dense time, and the options that beat what skips nothing. Their times are on a line by
    valid ratio for each shape of blocks: a distance from it is noise, and a hull of raw times would
    keep the few options that were lucky. All vary as the one does that varies most.
    """
    (_, dense), (_, exact), *skipping = timed
    found = [EXACT._replace(time=exact.median)] if exact.beats(dense) else []
    spread = max((timing.spread for _, timing in skipping), default=1.0)
    points: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for trial, timing in skipping:
        points[trial.what].append((trial.valid_ratio, timing.median))
    for option in options:
        ratios, times = zip(*points[str(option.pixel_block)], strict=True)
        is_line = len(set(ratios)) > 1
        slope, start = linear_regression(ratios, times) if is_line else (0.0, times[0])
        time = start + slope * option.valid_ratio
        if Timing(time, spread).beats(exact if exact.beats(dense) else dense):
            found.append(option._replace(time=time))
    return dense.median, found
