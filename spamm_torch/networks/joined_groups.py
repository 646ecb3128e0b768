"""A grouped convolution as one product, whose weight has blocks of zeros between the groups.

cuDNN computes groups of few channels slowly, and converts channels-last tensors for them. The op
``conv2d`` multiplies the whole weight matrix and skips the blocks of zeros, whose norms are zero.
Inside a block that is not zero a group also meets channels of its neighbours, with weights of zero:
finite values add nothing, but NaN and infinities of one group reach those of the same block as NaN.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from .._info import default_pixel_block
from .config import SpAMMConfig
from .lossless import lossless

_PIXELS = 64  # of a block
_MOST_BYTES = 1 << 28  # of a joined weight


def joined_setting(conv: nn.Conv2d, images: int) -> SpAMMConfig | None:
    """The setting for batches of so many images, or None where groups stay apart.

    Depthwise convolutions stay: a block would be nearly empty. Weights stay that would take more
    than 256 MiB. No setting loses anything, so that other batches are right with it, too.

    Args:
        images: 0 where no batch was seen.
    """
    joined_bytes = conv.weight.numel() * conv.groups * conv.weight.element_size()
    if images == 0 or conv.in_channels == conv.groups or joined_bytes > _MOST_BYTES:
        return None
    pixel_block = default_pixel_block(False, images, _PIXELS)
    return replace(lossless(conv.weight.dtype), pixel_block=pixel_block)


def joined_weight(weight: Tensor, groups: int) -> Tensor:
    """The weight (Co, Ci, kh, kw) of one group that computes what ``groups`` groups compute.

    Args:
        weight: (Co, Ci / groups, kh, kw).
    """
    rows, inner = weight.shape[0] // groups, weight.shape[1]
    joined = weight.new_zeros(groups, rows, groups, inner, *weight.shape[2:])
    joined.diagonal(dim1=0, dim2=2).copy_(weight.unflatten(0, (groups, rows)).movedim(0, -1))
    return joined.flatten(2, 3).flatten(0, 1)
