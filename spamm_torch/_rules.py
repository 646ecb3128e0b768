"""Fake kernels of the ops: shapes and dtypes, for FakeTensor, torch.compile and export.

The op itself says what is wrong with its arguments. These kernels refuse arguments for which there
is no shape or a wrong one, and tensors on several devices, of which some may be on meta.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.library import register_fake
from torch.nn.functional import max_pool2d

from ._arguments import check_block, check_block_pair, conv_block, dtype_name, norm_dtype

_ops = torch.ops.spamm_torch


def _fake(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers the fake kernel of these ops. It gets every argument of the schema, by name."""

    def register(kernel: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            schema = getattr(_ops, name).default._schema.arguments
            register_fake(f"spamm_torch::{name}")(partial(_by_name, kernel, schema))
        return kernel

    return register


def _by_name(kernel: Callable[..., Any], schema: Any, /, *args: Any, **given: Any) -> Any:
    defaults = {x.name: x.default_value for x in schema if x.has_default_value()}
    return kernel(**defaults | {x.name: value for x, value in zip(schema, args)} | given)  # noqa: B905


def _blocks(length: int, edge: int) -> int:
    return (length + edge - 1) // edge


def _norms(x: Tensor, *shape: int) -> Tensor:
    """Norms of a tensor's entries: float64 for float64, else float32."""
    return x.new_empty(shape, dtype=norm_dtype(x.dtype))


def _check_together(first: Tensor, tau: Tensor | None = None, **others: Tensor | None) -> None:
    """Raises unless all tensors are on one device; a threshold may be on the CPU."""
    for name, x in others.items():
        torch._check(
            x is None or x.device == first.device,
            lambda name=name, x=x: (
                f"{name} must be on the operands' device {first.device}; got {x.device}"
            ),
        )
    place = first.device if tau is None else tau.device
    torch._check(
        place == first.device or place.type == "cpu",
        lambda: f"tau must be on the operands' device {first.device} or on the CPU; got {place}",
    )


def _check_dtype(x: Tensor, y: Tensor, names: str) -> None:
    torch._check_type(
        x.dtype == y.dtype,
        lambda: f"{names} must have one dtype; got {dtype_name(x.dtype)} and {dtype_name(y.dtype)}",
    )


def _check_product(a: Tensor, b: Tensor, names: str) -> None:
    """(..., M, K) times (..., K, N)."""
    _check_dtype(a, b, names)
    torch._check(
        a.device == b.device,
        lambda: f"{names} must be on the same device; got {a.device} and {b.device}",
    )
    torch._check(
        a.dim() >= 2
        and a.dim() == b.dim()
        and a.shape[-1] == b.shape[-2]
        and a.shape[:-2] == b.shape[:-2],
        lambda: (
            f"{names} must be (..., M, K) and (..., K, N); "
            f"got shapes {tuple(a.shape)} and {tuple(b.shape)}"
        ),
    )


# ---- Norm maps and thresholds -------------------------------------------------------------------


@_fake("norm_map")
def _map(a: Tensor, block: Sequence[int]) -> Tensor:
    torch._check(
        a.dim() >= 2, lambda: f"a must be (..., rows, columns); got shape {tuple(a.shape)}"
    )
    rows, columns = check_block_pair(block)
    return _norms(a, *a.shape[:-2], _blocks(a.shape[-2], rows), _blocks(a.shape[-1], columns))


@_fake("norm_maps")
def _(a: Tensor, b: Tensor, block: Any) -> tuple[Tensor, Tensor]:
    return _map(a, check_block(block)[:2]), _map(b, block[1:])


@_fake("find_tau", "error_bound")
def _number(
    norm_a: Tensor,
    norm_b: Tensor,
    tau: Tensor | None = None,
    skip_norm_b: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """One number for a pair of maps: a threshold or a bound."""
    _check_product(norm_a, norm_b, "norm_a and norm_b")
    _check_together(norm_a, tau, skip_norm_b=skip_norm_b)
    return norm_a.new_empty(())


@_fake("valid_counts")
def _(norm_a: Tensor, norm_b: Tensor, tau: Tensor) -> Tensor:
    _number(norm_a, norm_b, tau)
    return norm_a.new_empty((*norm_a.shape[:-1], norm_b.shape[-1]), dtype=torch.int32)


@_fake("row_work")
def _(norm_a: Tensor, norm_b: Tensor, tau: Tensor, parts: int, **_: Any) -> tuple[Any, list[int]]:
    _number(norm_a, norm_b, tau)
    if parts != 0:  # cuts are numbers that depend on norms: a graph without data cannot have them
        raise DataDependentOutputException(_ops.row_work.default)
    return norm_a.new_empty(norm_a.shape[:1], dtype=torch.int64), []


# ---- Products -----------------------------------------------------------------------------------


@_fake("spamm", "multiply")
def _product(
    a: Tensor,
    b: Tensor,
    tau: Tensor | None,
    block: Sequence[int],
    norm_a: Tensor | None,
    norm_b: Tensor | None,
    input: Tensor | None = None,
    **_: Any,
) -> Tensor:
    _check_product(a, b, "a and b")
    _check_together(a, tau, norm_a=norm_a, norm_b=norm_b, input=input)
    check_block(block)
    return a.new_empty((*a.shape[:-1], b.shape[-1]))


@_fake("spamm_with_norms")
def _(block: Sequence[int], **arguments: Any) -> tuple[Tensor, Tensor]:
    product = _product(block=block, **arguments)
    return product, _map(product, block[::2])


@_fake("spamm_into", "multiply_part")
def _(out: Tensor, norms: Tensor | None = None, **arguments: Any) -> None:
    product = _product(**arguments)
    _check_dtype(out, product, "out and the operands")
    _check_together(product, out=out, norms=norms)
    torch._check(
        out.shape == product.shape,
        lambda: f"out must have shape {tuple(product.shape)}; got {tuple(out.shape)}",
    )


_fake("spamm_shards")(lambda a, b, **_: [x.new_empty(x.shape[0], b[0].shape[1]) for x in a])


# ---- Convolutions -------------------------------------------------------------------------------


@_fake("conv2d", "dense_conv2d")
def _conv(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int = 1,
    tau: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_input: Tensor | None = None,
    residual: Tensor | None = None,
    slope: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """The output of a convolution, channels last if the batch or the weight is."""
    _check_dtype(input, weight, "input and weight")
    others = {"weight": weight, "bias": bias, "residual": residual, "slope": slope}
    _check_together(input, tau, **others, norm_weight=norm_weight, norm_input=norm_input)
    torch._check(
        input.dim() in (3, 4) and weight.dim() == 4 and input.shape[-3] == weight.shape[1] * groups,
        lambda: (
            "input must be (images, channels, height, width) or (channels, height, width) and "
            f"weight (out_channels, channels / {groups}, height, width); got shapes "
            f"{tuple(input.shape)} and {tuple(weight.shape)}"
        ),
    )
    batch = input if input.dim() == 4 else input.unsqueeze(0)
    sides = []  # torch's own rule is another one without channels
    for axis, (size, kernel) in enumerate(zip(batch.shape[2:], weight.shape[2:], strict=True)):
        s, p, d = (numbers[min(axis, len(numbers) - 1)] for numbers in (stride, padding, dilation))
        window, padded = d * (kernel - 1) + 1, size + 2 * p
        torch._check(
            window <= padded,
            lambda window=window, padded=padded: (
                f"the dilated kernel must fit into the padded input; got {window} and {padded}"
            ),
        )
        sides.append((padded - window) // s + 1)
    is_last = torch.channels_last in map(suggest_memory_format, (batch, weight))
    last = torch.channels_last if is_last else torch.contiguous_format
    output = batch.new_empty((batch.shape[0], weight.shape[0], *sides)).to(memory_format=last)
    return output if input.dim() == 4 else output.squeeze(0)


def _with_norms(output: Tensor) -> tuple[Tensor, Tensor]:
    """An output, and the norms that it leaves for the next layer."""
    images, channels, rows, columns = (output if output.dim() == 4 else output[None]).shape
    return output, _norms(output, _blocks(images, 64), rows, columns, _blocks(channels, 64))


_fake("conv2d_with_norms")(lambda **given: _with_norms(_conv(**given)))


@_fake("conv2d_weight_norm")
def _(weight: Tensor, groups: int, block: Any, pixel_block: Any) -> Tensor:
    """(groups, MB, KB) with each kernel position in blocks of its own."""
    out_channels, channels, *kernel = weight.shape
    m, k, _ = conv_block(out_channels // groups, channels, block, pixel_block)
    rows, columns = _blocks(out_channels // groups, m), _blocks(channels, k)
    return _norms(weight, groups, rows, kernel[0] * kernel[1] * columns)


# ---- Pools --------------------------------------------------------------------------------------


@_fake("max_pool2d")
def _max_pool(input: Tensor, kernel_size: Any, **setting: Any) -> Tensor:
    torch._check(
        input.dim() == 4,
        lambda: f"input must be a batch (N, C, H, W); got shape {tuple(input.shape)}",
    )
    return max_pool2d(input, kernel_size, **setting)


_fake("conv2d_max_pool")(lambda **given: _max_pool(_conv(**given), 2))
