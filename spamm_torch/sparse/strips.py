"""Products with more blocks than fit in memory before small ones are dropped.

They are made in strips of block rows, twice. First for the norms of all blocks, which say which
blocks stay; then these blocks alone. So the result has the bits of a product in one piece, and
memory holds no more than it and a strip. It takes up to twice as long.
"""

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from .blocks import Blocks, check_memory, free_bytes, places_of
from .maps import Plan, dropped, make_plan

_MOST_BYTES = 2**34  # of a strip's blocks: launches take no time beside so many


class Strips:
    """One product by a plan without lists. ``b`` has norms until :meth:`take` gives blocks."""

    def __init__(
        self, function: str, plan: Plan, a: Blocks, b: Blocks, added: Blocks | None, **scale: float
    ) -> None:
        self._function, self._plan, self._a, self._b, self._added = function, plan, a, b, added
        self._scale, self._whole = scale, Blocks(plan.crow, plan.col, plan.col, b.columns)
        self._numbers: Tensor | None = None  # of the blocks of B that are there; None: all

    def product(self, below: float, max_error: float | None) -> tuple[Blocks, Tensor, Tensor]:
        """The norm map and the values of blocks that stay, and the bound of the others."""
        c, _, drop_bound, _ = dropped(
            self._plan, self.norms(), below, max_error, self._scale["alpha"]
        )
        return c, self.values(c), drop_bound

    def needed(self) -> Tensor:
        """The stored blocks of B that products need, by their numbers, ascending."""
        strips = self._strips(self._whole, self._room(), 0)
        return torch.cat([strip.slots_b.unique() for strip in strips]).unique().long()

    def take(self, b: Blocks, numbers: Tensor) -> None:
        """Has B with these blocks alone, which are all that products need."""
        self._b, self._numbers = b, numbers

    def norms(self) -> Blocks:
        """The norm map of the product with all blocks."""
        keys = self._whole.keys()
        norms = self._plan.norm_a.values.new_empty(len(keys))
        for strip in self._strips(self._whole, self._room(), self._a.block_bytes()):
            norms[self._places(strip, keys)] = self._multiplied(strip, norms=True)[1]
        return self._whole._replace(values=norms)

    def values(self, c: Blocks) -> Tensor:
        """The product's blocks of a pattern."""
        stored = len(c.col)
        blocks = self._beside() + stored
        check_memory(self._function, blocks, self._a.block_bytes(), c.col.device)
        room = self._room(stored)
        values = self._a.values.new_empty(stored, self._a.edge, self._a.edge)
        keys = c.keys()
        for strip in self._strips(c, room, 0):
            places = self._places(strip, keys)
            stays = (places >= 0).nonzero()[:, 0]
            values[places[stays]] = self._multiplied(strip.only(stays), norms=False)[0]
        return values

    def _beside(self) -> int:
        """Kernels for tensor cores split float32 operands: parts as large as so many blocks."""
        is_split = self._a.values.dtype == torch.float32 and self._a.values.is_cuda
        return len(self._a.col) + len(self._b.col) if is_split else 0

    def _room(self, stay: int = 0) -> int:
        """Bytes for a strip beside blocks that stay."""
        if (free := free_bytes(self._whole.col.device)) is None:
            return _MOST_BYTES
        free -= (self._beside() + stay) * self._a.block_bytes()
        return min(_MOST_BYTES, max(1, free // 4))

    def _strips(self, of: Blocks, room: int, block_bytes: int) -> Iterator[Plan]:
        """Plans of block rows for so much room; torch.OutOfMemoryError where one does not fit."""
        plan, row = self._plan, of.row_of()
        blocks = of.crow.diff()
        if plan.symmetric:  # a row's blocks from the diagonal on, and their mirror images
            blocks = 2 * torch.bincount(row[of.col >= row], minlength=len(blocks))
        products = plan.first[plan.crow].diff()
        needed = blocks * self._a.block_bytes() + 8 * products
        of_row = (needed.cumsum(0) - needed) // room
        ends = torch.searchsorted(of_row, of_row.unique(), right=True).tolist()
        for begin, end in pairwise((0, *ends)):
            added = None if self._added is None else self._added.of_rows(begin, end)
            rest = added, plan.tau, plan.symmetric, block_bytes
            norm_a = plan.norm_a.of_rows(begin, end)
            strip = make_plan(self._function, norm_a, plan.norm_b, *rest)
            slots_b = strip.slots_b
            if self._numbers is not None:
                slots_b = torch.searchsorted(self._numbers, slots_b.long(), out_int32=True)
            slots_a = strip.slots_a + int(plan.norm_a.crow[begin])
            yield strip._replace(slots_a=slots_a, slots_b=slots_b)

    def _places(self, strip: Plan, keys: Tensor) -> Tensor:
        """The places of the strip's blocks among blocks whose keys ascend; -1: not there."""
        pattern = Blocks(strip.crow, strip.col, strip.col, self._b.columns)
        return places_of(pattern.keys(), keys)

    def _multiplied(self, strip: Plan, norms: bool) -> tuple[Tensor, Tensor]:
        return strip.multiply(self._a, self._b, self._added, norms=norms, **self._scale)
