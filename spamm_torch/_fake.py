"""Fake kernels: shapes and dtypes of every op, for FakeTensor, torch.compile and export.

They refuse what the kernels refuse, as far as shapes, types, devices and numbers tell, so that a
mistake surfaces while tracing and not in a result of the wrong shape.
"""

import torch
from torch._prims_common import suggest_memory_format
from torch.library import register_fake


def _norm_dtype(operand):
    return torch.float64 if operand.dtype == torch.float64 else torch.float32


def _blocks(length, edge):
    return (length + edge - 1) // edge


def _check_operand_dtype(operand, name):
    torch._check_type(
        operand.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64),
        lambda: f"{name} must be float16, bfloat16, float32 or float64; got {operand.dtype}",
    )


def _check_block(block):
    torch._check_value(
        all(edge in (32, 64, 128) for edge in block),
        lambda: f"block edges must be 32, 64 or 128; got {tuple(block)}",
    )


def _check_alike(x, y, names):
    torch._check_type(
        x.dtype == y.dtype, lambda: f"{names} must have one dtype; got {x.dtype} and {y.dtype}"
    )
    torch._check(
        x.device == y.device,
        lambda: f"{names} must be on the same device; got {x.device} and {y.device}",
    )


def _check_product(x, y, names, dims):
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


def _check_operands(a, b, block):
    _check_operand_dtype(a, "a")
    _check_product(a, b, "a and b", (2, 3))
    _check_block(block)


def _check_norm_maps(norm_a, norm_b):
    torch._check_type(
        norm_a.dtype in (torch.float32, torch.float64),
        lambda: f"norm_a must be float32 or float64; got {norm_a.dtype}",
    )
    _check_product(norm_a, norm_b, "norm_a and norm_b", range(2, 64))


def _check_knobs(tau, valid_ratio, max_error):
    given = sum(knob is not None for knob in (tau, valid_ratio, max_error))
    torch._check_value(
        given == 1,
        lambda: f"exactly one of tau, valid_ratio and max_error must be given; got {given}",
    )


@register_fake("spamm_torch::norm_map")
def _(a, block):
    _check_operand_dtype(a, "a")
    torch._check(
        a.dim() >= 2, lambda: f"a must have at least 2 dimensions; got shape {tuple(a.shape)}"
    )
    _check_block(block)
    rows, columns = _blocks(a.shape[-2], block[0]), _blocks(a.shape[-1], block[1])
    return a.new_empty((*a.shape[:-2], rows, columns), dtype=_norm_dtype(a))


@register_fake("spamm_torch::norm_maps")
def _(a, b, block):
    m, k, n = block
    norm_map = torch.ops.spamm_torch.norm_map
    return norm_map(a, (m, k)), norm_map(b, (k, n))


@register_fake("spamm_torch::find_tau")
def _(norm_a, norm_b, valid_ratio, max_iterations=20, tolerance=0.01):
    _check_norm_maps(norm_a, norm_b)
    return norm_a.new_empty(())


@register_fake("spamm_torch::find_tau_for_error")
def _(norm_a, norm_b, max_error, judged_b=None):
    _check_norm_maps(norm_a, norm_b)
    return norm_a.new_empty(())


@register_fake("spamm_torch::valid_counts")
def _(norm_a, norm_b, tau):
    _check_norm_maps(norm_a, norm_b)
    return norm_a.new_empty((*norm_a.shape[:-1], norm_b.shape[-1]), dtype=torch.int32)


@register_fake("spamm_torch::valid_ratio")
def _(norm_a, norm_b, tau):
    _check_norm_maps(norm_a, norm_b)
    return norm_a.new_empty(())


@register_fake("spamm_torch::error_bound")
def _(norm_a, norm_b, tau, judged_b=None):
    _check_norm_maps(norm_a, norm_b)
    return norm_a.new_empty(())


@register_fake("spamm_torch::multiply")
def _(a, b, norm_a, norm_b, tau, block, input=None, beta=1, alpha=1):
    _check_operands(a, b, block)
    _check_norm_maps(norm_a, norm_b)
    return a.new_empty((*a.shape[:-1], b.shape[-1]))


@register_fake("spamm_torch::spamm")
def _(
    a,
    b,
    tau=None,
    valid_ratio=None,
    max_error=None,
    block=(64, 64, 64),
    norm_a=None,
    norm_b=None,
    input=None,
    beta=1,
    alpha=1,
):
    _check_operands(a, b, block)
    _check_knobs(tau, valid_ratio, max_error)
    return a.new_empty((*a.shape[:-1], b.shape[-1]))


@register_fake("spamm_torch::conv2d")
def _(
    input,
    weight,
    bias=None,
    stride=(1, 1),
    padding=(0, 0),
    dilation=(1, 1),
    groups=1,
    tau=None,
    valid_ratio=None,
    max_error=None,
    block=None,
    pixel_block=None,
    norm_weight=None,
):
    batch = input if input.dim() == 4 else input.unsqueeze(0)
    sides = [
        (size + 2 * p - d * (kernel - 1) - 1) // s + 1
        for size, kernel, s, p, d in zip(
            batch.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True
        )
    ]
    channels_last = torch.channels_last in map(suggest_memory_format, (batch, weight))
    output = torch.empty(
        (batch.shape[0], weight.shape[0], *sides),
        dtype=input.dtype,
        device=input.device,
        memory_format=torch.channels_last if channels_last else torch.contiguous_format,
    )
    return output if input.dim() == 4 else output.squeeze(0)


@register_fake("spamm_torch::conv2d_weight_norm")
def _(weight, groups=1, block=None, pixel_block=None):
    out_channels, in_channels, *kernel = weight.shape
    rows = out_channels // groups
    m, k = block[:2] if block else (32 if rows <= 32 else 64, 32 if in_channels <= 32 else 64)
    positions = kernel[0] * kernel[1]
    shape = (groups, _blocks(rows, m), positions * _blocks(in_channels, k))
    return weight.new_empty(shape, dtype=_norm_dtype(weight))
