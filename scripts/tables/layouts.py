"""The three ways in which the study cuts a convolution into blocks."""

from functools import partial
from typing import NamedTuple

import torch
from torch.nn.functional import pad

import spamm_torch


class Layout(NamedTuple):
    """Blocks of an explicit im2col matrix, or pixel blocks of (images, rows, columns)."""

    label: str
    block: int
    pixel_block: tuple[int, int, int] | None = None

    def run(self, conv, x, **knob):
        """A convolution by SpAMM: ``knob`` is tau or valid_ratio."""
        setting = {"block": self.block} | knob
        if self.pixel_block is None:
            return im2col_conv(conv, x, partial(spamm_torch.mm, **setting))
        setting |= {"padding": 1, "pixel_block": self.pixel_block}
        return spamm_torch.conv2d(x, conv.weight, conv.bias, **setting)

    def held(self, conv, x, ratio):
        """The convolution at a valid ratio, and its SkipInfo."""
        if self.pixel_block is not None:
            return self.run(conv, x, valid_ratio=ratio, return_info=True)
        infos = []

        def product(a, b):
            c, info = spamm_torch.mm(a, b, valid_ratio=ratio, block=self.block, return_info=True)
            infos.append(info)
            return c

        return im2col_conv(conv, x, product), infos[0]


# The paper's: image after image, K as (ci, kh, kw). This library's: K as (kh, kw, ci).
LAYOUTS = (
    Layout("paper", 32),
    Layout("image by image", 64, (1, 8, 8)),
    Layout("by position", 64, (64, 1, 1)),
)


def im2col_conv(conv, x, product=torch.mm):
    """A 3 x 3 convolution as one product of its weight with an explicit im2col matrix."""
    out = product(*im2col_operands(conv, x)).add_(conv.bias[:, None])
    return out.unflatten(1, (x.shape[0], *x.shape[2:])).transpose(0, 1)


def im2col_operands(conv, x):
    """Weights (Co, Ci * 9) and im2col matrix (Ci * 9, images * H * W), K as in torch's unfold."""
    assert conv.kernel_size == (3, 3)
    assert conv.padding == conv.stride == conv.dilation == (1, 1)
    x = pad(x.transpose(0, 1).contiguous(), (1, 1, 1, 1))
    windows = x.unfold(-2, 3, 1).unfold(-2, 3, 1)  # (Ci, images, H, W, kh, kw)
    return conv.weight.flatten(1), windows.permute(0, 4, 5, 1, 2, 3).flatten(3).flatten(0, 2)
