"""The ways of norms of pixels through the reference form, from layer to layer.

A convolution of deviations skips by the norms of its input's pixels, (images, rows, columns, blocks
of 64 channels). The convolution, max pool or concatenation before it leaves them with its output.
Nearest upsampling repeats them. From other layers a convolution takes norms itself.

Norms may be those of columns that are together (layouts.py): of f columns' channels as one pixel's.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from .._arguments import check_block
from ..networks.calls import size_after
from ..networks.config import lossless
from ..networks.nodes import Upsampling, is_written, may_write
from ..networks.plan import NormFlow, Plan, Shapes, Site
from .layouts import ALIGNED, BLOCK, Layout, columns_of_phases, concatenated_channels, find_layout

_MOST_JOINED = 4  # parts that the kernel which concatenates takes


@dataclass
class PixelNormFlow(NormFlow):
    """The sources and the readers of norms of pixels.

    ``joins``: the concatenations that compute norms. ``parts``: of the sites that read the parts of
    one, by name: those parts, and their channels. ``layouts``: of the sites that are not computed
    as they are. ``plain``: the sites that return values, not deviations: nothing but the output of
    the island reads them, and their values for the reference are a residual of the same call.
    """

    joins: set[fx.Node] = field(default_factory=set)
    parts: dict[str, dict[fx.Node, int]] = field(default_factory=dict)
    layouts: dict[str, Layout] = field(default_factory=dict)
    plain: set[str] = field(default_factory=set)


def pixel_norm_flow(plan: Plan, shapes: Shapes) -> PixelNormFlow:
    """The flow of norms in the reference form, as if its device computed output norms."""
    return _Flow(plan, shapes).run()


@dataclass(frozen=True)
class _Found:
    """The nodes that compute norms, and the number of columns that each norm covers."""

    sources: tuple[fx.Node, ...]
    columns: int = 1


class _Flow:
    def __init__(self, plan: Plan, shapes: Shapes) -> None:
        self._plan, self._shapes = plan, shapes
        self._root = plan.island.module
        self._by_last = {site.last: site for site in plan.fused}
        self._pools, self._upsamplings = plan.pools, plan.island.upsamplings
        self._layouts = find_layouts(plan, shapes)

    def run(self) -> PixelNormFlow:
        flow = PixelNormFlow(layouts=self._layouts)
        for site in self._plan.fused:
            if self._returns_values(site):
                flow.plain.add(site.name)
            parts = self._parts_for(site)
            if parts:
                self._read_parts(site, parts, flow)
                continue
            found, skips = self._norms_for(site), _skips_by_pixels(self._plan, site)
            if found is None:
                continue
            if skips:
                flow.readers.add(site.name)
            self._take(found, skips, flow)
        return flow

    def _take(self, found: _Found, skips: bool, flow: PixelNormFlow) -> None:
        """Adds nodes to those that compute norms."""
        for source in found.sources:
            producer = self._by_last.get(source)
            if producer is not None:
                if skips:
                    flow.producers.add(producer.name)
            elif source in self._pools:  # for any reader: torch's pool takes no deviations
                flow.pools.add(source)
            else:
                flow.joins.add(source)

    def _read_parts(self, site: Site, parts: dict[fx.Node, _Found], flow: PixelNormFlow) -> None:
        flow.parts[site.name] = {part: self._shapes[part][0][1] for part in parts}
        layout = self._layouts.get(site.name)
        if layout is not None:
            channels = tuple(flow.parts[site.name].values())
            flow.layouts[site.name] = replace(layout, parts=channels)
        for found in parts.values():
            self._take(found, True, flow)

    def _parts_for(self, site: Site) -> dict[fx.Node, _Found]:
        """The parts of a concatenation, with norms, that a site may read in its place; or none."""
        value, layout = site.input, self._layouts.get(site.name, Layout())
        if not self._computes_strips(site, layout):
            return {}
        parts = concatenated_channels(value) if can_be_joined(value, self._shapes) else None
        if parts is None or len(set(parts)) != 2 or len(parts) != 2:
            return {}
        if is_written(value, self._root) or _writes_between(value, site.nodes[0], self._plan):
            return {}
        found: dict[fx.Node, _Found] = {}
        for part in parts:
            if not isinstance(part, fx.Node) or not _is_new(part, self._plan, self._shapes):
                return {}
            norms, channels = self._norms_of(part), self._shapes[part][0][1]
            if norms is None or not _can_regroup(channels, norms.columns, layout.columns):
                return {}
            found[part] = norms
        first = self._shapes[parts[0]][0][1]
        return found if layout.columns * first % BLOCK == 0 else {}

    def _computes_strips(self, site: Site, layout: Layout) -> bool:
        """Whether the kernels that read parts compute a site."""
        conv = site.conv
        skips_zeros = self._plan.engines[site.name].setting == lossless(conv.weight.dtype)
        is_plain = (conv.kernel_size, conv.stride, conv.dilation) == ((3, 3), (1, 1), (1, 1))
        has_padding = conv.padding_mode == "zeros" and not isinstance(conv.padding, str)
        is_square = layout.options()["pixel_block"] == [1, 8, 8] and not layout.in_phases
        is_aligned = conv.out_channels % ALIGNED == 0
        return (
            (skips_zeros and is_plain and has_padding and is_square and is_aligned)
            and conv.groups == 1
            and site.residual is None
            and not self._returns_values(site)
        )

    def _norms_for(self, site: Site) -> _Found | None:
        """The nodes that write the norms that a site reads; None where there are none."""
        layout = self._layouts.get(site.name, Layout())
        found = self._norms_of(site.input.args[0] if layout.in_phases else site.input)
        channels = site.conv.in_channels
        if found is None or not _can_regroup(channels, found.columns, layout.columns):
            return None
        return found

    def _norms_of(self, value: Any) -> _Found | None:
        if not isinstance(value, fx.Node) or is_written(value, self._root):
            return None
        if (site := self._by_last.get(value)) is not None:
            layout = self._layouts.get(site.name, Layout())
            if layout.in_phases:  # it leaves norms in any case
                return _Found((), columns_of_phases(site.conv.out_channels))
            leaves = _skips_by_pixels(self._plan, site) and site.conv.out_channels % ALIGNED == 0
            return _Found((value,), layout.columns) if leaves else None
        if value in self._pools:
            return _Found((value,)) if value.args[0] in self._by_last else None
        if can_be_joined(value, self._shapes):
            return _Found((value,))
        if (passed := passed_on(value, self._upsamplings, self._shapes)) is not None:
            found = self._norms_of(passed)
            channels = self._shapes[passed][0][1]
            if found is not None and _can_regroup(channels, found.columns, 1):
                return _Found(found.sources)
        return None

    def _returns_values(self, site: Site) -> bool:
        """Whether a site is read as it is alone, and its base is what the reference makes of it."""
        skips_zeros = self._plan.engines[site.name].setting == lossless(site.conv.weight.dtype)
        is_sum = site.activation == "none" and site.residual is None
        is_read_as_it_is = all(user.op == "output" for user in site.last.users)
        layout = self._layouts.get(site.name, Layout())
        return skips_zeros and is_sum and is_read_as_it_is and not layout.in_phases


def _skips_by_pixels(plan: Plan, site: Site) -> bool:
    """Whether the norms that a site skips by are made of those of single pixels."""
    setting, conv = plan.engines[site.name].setting, site.conv
    if setting is None or setting.skips_nothing or conv.groups > 1 or setting.pixel_block is None:
        return False
    k = BLOCK if setting.block is None else check_block(setting.block)[1]
    return setting.pixel_block[0] == 1 and (k == BLOCK or conv.in_channels <= k < BLOCK)


def find_layouts(plan: Plan, shapes: Shapes) -> dict[str, Layout]:
    """The layouts of a plan's sites, by name, without those that are computed as they are."""
    found = {}
    for site in plan.fused:
        # Devices compute norms of some types; that of the island's argument decides for all sites.
        if site.conv.weight.dtype != plan.fused[0].conv.weight.dtype:
            continue
        value = site.input
        if value not in shapes or len(shapes[value][0]) != 4:
            continue
        setting = plan.engines[site.name].setting
        doubled = site.residual is None and _reads_doubled(plan, site, shapes)
        layout = find_layout(site.conv, setting, shapes[value][0][3], is_doubled=doubled)
        if layout is not None:
            found[site.name] = layout
    return found


