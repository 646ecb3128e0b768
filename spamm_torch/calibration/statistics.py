"""The effect of skipping on each layer: thresholds, relative errors and times, without labels.

Two passes over some 512 inputs with nothing skipped. The first pools each layer's norm maps and
finds the thresholds of eight valid ratios in each shape of pixel blocks. The second computes the
layer's output with each of them beside the exact one. Each layer's error is its own: the layers
before it skip nothing. In the reference form ratios are shares of the products that are not zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .._progress import Progress
from ..networks.config import SpAMMConfig
from ..networks.example import Example
from .calls import Call, ConvCall, OnCall, watch
from .form import Form, PixelBlock
from .inputs import batch_size

_ops = torch.ops.spamm_torch

RATIOS = (0.85, 0.7, 0.6, 0.5, 0.42, 0.34, 0.26, 0.18)


@dataclass(frozen=True)
class Candidate:
    """A setting that a layer may get.

    Attributes:
        setting: a tau, and the pixel block that it belongs to; the tau is for undisturbed inputs.
        valid_ratio: with this tau, over the statistics' inputs.
        error: relative to the layer's output after its activation, in Frobenius norms.
        output_error: what it comes to at the model's output, relative; the layer's where unknown.
    """

    setting: SpAMMConfig
    valid_ratio: float
    error: float
    output_error: float


@dataclass(frozen=True)
class LayerStatistics:
    """The statistics of a layer.

    Attributes:
        multiplications: for one input. candidates: the settings that it may get.
        exact_ratio: the share of block products that are not skipped without a loss.
    """

    multiplications: float
    candidates: tuple[Candidate, ...]
    exact_ratio: float = 1.0


def measure_layers(
    form: Form, inputs: Sequence[Example], progress: Progress
) -> dict[str, LayerStatistics]:
    """The statistics of the layers of a form that are called.

    The model is in eval mode and without gradients. Where norm maps hold a NaN, nothing can be
    skipped by any threshold, and there is no candidate.
    """
    pools = {name: _Pool(() if name in form.reasons else form.pixel_blocks) for name in form.layers}
    exact = form.exact.setting
    assert exact is not None

    def run(stage: str, on_call: OnCall) -> None:
        with watch(form.model, on_call):
            for number, example in enumerate(inputs):
                progress.at(f"{stage} of batches", number, len(inputs))
                example.call(form.model)

    def gather(name: str, call: Call) -> None:
        if name in pools and isinstance(call, ConvCall):
            pools[name].gather(call)

    def compare(name: str, call: Call) -> None:
        if name in pools and isinstance(call, ConvCall):
            pools[name].compare(call, exact)

    with form.observed_layers():
        run("norms", gather)
        for pool in pools.values():
            pool.find_taus(RATIOS, exact)
        run("errors", compare)
    count = sum(batch_size((example.args, example.kwargs)) for example in inputs)
    return {name: pool.statistics(count) for name, pool in pools.items() if pool.is_called}


@dataclass
class _Trial:
    """A candidate whose errors are being summed."""

    setting: SpAMMConfig
    valid_ratio: float
    error: Any = 0.0  # the sum of squares, a tensor once there is one


@dataclass
class _Pool:
    """The norm maps and outputs of one layer, as they are gathered."""

    pixel_blocks: Sequence[PixelBlock]  # none for a layer that cannot skip
    is_called: bool = False
    multiplications: int = 0
    output: Any = 0.0  # the sum of the output's squares
    weight_norms: Tensor | None = None
    exact_ratio: float = 1.0
    skip_norms: dict[PixelBlock, list[Tensor]] = field(default_factory=dict)
    trials: list[_Trial] = field(default_factory=list)

    def gather(self, call: ConvCall) -> None:
        """The norm maps of a call."""
        self.is_called = True
        for pixel_block in self.pixel_blocks:
            maps = call.norm_maps_in(None, pixel_block)
            self.weight_norms = maps.norm_a
            self.skip_norms.setdefault(pixel_block, []).append(maps.skip_norm_b)

    def find_taus(self, ratios: Sequence[float], exact: SpAMMConfig) -> None:
        """The candidates' thresholds, from the maps of all calls; ``exact`` loses nothing."""
        norms = self.weight_norms
        for pixel_block, parts in self.skip_norms.items():
            assert norms is not None
            pooled = torch.cat(parts, -1)
            most = _ops.valid_ratio(norms, pooled, norms.new_tensor(exact.tau)).item()
            self.exact_ratio = most
            if not most:  # no product to skip
                continue
            taus = torch.stack([_ops.find_tau(norms, pooled, most * ratio) for ratio in ratios])
            found = torch.stack([_ops.valid_ratio(norms, pooled, tau) for tau in taus])
            for tau, ratio in dict(zip(taus.tolist(), found.tolist(), strict=True)).items():
                if tau > 0 and ratio < most:
                    setting = SpAMMConfig(tau=tau, pixel_block=pixel_block)
                    self.trials.append(_Trial(setting, ratio))
        self.skip_norms.clear()

    def compare(self, call: ConvCall, setting: SpAMMConfig) -> None:
        """The error of each candidate in a call, against the setting that loses nothing."""
        exact = call.skipping(setting)
        self.multiplications += exact.numel() * call.weight[0].numel()
        self.output = self.output + _square(exact)
        for trial in self.trials:
            found = call.skipping(trial.setting)
            trial.error = trial.error + _square(found.sub_(exact))

    def statistics(self, inputs: int) -> LayerStatistics:
        """The candidates; those whose error is no number are left out."""
        output = float(self.output)
        candidates = []
        for trial in self.trials:
            error = float(trial.error) / output if output else float(trial.error)
            if error < torch.inf:
                root = error**0.5
                candidates.append(Candidate(trial.setting, trial.valid_ratio, root, root))
        multiplications = self.multiplications / inputs
        return LayerStatistics(multiplications, tuple(candidates), self.exact_ratio)


def _square(values: Tensor) -> Tensor:
    """The sum of squares, without overflow of half types."""
    wide = torch.float64 if values.dtype == torch.float64 else torch.float32
    return torch.linalg.vector_norm(values, dtype=wide).double().square()
