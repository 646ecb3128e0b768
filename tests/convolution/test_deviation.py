"""The op conv2d_deviation: what a convolution makes of deviations from a reference.

Random shapes and settings are the fuzzer's, of which tests/robustness runs some.
"""

import pytest
import torch
from support import ACTIVATIONS, hopper_kernels_run, norms_of_pixels
from torch.nn import functional as F

import spamm_torch  # loads the ops

OPS = torch.ops.spamm_torch


def convolved(input, *args, **options):
    """The op's result for an input of one part, and with ``norms`` the result's, too."""
    found, norms = OPS.conv2d_deviation([input], *args, **options)
    return (found, norms) if options.get("norms") else found


# Nothing skipped by the dense convolution and by blocks; exactly zeros, and hardly more, skipped.
ENGINES = {
    "dense": {},
    "blocks": {"threshold": 0.0},
    "zeros": {"threshold": 2.0**-149, "pixel_block": (1, 8, 8)},
    "small": {"threshold": 1e-30, "pixel_block": (1, 8, 8)},
    "images": {"threshold": 1e-30, "pixel_block": (64, 1, 1)},
}
pytestmark = pytest.mark.usefixtures("exact_reference")


def operands(device, channels=(40, 36), images=3, size=20, dtype=torch.float32):
    """Deviations that are zero but in a corner, a weight, a base, and a residual like them."""
    generator = torch.Generator().manual_seed(0)
    inner, outer = channels

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype)

    input, residual = random(images, inner, size, size), random(images, outer, size, size)
    for deviation in (input, residual):
        deviation[:, :, 5:], deviation[:, :, :, 5:] = 0, 0
    weight = random(outer, inner, 3, 3) / 20
    return input, weight, random(1, outer, size, size) * 3, residual


def is_fused(device):
    """Whether a kernel rounds a deviation of half types once: passes over an output round more."""
    return device.type == "cuda" and hopper_kernels_run()


