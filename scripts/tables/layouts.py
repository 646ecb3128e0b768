"""The three ways in which the study cuts a convolution into blocks.

Each layout makes, from an ``nn.Conv2d``, a module that computes it with SpAMM at a given ``tau``;
gives the norm maps that decide what is skipped; and ``run``s both in one go, for a ``tau`` that is
chosen by the norm maps of the input at hand.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import pad

import spamm_torch


@dataclass(frozen=True)
class ImageMajor:
    """The paper's: an explicit im2col matrix, image after image, K as (ci, kh, kw)."""

    label: str
    block: int

    def module(self, conv, tau):
        return Im2colConv2d(conv, lambda a, b: spamm_torch.mm(a, b, tau=tau, block=self.block))

    def norm_maps(self, conv, x):
        return self._norms(*im2col_operands(conv, x))

    def run(self, conv, x, choose_tau):
        def product(a, b):
            norm_a, norm_b = self._norms(a, b)
            tau = choose_tau(norm_a, norm_b)
            return spamm_torch.mm(a, b, tau=tau, block=self.block, norm_a=norm_a, norm_b=norm_b)

        return Im2colConv2d(conv, product)(x)

    def _norms(self, a, b):
        return spamm_torch.norm_map(a, self.block), spamm_torch.norm_map(b, self.block)


@dataclass(frozen=True)
class PixelBlocks:
    """This library's: pixel blocks of (images, rows, columns), K as (kh, kw, ci)."""

    label: str
    block: int
    pixel_block: tuple[int, int, int]

    def module(self, conv, tau):
        return spamm_torch.SpAMMConv2d.from_dense(
            conv, tau=tau, block=self.block, pixel_block=self.pixel_block
        )

    def norm_maps(self, conv, x):
        norm_a = torch.ops.spamm_torch.conv2d_weight_norm(
            conv.weight, block=(self.block,) * 3, pixel_block=self.pixel_block
        )
        return norm_a[0], _input_norms(conv, x, self.block, self.pixel_block)

    def run(self, conv, x, choose_tau):
        return self.module(conv, choose_tau(*self.norm_maps(conv, x)))(x)


LAYOUTS = (
    ImageMajor("paper", 32),
    PixelBlocks("image by image", 64, (1, 8, 8)),
    PixelBlocks("by position", 64, (64, 1, 1)),
)


class Im2colConv2d(nn.Module):
    """A convolution as one product of its weight with an explicit im2col matrix.

    Args:
        conv: 3x3, stride 1, padding 1, one group.
        product: what multiplies, torch.mm or another.
    """

    def __init__(self, conv, product):
        super().__init__()
        self.conv, self.product = conv, product

    def forward(self, x):
        out = self.product(*im2col_operands(self.conv, x)).add_(self.conv.bias[:, None])
        return out.unflatten(1, (x.shape[0], *x.shape[2:])).transpose(0, 1)


def im2col_operands(conv, x):
    """Weights (Co, Ci * 9) and im2col matrix (Ci * 9, images * H * W), K as in torch's unfold."""
    windows = _windows(conv, x.transpose(0, 1).contiguous())  # (Ci, images, H, W, kh, kw)
    return conv.weight.flatten(1), windows.permute(0, 4, 5, 1, 2, 3).flatten(3).flatten(0, 2)


def _windows(conv, x):
    """(..., H, W) -> (..., H, W, 3, 3): what the kernel sees at each position, zeros around."""
    assert conv.kernel_size == (3, 3)
    assert conv.padding == conv.stride == conv.dilation == (1, 1)
    return pad(x, (1, 1, 1, 1)).unfold(-2, 3, 1).unfold(-2, 3, 1)


def _input_norms(conv, x, block_k, pixel_block):
    """The skip norms of a convolution's input, as documented for spamm_torch.conv2d.

    A block of the im2col matrix is one (kh, kw), block_k channels and a box of pixels. Its squared
    norm is a sum over shifted energies, so no im2col matrix is needed. Boxes that stick out of the
    grid are tested by norm * sqrt(n / pixels inside).

    Returns:
        (9 * ceil(Ci / block_k), number of boxes) norms.
    """
    channels = pad(x.float().square(), (0, 0, 0, 0, 0, -x.shape[1] % block_k))
    energy = channels.unflatten(1, (-1, block_k)).sum(2)  # (images, channel blocks, H, W)
    windows = _windows(conv, energy).permute(4, 5, 1, 0, 2, 3).flatten(0, 2)
    inside = _box_sums(torch.ones_like(windows[:1]), pixel_block)
    fullness = pixel_block[0] * pixel_block[1] * pixel_block[2] / inside
    return _box_sums(windows, pixel_block).sqrt() * fullness.sqrt()


def _box_sums(values, box):
    """Sums over boxes: (K, images, H, W) -> (K, number of boxes), boxes in row-major order."""
    for dim, edge in enumerate(box, start=1):
        missing = -values.shape[dim] % edge
        values = pad(values, (0, 0) * (values.dim() - 1 - dim) + (0, missing))
        values = values.unflatten(dim, (-1, edge)).sum(dim + 1)
    return values.flatten(1)
