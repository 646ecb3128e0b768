"""Formulas for ``torch.utils.flop_counter.FlopCounterMode``.

They count the dense product, two operations for each multiply and add: the device alone knows how
much of it is skipped. ``SkipInfo.valid_ratio`` tells the share that was computed. Norm maps and
thresholds count nothing, as torch counts nothing but products.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

_ops = torch.ops.spamm_torch
_Shape = Sequence[int]


@register_flop_formula([_ops.spamm, _ops.spamm_with_norms, _ops.spamm_into, _ops.multiply])
def _product(a: _Shape, b: _Shape, *args: Any, **kwargs: Any) -> int:
    return 2 * math.prod(a) * b[-1]


def _convolution(weight: _Shape, output: _Shape) -> int:
    return 2 * math.prod(output) * math.prod(weight[1:])


def _weight(args: tuple[Any, ...], given: dict[str, Any]) -> Any:
    return given["weight"] if "weight" in given else args[1]


@register_flop_formula([_ops.conv2d, _ops.dense_conv2d])
def _conv2d(*args: Any, out_shape: _Shape, **given: Any) -> int:
    return _convolution(_weight(args, given), out_shape)


@register_flop_formula(_ops.conv2d_shards)
def _conv2d_shards(*args: Any, out_shape: Sequence[_Shape], **given: Any) -> int:
    return sum(_convolution(_weight(args, given)[0], output) for output in out_shape)


@register_flop_formula([_ops.conv2d_with_norms, _ops.conv2d_deviation])
def _conv2d_with_norms(*args: Any, out_shape: Sequence[_Shape], **given: Any) -> int:
    return _convolution(_weight(args, given), out_shape[0])


@register_flop_formula(_ops.conv2d_max_pool)
def _conv2d_max_pool(
    input: _Shape,
    weight: _Shape,
    bias: _Shape | None = None,
    stride: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    groups: int = 1,
    **kwargs: Any,
) -> int:
    geometry = (stride, padding, dilation, groups)
    output = torch.nn.functional.conv2d(_meta(input), _meta(weight), None, *geometry)
    return _convolution(weight, output.shape)


def _meta(shape: _Shape | None) -> Any:
    return None if shape is None else torch.empty(shape, device="meta")
