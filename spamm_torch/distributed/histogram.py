"""The exact threshold of a valid ratio, where the norm maps lie on several ranks.

No rank sees the products of the others. All ranks sum histograms of their products instead, and so
close in on the wanted product together: selection by radix, from the top of its key. A product's
key is its bit pattern, an integer; products are not negative, so keys have their order. Sums of
integers do not depend on the order of the ranks, so every rank finds the bits that one device does.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .._arguments import check_integer, check_valid_ratio

_LOG2_BINS = 11
_BINS = 2**_LOG2_BINS


def find_tau_across(
    norm_a: Tensor,
    norm_b: Tensor,
    valid_ratio: float,
    total_products: int,
    reduce: Callable[[Tensor], object],
) -> Tensor:
    """The threshold that keeps a given share of all ranks' products, bit for bit.

    All ranks call it together, with their rows of A's map, and B's map or their columns of it; each
    block product belongs to one rank. A round counts the rank's products, and sums 16 KiB of counts
    over the ranks: 3 rounds for float32 norms, 6 for float64, and as many again where equal
    products make the share without them nearer. The host waits once.

    ``valid_ratio``, ``total_products``: of all ranks. ``reduce``: replaces an int64 tensor by its
    sum over all ranks. ValueError on all ranks for another number of products.
    """
    check_valid_ratio(valid_ratio)
    check_integer(total_products, "total_products")
    wide = norm_a.dtype == torch.float64
    # log2 of the keys in a bin: the first round's hold all, of 31 or 63 bits, those of others one
    # bin of the round before.
    shifts = range((63 if wide else 31) - _LOG2_BINS, -_LOG2_BINS, -_LOG2_BINS)

    def product_of_place(place: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The product at a place from 1: its key, how many are larger, equal it, are there."""
        low = norm_a.new_zeros((), dtype=torch.int64)
        totals = []
        for shift in (max(each, 0) for each in shifts):
            counts = torch.ops.spamm_torch.product_histogram(norm_a, norm_b, low, shift, _BINS)
            reduce(counts)
            # The products above all bins, then with the highest bin, with the next, and so on.
            reached = counts.flip(0).cumsum(0)
            steps = (reached < place).sum().clamp(max=_BINS)
            low = low + ((_BINS - steps) << shift)
            totals.append(reached[-1])
        larger = reached.take(steps - 1)
        return low, larger, reached.take(steps) - larger, totals[0]

    target = float(valid_ratio) * int(total_products)
    key, *numbers = product_of_place(max(1, math.floor(target + 0.5)))
    larger, equal, total = torch.stack(numbers).tolist()
    if total != total_products:
        raise ValueError(
            f"total_products must be the number of block products of all ranks, {total}; got "
            f"{total_products}"
        )
    if total == 0:
        return norm_a.new_zeros(())
    if abs(larger - target) < abs(larger + equal - target):
        if larger == 0:
            return norm_a.new_full((), math.inf)
        key = product_of_place(larger)[0]
    return key.view(torch.float64) if wide else key.int().view(torch.float32)
