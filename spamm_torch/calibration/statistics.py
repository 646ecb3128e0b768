"""The effect of skipping on each layer, without labels: thresholds and errors.

Two passes over some 512 inputs with nothing skipped. The first pools each layer's norm maps and
finds the thresholds of eight valid ratios in each shape of pixel blocks. The second computes the
layer's output with each of them beside the exact one. Each layer's error is its own: the layers
before it skip nothing.

The same error costs more at the model's output in one layer than in another, and layers that skip
change the inputs of those behind them. So errors at the output are measured, too, and thresholds
are found again front to back.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .._arguments import norm_dtype
from .._info import share_of_valid
from .._output import Progress
from ..networks.compare import distance, size_of
from ..networks.config import NOTHING_SKIPPED, SpAMMConfig
from ..networks.example import Example
from .calls import ConvCall, OnCall, of_convolutions, watch
from .form import PIXEL_BLOCKS, Form, PixelBlock
from .inputs import batch_size

_ops = torch.ops.spamm_torch

RATIOS = (0.85, 0.7, 0.6, 0.5, 0.42, 0.34, 0.26, 0.18)
# Valid ratios: about where the search looks, and well below.
PROBES = (0.5, 0.26)
_PROBED = 128  # inputs


@dataclass(frozen=True)
class Candidate:
    """A setting that a layer may get, whose tau is for undisturbed inputs.

    ``valid_ratio``: over the statistics' inputs. ``error``: of the layer's output after its
    activation, relative. ``output_error``: at the model's output; the layer's where unknown.
    """

    setting: SpAMMConfig
    valid_ratio: float
    error: float
    output_error: float


@dataclass(frozen=True)
class LayerStatistics:
    """A layer's multiplications for one input, and candidates."""

    multiplications: float
    candidates: tuple[Candidate, ...]


def measure_layers(
    form: Form, inputs: Sequence[Example], progress: Progress
) -> dict[str, LayerStatistics]:
    """The statistics of the layers that are called. Norm maps with a NaN give no candidate."""
    pools = {name: _Pool(() if name in form.reasons else PIXEL_BLOCKS) for name in form.layers}

    def run(stage: str, on_call: Callable[[str, ConvCall], None]) -> None:
        with watch(form.model, of_convolutions(pools, on_call)):
            for example in progress.over(f"{stage} of batches", inputs):
                example.call(form.model)

    with form.observed_layers():
        run("norms", lambda name, call: pools[name].gather(call))
        for pool in pools.values():
            pool.find_taus(RATIOS)
        run("errors", lambda name, call: pools[name].compare(call))
    count = sum(map(_size_of, inputs))
    return {name: pool.statistics(count) for name, pool in pools.items() if pool.is_called}


def _size_of(example: Example) -> int:
    return batch_size((example.args, example.kwargs))


@dataclass
class _Pool:
    """The norm maps and outputs of one layer, as they are gathered."""

    pixel_blocks: Sequence[PixelBlock]  # none for a layer that cannot skip
    is_called: bool = False
    multiplications: int = 0
    output: Any = 0.0  # the sum of the output's squares; a tensor once there is one
    weight_norms: Tensor | None = None
    skip_norms: dict[PixelBlock, list[Tensor]] = field(default_factory=dict)
    # The sums of the errors' squares, by candidates' settings and valid ratios.
    errors: dict[tuple[SpAMMConfig, float], Any] = field(default_factory=dict)

    def gather(self, call: ConvCall) -> None:
        """The norm maps of a call."""
        self.is_called = True
        for pixel_block in self.pixel_blocks:
            maps = call.norm_maps_in(None, pixel_block)
            self.weight_norms = maps.norm_a
            self.skip_norms.setdefault(pixel_block, []).append(maps.skip_norm_b)

    def find_taus(self, ratios: Sequence[float]) -> None:
        """The candidates' thresholds, from the maps of all calls."""
        norms = self.weight_norms
        for pixel_block, parts in self.skip_norms.items():
            assert norms is not None
            pooled = torch.cat(parts, -1)
            taus = torch.stack([_ops.find_tau(norms, pooled, ratio) for ratio in ratios])
            found = torch.stack([share_of_valid(norms, pooled, tau) for tau in taus])
            for tau, ratio in dict(zip(taus.tolist(), found.tolist(), strict=True)).items():
                if tau > 0 and ratio < 1:
                    self.errors[SpAMMConfig(tau=tau, pixel_block=pixel_block), ratio] = 0.0
        self.skip_norms.clear()

    def compare(self, call: ConvCall) -> None:
        """The error of each candidate in a call, against nothing skipped."""
        exact = call.skipping(NOTHING_SKIPPED)
        self.multiplications += exact.numel() * call.weight[0].numel()
        self.output = self.output + _square(exact)
        for (other, ratio), error in self.errors.items():
            self.errors[other, ratio] = error + _square(call.skipping(other).sub_(exact))

    def statistics(self, inputs: int) -> LayerStatistics:
        """The candidates; those whose error is no number are left out."""
        output = float(self.output) or 1.0
        roots = {key: math.sqrt(float(error) / output) for key, error in self.errors.items()}
        candidates = (Candidate(*key, root, root) for key, root in roots.items() if root < math.inf)
        return LayerStatistics(self.multiplications / inputs, tuple(candidates))