def _reads_doubled(plan: Plan, site: Site, shapes: Shapes) -> bool:
    """Whether a site may read the value before nearest upsampling by 2: nothing writes to it."""
    value, root = site.input, plan.island.module
    before = passed_on(value, plan.island.upsamplings, shapes)
    if before is None or is_written(value, root) or is_written(before, root):
        return False
    if not _is_new(before, plan, shapes) or _writes_between(value, site.nodes[0], plan):
        return False
    own, doubled = shapes[before][0][2:], shapes[value][0][2:]
    return tuple(2 * length for length in own) == tuple(doubled)


def _is_new(value: fx.Node, plan: Plan, shapes: Shapes) -> bool:
    """Whether a node is known to return memory of its own."""
    is_computed = any(site.last is value for site in plan.fused)
    return is_computed or value in plan.pools or can_be_joined(value, shapes)


def _writes_between(first: fx.Node, last: fx.Node, plan: Plan) -> bool:
    """Whether nodes between two may write to anything; calls of sites write to nothing."""
    inside = {node for site in plan.fused for node in site.nodes}
    node = first.next
    while node is not last:
        if node not in inside and may_write(node, plan.island.module):
            return True
        node = node.next
    return False


def passed_on(
    node: fx.Node, upsamplings: Mapping[fx.Node, Upsampling], shapes: Shapes
) -> fx.Node | None:
    """The value that nearest upsampling by whole factors repeats; None for other nodes. Lengths
    alone do not tell: of 12 rows, a factor of 2.05 makes 24 others than a factor of 2.
    """
    if node not in upsamplings:
        return None
    first = node.args[0]
    if not isinstance(first, fx.Node) or {first, node} - shapes.keys():
        return None
    before, after = shapes[first][0][2:], shapes[node][0][2:]
    _, factors = upsamplings[node]
    if len(after) != 2 or any(b % a for a, b in zip(before, after, strict=True)):
        return None
    return first if factors is None or size_after(before, None, factors) == after else None


