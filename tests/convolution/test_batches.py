"""A held tau means the same for every batch: the default pixel block does not follow the batch."""

import functools

import pytest
import torch
from im2col_reference import Im2col, default_pixel_block, gap_near, norm_products

import spamm_torch

BATCHES = [1, 2, 8, 32, 63, 64, 65, 100]
# Type, torch's setting ("high" allows TF32) and the error allowed, relative to the largest result.
KINDS = {
    "float16": (torch.float16, "highest", 4e-3),
    "bfloat16": (torch.bfloat16, "highest", 3e-2),
    "float32": (torch.float32, "highest", 1e-5),
    "tf32": (torch.float32, "high", 2e-3),
    "float64": (torch.float64, "highest", 1e-13),
}
CHANNELS = 72  # a full block and a partial one


@pytest.fixture(params=KINDS)
def kind(request):
    """(type, error allowed), with the setting of the kind."""
    dtype, precision, tolerance = KINDS[request.param]
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    yield dtype, tolerance
    torch.set_float32_matmul_precision(before)


@functools.cache
def operands(channels=CHANNELS):
    """The largest batch and a weight, exact in every type; norms differ by image and position."""
    generator = torch.Generator().manual_seed(0)
    randn = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    input, weight = randn(100, channels, 3, 4), randn(CHANNELS, channels, 3, 3)
    input *= torch.tensor([0.1, 0.4, 1.0, 2.0]) * torch.linspace(0.5, 2, 100).view(-1, 1, 1, 1)
    weight *= torch.tensor([0.3, 1.0, 0.6])
    return input.bfloat16(), weight.bfloat16()


@functools.cache
def documented(images, channels=CHANNELS):
    """The oracle for the first ``images`` under a tau: its matrices, products of norms and a tau
    that skips half."""
    input, weight = operands(channels)
    reference = Im2col(input[:images].double(), weight.double(), padding=1)
    m, k, n = reference.block
    norm_a = spamm_torch.norm_map(reference.weights, (m, k))
    skip_norm = reference.skip_norm(spamm_torch.norm_map(reference.columns, (k, n)))
    products = norm_products(norm_a, skip_norm)
    return reference, products, gap_near(products, 0.5)


def convolve(device, dtype, images=slice(None), channels=CHANNELS, **setting):
    input, weight = operands(channels)
    return spamm_torch.conv2d(
        input[images].to(device, dtype), weight.to(device, dtype), padding=1, **setting
    )


@pytest.mark.parametrize("images", BATCHES)
@pytest.mark.parametrize("channels", [3, CHANNELS])
def test_a_tau_follows_the_definition(device, kind, images, channels):
    dtype, tolerance = kind
    reference, products, tau = documented(images, channels)
    assert reference.pixel_block == (64, 1, 1)
    expected = reference.product(~(products < tau))
    got = convolve(device, dtype, slice(images), channels, tau=tau).cpu()
    assert (got - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("images", BATCHES)
@pytest.mark.parametrize("block", [None, (64, 64, 128), 32])
def test_a_tau_takes_the_same_pixel_block_for_every_batch(device, kind, images, block):
    dtype, _ = kind
    _, _, tau = documented(100)
    n = {None: 64, 32: 32}.get(block, 128)
    setting = {"images": slice(images), "block": block, "tau": tau}
    got = convolve(device, dtype, **setting)
    assert torch.equal(got, convolve(device, dtype, **setting, pixel_block=(n, 1, 1)))


@pytest.mark.parametrize("images", BATCHES)
@pytest.mark.parametrize("knob", [{"valid_ratio": 0.5}, {"max_error": 0.05}], ids=str)
def test_a_search_takes_a_pixel_block_that_follows_the_batch(device, kind, images, knob):
    dtype, _ = kind
    pixel_block = default_pixel_block(*knob, images, 64)
    got = convolve(device, dtype, slice(images), **knob)
    assert torch.equal(got, convolve(device, dtype, slice(images), **knob, pixel_block=pixel_block))


def test_whole_blocks_are_the_same_in_every_batch(device, kind):
    dtype, _ = kind
    _, _, tau = documented(100)
    alone, together = (convolve(device, dtype, slice(images), tau=tau) for images in (64, 100))
    assert torch.equal(together[:64], alone)
    last = convolve(device, dtype, slice(64, 100), tau=tau)
    assert torch.equal(together[64:], last)


@pytest.mark.parametrize("images", BATCHES)
def test_a_partial_block_is_skipped_as_if_it_were_full(device, kind, images):
    # Of positions that are 1, 2 and 4 everywhere, a tau between their norms in full blocks keeps
    # the last, whether the images fill a block or not.
    dtype, _ = kind
    input = torch.tensor([1.0, 2.0, 4.0]).expand(images, 64, 1, 3).to(device, dtype)
    weight = torch.ones(64, 64, 1, 1, device=device, dtype=dtype)
    tau = 64.0 * 64.0 * 3.0
    got = spamm_torch.conv2d(input, weight, tau=tau)
    expected = torch.tensor([0.0, 0.0, 256.0]).expand(images, 64, 1, 3)
    assert torch.equal(got.cpu().float(), expected)
