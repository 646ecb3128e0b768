"""Convolutions of the kinds that a GPU computes without an im2col matrix.

Equal to SpAMM on the documented matrices whichever path is taken: shapes here follow what decides
between the paths (multiples of 8 channels, blocks that one block of 32 fills, strides, batches that
fill their last pixel block in part), and cross the lines in between.
"""

import itertools
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from reference import Im2col
from support import assert_near, float32_precision, relative_error, uneven

import spamm_torch

ops = torch.ops.spamm_torch
pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("exact_reference")]


@pytest.fixture(params=[torch.float16, torch.bfloat16, torch.float32], ids=str)
def boxed_dtype(request):
    """The types whose boxes Hopper multiplies as they lie, float32 where TF32 is allowed."""
    with float32_precision("high"):
        yield request.param


BLOCKS = [
    ((64, 64, 64), (64, 1, 1)),
    ((128, 32, 128), (64, 2, 1)),
    ((32, 128, 32), (32, 1, 1)),
    ((64, 32, 64), (1, 8, 8)),
]


@pytest.mark.parametrize(("block", "pixel_block"), BLOCKS)
@pytest.mark.parametrize(("channels", "groups"), [(3, 1), (64, 1), (40, 2), (20, 3)])
def test_tf32_on_the_documented_matrices(block, pixel_block, channels, groups, set_tf32):
    """Operands hold what TF32 does; the fuzzer draws the other types."""
    set_tf32(True)
    input = uneven(35, groups * channels, 4, 5, seed=1, dtype=torch.bfloat16).double()
    weight = uneven(groups * 72, channels, 3, 2, seed=2, dtype=torch.bfloat16).double()
    bias = uneven(groups * 72, seed=3, dtype=torch.float32)
    setting = {"stride": (1, 2), "padding": (2, 1), "dilation": (2, 1), "groups": groups}
    setting |= {"block": block, "pixel_block": pixel_block}
    reference = Im2col(input, weight, **setting)
    tau, valid = reference.decide(0.5)
    operands = (x.float().cuda() for x in (input, weight, bias))
    got = spamm_torch.conv2d(*operands, **setting, tau=tau, relu=True)
    assert_near(got, reference.product(valid, bias).relu(), 1e-3)


@pytest.mark.parametrize("pixel_block", [(64, 1, 1), (16, 2, 2), (1, 8, 8)])
@pytest.mark.parametrize(
    ("images", "channels", "groups"),
    [(1, 3, 1), (70, 3, 1), (2, 100, 1), (3, 1, 24), (70, 1, 24), (5, 33, 2), (9, 4, 8)],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_blocks_that_are_mostly_empty(dtype, images, channels, groups, pixel_block):
    input = uneven(images, groups * channels, 7, 5, seed=1, dtype=torch.bfloat16).double()
    weight = uneven(groups * 3, channels, 3, 2, seed=2, dtype=torch.bfloat16).double()
    bias = uneven(groups * 3, seed=3, dtype=torch.bfloat16)
    setting = {"stride": (1, 2), "padding": (2, 1), "dilation": (2, 1), "groups": groups}
    setting |= {"pixel_block": pixel_block}
    reference = Im2col(input, weight, **setting)
    tau, valid = reference.decide(0.5)
    expected = reference.product(valid, bias).relu()
    operands = [x.to("cuda", dtype) for x in (input, weight, bias)]
    for norms in ({}, {"norm_weight": ops.conv2d_weight_norm(operands[1], groups)}):
        got = spamm_torch.conv2d(*operands, **setting, tau=tau, relu=True, **norms)
        assert_near(got, expected)
    share = valid.double().mean().item()  # which the search reaches by the same products
    assert_near(spamm_torch.conv2d(*operands, **setting, valid_ratio=share, relu=True), expected)


@pytest.mark.parametrize("images", [65, 100, 128, 256])
@pytest.mark.parametrize(
    ("channels", "kernel", "stride"),
    [(64, 3, 1), (72, 3, (2, 1)), (128, (1, 2), 1), (8, (4, 3), 1)],
)
def test_more_output_channels_change_no_bit_of_the_others(
    boxed_dtype, images, channels, kernel, stride, monkeypatch
):
    """But for the number of segments, which grows with the output."""
    monkeypatch.setenv("SPAMM_TORCH_SEGMENTS", "1")
    dtype = boxed_dtype
    kernel = (kernel, kernel) if isinstance(kernel, int) else kernel
    input = uneven(images, channels, 7, 5, seed=images, dtype=dtype).cuda()
    input = input.to(memory_format=torch.channels_last)
    many = uneven(72, channels, *kernel, seed=2, dtype=dtype).cuda()
    many = many.to(memory_format=torch.channels_last)
    few = many[:64].clone(memory_format=torch.channels_last)  # a kernel of their own
    setting = {"stride": stride, "padding": 1, "return_norms": True, "relu": True}
    for tau in (1e-30, 2.0, 6.0, 1e9):  # torch serves 0 in TF32
        expected, norms = spamm_torch.conv2d(input, many, tau=tau, **setting)
        for frozen in (None, ops.conv2d_weight_norm(few)):
            got, left = spamm_torch.conv2d(input, few, tau=tau, norm_weight=frozen, **setting)
            assert torch.equal(got, expected[:, :64])
            assert torch.equal(left, norms[..., :1])


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        *itertools.product([torch.bfloat16], [1e-38, 1e30]),
        *itertools.product([torch.float32], [1e-42, 1e-38, 1e-30, 1e30, 1e38]),
    ],
)
@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("images", [64, 2])
def test_extreme_numbers_are_tested_and_multiplied_right(images, dtype, size, tf32, set_tf32):
    set_tf32(tf32)
    weight = torch.eye(64, dtype=dtype, device="cuda").view(64, 64, 1, 1)
    input = torch.full((images, 64, 2, 2), size, dtype=dtype, device="cuda")
    input[:, :, 1] = 0
    norm = input[:1, :, 0, 0].double().norm().item() * 8 * 8  # of 64, times the weight's norm
    if norm < 3e38:
        skipped = spamm_torch.conv2d(input, weight, tau=norm * 1.001)
        assert torch.equal(skipped, torch.zeros_like(input))
    kept = spamm_torch.conv2d(input, weight, tau=min(norm * 0.999, 3e38))
    atol, rtol = (2.0**-137, 1e-3) if tf32 else (0, 1e-6)  # TF32's least step
    exact = dtype == torch.bfloat16
    torch.testing.assert_close(kept, input, atol=0 if exact else atol, rtol=0 if exact else rtol)


