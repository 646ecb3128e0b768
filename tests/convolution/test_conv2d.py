"""conv2d: SpAMM on the documented matrices, what decides, gradients and bad input.

The fuzzer, of which tests/robustness runs some, holds random settings to the same oracle.
"""

import functools

import pytest
import torch
import torch.nn.functional as F
from golden import assert_refused
from reference import Im2col, norm_products
from support import TOLERANCE, assert_near, conv2d_backend, raises_line

import spamm_torch
from spamm_torch import _arguments

ops = torch.ops.spamm_torch


def randn(*shape, seed=0, dtype=torch.float32, device="cpu"):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values.to(device=device, dtype=dtype)


def decaying(*shape, seed=0, **kwargs):
    """Values whose size falls off along every dimension, so that blocks differ in norm."""
    values = randn(*shape, seed=seed)
    for d, size in enumerate(shape):
        scale = torch.exp(-torch.arange(size) / max(size / 3, 1))
        values = values * scale.view([-1 if i == d else 1 for i in range(len(shape))])
    return (values * 4).to(**kwargs)


@pytest.mark.parametrize(
    ("out_channels", "in_channels", "block"),
    [(32, 32, (32, 32, 64)), (33, 32, (64, 32, 64)), (32, 33, (32, 64, 64)), (33, 33, (64,) * 3)],
)
def test_block_none_follows_the_documented_rule(out_channels, in_channels, block):
    """Python's one; that of C++ is the fuzzer's."""
    assert _arguments.conv_block(out_channels, in_channels, None, None) == block


@pytest.mark.parametrize("images", [64, 16])  # 16 of a block of 64, whose norm counts twice
@pytest.mark.parametrize("channels", [64, 128])  # one block, and two
def test_a_product_of_norms_at_tau_is_kept_on_the_cpu(images, channels):
    input, weight = torch.ones(images, channels, 2, 2), torch.ones(64, channels, 1, 1)
    tau = torch.tensor(64.0 * 64.0)  # norms of 64 x 64 ones
    assert (spamm_torch.conv2d(input, weight, tau=tau) == channels).all()
    assert not spamm_torch.conv2d(input, weight, tau=tau.nextafter(tau + 1)).any()


def test_given_weight_norms_replace_the_weights_own(device):
    input, weight = randn(2, 3, 8, 8, device=device), randn(4, 3, 3, 3, device=device)
    norms, bias = ops.conv2d_weight_norm(weight) * 0, randn(4, seed=1, device=device)
    nothing = spamm_torch.conv2d(input, weight, bias, tau=1e-30, norm_weight=norms)
    assert torch.equal(nothing, bias.view(1, -1, 1, 1).expand_as(nothing))


@pytest.mark.parametrize("groups", [1, 4, 48])
def test_one_small_pixel_beside_zeros_is_skipped(device, groups):
    """A tau that one number of each row or block proves, but for one pixel."""
    input, channels = torch.ones(2, 48, 9, 9, device=device), 48 // groups
    input[:, :, :, -1] = 0
    weight = torch.ones(48, channels, 3, 3, device=device)
    skipped, whole = input.clone(), functools.partial(F.conv2d, padding=1, groups=groups)
    skipped[:, :, 4, 5], input[:, :, 4, 5] = 0, 1e-3
    for share, expected in ((1e-3, whole(input, weight)), (0.5, whole(skipped, weight))):
        tau = share * channels * (64 * channels) ** 0.5  # of the norms of ones
        got = spamm_torch.conv2d(input, weight, padding=1, groups=groups, tau=tau * 0.99)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


# ---- The knobs that search ----------------------------------------------------------------------


