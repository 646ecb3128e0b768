"""record_stats: each SpAMM layer's tau, valid ratio and error bound in the calls made meanwhile."""

import math
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._arguments import as_knobs, check_module, has_tau, holds_dtensor
from .._info import NormMaps, SkipInfo, skip_info
from .._output import table
from ..networks.config import SpAMMConfig
from ..nn import _SpAMM

_HEAD = ("layer", "calls", "valid", "tau", "block", "pixel block", "error bound")


@dataclass(frozen=True)
class LayerStats:
    """The statistics of one layer, over all its calls; NaN without any.

    Attributes:
        calls: how often it multiplied.
        tau: the threshold; the mean, where it was searched for in each call.
        valid_ratio: the share of all block products that were computed.
        error_bound: a proven bound of the Frobenius norm of what skipping lost in the results of
            all calls together, before the activation; absolute.
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
    block: tuple[int, int, int] | None = None
    pixel_block: tuple[int, int, int] | None = None
    held: float = math.nan

    def config(self) -> SpAMMConfig:
        """The setting that skips what was skipped here, whatever the batch: the tau in its blocks.

        Raises ValueError for a layer that was not called, or in blocks of several shapes.
        """
        if self.block is None:
            why = "several (batches of several sizes)" if self.calls else "no call"
            raise ValueError(f"config expects calls of a layer in blocks of one shape; got {why}")
        return SpAMMConfig(tau=self.held, block=self.block, pixel_block=self.pixel_block)


class ModelStats(Mapping[str, LayerStats]):
    """The :class:`LayerStats` of a model's SpAMM layers by qualified name; prints as a table.

    Reading waits for the device, recording does not. It may be read at any time.
    """

    def __init__(self, model: nn.Module) -> None:
        named = model.named_modules()
        self.layers: dict[str, Any] = {n: layer for n, layer in named if isinstance(layer, _SpAMM)}
        self._infos: dict[str, list[tuple[int, SkipInfo, Tensor]]] = {n: [] for n in self.layers}

    def __getitem__(self, name: str) -> LayerStats:
        infos = self._infos[name]
        if not infos:
            return LayerStats(0, math.nan, math.nan, math.nan)
        counts = [count for count, _, _ in infos]
        rows = [torch.stack([*info[:3], held]).double() for _, info, held in infos]
        taus, ratios, bounds, held = torch.stack(rows).T.tolist()  # one copy to the host
        valid = math.fsum(map(math.prod, zip(ratios, counts, strict=True))) / sum(counts)
        blocks = {info[3:] for _, info, _ in infos}
        given = *(blocks.pop() if len(blocks) == 1 else (None, None)), math.fsum(held) / len(held)
        mean = math.fsum(taus) / len(taus)
        return LayerStats(len(infos), mean, valid, math.hypot(*bounds), *given)

    def __iter__(self) -> Iterator[str]:
        return iter(self._infos)

    def __len__(self) -> int:
        return len(self._infos)

    def record(self, name: str, input: Tensor) -> None:
        """Counts a call."""
        layer = self.layers[name]
        maps, knobs = layer.norm_maps(input), as_knobs(**layer._knobs())
        if products := maps.norm_a.numel() * maps.norm_b.shape[-1]:
            info = skip_info(maps, knobs)
            held = info.tau if has_tau(knobs) else _halfway(maps, info.tau)
            self._infos[name].append((products, info, held))

    def __str__(self) -> str:
        lines = [_HEAD, *(_cells(name, stats) for name, stats in self.items())]
        return "\n".join([table(lines), *["no layer of the model skips"][: not self.layers]])


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
    blocks = ("x".join(map(str, block or ())) for block in (stats.block, stats.pixel_block))
    numbers = (f"{stats.valid_ratio:.1%}", f"{stats.tau:.4g}", *blocks, f"{stats.error_bound:.3g}")
    return name or "(root)", str(stats.calls), *numbers


@contextmanager
def observed(
    layers: Mapping[str, nn.Module], on_call: Callable[[str, Tensor], None], before: bool = False
) -> Iterator[None]:
    """Inside, ``on_call`` gets name and input after each call of a layer in this thread, or before
    it, without gradients. Compiled functions run uncompiled meanwhile; calls under ``torch.func``
    are not seen.
    """
    thread = threading.get_ident()

    def hook(name: str) -> Callable[..., None]:
        def call(module: nn.Module, args: Any, kwargs: Any, *_: Any) -> None:
            input = args[0] if args else kwargs["input"]
            is_own = threading.get_ident() == thread and not holds_dtensor(input, module.weight)
            if is_own and torch._C._functorch.peek_interpreter_stack() is None:
                with torch.no_grad():
                    on_call(name, input)

        return call

    is_there = "torch._dynamo" in sys.modules  # importing it takes seconds
    uncompiled: Any = torch.compiler.set_stance("force_eager") if is_there else nullcontext()
    kind = "register_forward_pre_hook" if before else "register_forward_hook"
    handles = [getattr(of, kind)(hook(name), with_kwargs=True) for name, of in layers.items()]
    try:
        with uncompiled:
            yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def record_stats(model: nn.Module) -> Iterator[ModelStats]:
    """Records what each SpAMM layer skips in the calls inside: tau, valid ratio, error bound.

    Results are the same inside and outside, where it costs nothing. Inside each call of a layer
    computes its norm maps once more, as for ``return_info``. Nothing waits for a GPU until the
    numbers are read. Calls of this thread are recorded, by hooks of the layers: not those of
    replicas of ``nn.DataParallel``, nor replays of CUDA graphs. Compiled functions run uncompiled
    meanwhile. Gives :class:`ModelStats`, by qualified names; ``print`` shows a table.

    Raises TypeError for a model that is no ``nn.Module``.

    Example:
        >>> layer = spamm_torch.SpAMMConv2d(32, 32, 3, valid_ratio=0.5)
        >>> with record_stats(layer) as stats:
        ...     result = layer(torch.rand(64, 32, 8, 8))
        >>> print(stats[""].calls)
        1
    """
    check_module(model, "record_stats")
    stats = ModelStats(model)
    with observed(stats.layers, stats.record):
        yield stats
