"""Blocks of images that a batch does not fill: right for every batch, whatever is skipped."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from im2col_reference import Im2col, gap_near, norm_products

import spamm_torch

# The error allowed, relative to the largest result.
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-13, torch.bfloat16: 1.2e-2, torch.float16: 2e-3}
ACTIVATIONS = {
    "relu": F.relu,
    "relu6": F.relu6,
    "hardswish": F.hardswish,
    "silu": F.silu,
    "leaky_relu": F.leaky_relu,
    None: lambda x: x,
}


def uneven(*shape, seed, dtype):
    """Numbers whose size differs from pixel to pixel and from 16 channels to the next."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    for d, size in enumerate(shape[1:], start=1):
        run = 16 if d == 1 else 1
        scale = torch.rand(-(-size // run), generator=generator) + 0.1
        view = [1] * len(shape)
        view[d] = size
        values *= scale.repeat_interleave(run)[:size].view(view)
    return values.to(dtype)


@st.composite
def convolutions(draw):
    """Operands, geometry and the setting of blocks."""
    groups = draw(st.sampled_from([1, 1, 2]))
    channels = draw(st.sampled_from([1, 3, 32, 64, 72, 136, 200]))
    out_channels = draw(st.sampled_from([4, 32, 64, 100, 136]))
    images = draw(st.integers(1, 70))
    most = 3 if images > 9 else 9
    size = draw(st.integers(1, most)), draw(st.integers(1, most))
    kernel = draw(st.sampled_from([(1, 1), (3, 3), (2, 3), (5, 1)]))
    geometry = {
        "stride": draw(st.sampled_from([(1, 1), (2, 2), (1, 3)])),
        "padding": draw(st.sampled_from([(0, 0), (1, 1), (2, 3)])),
        "dilation": draw(st.sampled_from([(1, 1), (2, 1), (1, 3)])),
        "groups": groups,
    }
    for d in range(2):
        window = geometry["dilation"][d] * (kernel[d] - 1) + 1
        assume(window <= size[d] + 2 * geometry["padding"][d])
    setting = draw(
        st.sampled_from(
            [
                {},
                {"pixel_block": (64, 1, 1)},
                {"block": (32, 32, 32)},
                {"block": (128, 32, 128)},
                {"pixel_block": (4, 4, 4)},
                {"pixel_block": (1, 8, 8)},
            ]
        )
    )
    dtype = draw(st.sampled_from(list(TOLERANCE)))
    seed = draw(st.integers(0, 1000))
    input = uneven(images, channels * groups, *size, seed=seed, dtype=dtype)
    weight = uneven(out_channels * groups, channels, *kernel, seed=seed + 1, dtype=dtype)
    if draw(st.booleans()):
        input = input.to(memory_format=torch.channels_last)
    if draw(st.booleans()):
        weight = weight.to(memory_format=torch.channels_last)
    return input, weight, geometry, setting


@settings(max_examples=120)
@given(
    convolutions(),
    st.floats(0, 1),
    st.sampled_from(list(ACTIVATIONS)),
    st.booleans(),
    st.booleans(),
)
def test_every_batch_follows_the_definition(
    device, convolution, share, activation, with_bias, with_residual
):
    input, weight, geometry, setting = convolution
    dtype = input.dtype
    reference = Im2col(input, weight, **geometry, **setting)
    m, k, n = reference.block
    norm_a = spamm_torch.norm_map(reference.weights, (m, k))
    skip_norm = reference.skip_norm(spamm_torch.norm_map(reference.columns, (k, n)))
    products = norm_products(norm_a, skip_norm)
    tau = gap_near(products, share)
    assume(tau > 0)  # else groups are the dense convolution
    bias = uneven(1, len(weight), seed=1, dtype=dtype)[0] if with_bias else None
    expected = reference.product(~(products < tau), bias)
    scale = expected.abs().max().clamp(min=1e-3)
    residual = uneven(*expected.shape, seed=2, dtype=dtype) if with_residual else None
    if residual is not None:
        expected += residual.double()
    on_device = lambda x: x if x is None else x.to(device)  # noqa: E731
    got = spamm_torch.conv2d(
        input.to(device),
        weight.to(device),
        on_device(bias),
        **geometry,
        **setting,
        tau=tau,
        residual=on_device(residual),
        activation=activation,
    )
    # On the device, because torch's hardswish multiplies by a float32 sixth on CUDA alone.
    error = got.double() - ACTIVATIONS[activation](expected.to(device))
    assert error.abs().max() <= TOLERANCE[dtype] * (scale + expected.abs().max())


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("images", [1, 2, 3, 8, 32, 33, 64, 70])
def test_what_is_skipped_elsewhere_changes_no_bit(device, images, dtype):
    input = uneven(images, 136, 9, 8, seed=1, dtype=dtype)
    weight = uneven(72, 136, 3, 3, seed=2, dtype=dtype).to(device)
    reference = Im2col(input, weight.cpu(), padding=1)
    m, k, n = reference.block
    norm_a = spamm_torch.norm_map(reference.weights, (m, k))
    skip_norm = reference.skip_norm(spamm_torch.norm_map(reference.columns, (k, n)))
    tau = gap_near(norm_products(norm_a, skip_norm), 0.5)
    input = input.to(device)
    whole = spamm_torch.conv2d(input, weight, padding=1, tau=tau)
    for row, column in ((0, 0), (4, 3), (8, 7), (2, 6)):
        alone = torch.zeros_like(input)  # but for the window of one output pixel
        window = (
            slice(None),
            slice(None),
            slice(max(row - 1, 0), row + 2),
            slice(max(column - 1, 0), column + 2),
        )
        alone[window] = input[window]
        got = spamm_torch.conv2d(alone, weight, padding=1, tau=tau)
        assert torch.equal(got[:, :, row, column], whole[:, :, row, column])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_an_image_has_the_same_bits_in_every_batch(dtype):
    # Where nothing is skipped, and one kernel multiplies all batches: on the CPU.
    input = uneven(70, 72, 7, 5, seed=3, dtype=dtype)
    weight = uneven(72, 72, 3, 3, seed=4, dtype=dtype)
    together = spamm_torch.conv2d(input, weight, padding=1, stride=(1, 2), tau=0.0)
    for images in (1, 2, 5, 8, 31, 64):
        for first in (0, 70 - images):
            own = slice(first, first + images)
            alone = spamm_torch.conv2d(input[own], weight, padding=1, stride=(1, 2), tau=0.0)
            assert torch.equal(alone, together[own])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("images", [1, 5, 64])
@pytest.mark.parametrize("tau", [0.0, 1e-6])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_padding_times_infinity_is_no_number(device, dtype, images, tau, bad):
    input = uneven(images, 72, 4, 5, seed=5, dtype=dtype)
    weight = uneven(136, 72, 3, 3, seed=6, dtype=dtype)
    weight[1, 70, 0, 0] = bad
    weight[130, 2, 1, 2] = bad
    padded = F.pad(input, (1, 1, 1, 1)).double()
    expected = F.conv2d(padded, weight.double())
    got = spamm_torch.conv2d(input.to(device), weight.to(device), padding=1, tau=tau).cpu()
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got.isinf(), expected.isinf())
    finite = expected.isfinite()
    limit = TOLERANCE[dtype] * expected[finite].abs().max()
    assert (got.double() - expected)[finite].abs().max() <= limit


@pytest.mark.parametrize("images", [1, 5, 64])
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_infinite_pixels_reach_their_windows_alone(device, images, bad):
    input = uneven(images, 72, 6, 5, seed=7, dtype=torch.float32)
    weight = uneven(72, 72, 3, 3, seed=8, dtype=torch.float32)
    setting = {"padding": 1, "tau": 1e-6}
    before = spamm_torch.conv2d(input.to(device), weight.to(device), **setting).cpu()
    input[0, 7, 2, 3] = bad
    after = spamm_torch.conv2d(input.to(device), weight.to(device), **setting).cpu()
    touched = torch.zeros_like(after, dtype=torch.bool)
    touched[0, :, 1:4, 2:5] = True
    assert not after[touched].isfinite().any()
    if device == "cpu":
        assert torch.equal(after[~touched], before[~touched])
    else:  # products of blocks with an infinity take another way, which rounds differently
        torch.testing.assert_close(after[~touched], before[~touched])


@pytest.mark.parametrize(
    ("dtype", "large"), [(torch.bfloat16, 256), (torch.float16, 2048)], ids=str
)
@pytest.mark.parametrize("activation", [None, "relu", "relu6", "leaky_relu"])
def test_half_types_are_rounded_once(dtype, large, activation):
    # The sum, large + 1, is between two numbers of the type; sum + residual is 1 or -1.
    input = torch.ones(3, large + 1, 2, 2, dtype=dtype)
    weight = torch.ones(64, large + 1, 1, 1, dtype=dtype)
    weight[32:] = -1
    residual = torch.full((3, 64, 2, 2), -large, dtype=dtype)
    residual[:, 32:] = large
    got = spamm_torch.conv2d(
        input, weight, tau=0.0, pixel_block=(64, 1, 1), residual=residual, activation=activation
    )
    one = torch.ones(3, 32, 2, 2)
    expected = ACTIVATIONS[activation](torch.cat([one, -one], dim=1)).to(dtype)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("tau", [0.0, -1.0, torch.tensor(0.0)])
@pytest.mark.parametrize("pixel_block", [None, (1, 8, 8)])
def test_a_tau_of_zero_takes_no_norms(tau, pixel_block):
    input = uneven(2, 64, 5, 5, seed=9, dtype=torch.float32)
    weight = uneven(64, 64, 3, 3, seed=10, dtype=torch.float32)
    call = lambda tau: spamm_torch.conv2d(input, weight, tau=tau, pixel_block=pixel_block)  # noqa: E731
    for threshold, takes_norms in ((tau, False), (1e-6, True)):
        with torch.profiler.profile() as profile:
            call(threshold)
        names = {event.key for event in profile.key_averages()}
        assert ("spamm_torch::norm_map" in names) == takes_norms


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("images", [1, 2, 3, 5, 8, 9, 20, 33])
def test_norms_of_few_images_are_those_among_zeros(images, dtype, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
    for channels, size in ((72, (9, 11)), (128, (3, 3)), (200, (1, 1))):
        input = uneven(images, channels, *size, seed=images, dtype=dtype).cuda()
        if dtype != torch.float16:  # plain sums of their squares overflow or underflow
            input[:, :64, ::2] *= 1e-30
            input[:, 64:, :, ::2] *= 1e25
        identity = torch.eye(channels, dtype=dtype, device="cuda")[:, :, None, None]
        norms = []
        for among in (images, 50):  # as many as one thread holds, or not
            batch = input.new_zeros(among, *input.shape[1:])
            batch[:images] = input
            batch = batch.contiguous(memory_format=torch.channels_last)
            output, of_pixels = spamm_torch.conv2d(batch, identity, tau=0.0, return_norms=True)
            norms.append(of_pixels)
        if dtype == torch.float32:
            torch.testing.assert_close(norms[0], norms[1], rtol=2**-21, atol=0)
        else:
            assert torch.equal(norms[0], norms[1])
        groups = [output[:, first : first + 64] for first in range(0, channels, 64)]
        expected = torch.stack([x.double().norm(dim=(0, 1)) for x in groups], dim=-1)
        torch.testing.assert_close(norms[0][0].double(), expected, rtol=2**-19, atol=0)