def test_tiles_of_all_sizes_give_the_same_bits(boxed_dtype):
    """Many pixels are cut into larger tiles than few."""
    generator = torch.Generator().manual_seed(6)
    input = torch.randn(1200, 64, 12, 12, generator=generator).to("cuda", boxed_dtype)
    weight = torch.randn(192, 64, 3, 3, generator=generator).to("cuda", boxed_dtype)
    kept = {"tau": 4096.0, "pixel_block": (64, 1, 1)}  # all norms are near 64: about half
    input = input.to(memory_format=torch.channels_last)
    whole = spamm_torch.conv2d(input, weight, **kept)
    dense = spamm_torch.conv2d(input, weight, **(kept | {"tau": 0.0}))
    assert not torch.equal(whole, dense)
    for images, size in ((256, 12), (140, 12), (100, 12), (140, 5), (100, 5), (64, 4)):
        part = spamm_torch.conv2d(input[:images, :, :size, :size], weight, **kept)
        # A last block that is filled in part is tested by its own norm.
        same = images // 64 * 64
        assert torch.equal(part[:same], whole[:same, :, : size - 2, : size - 2])


# ---- float32 ------------------------------------------------------------------------------------


def operands(data):
    """An input and a weight whose channels, pixels or rows may differ wildly in size."""
    generator = torch.Generator("cuda").manual_seed(1)
    randn = lambda *shape: torch.randn(shape, generator=generator, device="cuda")  # noqa: E731
    input, weight = randn(70, 136, 9, 7), randn(72, 136, 3, 3)
    powers = lambda count: torch.randint(  # noqa: E731
        -24, 25, (count,), generator=generator, device="cuda"
    ).exp2()
    if data == "rectified":
        input = input.relu()
    if data in ("channels", "alike", "both"):  # what one has large, the other has small; or large
        scale = powers(136).view(1, -1, 1, 1)
        input, weight = input * scale, weight * scale if data == "alike" else weight / scale
    if data in ("places", "both"):
        input = input * powers(63).view(1, 1, 9, 7)
        weight = weight * powers(9).view(1, 1, 3, 3)
    return input, weight


