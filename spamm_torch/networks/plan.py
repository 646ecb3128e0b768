"""The engine of each convolution of an island."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from .capture import Island
from .config import SpAMMConfig
from .leaves import Band
from .linear import find_linear_relus
from .pool import Pooling, find_pools
from .sites import Site
from .upsample import Upsampling, find_upsamplings


@dataclass(frozen=True)
class Engine:
    """How a convolution is computed.

    Attributes:
        kind: "spamm" (the op conv2d), "dense" (the op dense_conv2d), or "left" (as it was).
        setting: of the op conv2d; None for the others.
        band: the lowest and highest valid ratio of a batch when the setting was calibrated.
    """

    kind: str
    setting: SpAMMConfig | None = None
    band: Band | None = None


DENSE = Engine("dense")
LEFT = Engine("left")


@dataclass
class Plan:
    """An island, its sites, and the engine of each; ``engines`` is by the sites' names."""

    island: Island
    sites: Sequence[Site]
    engines: Mapping[str, Engine]

    @property
    def fused(self) -> list[Site]:
        """The sites that the generated forward computes itself, in the order of its operands."""
        return [site for site in self.sites if self._pays(site)]

    @property
    def pools(self) -> dict[fx.Node, Pooling]:
        """The max pools that the generated forward computes itself."""
        return find_pools(self.island)

    @property
    def linear_relus(self) -> dict[fx.Node, fx.Node]:
        """The linear layers that it computes with the ReLU behind them, and that ReLU."""
        return find_linear_relus(self.island)

    @property
    def upsamplings(self) -> dict[fx.Node, Upsampling]:
        """The nearest upsamplings that it computes itself."""
        return find_upsamplings(self.island)

    def _pays(self, site: Site) -> bool:
        engine = self.engines[site.name]
        if self.island.reference is not None:  # every convolution computes deviations
            return engine.kind != "left"
        works = bool(site.absorbed) or site.is_ordered
        return engine.kind == "spamm" or (engine.kind == "dense" and works)
