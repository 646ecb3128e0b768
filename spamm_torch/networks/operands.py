"""The operands of a fused call, made of a convolution's tensors: weight, bias, and the weight's
norms or its packed copy.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch._prims_common import suggest_memory_format
from torch.nn.utils.fusion import fuse_conv_bn_weights

from .._arguments import DTYPES, norm_dtype
from .._info import default_pixel_block
from .config import Engine, SpAMMConfig, lossless

_ops = torch.ops.spamm_torch

_PIXELS = 64  # of a block of joined groups
_MOST_BYTES = 1 << 28  # of a joined weight

T = TypeVar("T")
# Tensors made of others that have not changed since: forms of one model share them.
Made: TypeAlias = dict[Any, Any]


@dataclass(frozen=True, eq=False)
class Source:
    """Where operands of a fused call come from; ``packs``: dense ones may have a packed copy."""

    conv: nn.Conv2d
    batch_norm: nn.Module | None
    engine: Engine
    input_shape: tuple[int, ...] | None
    packs: bool

    @property
    def is_owned(self) -> tuple[bool, bool, bool]:
        """Which operands have memory that may be written; others are Parameters, or packed."""
        is_folded, of_op = self.batch_norm is not None, self.engine.of_op is not None
        return is_folded or self.engine.joined is not None, is_folded, of_op

    @property
    def can_be_read(self) -> bool:
        """Whether the ops take the weight, and a change of the batch norm's statistics shows."""
        weight, batch_norm = self.conv.weight, self.batch_norm
        if weight is None or (batch_norm is not None and not _keeps_statistics(batch_norm)):
            return False
        return weight.device.type in ("cpu", "cuda", "meta") and weight.dtype in DTYPES

    def operands(self, made: Made) -> list[Tensor | None]:
        """The operands for the values that the tensors have now; ``made`` is filled with them. The
        op conv2d reads weights on CUDA as channels-last, and would copy others in each call.
        """

        def once(key: tuple[Any, ...], make: Callable[[], T]) -> T:
            key = (self.conv, self.batch_norm, *key)
            if key not in made:
                made[key] = make()
            found: T = made[key]
            return found

        setting, joined = self.engine.of_op, self.engine.joined is not None
        of_op = setting is not None and self.conv.weight.is_cuda

        def weight_read() -> Tensor:
            weight = bare
            if joined:
                weight = joined_weight(weight, self.conv.groups)
            return weight.contiguous(memory_format=torch.channels_last) if of_op else weight

        bare, bias = once((), lambda: folded(self.conv, self.batch_norm))
        weight = once((joined, of_op), weight_read)
        norms = None
        if setting is not None:  # where nothing is skipped they tell what meets padding alone
            options = setting.op_arguments()
            blocks = {name: options.get(name) for name in ("block", "pixel_block")}
            groups = 1 if joined else self.conv.groups
            # A layer skips by its own weight, folded or not: a held tau belongs to that.
            is_own = not joined and not setting.skips_nothing
            source = self.conv.weight.detach() if is_own else weight
            norms = once(
                (joined, is_own, *blocks.values()),
                lambda: _ops.conv2d_weight_norm(source, groups, **blocks),
            )
        elif self.packs:
            norms = once((self.input_shape,), lambda: packed(self.conv, weight, self.input_shape))
        return [weight, bias, norms]


def _keeps_statistics(batch_norm: Any) -> bool:
    """Whether a batch norm computes with running statistics, and counts what changes them."""
    counts = "num_batches_tracked" in batch_norm._buffers
    return (
        batch_norm.running_mean is not None
        and batch_norm.running_var is not None
        and (not counts or batch_norm.num_batches_tracked is not None)
    )


def folded(conv: nn.Conv2d, batch_norm: Any) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of the convolution that computes both, the batch norm in eval mode, in the
    weight's format, rounded once from float32 (float64 for float64). Without one these are the
    Parameters' own memory. Source: ``torch.nn.utils.fusion``.
    """
    weight, bias = conv.weight.detach(), None if conv.bias is None else conv.bias.detach()
    if batch_norm is None:
        return weight, bias
    operands: list[Any] = [  # torch's own annotations know no missing statistics
        None if tensor is None else tensor.detach().to(norm_dtype(weight.dtype))
        for tensor in (
            *(weight, bias, batch_norm.running_mean, batch_norm.running_var),
            *(batch_norm.weight, batch_norm.bias),
        )
    ]
    weight_, bias_, mean, variance, scale, shift = operands
    both = fuse_conv_bn_weights(weight_, bias_, mean, variance, batch_norm.eps, scale, shift)
    new_weight, new_bias = (tensor.detach().to(weight.dtype) for tensor in both)
    return new_weight, new_bias


def packed(conv: nn.Conv2d, weight: Tensor, input_shape: Any) -> Tensor | None:
    """A copy of a weight in the layout of oneDNN, which the op ``dense_conv2d`` takes in its place:
    oneDNN makes one in each call of another. None for other weights than channels-last float32 on a
    CPU, whose results would change their format. ``input_shape``: for which it is best.
    """
    is_last = suggest_memory_format(weight) == torch.channels_last
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or not is_last:
        return None
    if weight.numel() == 0 or not torch._C._has_mkldnn or not torch._C._get_mkldnn_enabled():
        return None
    geometry: Any = (conv.padding, conv.stride, conv.dilation, conv.groups)
    made: Tensor = torch.ops.mkldnn._reorder_convolution_weight(weight, *geometry, input_shape)
    return made


# ---- Joined groups ------------------------------------------------------------------------------
# cuDNN computes groups of few channels slowly, and converts channels-last tensors for them. The op
# conv2d multiplies the whole weight matrix and skips the blocks of zeros between the groups. Inside
# a block that is not zero a group also meets channels of its neighbours, with weights of zero:
# finite values add nothing, but NaN and infinities of one group reach those of the same block as
# NaN.


def joined_setting(conv: nn.Conv2d, images: int) -> SpAMMConfig | None:
    """The setting for batches of so many images, which loses nothing for others; None where groups
    stay apart: depthwise ones, whose blocks would be nearly empty, and weights of more than 256
    MiB. 0 images: no batch was seen.
    """
    joined_bytes = conv.weight.numel() * conv.groups * conv.weight.element_size()
    if images == 0 or conv.in_channels == conv.groups or joined_bytes > _MOST_BYTES:
        return None
    pixel_block = default_pixel_block(False, images, _PIXELS)
    return replace(lossless(conv.weight.dtype), pixel_block=pixel_block)


def joined_weight(weight: Tensor, groups: int) -> Tensor:
    """The weight (Co, Ci, kh, kw) of one group, from that of all, (Co, Ci / groups, kh, kw)."""
    rows, inner = weight.shape[0] // groups, weight.shape[1]
    joined = weight.new_zeros(groups, rows, groups, inner, *weight.shape[2:])
    joined.diagonal(dim1=0, dim2=2).copy_(weight.unflatten(0, (groups, rows)).movedim(0, -1))
    return joined.flatten(2, 3).flatten(0, 1)