def _square(values: Tensor) -> Tensor:
    """The sum of squares, without overflow of half types."""
    return torch.linalg.vector_norm(values, dtype=norm_dtype(values.dtype)).double().square()


# ---- Errors at the model's output ---------------------------------------------------------------


def with_output_errors(
    form: Form,
    inputs: Sequence[Example],
    statistics: Mapping[str, LayerStatistics],
    progress: Progress,
) -> dict[str, LayerStatistics]:
    """The statistics with each candidate's error at the model's output, on some 128 inputs.

    Of an error of a tenth, a pooling or a ReLU behind may leave nothing. So each layer skips by
    itself, twice. Between, a power of the layer's error stands in, as seen in VGG13 (exponents of
    1.1 to 3.1 of squares). Without a floating output other than zero, its own error stands.
    """
    before = itertools.accumulate(map(_size_of, inputs), initial=0)
    inputs = [each for each, count in zip(inputs, before, strict=False) if count < _PROBED]

    def outputs(settings: Mapping[str, SpAMMConfig]) -> list[Any]:
        with watch(form.model, settings=settings):
            return [pytree.tree_leaves(example.call(form.model)) for example in inputs]

    found = {}
    with form.observed_layers():
        exact = outputs({})
        size = size_of(exact)
        for name, layer in progress.over("errors at the output", [*statistics.items()]):
            points = []
            for candidate in _probes(layer):
                skipping = outputs({name: candidate.setting})
                points.append((candidate.error, distance(skipping, exact) / size if size else 0.0))
            law = _power_law(points)
            candidates = (replace(each, output_error=law(each.error)) for each in layer.candidates)
            found[name] = replace(layer, candidates=tuple(candidates))
    return found


def _probes(layer: LayerStatistics) -> list[Candidate]:
    """At most two candidates that lose something, and not the same."""
    found: list[Candidate] = []
    for share in PROBES:
        errors = {candidate.error for candidate in found}
        rest = [each for each in layer.candidates if each.error > 0 and each.error not in errors]
        if rest:
            found.append(min(rest, key=lambda each: abs(each.valid_ratio - share)))
    return found


def _power_law(points: Sequence[tuple[float, float]]) -> Callable[[float], float]:
    """A power of the layer's error through these; a multiple through one; itself without any."""
    points = [point for point in points if all(0 < value < math.inf for value in point)]
    if not points:
        return lambda error: error
    (x, y), *others = points
    exponent = 1.0
    for other_x, other_y in others:
        # Below 1 by chance alone, and then more skipping would seem to be free.
        exponent = max(1.0, math.log(other_y / y) / math.log(other_x / x))
    return lambda error: y * (error / x) ** exponent if error else 0.0


# ---- Thresholds front to back -------------------------------------------------------------------


def thresholds_for(
    form: Form, inputs: Sequence[Example], wanted: Mapping[str, Candidate]
) -> dict[str, SpAMMConfig]:
    """The settings by which layers compute the wanted shares, all at once; others lose nothing.

    Layers behind those that skip get less energy. So first each call searches for its own
    threshold, and every layer sees what it will see; then they hold the means, and norm maps are
    pooled.
    """
    own: dict[str, list[Tensor]] = {name: [] for name in wanted}
    pooled: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in wanted}
    searched: dict[str, SpAMMConfig] = {}

    def held(name: str, tau: Tensor) -> SpAMMConfig:
        number = tau.item()
        if not 0 < number < math.inf:  # where norms are none, there is nothing to skip by
            number = 0.0
        return replace(wanted[name].setting, tau=number)

    def run(settings: Mapping[str, SpAMMConfig], **on_call: OnCall) -> None:
        with watch(form.model, settings=settings, **on_call):
            for example in inputs:
                example.call(form.model)

    def search(name: str, call: ConvCall) -> None:
        maps = call.norm_maps_in(None, wanted[name].setting.pixel_block)
        tau = _ops.find_tau(maps.norm_a, maps.skip_norm_b, wanted[name].valid_ratio)
        own[name].append(tau)
        searched[name] = held(name, tau)

    def gather(name: str, call: ConvCall) -> None:
        maps = call.norm_maps()
        pooled[name].append((maps.norm_a, maps.skip_norm_b))

    with form.observed_layers():
        run(searched, before=of_convolutions(wanted, search))
        means = {name: held(name, torch.stack(taus).mean()) for name, taus in own.items()}
        run(means, on_call=of_convolutions(wanted, gather))
    found = {}
    for name, candidate in wanted.items():
        (weight, *_), inputs_norms = zip(*pooled[name], strict=True)
        tau = _ops.find_tau(weight, torch.cat(inputs_norms, -1), candidate.valid_ratio)
        found[name] = held(name, tau)
    return found
