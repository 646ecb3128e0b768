"""Fake kernels: shapes and dtypes of every op, for FakeTensor, torch.compile and export.

They refuse what the kernels refuse, as far as shapes, types, devices and numbers tell, so that a
mistake surfaces while tracing and not in a result of the wrong shape. The rules of knobs and blocks
are those of _arguments.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.library import register_fake

from ._arguments import (
    ACTIVATIONS,
    check_block,
    check_block_pair,
    check_knobs,
    check_max_error,
    check_search,
    check_tau,
    conv_block,
    dtype_name,
)
from ._info import default_pixel_block
from .chain import CONVOLUTION, MAX_ERROR, MAX_POOL, TAU, VALID_RATIO


def _norm_dtype(operand: Tensor) -> torch.dtype:
    return torch.float64 if operand.dtype == torch.float64 else torch.float32


def _blocks(length: int, edge: int) -> int:
    return (length + edge - 1) // edge


def _check_operand_dtype(operand: Tensor, name: str) -> None:
    torch._check_type(
        operand.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64),
        lambda: (
            f"{name} must be float16, bfloat16, float32 or float64; got {dtype_name(operand.dtype)}"
        ),
    )


def _check_dtype(x: Tensor, dtype: torch.dtype, name: str) -> None:
    torch._check_type(
        x.dtype == dtype, lambda: f"{name} must be {dtype_name(dtype)}; got {dtype_name(x.dtype)}"
    )


def _check_device(x: Tensor, device: torch.device, name: str) -> None:
    torch._check(
        x.device == device, lambda: f"{name} must be on the device {device}; got {x.device}"
    )


def _check_shape(x: Tensor, shape: Sequence[int], name: str) -> None:
    torch._check(
        tuple(x.shape) == tuple(shape),
        lambda: f"{name} must have shape {tuple(shape)}; got {tuple(x.shape)}",
    )


def _check_alike(x: Tensor, y: Tensor, names: str) -> None:
    torch._check_type(
        x.dtype == y.dtype,
        lambda: f"{names} must have one dtype; got {dtype_name(x.dtype)} and {dtype_name(y.dtype)}",
    )
    torch._check(
        x.device == y.device,
        lambda: f"{names} must be on the same device; got {x.device} and {y.device}",
    )


def _check_product(x: Tensor, y: Tensor, names: str, dims: Sequence[int]) -> None:
    """(..., M, K) times (..., K, N)."""
    _check_alike(x, y, names)
    torch._check(
        x.dim() in dims
        and x.dim() == y.dim()
        and x.shape[-1] == y.shape[-2]
        and x.shape[:-2] == y.shape[:-2],
        lambda: (
            f"{names} must be (..., M, K) and (..., K, N); "
            f"got shapes {tuple(x.shape)} and {tuple(y.shape)}"
        ),
    )


def _check_operands(a: Tensor, b: Tensor, block: Sequence[int]) -> None:
    _check_operand_dtype(a, "a")
    _check_product(a, b, "a and b", (2, 3))
    check_block(block)


def _check_norm_maps(norm_a: Tensor, norm_b: Tensor) -> None:
    torch._check_type(
        norm_a.dtype in (torch.float32, torch.float64),
        lambda: f"norm_a must be float32 or float64; got {dtype_name(norm_a.dtype)}",
    )
    _check_product(norm_a, norm_b, "norm_a and norm_b", range(2, 64))


def _check_norm_map_of(
    norm: Tensor | None, operand: Tensor, block: Sequence[int], name: str
) -> None:
    """A map that the caller gives is what norm_map would give."""
    if norm is None:
        return
    _check_dtype(norm, _norm_dtype(operand), name)
    _check_device(norm, operand.device, name)
    _check_shape(norm, _map_shape(operand, block), name)


def _map_shape(operand: Tensor, block: Sequence[int]) -> tuple[int, ...]:
    rows, columns = _blocks(operand.shape[-2], block[0]), _blocks(operand.shape[-1], block[1])
    return (*operand.shape[:-2], rows, columns)


def _check_skip_norm(skip_norm_b: Tensor | None, norm_b: Tensor) -> None:
    if skip_norm_b is not None:
        _check_alike(skip_norm_b, norm_b, "skip_norm_b and norm_b")
        _check_shape(skip_norm_b, norm_b.shape, "skip_norm_b")


def _check_tau(tau: Tensor, device: torch.device) -> None:
    check_tau(tau)
    torch._check(
        tau.device == device or tau.device.type == "cpu",
        lambda: f"tau must be on the operands' device {device} or on the CPU; got {tau.device}",
    )


def _check_knobs(
    tau: Tensor | None,
    threshold: float | None,
    valid_ratio: float | None,
    max_error: float | None,
    device: torch.device,
) -> None:
    _check_one_knob(tau, threshold, valid_ratio, max_error)
    if tau is not None:
        _check_tau(tau, device)


def _check_one_knob(
    tau: Tensor | None,
    threshold: float | None,
    valid_ratio: float | None,
    max_error: float | None,
) -> None:
    torch._check_value(
        tau is None or threshold is None,
        lambda: "tau and threshold must not both be given; got both",
    )
    check_knobs(threshold if tau is None else tau, valid_ratio, max_error)


def _product(
    a: Tensor,
    b: Tensor,
    block: Sequence[int],
    norm_a: Tensor | None,
    norm_b: Tensor | None,
    input: Tensor | None,
) -> Tensor:
    """The result of a product of checked operands."""
    _check_norm_map_of(norm_a, a, block[:2], "norm_a")
    _check_norm_map_of(norm_b, b, block[1:], "norm_b")
    shape = (*a.shape[:-1], b.shape[-1])
    if input is not None:
        _check_alike(input, a, "input and the operands")
        torch._check(
            input.dim() <= len(shape)
            and all(
                given in (1, wanted)
                for given, wanted in zip(input.shape[::-1], shape[::-1], strict=False)
            ),
            lambda: f"input must broadcast to shape {shape}; got shape {tuple(input.shape)}",
        )
    return a.new_empty(shape)


@register_fake("spamm_torch::norm_map")
def _(a: Tensor, block: Sequence[int]) -> Tensor:
    _check_operand_dtype(a, "a")
    torch._check(
        a.dim() >= 2, lambda: f"a must be (..., rows, columns); got shape {tuple(a.shape)}"
    )
    check_block_pair(block)
    return a.new_empty(_map_shape(a, block), dtype=_norm_dtype(a))


@register_fake("spamm_torch::norm_maps")
def _(a: Tensor, b: Tensor, block: Sequence[int]) -> tuple[Tensor, Tensor]:
    m, k, n = block
    norm_map = torch.ops.spamm_torch.norm_map
    return norm_map(a, (m, k)), norm_map(b, (k, n))


@register_fake("spamm_torch::find_tau")
def _(
    norm_a: Tensor,
    norm_b: Tensor,
    valid_ratio: float,
    max_iterations: int = 20,
    tolerance: float = 0.01,
) -> Tensor:
    _check_norm_maps(norm_a, norm_b)
    check_search(valid_ratio, max_iterations, tolerance)
    return norm_a.new_empty(())


@register_fake("spamm_torch::find_tau_for_error")
def _(
    norm_a: Tensor, norm_b: Tensor, max_error: float, skip_norm_b: Tensor | None = None
) -> Tensor:
    _check_norm_maps(norm_a, norm_b)
    _check_skip_norm(skip_norm_b, norm_b)
    check_max_error(max_error)
    return norm_a.new_empty(())


@register_fake("spamm_torch::product_histogram")
def _(norm_a: Tensor, norm_b: Tensor, low: Tensor, shift: int, bins: int) -> Tensor:
    _check_norm_maps(norm_a, norm_b)
    most_shift = 52 if norm_a.dtype == torch.float64 else 20
    torch._check_value(1 <= bins <= 2048, lambda: f"bins must be from 1 to 2048; got {bins}")
    torch._check_value(
        0 <= shift <= most_shift, lambda: f"shift must be from 0 to {most_shift}; got {shift}"
    )
    _check_dtype(low, torch.int64, "low")
    _check_shape(low, (), "low")
    _check_device(low, norm_a.device, "low")
    return norm_a.new_empty((bins + 1,), dtype=torch.int64)


@register_fake("spamm_torch::valid_counts")
def _(norm_a: Tensor, norm_b: Tensor, tau: Tensor) -> Tensor:
    _check_norm_maps(norm_a, norm_b)
    _check_tau(tau, norm_a.device)
    return norm_a.new_empty((*norm_a.shape[:-1], norm_b.shape[-1]), dtype=torch.int32)


@register_fake("spamm_torch::valid_ratio")
def _(norm_a: Tensor, norm_b: Tensor, tau: Tensor) -> Tensor:
    _check_norm_maps(norm_a, norm_b)
    _check_tau(tau, norm_a.device)
    return norm_a.new_empty(())


@register_fake("spamm_torch::error_bound")
def _(norm_a: Tensor, norm_b: Tensor, tau: Tensor, skip_norm_b: Tensor | None = None) -> Tensor:
    _check_norm_maps(norm_a, norm_b)
    _check_skip_norm(skip_norm_b, norm_b)
    _check_tau(tau, norm_a.device)
    return norm_a.new_empty(())


def _check_matrix_maps(norm_a: Tensor, norm_b: Tensor, tau: Tensor) -> None:
    """The norm maps of one product of matrices, without batches, and a threshold."""
    _check_norm_maps(norm_a, norm_b)
    torch._check(
        norm_a.dim() == 2,
        lambda: (
            "norm maps must be 2-d: (MB, KB) and (KB, NB); "
            f"got shapes {tuple(norm_a.shape)} and {tuple(norm_b.shape)}"
        ),
    )
    _check_tau(tau, norm_a.device)


@register_fake("spamm_torch::needed_units")
def _(largest_a: Tensor, norm_b: Tensor, tau: Tensor, stage_blocks: int) -> Tensor:
    _check_matrix_maps(largest_a, norm_b, tau)
    torch._check_value(
        stage_blocks > 0, lambda: f"stage_blocks must be positive; got {stage_blocks}"
    )
    stages = _blocks(norm_b.shape[1], stage_blocks)
    return norm_b.new_empty((*largest_a.shape, stages), dtype=torch.bool)


@register_fake("spamm_torch::row_work")
def _(norm_a: Tensor, norm_b: Tensor, tau: Tensor) -> Tensor:
    _check_matrix_maps(norm_a, norm_b, tau)
    return norm_a.new_empty(norm_a.shape[:1], dtype=torch.int64)


@register_fake("spamm_torch::row_cuts")
def _(norm_a: Tensor, norm_b: Tensor, tau: Tensor, parts: int, multiple: int) -> list[int]:
    """Cuts are numbers that depend on norms: a graph without data cannot have them."""
    raise DataDependentOutputException(torch.ops.spamm_torch.row_cuts.default)


@register_fake("spamm_torch::multiply")
def _(
    a: Tensor,
    b: Tensor,
    norm_a: Tensor,
    norm_b: Tensor,
    tau: Tensor,
    block: Sequence[int],
    input: Tensor | None = None,
    beta: float = 1,
    alpha: float = 1,
    whole: Sequence[int] | None = None,
) -> Tensor:
    _check_operands(a, b, block)
    _check_tau(tau, a.device)
    return _product(a, b, block, norm_a, norm_b, input)


@register_fake("spamm_torch::multiply_part")
def _(
    a: Tensor,
    b: Tensor,
    norm_a: Tensor,
    norm_b: Tensor,
    tau: Tensor,
    block: Sequence[int],
    out: Tensor,
    whole: Sequence[int],
    own_rows: Tensor | None = None,
    first_own_row: int = 0,
) -> None:
    _check_operands(a, b, block)
    _check_tau(tau, a.device)
    _check_dtype(out, a.dtype, "out")
    _check_device(out, a.device, "out")
    _check_shape(out, _product(a, b, block, norm_a, norm_b, None).shape, "out")


def _check_symmetric(a: Tensor, b: Tensor, block: Sequence[int], input: Tensor | None) -> None:
    rows = a.shape[-2]
    torch._check(
        rows == b.shape[-1],
        lambda: (
            f"a symmetric product must be square; got shapes {tuple(a.shape)}, {tuple(b.shape)}"
        ),
    )
    torch._check_value(
        block[0] == block[2],
        lambda: f"block must have m equal to n for a symmetric product; got {tuple(block)}",
    )
    torch._check(
        input is None or input.numel() == 1 or tuple(input.shape[-2:]) == (rows, rows),
        lambda: (
            f"input must be a square matrix of {rows} rows for a symmetric product; got shape "
            f"{tuple(input.shape) if input is not None else None}"
        ),
    )


def _check_into(out: Tensor, product: Tensor, block: Sequence[int], norms: Tensor | None) -> None:
    """``out`` takes the product, and ``norms`` its norm map."""
    _check_dtype(out, product.dtype, "out")
    _check_device(out, product.device, "out")
    _check_shape(out, product.shape, "out")
    _check_norm_map_of(norms, out, block[::2], "norms")


@register_fake("spamm_torch::multiply_into")
def _(
    a: Tensor,
    b: Tensor,
    norm_a: Tensor,
    norm_b: Tensor,
    tau: Tensor,
    block: Sequence[int],
    out: Tensor,
    input: Tensor | None = None,
    beta: float = 1,
    alpha: float = 1,
    symmetric: bool = False,
    norms: Tensor | None = None,
) -> None:
    _check_operands(a, b, block)
    _check_tau(tau, a.device)
    if symmetric:
        _check_symmetric(a, b, block, input)
    _check_into(out, _product(a, b, block, norm_a, norm_b, input), block, norms)


@register_fake("spamm_torch::spamm")
def _fake_spamm(
    a: Tensor,
    b: Tensor,
    tau: Tensor | None = None,
    threshold: float | None = None,
    valid_ratio: float | None = None,
    max_error: float | None = None,
    block: Sequence[int] = (64, 64, 64),
    norm_a: Tensor | None = None,
    norm_b: Tensor | None = None,
    input: Tensor | None = None,
    beta: float = 1,
    alpha: float = 1,
    devices: Sequence[int] | None = None,
    symmetric: bool = False,
) -> Tensor:
    _check_operands(a, b, block)
    _check_knobs(tau, threshold, valid_ratio, max_error, a.device)
    if symmetric:
        _check_symmetric(a, b, block, input)
    return _product(a, b, block, norm_a, norm_b, input)


@register_fake("spamm_torch::spamm_with_norms")
def _(
    a: Tensor, b: Tensor, *, block: Sequence[int] = (64, 64, 64), **options: Any
) -> tuple[Tensor, Tensor]:
    product = _fake_spamm(a, b, block=block, **options)
    norms = product.new_empty(_map_shape(product, block[::2]), dtype=_norm_dtype(product))
    return product, norms


@register_fake("spamm_torch::spamm_into")
def _(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    *,
    block: Sequence[int] = (64, 64, 64),
    norms: Tensor | None = None,
    **options: Any,
) -> None:
    _check_into(out, _fake_spamm(a, b, block=block, **options), block, norms)


@register_fake("spamm_torch::spamm_shards")
def _(
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    tau: Tensor | None = None,
    threshold: float | None = None,
    valid_ratio: float | None = None,
    max_error: float | None = None,
    block: Sequence[int] = (64, 64, 64),
) -> list[Tensor]:
    check_block(block)
    _check_one_knob(tau, threshold, valid_ratio, max_error)
    return [shard.new_empty(shard.shape[0], b[0].shape[1]) for shard in a]


def _check_conv_weight(weight: Tensor, groups: int) -> None:
    _check_operand_dtype(weight, "weight")
    torch._check(
        weight.dim() == 4 and weight.shape[2] > 0 and weight.shape[3] > 0,
        lambda: (
            "weight must be (out_channels, in_channels / groups, height, width) with a kernel of "
            f"at least 1 x 1; got shape {tuple(weight.shape)}"
        ),
    )
    torch._check(
        groups > 0 and weight.shape[0] % groups == 0,
        lambda: (
            "groups must be positive and divide weight's out_channels, "
            f"{weight.shape[0]}; got {groups}"
        ),
    )


def _check_pair(pair: Sequence[int], least: int, name: str) -> tuple[int, int]:
    """One integer for both dimensions or one for each."""
    torch._check(
        len(pair) in (1, 2) and all(least <= number < 2**31 for number in pair),
        lambda: f"{name} must be one or two integers from {least} to {2**31 - 1}; got {pair}",
    )
    return (pair[0], pair[-1])


def _check_conv_operands(input: Tensor, weight: Tensor, bias: Tensor | None, groups: int) -> None:
    torch._check(
        input.dim() in (3, 4),
        lambda: (
            "input must be (images, channels, height, width) or (channels, height, width); got "
            f"shape {tuple(input.shape)}"
        ),
    )
    _check_alike(input, weight, "input and weight")
    channels = weight.shape[1] * groups
    torch._check(
        input.shape[-3] == channels,
        lambda: (
            f"input must have {channels} channels for a weight of shape {tuple(weight.shape)} and "
            f"groups {groups}; got shape {tuple(input.shape)}"
        ),
    )
    if bias is not None:
        _check_alike(bias, weight, "bias and weight")
        _check_shape(bias, weight.shape[:1], "bias")


def _conv_blocks(
    weight: Tensor, groups: int, block: Sequence[int] | None, pixel_block: Sequence[int] | None
) -> tuple[int, int]:
    """The (m, k) of a convolution's blocks."""
    return conv_block(weight.shape[0] // groups, weight.shape[1], block, pixel_block)[:2]


def _weight_map_shape(weight: Tensor, groups: int, blocks: Sequence[int]) -> tuple[int, int, int]:
    """(groups, MB, KB) with each kernel position in blocks of its own."""
    out_channels, in_channels, *kernel = weight.shape
    m, k = blocks
    positions = kernel[0] * kernel[1]
    return (groups, _blocks(out_channels // groups, m), positions * _blocks(in_channels, k))


def _fake_conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    groups: int = 1,
    tau: Tensor | None = None,
    threshold: float | None = None,
    valid_ratio: float | None = None,
    max_error: float | None = None,
    block: Sequence[int] | None = None,
    pixel_block: Sequence[int] | None = None,
    norm_weight: Tensor | None = None,
    norm_input: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str = "none",
    weight_is_ready: bool = False,
) -> Tensor:
    _check_knobs(tau, threshold, valid_ratio, max_error, input.device)
    _check_activation(activation)
    _check_conv_weight(weight, groups)
    _check_conv_operands(input, weight, bias, groups)
    blocks = _conv_blocks(weight, groups, block, pixel_block)
    if norm_weight is not None:
        _check_dtype(norm_weight, _norm_dtype(weight), "norm_weight")
        _check_device(norm_weight, weight.device, "norm_weight")
        _check_shape(norm_weight, _weight_map_shape(weight, groups, blocks), "norm_weight")
    batch = input if input.dim() == 4 else input.unsqueeze(0)
    if norm_input is not None:
        _check_dtype(norm_input, _norm_dtype(input), "norm_input")
        _check_device(norm_input, input.device, "norm_input")
        _check_shape(norm_input, _layer_norms_shape(batch), "norm_input")
    output = _conv_output(batch, weight, stride, padding, dilation)
    return _with_residual(output if input.dim() == 4 else output.squeeze(0), residual)


def _conv_output(
    batch: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """The output of a convolution of a batch, channels last if the batch or the weight is."""
    stride = _check_pair(stride, 1, "stride")
    padding = _check_pair(padding, 0, "padding")
    dilation = _check_pair(dilation, 1, "dilation")
    windows = [d * (kernel - 1) + 1 for d, kernel in zip(dilation, weight.shape[2:], strict=True)]
    padded = [size + 2 * p for size, p in zip(batch.shape[2:], padding, strict=True)]
    torch._check(
        windows[0] <= padded[0] and windows[1] <= padded[1],
        lambda: (
            f"the dilated kernel, {windows[0]} x {windows[1]}, must fit into the padded input; got "
            f"{padded[0]} x {padded[1]}"
        ),
    )
    sides = [(p - w) // s + 1 for p, w, s in zip(padded, windows, stride, strict=True)]
    channels_last = torch.channels_last in map(suggest_memory_format, (batch, weight))
    return torch.empty(
        (batch.shape[0], weight.shape[0], *sides),
        dtype=batch.dtype,
        device=batch.device,
        memory_format=torch.channels_last if channels_last else torch.contiguous_format,
    )


def _with_residual(output: Tensor, residual: Tensor | None) -> Tensor:
    """The output, if a residual can be added to it."""
    if residual is not None:
        _check_dtype(residual, output.dtype, "residual")
        _check_device(residual, output.device, "residual")
        _check_shape(residual, output.shape, "residual")
    return output


def _check_activation(activation: str) -> None:
    torch._check_value(
        activation in ACTIVATIONS,
        lambda: f"activation must be one of {', '.join(ACTIVATIONS)}; got {activation!r}",
    )


register_fake("spamm_torch::conv2d")(_fake_conv2d)


@register_fake("spamm_torch::dense_conv2d")
def _(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    groups: int = 1,
    residual: Tensor | None = None,
    activation: str = "none",
) -> Tensor:
    _check_activation(activation)
    _check_conv_weight(weight, groups)
    _check_conv_operands(input, weight, bias, groups)
    batch = input if input.dim() == 4 else input.unsqueeze(0)
    output = _conv_output(batch, weight, stride, padding, dilation)
    return _with_residual(output if input.dim() == 4 else output.squeeze(0), residual)


def _fake_deviation(
    input: Tensor,
    weight: Tensor,
    base: Tensor,
    stride: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    groups: int = 1,
    threshold: float | None = None,
    valid_ratio: float | None = None,
    max_error: float | None = None,
    block: Sequence[int] | None = None,
    pixel_block: Sequence[int] | None = None,
    norm_weight: Tensor | None = None,
    norm_input: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str = "none",
) -> Tensor:
    torch._check(
        input.dim() == 4,
        lambda: f"input must be (images, channels, height, width); got shape {input.shape}",
    )
    is_dense = threshold is None and valid_ratio is None and max_error is None
    output = _fake_conv2d(
        *(input, weight, None, stride, padding, dilation, groups, None),
        *(0.0 if is_dense else threshold, valid_ratio, max_error, block, pixel_block),
        *(norm_weight, None, residual, activation),
    )
    _check_dtype(base, input.dtype, "base")
    _check_device(base, input.device, "base")
    _check_shape(base, (1, *output.shape[1:]), "base")
    if norm_input is not None:
        _check_pixel_norms(norm_input, input, "norm_input")
    return output


register_fake("spamm_torch::conv2d_deviation")(_fake_deviation)


@register_fake("spamm_torch::conv2d_deviation_with_norms")
def _(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    return _with_pixel_norms(_fake_deviation(*args, **kwargs))


@register_fake("spamm_torch::conv2d_deviation_parts")
def _(
    parts: Sequence[Tensor],
    weight: Tensor,
    base: Tensor,
    stride: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    *,
    threshold: float,
    block: Sequence[int] | None = None,
    pixel_block: Sequence[int] | None = None,
    norm_weight: Tensor | None = None,
    norm_parts: Sequence[Tensor],
    activation: str = "none",
    in_phases: bool = False,
) -> tuple[Tensor, Tensor]:
    _check_parts(parts)
    torch._check(
        len(norm_parts) in (0, len(parts)),
        lambda: (
            f"norm_parts must have one tensor for each of the {len(parts)} parts, or none; "
            f"got {len(norm_parts)}"
        ),
    )
    for part, norms in zip(parts, norm_parts, strict=False):
        _check_pixel_norms(norms, part, "norm_parts")
    output = _fake_deviation(
        *(torch.cat(list(parts), 1), weight, base, stride, padding, dilation, 1, threshold),
        block=block,
        pixel_block=pixel_block,
        norm_weight=norm_weight,
        activation=activation,
    )
    images, channels, rows, columns = output.shape
    torch._check(
        not in_phases or channels % 4 == 0,
        lambda: f"an output in phases must have a multiple of 4 channels; got {channels}",
    )
    if not in_phases:
        return _with_pixel_norms(output.to(memory_format=torch.channels_last))
    placed = output.new_empty((images, channels // 4, 2 * rows, 2 * columns))
    of_norms = _pixel_norms_shape(placed, 2 if channels // 4 == 32 else 1)
    return (
        placed.to(memory_format=torch.channels_last),
        placed.new_empty(of_norms, dtype=_norm_dtype(placed)),
    )


def _check_parts(parts: Sequence[Tensor]) -> None:
    torch._check(len(parts) > 0, lambda: "parts must have at least one tensor; got none")
    first = parts[0]
    for x in parts:
        _check_operand_dtype(x, "parts")
        torch._check(
            x.device == first.device,
            lambda x=x: (
                "all parts and the first one must be on the same device; "
                f"got {x.device} and {first.device}"
            ),
        )
        torch._check_type(
            x.dtype == first.dtype,
            lambda x=x: (
                f"parts must have one dtype; got {dtype_name(first.dtype)} and "
                f"{dtype_name(x.dtype)}"
            ),
        )
        torch._check(
            x.dim() == 4,
            lambda x=x: f"parts must be batches (N, C, H, W); got shape {tuple(x.shape)}",
        )
        torch._check(
            (x.shape[0], *x.shape[2:]) == (first.shape[0], *first.shape[2:]),
            lambda x=x: f"parts must be pictures of one size, {_size(first)}; got {_size(x)}",
        )


def _size(images: Tensor) -> str:
    return "{} of {} x {}".format(images.shape[0], *images.shape[2:])


def _check_pixel_norms(norms: Tensor, x: Tensor, name: str, together: int = 1) -> None:
    _check_dtype(norms, _norm_dtype(x), name)
    _check_shape(norms, _pixel_norms_shape(x, together), name)
    _check_device(norms, x.device, name)


def _pixel_norms_shape(x: Tensor, together: int = 1) -> tuple[int, ...]:
    """Norms of images' pixels, or of neighbouring columns together: one for each 64 channels."""
    images, channels, rows, columns = x.shape
    return (images, rows, columns // together, _blocks(channels * together, 64))


def _with_pixel_norms(output: Tensor) -> tuple[Tensor, Tensor]:
    return output, output.new_empty(_pixel_norms_shape(output), dtype=_norm_dtype(output))


def _beside(shards: Sequence[Tensor], given: Sequence[Tensor], name: str) -> list[Tensor]:
    """One tensor for each shard; one that is given alone is copied to their devices."""
    torch._check_value(
        len(given) in (1, len(shards)),
        lambda: (
            f"{name} must be one tensor, or one for each of the {len(shards)} shards; "
            f"got {len(given)}"
        ),
    )
    if len(given) > 1:
        return list(given)
    return [given[0].to(shard.device) for shard in shards]


@register_fake("spamm_torch::conv2d_shards")
def _(
    input_shards: Sequence[Tensor],
    weight: Sequence[Tensor],
    bias: Sequence[Tensor],
    stride: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    groups: int = 1,
    tau: Tensor | None = None,
    threshold: float | None = None,
    valid_ratio: float | None = None,
    max_error: float | None = None,
    block: Sequence[int] | None = None,
    pixel_block: Sequence[int] | None = None,
    activation: str = "none",
) -> list[Tensor]:
    torch._check_value(
        len(input_shards) > 0, lambda: "input_shards must hold at least one shard; got none"
    )
    first = input_shards[0]
    for shard in input_shards:
        torch._check(
            shard.dim() == 4 and shard.shape[1:] == first.shape[1:],
            lambda shard=shard: (
                "input_shards must be (images, channels, height, width), alike but for the images; "
                f"got shapes {tuple(first.shape)} and {tuple(shard.shape)}"
            ),
        )
    weights = _beside(input_shards, weight, "weight")
    biases = _beside(input_shards, bias, "bias") if bias else [None] * len(input_shards)
    outputs = [
        _fake_conv2d(
            shard,
            weight,
            bias,
            stride,
            padding,
            dilation,
            groups,
            tau if tau is None or tau.device.type == "cpu" else tau.to(shard.device),
            threshold,
            valid_ratio,
            max_error,
            block,
            pixel_block,
            activation=activation,
        )
        for shard, weight, bias in zip(input_shards, weights, biases, strict=True)
    ]
    images = [shard.shape[0] for shard in input_shards]
    edges = conv_block(weight[0].shape[0] // groups, weight[0].shape[1], block, pixel_block)
    block_images = (
        pixel_block
        or default_pixel_block(tau is not None or threshold is not None, sum(images), edges[2])
    )[0]
    images_left = sum(images)
    for count in images:
        images_left -= count
        torch._check_value(
            images_left == 0 or count % block_images == 0,
            lambda count=count: (
                f"each shard but the last must be whole pixel blocks, a multiple of {block_images} "
                f"images; got {count}"
            ),
        )
    return outputs


@register_fake("spamm_torch::conv2d_with_norms")
def _(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    return _with_norms(_fake_conv2d(*args, **kwargs))


def _check_batch(input: Tensor) -> None:
    torch._check(
        input.dim() == 4,
        lambda: f"input must be a batch (N, C, H, W); got shape {tuple(input.shape)}",
    )


def _fake_max_pool(
    input: Tensor,
    kernel_size: Any,
    stride: Any = (),
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
) -> Tensor:
    _check_operand_dtype(input, "input")
    _check_batch(input)
    setting = (kernel_size, stride, padding, dilation, ceil_mode)
    return torch.nn.functional.max_pool2d(input, *setting)


register_fake("spamm_torch::max_pool2d")(_fake_max_pool)


@register_fake("spamm_torch::conv2d_max_pool")
def _(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    groups: int = 1,
    norm_weight: Tensor | None = None,
    activation: str = "none",
) -> Tensor:
    _check_batch(input)
    output = _fake_conv2d(
        *(input, weight, bias, stride, padding, dilation, groups),
        threshold=0.0,
        norm_weight=norm_weight,
        activation=activation,
    )
    rows, columns = output.shape[2:]
    torch._check(
        rows > 1 and columns > 1,
        lambda: f"the convolution's output must have at least 2 x 2 pixels; got {rows} x {columns}",
    )
    return _fake_max_pool(output, 2)


@register_fake("spamm_torch::max_pool2d_with_norms")
def _(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    return _with_norms(_fake_max_pool(*args, **kwargs))


@register_fake("spamm_torch::max_pool2d_deviation")
def _(
    input: Tensor,
    reference: Tensor,
    kernel_size: Any,
    stride: Any = (),
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    norm_input: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    output = _fake_max_pool(input, kernel_size, stride, padding, dilation, ceil_mode)
    _check_device(reference, input.device, "reference")
    _check_dtype(reference, input.dtype, "reference")
    _check_shape(reference, (1, *input.shape[1:]), "reference")
    if norm_input is not None:
        columns, given = input.shape[3], norm_input.shape[2] if norm_input.dim() == 4 else 0
        together = columns // given if given > 0 and columns % given == 0 else 1
        _check_pixel_norms(norm_input, input, "norm_input", together)
    return _with_pixel_norms(output)


@register_fake("spamm_torch::join_deviations")
def _(parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    _check_parts(parts)
    output = torch.cat(list(parts), 1)
    return _with_pixel_norms(output.to(memory_format=torch.channels_last))


@register_fake("spamm_torch::chain")
def _(
    input: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    norm_weights: Sequence[Tensor | None],
    knobs: Sequence[Tensor],
    layers: Sequence[int],
) -> Tensor:
    for output, _weight in run_layers(input, weights, biases, norm_weights, knobs, layers):
        input = output
    return input


def run_layers(
    input: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    norm_weights: Sequence[Tensor | None],
    knobs: Sequence[Tensor],
    layers: Sequence[int],
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """The chain's layers one by one: each one's output, and its weight, None for a max pool."""
    counts = [len(of) for of in (weights, biases, norm_weights, knobs)]
    torch._check_value(
        len(set(counts)) == 1,
        lambda: (
            "weights, biases, norm_weights and knobs must be equally many; got "
            "{}, {}, {} and {}".format(*counts)
        ),
    )
    torch._check_value(len(layers) > 0, lambda: "layers must hold a layer; got none")
    convolutions = 0
    rest = list(layers)

    def take(count: int) -> list[int]:
        lacking = count - len(rest)
        torch._check_value(
            lacking <= 0,
            lambda: f"layers must be whole; the last one lacks {lacking} of its numbers",
        )
        first, rest[:count] = rest[:count], []
        return first

    def pairs(count: int) -> list[tuple[int, ...]]:
        return [tuple(take(2)) for _ in range(count)]

    def edges() -> list[int] | None:
        three = take(3)
        return three if any(three) else None

    while rest:
        (kind,) = take(1)
        torch._check_value(
            kind in (CONVOLUTION, MAX_POOL),
            lambda kind=kind: (
                f"a layer's kind must be 0 (convolution) or 1 (max pooling); got {kind}"
            ),
        )
        if kind == MAX_POOL:
            kernel_size, stride, padding, dilation = pairs(4)
            ceil_mode = bool(*take(1))
            input = _fake_max_pool(input, kernel_size, stride, padding, dilation, ceil_mode)
            yield input, None
            continue
        _check_weights(convolutions < len(weights), weights)
        geometry: Any = *pairs(3), *take(1)
        activation, _weight_is_ready, knob = take(3)
        torch._check_value(
            0 <= activation < len(ACTIVATIONS),
            lambda activation=activation: (
                f"an activation must be a number from 0 to {len(ACTIVATIONS) - 1}; got {activation}"
            ),
        )
        torch._check_value(
            knob in (TAU, VALID_RATIO, MAX_ERROR),
            lambda knob=knob: (
                f"a knob's kind must be 0 (tau), 1 (valid_ratio) or 2 (max_error); got {knob}"
            ),
        )
        if knob == TAU:
            _check_tau(knobs[convolutions], input.device)
        setting: dict[str, Any] = {"valid_ratio": 1.0, "block": edges(), "pixel_block": edges()}
        setting["norm_weight"] = norm_weights[convolutions]
        input = _fake_conv2d(
            input, weights[convolutions], biases[convolutions], *geometry, **setting
        )
        yield input, weights[convolutions]
        convolutions += 1
    _check_weights(convolutions == len(weights), weights)


def _check_weights(right: bool, weights: Sequence[Tensor]) -> None:
    torch._check_value(
        right, lambda: f"weights must be as many as convolutions; got {len(weights)}"
    )


def _layer_norms_shape(batch: Tensor) -> tuple[int, int, int, int]:
    images, channels, height, width = batch.shape
    return (_blocks(images, 64), height, width, _blocks(channels, 64))


def _with_norms(output: Tensor) -> tuple[Tensor, Tensor]:
    """An output, and the norms that it leaves for the next layer."""
    shape = _layer_norms_shape(output if output.dim() == 4 else output.unsqueeze(0))
    return output, output.new_empty(shape, dtype=_norm_dtype(output))


@register_fake("spamm_torch::likeness_order")
def _(images: Tensor, bands: int) -> tuple[Tensor, Tensor]:
    order = images.new_empty(images.shape[:1], dtype=torch.int64)
    return order, torch.empty_like(order)


@register_fake("spamm_torch::order_images")
def _(images: Tensor, bands: int) -> tuple[Tensor, Tensor, Tensor]:
    order = images.new_empty(images.shape[:1], dtype=torch.int64)
    return torch.empty_like(images), order, torch.empty_like(order)


@register_fake("spamm_torch::conv2d_weight_norm")
def _(
    weight: Tensor,
    groups: int = 1,
    block: Sequence[int] | None = None,
    pixel_block: Sequence[int] | None = None,
) -> Tensor:
    _check_conv_weight(weight, groups)
    blocks = _conv_blocks(weight, groups, block, pixel_block)
    return weight.new_empty(_weight_map_shape(weight, groups, blocks), dtype=_norm_dtype(weight))
