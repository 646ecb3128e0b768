"""record_stats: what each SpAMM layer of a model skips in the calls made meanwhile."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from .._info import SkipInfo, skip_info
from .._table import table
from ..networks.leaves import Band
from .calls import Call, Watch, bands_of, spamm_layers, watch


@dataclass(frozen=True)
class LayerStats:
    """What one layer skipped, over all its calls.

    Attributes:
        calls: how often it multiplied. With none, the numbers are NaN.
        tau: the threshold; the mean, where it was searched for in each call.
        valid_ratio: the share of all block products that were computed.
        error_bound: a proven bound of the Frobenius norm of what skipping lost in the results of
            all calls together, before the activation; absolute.
        band: the lowest and highest valid ratio of a batch when the layer was calibrated; None for
            others.
    """

    calls: int
    tau: float
    valid_ratio: float
    error_bound: float
    band: Band | None = None

    @property
    def has_drifted(self) -> bool:
        """Whether the valid ratio is outside the calibrated band: the data may be of another kind.

        The ratio is over all calls; a few images alone may be outside by chance.
        """
        if self.band is None or not self.calls:
            return False
        low, high = self.band
        return not low <= self.valid_ratio <= high


class ModelStats(Mapping[str, LayerStats]):
    """The :class:`LayerStats` of a model's SpAMM layers by qualified name; prints as a table.

    Reading waits for the device, recording does not. It may be read at any time.
    """

    def __init__(self, model: nn.Module) -> None:
        self._bands = bands_of(model)
        self._infos: dict[str, list[tuple[int, SkipInfo]]] = {name: [] for name in self._bands}
        self._read: dict[str, LayerStats] = {}
        self._watch: Watch | None = None

    def __getitem__(self, name: str) -> LayerStats:
        infos = self._infos[name]
        known = self._read.get(name)
        if known is None or known.calls != len(infos):
            known = self._read[name] = _layer_stats(infos, self._bands[name])
        return known

    def __iter__(self) -> Iterator[str]:
        return iter(self._infos)

    def __len__(self) -> int:
        return len(self._infos)

    def record(self, layer: str, call: Call) -> None:
        """Counts a call."""
        maps = call.norm_maps()
        if maps.products:
            info = skip_info(maps.norm_a, maps.norm_b, call.knobs, maps.skip_norm_b)
            self._infos[layer].append((maps.products, info))

    @property
    def drifted(self) -> list[str]:
        """The layers whose valid ratio left its calibrated band."""
        return [name for name, stats in self.items() if stats.has_drifted]

    def __str__(self) -> str:
        head = ("layer", "calls", "valid", "tau", "error bound", "calibrated")
        lines = [head, *(_cells(name, stats) for name, stats in self.items())]
        notes = []
        if self._watch is not None and self._watch.unknown:
            notes.append(
                f"{self._watch.unknown} calls with weights that are no layer's own: not counted"
            )
        return "\n".join([table(lines), *notes])


def _layer_stats(infos: list[tuple[int, SkipInfo]], band: Band | None) -> LayerStats:
    if not infos:
        return LayerStats(0, math.nan, math.nan, math.nan, band)
    numbers = torch.stack([torch.stack(info).double() for _, info in infos])
    taus, ratios, bounds = numbers.T.tolist()  # one copy to the host
    products = [count for count, _ in infos]
    valid = math.fsum(map(math.prod, zip(ratios, products, strict=True)))
    return LayerStats(
        calls=len(infos),
        tau=math.fsum(taus) / len(taus),
        valid_ratio=valid / sum(products),
        error_bound=math.hypot(*bounds),
        band=band,
    )


def _cells(name: str, stats: LayerStats) -> tuple[str, ...]:
    if not stats.calls:
        return name or "(root)", "0", "", "", "", ""
    band = ""
    if stats.band is not None:
        low, high = stats.band
        band = f"{low:.1%} to {high:.1%}" + (": left" if stats.has_drifted else "")
    numbers = (f"{stats.valid_ratio:.1%}", f"{stats.tau:.4g}", f"{stats.error_bound:.3g}")
    return name or "(root)", str(stats.calls), *numbers, band


@contextmanager
def record_stats(model: nn.Module) -> Iterator[ModelStats]:
    """Records what each SpAMM layer skips in the calls inside: tau, valid ratio, error bound.

    Results are the same inside and outside. Outside nothing of it is left: it costs nothing. Inside
    each call of a layer computes its norm maps once more, with a pass over the input for each
    kernel position. Nothing waits for a GPU until the numbers are read. What is recorded is what
    the call skipped: in the generated forward of :func:`convert_` by the folded weights, in a
    :class:`SpAMMChain` layer by layer. Norms are computed apart, as for ``return_info``: a product
    that differs from tau by less than 1e-5 may be counted on its other side.

    Calls of this thread are recorded: not those of replicas of ``nn.DataParallel``, nor replays of
    CUDA graphs. Compiled functions run uncompiled meanwhile. A call is a layer's by its weight:
    layers that share a weight are counted under the first one's name, and weights computed anew in
    each call (parametrizations) are not counted, which the table says.

    Args:
        model: an ``nn.Module`` with SpAMM layers: set by hand, by :func:`convert_`, or chained.

    Returns:
        A context manager that gives :class:`ModelStats`, a mapping from qualified names to
        :class:`LayerStats`; ``print`` shows a table. A layer that :func:`calibrate` gave its
        setting knows the valid ratios it had then; ``drifted`` names the layers that left these.

    Raises:
        TypeError: what is no module.
        ValueError: a model without SpAMM layers.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"record_stats expects an nn.Module; got {type(model).__name__}")
    if not spamm_layers(model):
        modules = sum(1 for _ in model.modules())
        raise ValueError(
            "record_stats expects a model with SpAMM layers; got "
            f"{type(model).__name__}, which has none in {modules} modules"
        )
    stats = ModelStats(model)
    with watch(model, stats.record) as found:
        stats._watch = found
        yield stats