def can_be_joined(node: fx.Node, shapes: Shapes) -> bool:
    """Whether a node concatenates channels of a few pictures of one type, as a kernel does."""
    parts = concatenated_channels(node)
    if parts is None or len(parts) > _MOST_JOINED or not shapes.keys() >= set(parts):
        return False
    sizes, dtypes = zip(*(shapes[part] for part in parts), strict=True)
    are_pictures = all(len(size) == 4 and size[1] % ALIGNED == 0 for size in sizes)
    return are_pictures and len(set(dtypes)) == 1 and dtypes[0].is_floating_point


def upsampled(norms: Tensor, size: Sequence[int]) -> Tensor:
    """Norms (images, rows, columns, blocks) of a picture whose pixels are repeated up to a size."""
    return F.interpolate(norms.permute(0, 3, 1, 2), size=tuple(size)).permute(0, 2, 3, 1)


def _can_regroup(channels: int, before: int, after: int) -> bool:
    """Whether norms of ``before`` columns together tell those of ``after``."""
    if before == after:
        return True
    if before * channels % BLOCK == 0 and after * channels % BLOCK == 0:
        return True
    if before * channels > BLOCK or after % before:
        return False
    block = min(after * channels, BLOCK)
    return block % (before * channels) == 0 and after * channels % block == 0


def regrouped(norms: Tensor, channels: int, before: int, after: int) -> Tensor:
    """Norms (images, rows, columns / before, blocks) as (images, rows, columns / after, blocks)."""
    if before == after:
        return norms
    images, rows, width, _ = norms.shape  # -1 would not tell a length where there are no images
    if before * channels % BLOCK:  # several of them make the norm of a block
        count = min(after * channels, BLOCK) // (before * channels)
        groups = norms.reshape(images, rows, width // count, count)
        norms = functools.reduce(torch.hypot, groups.unbind(3))
    return norms.reshape(images, rows, width * before // after, -(-after * channels // BLOCK))