@pytest.mark.parametrize("data", ["normal", "rectified", "channels", "alike", "places", "both"])
@pytest.mark.parametrize("stride", [1, 2])
def test_float32_is_as_accurate_as_torch(data, stride):
    """As cuBLAS on the im2col matrix; as cuDNN where TF32 is allowed."""
    input, weight = operands(data)
    geometry = {"padding": 1, "stride": stride}
    expected = F.conv2d(input.double(), weight.double(), **geometry)
    by_cublas = (weight.flatten(1) @ F.unfold(input, 3, **geometry)).view_as(expected)
    got = spamm_torch.conv2d(input, weight, **geometry, tau=0.0)
    most = 1 if data in ("normal", "rectified") else 4
    assert relative_error(got, expected) <= most * relative_error(by_cublas, expected)
    if stride == 1:
        torch.backends.cudnn.allow_tf32 = True
        by_cudnn = F.conv2d(input, weight, padding=1)
        with float32_precision("high"):
            got = spamm_torch.conv2d(input, weight, padding=1, tau=0.0)
        assert relative_error(got, expected) <= 1.05 * relative_error(by_cudnn, expected)


# ---- Norms that one layer leaves for the next ---------------------------------------------------


def test_norms_that_are_left_stand_for_the_inputs_own(boxed_dtype):
    input = uneven(100, 64, 6, 6, seed=16, dtype=boxed_dtype).cuda()
    input = input.to(memory_format=torch.channels_last)
    weight = uneven(64, 64, 3, 3, seed=17, dtype=boxed_dtype).cuda()
    zero = torch.zeros(2, 6, 6, 1, device="cuda")
    nothing = spamm_torch.conv2d(input, weight, padding=1, tau=1e-9, norm_input=zero)
    assert not nothing.any()
    hidden, norms = spamm_torch.conv2d(input, weight, padding=1, tau=0.0, return_norms=True)
    for frozen in (None, ops.conv2d_weight_norm(weight)):
        setting = {"padding": 1, "tau": 3.0, "norm_weight": frozen}
        given = spamm_torch.conv2d(hidden, weight, norm_input=norms, **setting)
        torch.testing.assert_close(given, spamm_torch.conv2d(hidden, weight, **setting))


@pytest.mark.parametrize("size", [(16, 16), (17, 15), (8, 16), (1, 200)])
def test_tiles_dealt_out_beforehand_give_the_bits_of_claimed_ones(size, boxed_dtype):
    """With all norms given no tile is claimed. Each thread block has one or opposite ones."""
    input = uneven(128, 64, *size, seed=18, dtype=boxed_dtype).cuda()
    input = input.to(memory_format=torch.channels_last)
    weight = uneven(128, 64, 3, 3, seed=19, dtype=boxed_dtype).cuda()
    hidden, norms = spamm_torch.conv2d(input, weight, padding=1, tau=0.0, return_norms=True)
    weight = uneven(128, 128, 3, 3, seed=20, dtype=boxed_dtype).cuda()
    norm_weight = ops.conv2d_weight_norm(weight)
    products = norm_weight.max() * norms.max()
    for share in (0.1, 0.3, 0.6):
        kept = {"padding": 1, "tau": share * products, "norm_weight": norm_weight}
        claimed = spamm_torch.conv2d(hidden, weight, **kept, return_norms=True)
        given = spamm_torch.conv2d(hidden, weight, **kept, norm_input=norms, return_norms=True)
        assert torch.equal(given[0], claimed[0])
        assert torch.equal(given[1], claimed[1])
    assert not torch.equal(given[0], spamm_torch.conv2d(hidden, weight, padding=1, tau=0.0))


# ---- Threads ------------------------------------------------------------------------------------


def test_another_thread_may_change_the_tf32_setting(set_tf32):
    """Each call is right by one answer or the other: of pixels in boxes, only TF32's kernel is."""
    set_tf32(False)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    x, weight = torch.randn(128, 64, 8, 8), torch.randn(128, 64, 3, 3)
    exact = F.conv2d(x.double(), weight.double(), padding=1).cuda()
    x, weight = (t.cuda().to(memory_format=torch.channels_last) for t in (x, weight))
    setting = {"padding": 1, "tau": 0.0, "block": (64, 64, 128), "pixel_block": (64, 2, 1)}

    def compute():
        found = (spamm_torch.conv2d(x, weight, **setting) for _ in range(1000))
        return torch.stack([(each.double() - exact).norm() for each in found])

    with ThreadPoolExecutor(1) as pool:
        errors = pool.submit(compute)
        while not errors.done():
            for allowed in (True, False):
                torch.backends.cuda.matmul.allow_tf32 = allowed
    sys.setswitchinterval(before)
    assert (errors.result() < 1e-2 * exact.norm()).all()
