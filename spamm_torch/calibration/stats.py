"""record_stats: each SpAMM layer's tau, valid ratio and error bound in the calls made meanwhile."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from .._arguments import check_module, has_tau
from .._info import NormMaps, SkipInfo, skip_info
from .._output import table
from ..networks.config import Band, SpAMMConfig
from ..networks.proof import BAND
from .calls import Call, Watch, spamm_layers, watch

Triple: TypeAlias = tuple[int, int, int]

_HEAD = ("layer", "calls", "valid", "tau", "block", "pixel block", "error bound", "calibrated")


@dataclass(frozen=True)
class LayerStats:
    """The statistics of one layer, over all its calls.

    Attributes:
        calls: how often it multiplied. With none, the numbers are NaN.
        tau: the threshold; the mean, where it was searched for in each call.
        valid_ratio: the share of all block products that were computed.
        error_bound: a proven bound of the Frobenius norm of what skipping lost in the results of
            all calls together, before the activation; absolute.
        band: the lowest and highest valid ratio of a batch when the layer was calibrated; None for
            others.
        block, pixel_block: the blocks of its calls, to which the tau belongs; None where calls had
            several, and pixel_block for a :class:`SpAMMLinear`.
        held: the tau of :meth:`config`: of one that was searched for, which is the least product
            kept, halfway to the greatest that was skipped; so norms of other kernels, in other
            digits, keep the same.
    """

    calls: int
    tau: float
    valid_ratio: float
    error_bound: float
    band: Band | None = None
    block: Triple | None = None
    pixel_block: Triple | None = None
    held: float = math.nan

    def config(self) -> SpAMMConfig:
        """The setting that skips what was skipped here, whatever the batch: the tau in its blocks.

        Raises ValueError for a layer that was not called, or in blocks of several shapes.
        """
        if self.block is None:
            why = "several (batches of several sizes)" if self.calls else "no call"
            raise ValueError(f"config expects calls of a layer in blocks of one shape; got {why}")
        return SpAMMConfig(tau=self.held, block=self.block, pixel_block=self.pixel_block)

    @property
    def has_drifted(self) -> bool:
        """Tells whether the valid ratio is outside the calibrated band: the data may be of another
        kind.

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
        layers = spamm_layers(model).items()
        self._bands: dict[str, Band | None] = {n: vars(layer).get(BAND) for n, layer in layers}
        self._infos: dict[str, list[tuple[int, SkipInfo, Tensor]]] = {
            name: [] for name in self._bands
        }
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
            info = skip_info(maps, call.knobs)
            held = info.tau if has_tau(call.knobs) else _halfway(maps, info.tau)
            self._infos[layer].append((maps.products, info, held))

    @property
    def drifted(self) -> list[str]:
        """The layers whose valid ratio left its calibrated band."""
        return [name for name, stats in self.items() if stats.has_drifted]

    def __str__(self) -> str:
        lines = [_HEAD, *(_cells(name, stats) for name, stats in self.items())]
        notes = [] if self._bands else ["no layer of the model skips"]
        if self._watch is not None and self._watch.unknown:
            notes.append(
                f"{self._watch.unknown} calls with weights that are no layer's own: not counted"
            )
        return "\n".join([table(lines), *notes])


def _layer_stats(infos: list[tuple[int, SkipInfo, Tensor]], band: Band | None) -> LayerStats:
    if not infos:
        return LayerStats(0, math.nan, math.nan, math.nan, band)
    numbers = torch.stack([torch.stack([*info[:3], held]).double() for _, info, held in infos])
    taus, ratios, bounds, held = numbers.T.tolist()  # one copy to the host
    products = [count for count, _, _ in infos]
    valid = math.fsum(map(math.prod, zip(ratios, products, strict=True)))
    blocks = {info[3:] for _, info, _ in infos}
    block, pixel_block = blocks.pop() if len(blocks) == 1 else (None, None)
    return LayerStats(
        calls=len(infos),
        tau=math.fsum(taus) / len(taus),
        valid_ratio=valid / sum(products),
        error_bound=math.hypot(*bounds),
        band=band,
        block=block,
        pixel_block=pixel_block,
        held=math.fsum(held) / len(held),
    )


def _halfway(maps: NormMaps, tau: Tensor) -> Tensor:
    """Halfway between a threshold and the greatest product that it skips."""
    greatest = torch.zeros_like(tau)
    for a, b in zip(maps.norm_a.unbind(-1), maps.skip_norm_b.unbind(-2), strict=True):
        products = a.unsqueeze(-1) * b.unsqueeze(-2)
        greatest = greatest.maximum(products.where(products < tau, 0.0).amax())
    return (tau + greatest) / 2


def _cells(name: str, stats: LayerStats) -> tuple[str, ...]:
    if not stats.calls:
        return name or "(root)", "0", *[""] * (len(_HEAD) - 2)
    band = ""
    if stats.band is not None:
        low, high = stats.band
        band = f"{low:.1%} to {high:.1%}" + (": left" if stats.has_drifted else "")
    blocks = ("x".join(map(str, block or ())) for block in (stats.block, stats.pixel_block))
    numbers = (f"{stats.valid_ratio:.1%}", f"{stats.tau:.4g}", *blocks, f"{stats.error_bound:.3g}")
    return name or "(root)", str(stats.calls), *numbers, band


@contextmanager
def record_stats(model: nn.Module) -> Iterator[ModelStats]:
    """Records what each SpAMM layer skips in the calls inside: tau, valid ratio, error bound.

    Results are the same inside and outside, where it costs nothing. Inside each call of a layer
    computes its norm maps once more, as for ``return_info``, with a pass over the input for each
    kernel position. Nothing waits for a GPU until the numbers are read. The record says what
    the call skipped: in the generated forward of :func:`convert_` by the folded weights.

    Calls of this thread are recorded: not those of replicas of ``nn.DataParallel``, nor replays of
    CUDA graphs. Compiled functions run uncompiled meanwhile. A call is a layer's by its weight:
    layers that share a weight are counted under the first one's name, and weights computed anew in
    each call (parametrizations) are not counted, which the table says.

    Args:
        model: an ``nn.Module`` with SpAMM layers; one without any gives an empty mapping.

    Returns:
        A context manager that gives :class:`ModelStats`, a mapping from qualified names to
        :class:`LayerStats`; ``print`` shows a table. A layer that :func:`calibrate` gave its
        setting knows the valid ratios it had then; ``drifted`` names the layers that left these.

    Raises TypeError for a model that is no module.
    """
    check_module(model, "record_stats")
    stats = ModelStats(model)
    with watch(model, stats.record) as found:
        stats._watch = found
        yield stats