@pytest.mark.parametrize("images", [3, 70])
@pytest.mark.parametrize("width", [1, 4, 8])
def test_narrow_groups_have_a_kernel_of_their_own(device, images, width):
    dtype = torch.float32 if device.type == "cpu" else torch.float16
    input, weight = randn(images, 24, 9, 7), randn(24, width, 3, 2)
    operands = input.to(device, dtype), weight.to(device, dtype)
    name = conv2d_backend(*operands, tau=1.0, groups=24 // width)
    assert name == ("cpu-depthwise" if device.type == "cpu" else "sm80-depthwise")


KNOBS = [{"valid_ratio": x} for x in (0.05, 0.7)] + [{"max_error": x} for x in (0.0, 1e-2)]


@pytest.mark.parametrize(
    ("images", "pixel_block"), [(5, (2, 4, 8)), (70, (64, 1, 1)), (19, (8, 2, 4))]
)
@pytest.mark.parametrize("knob", KNOBS, ids=str)
def test_knobs_that_search(device, dtype, images, pixel_block, knob):
    """Pixel blocks stick out of the grid. The last bit of a norm may decide."""
    input, weight = decaying(images, 34, 7, 9, seed=5), decaying(40, 34, 3, 3, seed=6)
    setting = {"padding": 1, "block": (32, 32, 64), "pixel_block": pixel_block}
    input, weight = input.to(dtype), weight.to(dtype)
    reference = Im2col(input, weight, **setting)
    norm_a, norm_b, skip_norm = reference.norms(device)
    call = functools.partial(spamm_torch.conv2d, input.to(device), weight.to(device))
    got, info = call(**knob, **setting, return_info=True)
    products = norm_products(norm_a, skip_norm)
    skipped = products < info.tau
    assert info.valid_ratio.item() == pytest.approx(1 - skipped.double().mean().item(), abs=5e-3)
    if "valid_ratio" in knob:
        assert info.valid_ratio.item() == pytest.approx(knob["valid_ratio"], abs=0.01)
    else:
        limit = knob["max_error"] * norm_a.double().norm() * norm_b.double().norm()
        assert info.error_bound <= limit * (1 + 1e-6)
        assert bool((norm_products(norm_a, norm_b)[skipped] > 0).any()) == (knob["max_error"] > 0)
    either = [reference.product(~(products < info.tau * by)) for by in (1 - 1e-5, 1 + 1e-5)]
    off = torch.stack([(got.cpu().double() - kept).abs() for kept in either]).amin(0).max()
    assert off <= TOLERANCE[dtype] * either[0].abs().max()


def test_groups_share_one_knob(device):
    input = decaying(2, 8, 8, 8, dtype=torch.float64, device=device)
    input[:, 4:] *= 1e-3  # the second group's products are the lesser half
    weight = decaying(8, 4, 1, 1, seed=1, dtype=torch.float64, device=device)
    got = spamm_torch.conv2d(input, weight, groups=2, valid_ratio=0.5)
    dense = F.conv2d(input, weight, groups=2)
    assert_near(got[:, :4], dense[:, :4].cpu())
    assert torch.all(got[:, 4:] == 0)


@pytest.mark.parametrize("knob", ["tau", "valid_ratio", "max_error"])
def test_large_convolutions_are_cut_into_pieces(device, knob):
    # The im2col matrix is larger than what is built at a time, so that several pieces must act as
    # one. With a 1 x 1 kernel it is the input itself, block by block; one image fills a quarter of
    # the last blocks. Of few images, a CPU builds it for its matrix instructions, of bfloat16.
    images, dtype = (65, torch.bfloat16) if device.type == "cpu" else (321, torch.float32)
    generator = torch.Generator(device).manual_seed(0)
    input = torch.randn(images, 64, 64, 64, generator=generator, device=device).to(dtype)
    input *= torch.linspace(0, 1, 64, device=device).view(-1, 1)
    weight = randn(32, 64, 1, 1, device=device).to(dtype) / 100
    block = (32, 64, 64)

    padded = F.pad(input, (0, 0, 0, 0, 0, 0, 0, 3)).view(-1, 4, 64, 64, 4, 16)
    matrix = padded.permute(2, 0, 3, 4, 1, 5).reshape(64, -1)
    norm_a = spamm_torch.norm_map(weight.view(32, 64), block[:2])
    norm_b = spamm_torch.norm_map(matrix, block[1:])
    skip_norm = norm_b.clone()
    skip_norm[:, -64 * 4 :] *= 2  # sqrt(64 / 16)
    tau = {
        "tau": norm_a.max() * skip_norm.max() * 0.6,
        "valid_ratio": spamm_torch.find_tau(norm_a, skip_norm, 0.4),
        "max_error": ops.find_tau(norm_a, norm_b, max_error=0.3, skip_norm_b=skip_norm),
    }[knob]
    expected = spamm_torch.mm(weight.view(32, 64), matrix, tau=tau, block=block, norm_b=skip_norm)
    expected = expected.view(32, -1, 64, 4, 4, 16).permute(1, 4, 0, 2, 3, 5)
    expected = expected.reshape(-1, 32, 64, 64)[:images]

    value = {"tau": tau, "valid_ratio": 0.4, "max_error": 0.3}[knob]
    got = spamm_torch.conv2d(input, weight, **{knob: value}, block=block, pixel_block=(4, 1, 16))
    for images_tested in (slice(0, -1), slice(-1, None)):
        assert 0 < (got[images_tested] == 0).double().mean() < 1
    assert torch.equal(got == 0, expected == 0)
    torch.testing.assert_close(got, expected)


def test_rows_too_long_for_one_piece(device):
    width = 64 * (313 if device.type == "cpu" else 8300)
    generator = torch.Generator(device).manual_seed(0)
    input = torch.randn(1, 64, 2, width, generator=generator, device=device, dtype=torch.float64)
    input *= torch.linspace(0, 1, width, device=device)
    weight = randn(32, 64, 1, 1, dtype=torch.float64, device=device)
    knob = {"valid_ratio": 0.5, "block": (32, 64, 64)}
    got = spamm_torch.conv2d(input, weight, **knob, pixel_block=(1, 1, 64))
    expected = spamm_torch.mm(weight.view(32, 64), input.view(64, -1), **knob)
    assert 0.4 < (got == 0).double().mean() < 0.6
    torch.testing.assert_close(got.view(32, -1), expected)


# ---- Layout and shapes --------------------------------------------------------------------------


@pytest.mark.parametrize("input_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("weight_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("pixel_block", [None, (1, 8, 8), (4, 4, 4), (8, 2, 4)])
def test_memory_format_is_torchs(device, input_format, weight_format, pixel_block):
    input = randn(4, 5, 8, 8, device=device).to(memory_format=input_format)
    weight = randn(6, 5, 3, 3, device=device).to(memory_format=weight_format)
    got = spamm_torch.conv2d(input, weight, padding=1, tau=0.0, pixel_block=pixel_block)
    assert got.stride() == F.conv2d(input, weight, padding=1).stride()


@pytest.mark.parametrize("knob", [{"tau": 0.1}, {"valid_ratio": 0.5}, {"max_error": 0.5}])
def test_one_image_and_none(device, knob):
    input, weight = decaying(6, 9, 9, device=device), decaying(4, 6, 3, 3, device=device)
    residual = decaying(4, 7, 7, seed=2, device=device)
    call = functools.partial(spamm_torch.conv2d, weight=weight, activation="relu", **knob)
    got = call(input, residual=residual)
    assert got.shape == (4, 7, 7)
    assert torch.equal(got, call(input[None], residual=residual[None])[0])
    assert call(input.expand(0, 6, 9, 9)).shape == (0, 4, 7, 7)
    dense = functools.partial(ops.dense_conv2d, weight=weight)
    batch = dense(input[None], residual=residual[None])
    assert torch.equal(dense(input, residual=residual), batch[0])


# ---- Gradients, autocast, tracing ---------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 4, 7, 9), (4, 7, 9)])
def test_gradients_are_dense(device, shape):
    """Whatever is skipped; the second derivatives are those of differences."""
    shapes = (shape, (6, 2, 3, 2), (6,))
    tensors = [
        decaying(*of, seed=seed, dtype=torch.float64, device=device).requires_grad_()
        for seed, of in enumerate(shapes)
    ]
    setting = {"stride": (1, 2), "padding": (1, 0), "dilation": 2, "groups": 2}
    ours = functools.partial(spamm_torch.conv2d, valid_ratio=0.3, **setting)
    outputs = [convolve(*tensors) for convolve in (ours, functools.partial(F.conv2d, **setting))]
    assert not torch.allclose(*outputs)
    factors = randn(*outputs[0].shape, seed=9, dtype=torch.float64, device=device)
    gradients = (torch.autograd.grad(output, tensors, factors) for output in outputs)
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected)
    dense = functools.partial(spamm_torch.conv2d, tau=0.0, **setting)
    # cuDNN adds up a weight's gradient in no fixed order.
    options = {"fast_mode": True, "nondet_tol": 1e-10 if device.type == "cuda" else 0}
    assert torch.autograd.gradcheck(dense, tensors, **options)
    assert torch.autograd.gradgradcheck(dense, tensors, **options)


@pytest.mark.parametrize("run", ["skips", "grouped", "dense"])
@pytest.mark.parametrize("channels", [300, 30])
def test_a_kernel_of_one_pixel_ignores_dilation(device, run, channels):
    """torch's own CPU convolution dies of it in channels-last; gradients are torch's, too."""
    input = randn(65, channels, 3, 1, device=device).contiguous(memory_format=torch.channels_last)
    weight = randn(6, channels // 3, 1, 1, device=device)
    tensors = input.requires_grad_(), weight.requires_grad_()
    shape = {"stride": (3, 2), "padding": (0, 1), "groups": 3}

    def gradients(dilation):
        tau = {"tau": 0.0 if run == "grouped" else 0.5}
        convolve, knob = (ops.dense_conv2d, {}) if run == "dense" else (spamm_torch.conv2d, tau)
        output = convolve(*tensors, dilation=dilation, **knob, **shape)
        return output, *torch.autograd.grad(output.square().sum(), tensors)

    for found, expected in zip(gradients((2, 3)), gradients(1), strict=True):
        assert torch.equal(found, expected)
    if run == "skips":
        found = spamm_torch.conv2d(*tensors, dilation=(2, 3), tau=1e-30, **shape)
        assert_near(found, F.conv2d(input.double(), weight.double(), **shape))


# ---- Bad input ----------------------------------------------------------------------------------

GOOD = {"input": torch.zeros(2, 4, 8, 8), "weight": torch.zeros(6, 4, 3, 3)}


def test_what_is_refused(device):
    def good_but(call, **more):
        return lambda **changes: call(**on(device, {**GOOD, **more, **changes}))

    names = {"conv": good_but(spamm_torch.conv2d, tau=1.0), "op": good_but(ops.conv2d)}
    names |= {"dense": good_but(ops.dense_conv2d), "SpAMMConv2d": spamm_torch.SpAMMConv2d}
    names |= {"conv_pool": good_but(ops.conv2d_max_pool), "zeros": torch.zeros}
    names["pool"] = lambda x: ops.max_pool2d(x.to(device), 2)
    assert_refused("refused: convolutions", names)


def test_what_has_no_result_is_refused_while_tracing():
    for name, shape in (("input", (8, 8)), ("input", (2, 3, 8, 8)), ("weight", (6, 4, 9, 9))):
        with raises_line(RuntimeError):
            spamm_torch.conv2d(**on("meta", {**GOOD, name: torch.zeros(shape)}), tau=1.0)
    with raises_line(TypeError):
        spamm_torch.conv2d(**on("meta", {**GOOD, "weight": GOOD["weight"].double()}), tau=1.0)


def on(device, arguments):
    return {
        name: value.to(device) if isinstance(value, torch.Tensor) and not value.is_meta else value
        for name, value in arguments.items()
    }


@pytest.mark.parametrize("name", ["input", "weight", "bias", "norm_weight", "tau"])
def test_one_meta_tensor_among_real_ones_is_refused(name):
    arguments = {**GOOD, "bias": torch.zeros(6), "tau": torch.tensor(1.0)}
    arguments["norm_weight"] = ops.conv2d_weight_norm(GOOD["weight"])
    arguments[name] = arguments[name].to("meta")
    with raises_line(RuntimeError, "device"):
        spamm_torch.conv2d(**arguments)


def test_numbers_in_tuples_of_one_are_pairs(device):
    x, weight = randn(2, 4, 8, 8, device=device), randn(6, 4, 3, 3, seed=1, device=device)
    pairs = None, (1,), "same", (2,)
    found = spamm_torch.conv2d(x, weight, *pairs, tau=0.0)
    assert_near(found, F.conv2d(x.double(), weight.double(), *pairs))
