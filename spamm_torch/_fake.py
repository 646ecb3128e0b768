"""Fake kernels: shapes and dtypes of every op, for FakeTensor, torch.compile and export."""

import torch
from torch._prims_common import suggest_memory_format
from torch.library import register_fake


def _norm_dtype(operand):
    return torch.float64 if operand.dtype == torch.float64 else torch.float32


def _blocks(length, edge):
    return (length + edge - 1) // edge


@register_fake("spamm_torch::norm_map")
def _(a, block):
    rows, columns = _blocks(a.shape[-2], block[0]), _blocks(a.shape[-1], block[1])
    return a.new_empty((*a.shape[:-2], rows, columns), dtype=_norm_dtype(a))


@register_fake("spamm_torch::find_tau")
def _(norm_a, norm_b, valid_ratio, max_iterations=20, tolerance=0.01):
    return norm_a.new_empty(())


@register_fake("spamm_torch::find_tau_for_error")
def _(norm_a, norm_b, max_error, judged_b=None):
    return norm_a.new_empty(())


@register_fake("spamm_torch::valid_counts")
def _(norm_a, norm_b, tau):
    return norm_a.new_empty((*norm_a.shape[:-1], norm_b.shape[-1]), dtype=torch.int32)


@register_fake("spamm_torch::valid_ratio")
def _(norm_a, norm_b, tau):
    return norm_a.new_empty(())


@register_fake("spamm_torch::error_bound")
def _(norm_a, norm_b, tau, judged_b=None):
    return norm_a.new_empty(())


@register_fake("spamm_torch::multiply")
def _(a, b, norm_a, norm_b, tau, block, input=None, beta=1, alpha=1):
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
    torch._check(
        a.device == b.device,
        lambda: f"a and b must be on the same device; got {a.device} and {b.device}",
    )
    torch._check(
        a.shape[-1] == b.shape[-2],
        lambda: f"a's columns must match b's rows; got shapes {a.shape} and {b.shape}",
    )
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