@pytest.mark.parametrize("engine", ["zeros", "small"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_where_nothing_is_valid_nothing_is_read(device, engine, dtype):
    """A base of NaN shows in every element that was computed from it."""
    input, weight, base, residual = operands(device, (40, 72), 2, 40, dtype=dtype)
    base.fill_(float("nan"))
    options = {"activation": "relu", **ENGINES[engine]}
    found = convolved(input, weight, base, 1, 1, **options)
    assert found[:, :, :6, :6].isnan().all()
    on_cpu = device.type == "cpu" and dtype == torch.float32
    if on_cpu or (is_fused(device) and dtype != torch.float32 and engine == "zeros"):
        assert not found[:, :, 9:].any()
        assert not found[:, :, :, 17:].any()
    # A residual may differ from the reference where the input does not.
    found = convolved(input, weight, base, 1, 1, residual=residual, **options)
    assert found[residual != 0].isnan().all()


def test_a_pictures_bits_do_not_depend_on_its_batch_on_a_cpu():
    input, weight, base, residual = operands(torch.device("cpu"), images=5, size=70)
    input[3:, :, 40:60, 30:50] = 1
    options = {"activation": "relu", **ENGINES["zeros"]}
    together = convolved(input, weight, base, 1, 1, residual=residual, **options)
    for i in range(5):
        one = slice(i, i + 1)
        alone = convolved(input[one], weight, base, 1, 1, residual=residual[one], **options)
        assert torch.equal(alone, together[one])


def test_a_picture_that_several_tasks_write_on_a_cpu():
    input, weight, base, residual = operands(torch.device("cpu"), images=2, size=70)
    found = convolved(input, weight, base, 1, 1, residual=residual, activation="relu")
    sums = F.conv2d(input.double(), weight.double(), padding=1) + residual
    wanted = F.relu(sums + base) - F.relu(base.double())
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)


def test_the_smallest_threshold_skips_exactly_zeros(device):
    """Deviations that a float can just hold, and a weight that is not less than 1."""
    input, weight, base, _ = operands(device)
    input, weight, base = input * 2.0**-130, weight.sign(), torch.zeros_like(base)
    options = {"activation": "relu", "pixel_block": (64, 1, 1)}
    found, all_computed = (
        convolved(input, weight, base, 1, 1, threshold=threshold, **options)
        for threshold in (2.0**-149, 0.0)
    )
    assert found.any()
    assert torch.equal(found, all_computed)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("pixel_block", [(1, 8, 8), (64, 1, 1)])
@pytest.mark.parametrize("threshold", [2.0**-149, 1e-46])  # the latter rounds to zero
def test_weights_that_are_not_finite_are_never_skipped(device, value, pixel_block, threshold):
    input, weight, base, _ = operands(device, size=40)
    weight[3, 7, 0, 1] = value
    given = (input, weight, base, 1, 1)
    skipping = convolved(*given, threshold=threshold, pixel_block=pixel_block)
    dense = convolved(*given, threshold=0.0, pixel_block=pixel_block)
    assert torch.equal(skipping.isnan(), dense.isnan())
    assert skipping.isnan().any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("engine", ["zeros", "small", "images"])
@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
def test_pixels_that_are_not_finite_meet_weights_of_zero(device, dtype, engine, value):
    input, weight, base, _ = operands(device, (136, 136), 3, 40, dtype=dtype)
    weight[:64, :64, 0, 1] = 0
    input[1, 7, 17, 23] = input[2, 70, 30, 9] = value
    found = convolved(input, weight, base, 1, 1, **ENGINES[engine])
    wanted = F.conv2d(input.double(), weight.double(), None, 1, 1).isnan()
    assert wanted[1, :64, 18, 23].all()  # where the pixel meets the zeros
    assert torch.equal(found.isnan(), wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("engine", ["zeros", "small"])
def test_norms_count_no_channel_that_does_not_exist(device, dtype, engine, set_tf32):
    """Its weights are zeros, whose products with an infinite pixel are NaN."""
    set_tf32(True)
    input, weight, base, _ = operands(device, (8, 40), dtype=dtype)
    input[1, 3, 2, 2] = float("inf")
    options = {"norms": True, "activation": "relu6", **ENGINES[engine]}
    found, norms = convolved(input, weight, base, 1, 1, **options)
    assert found.isfinite().all()
    torch.testing.assert_close(norms.double(), norms_of_pixels(found), rtol=1e-5, atol=0)


def test_pictures_without_columns_and_without_channels(device):
    """The padding is all there is."""
    input, weight = torch.zeros(2, 8, 5, 0, device=device), torch.ones(16, 8, 3, 3, device=device)
    base = torch.ones(1, 16, 7, 2, device=device)
    options = {"threshold": 2.0**-149, "pixel_block": (1, 8, 8)}
    assert not convolved(input, weight, base, 1, 2, **options).any()
    plain = spamm_torch.conv2d(input, weight, padding=2, tau=2.0**-149, pixel_block=(1, 8, 8))
    assert plain.shape == (2, 16, 7, 2)
    assert not plain.any()
    for engine in ENGINES.values():
        input, weight, base, _ = operands(device, (0, 4))
        found = convolved(input, weight, base, 1, 1, activation="relu", **engine)
        assert found.shape == (3, 4, 20, 20)
        assert not found.any()


# ---- On the kernels of half types ---------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("channels", [(72, 40), (200, 136), (8, 264), (712, 64)])
@pytest.mark.parametrize("size", [8, 9, 17, 35])
@pytest.mark.parametrize("padding", [0, 1, 2])
def test_half_types_by_strips(device, dtype, channels, size, padding):
    """Zeros in some channels, and weights of zero, in blocks of 64 by turns."""
    input, weight, _, _ = operands(device, channels, 3, size, dtype=dtype)
    input[1, : channels[0] // 2, :, 2:] = 1
    weight[64:128, :, 1], weight[:64, 64:128, :, 2] = 0, 0
    sums = F.conv2d(input.double(), weight.double(), None, 1, padding)
    base = torch.randn(sums[:1].shape, generator=torch.Generator().manual_seed(1)).to(input)
    found, norms = convolved(
        input, weight, base, 1, padding, norms=True, activation="relu", **ENGINES["zeros"]
    )
    wanted = F.relu(sums + base.double()) - F.relu(base.double())
    digits = 2.0**-10 if dtype == torch.float16 else 2.0**-7
    on_other_devices = 0 if is_fused(device) else 4 * digits * base.abs().max()
    error = (found.double() - wanted).abs()
    assert (error <= digits * wanted.abs() + 1e-3 + on_other_devices).all()
    assert not found[2, :, 7 + padding :].any()
    torch.testing.assert_close(norms.double(), norms_of_pixels(found), rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("pixel_block", [(1, 8, 8), (1, 16, 4), (64, 1, 1)])
@pytest.mark.parametrize("activation", ["none", "relu"])
def test_one_residual_for_all_images(device, dtype, pixel_block, activation):
    input, weight, base, residual = operands(device, (40, 88), 5, 21, dtype=dtype)
    residual = residual[:1].contiguous(memory_format=torch.channels_last).expand(5, -1, -1, -1)
    options = {"threshold": 2.0**-149, "pixel_block": pixel_block, "activation": activation}
    given = (input, weight, base, 1, 1)
    found = convolved(*given, residual=residual, **options)
    copies = residual.contiguous(memory_format=torch.channels_last)
    assert torch.equal(found, convolved(*given, residual=copies, **options))
    plain = {"padding": 1, "tau": 2.0**-149, "pixel_block": pixel_block}
    of_one = spamm_torch.conv2d(input, weight, residual=residual, **plain)
    assert torch.equal(of_one, spamm_torch.conv2d(input, weight, residual=copies, **plain))


@pytest.mark.cuda
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_float32_rounded_to_tf32(activation, set_tf32):
    set_tf32(True)
    for channels, size in (((40, 72), 37), ((96, 132), 20), ((160, 32), 13)):
        input, weight, base, _ = operands("cuda", channels, 2, size)
        options = {**ENGINES["zeros"], "activation": activation}
        found = convolved(input, weight, base, 1, 1, **options)
        activate, base = ACTIVATIONS[activation], base.double()
        sums = F.conv2d(input.double(), weight.double(), padding=1)
        wanted = activate(sums + base) - activate(base)
        assert (found.double() - wanted).norm() <= 2e-3 * wanted.norm()
        assert not found[:, :, 6:].any()


# ---- Norms of pixels ----------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_norms_of_the_output(device, dtype, engine):
    for activation in ("none", "relu"):
        input, weight, base, residual = operands(device, (72, 136), 2, 21, dtype=dtype)
        given = (input, weight, base, 1, 1)
        options = {"activation": activation, "residual": residual, **ENGINES[engine]}
        found, norms = convolved(*given, norms=True, **options)
        without = convolved(*given, **options)
        if activation == "none" and dtype.itemsize == 2:  # by strips, and by boxes: other sums
            torch.testing.assert_close(found, without, rtol=2e-2, atol=1e-2)
        else:
            assert torch.equal(found, without)
        assert norms.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        torch.testing.assert_close(norms.double(), norms_of_pixels(found), rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("engine", ["zeros", "small", "images"])
@pytest.mark.parametrize("stride", [1, 2])
def test_norms_of_the_input_change_no_bit(device, dtype, engine, stride):
    input, weight, _, _ = operands(device, (72, 40), 3, 30, dtype=dtype)
    base = torch.ones_like(F.conv2d(input[:1], weight, stride=stride, padding=1))
    norms = norms_of_pixels(input).float()
    given = (input, weight, base, stride, 1)
    options = {"activation": "relu", **ENGINES[engine]}
    expected = convolved(*given, **options)
    assert torch.equal(convolved(*given, norm_parts=[norms], **options), expected)


POOLS = [(2, [], 0, 1, False), (3, 2, 1, 1, False), (3, 1, 1, 2, False), (2, 2, 0, 1, True)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize(("channels", "together"), [(72, 1), (32, 2), (16, 4), (32, 4), (8, 3)])
def test_norms_of_the_input_change_no_bit_of_a_pool(device, dtype, pool, channels, together):
    input, _, _, _ = operands(device, (channels, 8), 3, 24, dtype=dtype)
    input = input.contiguous(memory_format=torch.channels_last)
    input[1, -1, 17, 13] = float("nan")
    reference = operands(device, (8, channels), 1, 24, dtype=dtype)[2]
    columns = input.unflatten(3, (-1, together)).permute(0, 4, 1, 2, 3).flatten(1, 2)
    norms = norms_of_pixels(columns).float()
    given = (input, reference, *_pairs(pool))
    for found, wanted in zip(
        OPS.max_pool2d_deviation(*given, norm_input=norms),
        OPS.max_pool2d_deviation(*given),
        strict=True,
    ):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


def test_a_window_without_a_pixel_has_no_deviation(device):
    """Here it is the only one: all of its pixels lie in the padding."""
    input = torch.randn(2, 8, 2, 2, device=device).contiguous(memory_format=torch.channels_last)
    found, norms = OPS.max_pool2d_deviation(input, input[:1], *_pairs((2, 1, 1, 3, False)))
    assert found.shape == (2, 8, 1, 1)
    assert not found.any()
    assert not norms.any()


def _pairs(pool):
    kernel, stride, padding, dilation, ceil_mode = pool
    stride = [stride, stride] if stride else [kernel, kernel]
    return [kernel, kernel], stride, [padding, padding], [dilation, dilation], ceil_mode


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_max_pool_keeps_nan(device, dtype):
    input, _, _, _ = operands(device, (8, 8), 2, 12, dtype=dtype)
    reference = torch.zeros_like(input[:1])
    input[1, 3, 7, 6] = float("nan")
    found, norms = OPS.max_pool2d_deviation(input, reference, [2, 2])
    places = torch.zeros_like(found, dtype=torch.bool)
    places[1, 3, 3, 3] = True
    assert torch.equal(found.isnan(), places)
    assert torch.equal(norms.isnan(), places.any(1)[..., None])


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"reference": torch.zeros(2, 8, 12, 12)}, "reference must have (the )?shape"),
        ({"reference": torch.zeros(1, 8, 12, 12).double()}, "reference must .*float32; got"),
        ({"input": torch.zeros(8, 12, 12)}, "input must be a batch"),
        ({"norm_input": torch.zeros(2, 12, 5, 1)}, "norm_input must have shape"),
        ({"norm_input": torch.zeros(2, 12, 6, 2)}, "norm_input must have shape"),
        ({"norm_input": torch.zeros(2, 12, 12)}, "norm_input must have shape"),
        ({"norm_input": torch.zeros(2, 12, 6, 1).double()}, "norm_input must be float32"),
    ],
)
def test_a_max_pool_with_bad_arguments(changes, line):
    given = {"input": torch.zeros(2, 8, 12, 12), "reference": torch.zeros(1, 8, 12, 12), **changes}
    with pytest.raises((RuntimeError, TypeError), match=line):
        OPS.max_pool2d_deviation(**given, kernel_size=2)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"base": torch.zeros(2, 36, 20, 20)}, "base must have the shape of one image's output"),
        ({"base": torch.zeros(1, 36, 1, 1)}, "base must have the shape of one image's output"),
        ({"base": torch.zeros(1, 36, 20, 20).double()}, "base must have the input's dtype"),
        ({"activation": "gelu"}, "activation must be one of"),
        ({"threshold": 1.0, "valid_ratio": 0.5}, "exactly one of"),
        ({"residual": torch.zeros(3, 1, 20, 20)}, "residual must have the output's shape"),
        ({"norm_parts": [torch.zeros(1, 20, 20, 1)]}, "norm_parts must have shape"),
        ({"norm_parts": [torch.zeros(3, 20, 20, 1).double()]}, "norm_parts must be float32"),
    ],
)
def test_bad_arguments(changes, line):
    input, weight, base, _ = operands("cpu")
    given = {"input": input, "weight": weight, "base": base, "padding": [1, 1], **changes}
    with pytest.raises((RuntimeError, ValueError, TypeError), match=line):
        convolved(**given)


def test_a_gradient_is_refused():
    input, weight, base, _ = operands("cpu")
    with pytest.raises(RuntimeError, match="conv2d_deviation is for inference"):
        convolved(input, weight.requires_grad_(), base, 1, 1)
