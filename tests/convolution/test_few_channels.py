"""Convolutions of few input channels that skip nothing: on Hopper they have their own kernel."""

import pytest
import torch
from support import ACTIVATIONS

import spamm_torch

OPS = torch.ops.spamm_torch

# images, in_channels, out_channels, (rows, columns), kernel, and what else conv2d takes
CASES = [
    (72, 3, 64, (32, 32), (3, 3), {"padding": 1}),
    (1, 1, 8, (5, 3), (3, 3), {"padding": 1}),
    (65, 3, 72, (6, 9), (3, 3), {"padding": (0, 2)}),
    (130, 7, 136, (5, 17), (1, 1), {}),
    (70, 3, 64, (15, 19), (7, 7), {"padding": 3, "stride": 2}),
    (33, 5, 16, (12, 11), (5, 4), {"padding": (4, 1), "stride": (1, 3), "dilation": (2, 1)}),
    (3, 2, 24, (7, 30), (2, 9), {"stride": (3, 1)}),
    # Tiles of several rows; rows that start at multiples of 16, 4 and 2 bytes.
    (2, 3, 64, (40, 224), (7, 7), {"padding": 3, "stride": 2}),
    (3, 1, 64, (64, 70), (3, 3), {"padding": 1}),
    (2, 3, 32, (33, 227), (3, 3), {"padding": 1, "stride": 2}),
    # Several tiles in a row of the output, and in each of many thread blocks.
    (5, 1, 8, (170, 700), (3, 3), {"padding": 1}),
    # More of K than registers hold at once.
    (2, 3, 72, (63, 79), (9, 9), {"padding": 2, "stride": 4}),
    (17, 4, 96, (16, 24), (8, 8), {"stride": 8}),
]
CHANNELS_LAST = {"memory_format": torch.channels_last}
pytestmark = pytest.mark.cuda


def operands(dtype, case):
    images, channels, out_channels, size, kernel, geometry = case
    generator = torch.Generator().manual_seed(sum(case[:3]))

    def draw(*shape):
        return torch.randn(shape, generator=generator).to("cuda", dtype)

    input = draw(images, channels, *size).to(**CHANNELS_LAST)
    weight = draw(out_channels, channels, *kernel).to(**CHANNELS_LAST)
    return input, weight, draw(out_channels), geometry


def expected_of(input, weight, bias, geometry):
    bias = None if bias is None else bias.double()
    return torch.nn.functional.conv2d(input.double(), weight.double(), bias, **geometry)


def tolerance(dtype):
    eps = torch.finfo(dtype).eps
    return {"rtol": eps, "atol": 16 * torch.finfo(torch.float32).eps * 32 + eps / 64}


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_equal_to_the_convolution(dtype, case):
    input, weight, bias, geometry = operands(dtype, case)
    expected = expected_of(input, weight, bias, geometry)
    actual = spamm_torch.conv2d(input, weight, bias, tau=0.0, **geometry)
    assert actual.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(actual.double(), expected, **tolerance(dtype))
    plain = spamm_torch.conv2d(input, weight, tau=0.0, **geometry)
    torch.testing.assert_close(
        plain.double(), expected_of(input, weight, None, geometry), **tolerance(dtype)
    )
    contiguous = spamm_torch.conv2d(
        input.contiguous(), weight.contiguous(), bias, tau=0.0, **geometry
    )
    assert torch.equal(contiguous, actual)


@pytest.mark.strength(1)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("activation", ["relu", "silu"])
@pytest.mark.parametrize("with_residual", [False, True])
def test_the_epilogue_and_norms(dtype, case, activation, with_residual):
    input, weight, bias, geometry = operands(dtype, case)
    sums = expected_of(input, weight, bias, geometry)
    residual = torch.randn(sums.shape, generator=torch.Generator().manual_seed(1))
    residual = residual.to("cuda", dtype).to(**CHANNELS_LAST) if with_residual else None
    options = {"tau": 0.0, "residual": residual, "activation": activation, **geometry}
    actual, norms = spamm_torch.conv2d(input, weight, bias, return_norms=True, **options)
    without_norms = spamm_torch.conv2d(input, weight, bias, **options)
    expected = ACTIVATIONS[activation](sums if residual is None else sums + residual.double())
    eps = torch.finfo(dtype).eps
    for found in (actual, without_norms):
        torch.testing.assert_close(found.double(), expected, rtol=4 * eps, atol=4 * eps)
    # Those of a convolution that reads the output with a weight of its own.
    _, expected = OPS.max_pool2d(actual, 1, norms=True)
    torch.testing.assert_close(norms, expected, rtol=1e-5, atol=1e-30)


def test_odd_addresses_and_other_batches_change_no_bit():
    input, weight, bias, geometry = operands(torch.float16, CASES[0])
    whole = spamm_torch.conv2d(input, weight, bias, tau=0.0, **geometry)
    buffer = input.new_empty(input.numel() + 1)
    shifted = buffer[1:].view(input.permute(0, 2, 3, 1).shape).permute(0, 3, 1, 2)
    shifted.copy_(input)
    for x, b in ((shifted, bias), (input, torch.cat([bias[:1], bias])[1:])):
        assert torch.equal(spamm_torch.conv2d(x, weight, b, tau=0.0, **geometry), whole)
    for images in (slice(0, 1), slice(20, 69), slice(64, None)):
        part = spamm_torch.conv2d(input[images], weight, bias, tau=0.0, **geometry)
        assert torch.equal(part, whole[images])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_infinities_and_nan_stay_in_their_windows(dtype):
    """The memory behind a window is read with it, and must not count."""
    input, weight, bias, geometry = operands(dtype, CASES[0])
    expected = spamm_torch.conv2d(input, weight, bias, tau=0.0, **geometry)
    spoilt = input.clone(**CHANNELS_LAST)
    spoilt[3, 1, 10, 12] = torch.inf
    spoilt[70, 0, 31, 31] = torch.nan
    actual = spamm_torch.conv2d(spoilt, weight, bias, tau=0.0, **geometry)
    touched = torch.zeros_like(actual, dtype=torch.bool)
    touched[3, :, 9:12, 11:14] = touched[70, :, 30:, 30:] = True
    assert not actual[touched].isfinite().any()
    assert torch.equal(actual[~touched], expected[~touched])
