"""Convolutions of deviations as other convolutions, which waste less of the kernels' blocks.

The kernels that skip work in blocks of 64 channels. Two layouts make such blocks of fewer channels.
Both sum the same products, so that the results differ by rounding alone.

Columns together: memory (images, rows, columns, channels) is also that of pictures with 1 / f of
the columns and f times the channels, for which nothing is copied. A convolution there has a weight
that holds the original one f times, shifted, and zeros elsewhere. Blocks of zeros are skipped by
their norms.

In phases: behind nearest upsampling by 2 each pixel is read several times, by weights that may as
well be added before. A 3 x 3 convolution of the upsampled picture is four convolutions with at most
2 x 2 weights of the picture before, one for each of the 2 x 2 pixels that come from one. They are
one convolution with four times the output channels, and zeros in its weight (Shi et al., "Is the
deconvolution layer the same as a convolutional layer?", 2016).
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..networks.config import SpAMMConfig, lossless
from ..networks.plan import Plan, Site

_ops = torch.ops.spamm_torch

BLOCK = 64  # channels that share a norm
ALIGNED = 8  # channels of half types are read and written in these
_MOST_COLUMNS = 8
_FEW_CHANNELS = 32  # at most so many fill half a block

# By the columns that are together: about square in pixels.
_PIXEL_BLOCKS = {1: (1, 8, 8), 2: (1, 8, 8), 4: (1, 16, 4), 8: (1, 16, 4)}


@dataclass(frozen=True)
class Layout:
    """How a convolution is computed: with neighbouring columns together, or in phases, from the
    image before upsampling by 2. ``parts``: the channels of the parts that it takes, if several,
    each with its columns together.
    """

    columns: int = 1
    in_phases: bool = False
    parts: tuple[int, ...] = ()

    def weight(self, conv: nn.Conv2d, weight: Tensor) -> Tensor:
        """The weight in this layout, channels-last."""
        if self.in_phases:
            weight = _weight_in_phases(weight)
        else:
            of_parts = weight.split(list(self.parts), 1) if self.parts else (weight,)
            made = [_weight_of_columns(part, self.columns, conv.dilation[1]) for part in of_parts]
            weight = torch.cat(made, 1)
        return weight.contiguous(memory_format=torch.channels_last)

    def image(self, image: Tensor) -> Tensor:
        """An output (N, C, H, W) in this layout."""
        return in_phases(image) if self.in_phases else columns_together(image, self.columns)

    def geometry(self, conv: nn.Conv2d) -> tuple[Any, ...]:
        """Stride, padding, dilation and groups."""
        (rows, _), (above, beside), (down, _) = conv.stride, _padding(conv), conv.dilation
        factor = 2 if self.in_phases else self.columns
        along_rows = (-(-above // 2), 1) if self.in_phases else (above, down)
        padding = [along_rows[0], -(-beside // factor)]
        return ([rows, 1], padding, [along_rows[1], 1], 1)

    def options(self) -> dict[str, Any]:
        """The blocks, as keyword arguments of the ops."""
        return {"pixel_block": list(_PIXEL_BLOCKS[self.columns])}

    def operands(self, conv: nn.Conv2d, weight: Tensor, base: Tensor) -> list[Tensor | None]:
        """Weight, base and weight norms of a call, from the weight and base of the original."""
        own = self.weight(conv, weight)
        return [own, self.image(base), _ops.conv2d_weight_norm(own, 1, **self.options())]


def find_layout(
    conv: nn.Conv2d, setting: SpAMMConfig | None, width: int, *, is_doubled: bool
) -> Layout | None:
    """The layout to compute a convolution in, if zeros alone are skipped; None: as it is."""
    if setting != lossless(conv.weight.dtype) or conv.groups > 1 or not _keeps_width(conv):
        return None
    if is_doubled and _can_be_in_phases(conv):
        return Layout(in_phases=True)
    columns = _columns_of(conv)
    return Layout(columns) if columns > 1 and width > 0 and width % columns == 0 else None


def _keeps_width(conv: nn.Conv2d) -> bool:
    if isinstance(conv.padding, str) or conv.padding_mode != "zeros":
        return False
    reach = conv.dilation[1] * (conv.kernel_size[1] - 1)
    return conv.stride[1] == 1 and 2 * conv.padding[1] == reach


def _can_be_in_phases(conv: nn.Conv2d) -> bool:
    return (
        conv.stride[0] == 1
        and conv.dilation == (1, 1)
        and 2 * _padding(conv)[0] == conv.kernel_size[0] - 1
        and conv.in_channels % ALIGNED == 0
        and conv.out_channels % ALIGNED == 0
    )


def _columns_of(conv: nn.Conv2d) -> int:
    """How many columns fill blocks of output channels and whole chunks of memory."""
    read, written = conv.in_channels, conv.out_channels
    if written > _FEW_CHANNELS and read % ALIGNED == 0:
        return 1
    columns = 1
    while columns < _MOST_COLUMNS and (
        columns * written < BLOCK or columns * read % ALIGNED or columns * written % ALIGNED
    ):
        columns *= 2
    return 1 if columns * read % ALIGNED or columns * written % ALIGNED else columns


def _padding(conv: nn.Conv2d) -> tuple[int, int]:
    assert not isinstance(conv.padding, str)
    return conv.padding[0], conv.padding[1]


def columns_of_phases(channels: int) -> int:
    """The number of columns that each norm covers behind a convolution in phases."""
    return 2 if 2 * channels == BLOCK else 1


def one_for_each(image: Tensor, images: Tensor) -> Tensor:
    """One image as one for each of a batch, all in the same memory."""
    return image.expand(images.shape[0], -1, -1, -1)


def columns_together(images: Tensor, factor: int) -> Tensor:
    """Images (N, C, H, W) as (N, factor * C, H, W / factor): a view of channels-last memory."""
    channels, width = images.shape[1] * factor, images.shape[3] // factor
    return _regrouped(images, channels, width)


def columns_apart(images: Tensor, factor: int) -> Tensor:
    """Undoes :func:`columns_together`."""
    return _regrouped(images, images.shape[1] // factor, images.shape[3] * factor)


def _regrouped(images: Tensor, channels: int, width: int) -> Tensor:
    images = images.contiguous(memory_format=torch.channels_last)
    line, rows = channels * width, images.shape[2]
    return images.as_strided(
        (images.shape[0], channels, rows, width), (rows * line, 1, line, channels)
    )


def _weight_of_columns(weight: Tensor, factor: int, dilation: int) -> Tensor:
    """The weight (factor * outputs, factor * inputs, ...): each own column reads its neighbours."""
    outputs, inputs, rows, columns = weight.shape
    padding = dilation * (columns - 1) // 2
    most = -(-padding // factor)  # groups to either side
    made = weight.new_zeros(factor, outputs, factor, inputs, rows, 2 * most + 1)
    for own, column in itertools.product(range(factor), range(columns)):
        group, place = divmod(own + column * dilation - padding, factor)
        made[own, :, place, :, :, group + most] = weight[..., column]
    return made.flatten(0, 1).flatten(1, 2)


def in_phases(images: Tensor) -> Tensor:
    """Images (N, C, H, W) as (N, 4 * C, H / 2, W / 2), channels [row][column][C]; a copy."""
    count, channels, rows, columns = images.shape
    split = images.view(count, channels, rows // 2, 2, columns // 2, 2).permute(0, 3, 5, 1, 2, 4)
    joined = split.reshape(count, 4 * channels, rows // 2, columns // 2)
    return joined.contiguous(memory_format=torch.channels_last)


def _weight_in_phases(weight: Tensor) -> Tensor:
    """(4 * outputs, inputs, rows, columns) for the picture before upsampling by 2, rounded once."""
    outputs, inputs, rows, columns = weight.shape
    above, beside = rows // 2, columns // 2
    most = (-(-above // 2), -(-beside // 2))
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
    made = wide.new_zeros(2, 2, outputs, inputs, 2 * most[0] + 1, 2 * most[1] + 1)
    for row, column in itertools.product(range(2), repeat=2):
        for y, x in itertools.product(range(rows), range(columns)):
            to_y, to_x = (row + y - above) // 2 + most[0], (column + x - beside) // 2 + most[1]
            made[row, column, :, :, to_y, to_x] += wide[:, :, y, x]
    return made.flatten(0, 2).to(weight.dtype)


# ---- Plans, and nodes that this form alone looks at ----------------------------------------------


# They have no weights: they take deviations as they are.
LINEAR_MODULES = (
    *(nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.Upsample, nn.UpsamplingNearest2d),
    *(nn.UpsamplingBilinear2d, nn.Identity, nn.Dropout, nn.Dropout2d, nn.PixelShuffle),
)


@dataclass
class ReferencePlan(Plan):
    """A plan of deviations; ``reference``: the island's arguments for the reference picture."""

    reference: tuple[Tensor, ...]

    def _pays(self, site: Site) -> bool:
        return self.engines[site.name].kind != "left"

    def _replaces(self, module: nn.Module) -> bool:
        return type(module) in LINEAR_MODULES  # the result for the reference is held


_CONCATENATIONS = (torch.cat, torch.concat, torch.concatenate)


def concatenated(node: fx.Node) -> tuple[Sequence[Any], Any] | None:
    """The parts that a node concatenates, and the dimension; None for other nodes."""
    if node.op != "call_function" or node.target not in _CONCATENATIONS or not node.args:
        return None
    parts = node.args[0]
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    return (parts, dim) if isinstance(parts, (list, tuple)) else None


def concatenated_channels(node: fx.Node) -> Sequence[Any] | None:
    """The parts of a concatenation of channels; None for other nodes."""
    joined = concatenated(node)
    return joined[0] if joined is not None and joined[1] == 1 else None


def looks_at_shape(node: fx.Node) -> bool:
    """Whether a node asks a value for its shape, dtype or device alone."""
    if node.op == "call_method":
        return node.target in ("size", "dim")
    looks = node.op == "call_function" and node.target is getattr
    return looks and node.args[1] in ("shape", "dtype", "device", "ndim")
