"""The engine of each convolution of an island."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx, nn

from .capture import Island
from .config import SpAMMConfig
from .leaves import Band
from .linear import find_linear_relus
from .pool import Pooling, find_pools
from .sites import Site
from .upsample import Upsampling, find_upsamplings

# Without weights: the reference form has them take deviations.
LINEAR_MODULES = (
    *(nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.Upsample, nn.UpsamplingNearest2d),
    *(nn.UpsamplingBilinear2d, nn.Identity, nn.Dropout, nn.Dropout2d, nn.PixelShuffle),
)


@dataclass(frozen=True)
class Engine:
    """How a convolution is computed.

    Attributes:
        kind: "spamm" (the op conv2d), "dense" (the op dense_conv2d), or "left" (as it was).
        setting: of the op conv2d; None for the others.
        band: the lowest and highest valid ratio of a batch when the setting was calibrated.
        pools: whether its call is to compute the max pool behind the convolution, too.
        joined: of a dense engine: the setting of the op conv2d with which all groups are one
            product (joined_groups.py); None: the op dense_conv2d.
    """

    kind: str
    setting: SpAMMConfig | None = None
    band: Band | None = None
    pools: bool = False
    joined: SpAMMConfig | None = None

    @property
    def of_op(self) -> SpAMMConfig | None:
        """The setting of the op conv2d in a generated forward; None: the op dense_conv2d."""
        return self.joined or self.setting

    @property
    def may_skip(self) -> bool:
        """Whether its setting skips anything, zeros too."""
        return self.setting is not None and not self.setting.skips_nothing


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

    def nodes(self, site: Site) -> list[fx.Node]:
        """The nodes whose work the site's call does, the convolution first."""
        pool = site.pool if self.engines[site.name].pools else None
        return site.nodes if pool is None else [*site.nodes, pool]

    def computes_pool(self, site: Site) -> bool:
        """Whether the site's call computes the max pool behind it."""
        return len(self.nodes(site)) > len(site.nodes)

    @property
    def pools(self) -> dict[fx.Node, Pooling]:
        """The max pools that are calls of their own in the generated forward."""
        absorbed = {node for site in self.sites for node in self.nodes(site)}
        found = find_pools(self.island)
        return {node: pooling for node, pooling in found.items() if node not in absorbed}

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
        works = bool(site.absorbed) or engine.joined is not None
        return engine.kind == "spamm" or (engine.kind == "dense" and works)
