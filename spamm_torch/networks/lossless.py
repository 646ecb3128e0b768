"""The setting that skips the products of zeros, and no others."""

from __future__ import annotations

import torch

from .config import SpAMMConfig

_PIXEL_BLOCK = (1, 8, 8)  # of one image: what is skipped for it depends on no other


def lossless(dtype: torch.dtype) -> SpAMMConfig:
    """The setting that skips the products whose norms multiply to exactly zero, and no others.

    A product is skipped unless ``not (x < tau)``, where x is the product of norms in their type.
    With the smallest positive number of that type as tau, x < tau holds for x = 0 alone. So a block
    is skipped if all its deviations are zero, or if they and its weights are so small that the
    norms' product rounds to zero: what is lost then is below what the type can hold.

    Args:
        dtype: of the model. The norms' type is float64 for float64, else float32.
    """
    norms = torch.float64 if dtype == torch.float64 else torch.float32
    info = torch.finfo(norms)
    return SpAMMConfig(tau=info.smallest_normal * info.eps, pixel_block=_PIXEL_BLOCK)
