"""Convolutions that a GPU computes without an im2col matrix: of boxes of pixels, in segments of
steps, of consecutive pixels where nothing is skipped, of few input channels.

Shapes here follow what decides between the paths (multiples of 8 channels, strides, batches that
fill their last pixel block in part) and are larger than those that the fuzzer draws.
SPAMM_TORCH_SEGMENTS and SPAMM_TORCH_UNSKIPPED force what follows from the sizes otherwise.
"""

import itertools
import json
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from reference import Im2col, norm_products
from support import (
    ACTIVATIONS,
    assert_near,
    float32_precision,
    hopper_kernels_run,
    relative_error,
    uneven,
)

import fuzz
import spamm_torch
from fuzzing import convolutions, space

ops = torch.ops.spamm_torch
pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("exact_reference")]

HALF = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
LAST = {"memory_format": torch.channels_last}


@pytest.fixture(params=[torch.float16, torch.bfloat16, torch.float32], ids=str)
def boxed_dtype(request):
    """The types whose boxes Hopper multiplies as they lie, float32 where TF32 is allowed."""
    with float32_precision("high"):
        yield request.param


# ---- Layers that skip nothing -------------------------------------------------------------------

# images, channels, out_channels, height and width; then kernel, stride, padding, dilation
LONG = [
    (128, 512, 512, 4, 4, (3, 3), 1, 1),
    (128, 512, 512, 2, 2, (3, 3), 1, 1),
    (100, 200, 136, 5, 3, (3, 3), 1, 1),  # the last images and channels fill their blocks in part
    (3, 520, 264, 7, 7, (3, 3), 2, 1),
    (9, 1032, 72, 6, 5, (1, 1)),
    (70, 64, 128, 3, 3, (1, 1)),  # one step
]
LAYERS = {
    "1 x 1": (9, 264, 136, 14, 14, (1, 1)),
    "1 x 1, a single step": (3, 40, 72, 17, 19, (1, 1)),
    "1 x 1, stride 2": (5, 128, 256, 15, 13, (1, 1), 2),
    "3 x 3": (11, 64, 128, 14, 14, (3, 3), 1, 1),
    "3 x 3, many tiles": (40, 72, 200, 28, 28, (3, 3), 1, 1),
    "3 x 3, stride 2": (7, 128, 64, 15, 14, (3, 3), 2, 1),
    "rows unlike columns": (5, 72, 264, 9, 21, (2, 5), (3, 1), (2, 1), (1, 3)),
    "columns unlike rows": (4, 136, 64, 23, 8, (4, 1), (1, 2), (0, 2), (4, 1)),
    "no pixel twice": (3, 64, 64, 12, 12, (3, 3), 3),
    "padding beyond the kernel": (2, 64, 64, 5, 6, (3, 3), 1, (4, 5)),
    "one pixel": (1, 64, 64, 1, 1, (1, 1)),
}
FEW_CHANNELS = [
    (72, 3, 64, 32, 32, (3, 3), 1, 1),
    (65, 3, 72, 6, 9, (3, 3), 1, (0, 2)),
    (70, 3, 64, 15, 19, (7, 7), 2, 3),
    # Tiles of several rows; rows that start at multiples of 16, 4 and 2 bytes.
    (2, 3, 64, 40, 224, (7, 7), 2, 3),
    (3, 1, 64, 64, 70, (3, 3), 1, 1),
    (2, 3, 32, 33, 227, (3, 3), 2, 1),
    # Several tiles in a row of the output, and in each of many thread blocks.
    (5, 1, 8, 170, 700, (3, 3), 1, 1),
    # More of K than registers hold at once.
    (2, 3, 72, 63, 79, (9, 9), 4, 2),
    (17, 4, 96, 16, 24, (8, 8), 8),
]
_WIDE = [f"128x{pixels}" for pixels in (96, 128, 160, 192, 208, 256)]
_NARROW = [f"64x{pixels}" for pixels in (192, 256, 320, 384)]
TILES = ["".join(pair) for pair in itertools.product([*_WIDE, *_NARROW], "wp")]


class Layer:
    """A layer's operands, whose sums are about 1, and its call."""

    def __init__(self, layer, dtype):
        images, channels, outs, height, width, kernel, *geometry = layer
        generator = torch.Generator().manual_seed(1)

        def normal(*shape):
            values = torch.randn(shape, generator=generator).to("cuda", dtype)
            return values.to(**LAST) if len(shape) == 4 else values

        self.input = normal(images, channels, height, width)
        self.weight = normal(outs, channels, *kernel)
        self.weight /= (channels * kernel[0] * kernel[1]) ** 0.5
        self.bias = normal(outs)
        self.geometry = dict(zip(("stride", "padding", "dilation"), geometry, strict=False))
        self.residual = normal(*self.sums().shape)

    def sums(self):
        return F.conv2d(self.input.double(), self.weight.double(), **self.geometry)

    def __call__(self, bias=True, residual=True, activation="relu", **more):
        bias = self.bias if bias else None
        more |= {"residual": self.residual if residual else None, "tau": 0.0, **self.geometry}
        activation = None if activation == "none" else activation
        return spamm_torch.conv2d(self.input, self.weight, bias, activation=activation, **more)

    def expected(self, bias=True, residual=True, activation="relu"):
        sums = self.sums()
        if bias:
            sums += self.bias.double().view(-1, 1, 1)
        if residual:
            sums += self.residual
        return ACTIVATIONS[activation](sums)


PLAIN = {"bias": False, "residual": False, "activation": "none"}
PARTS = ({}, {"residual": False, "activation": "none"}, {"bias": False})


@HALF
@pytest.mark.parametrize("layer", LAYERS)
def test_every_tile_gives_the_bits_of_the_kernel_of_boxes(layer, dtype, force):
    case = Layer(LAYERS[layer], dtype)
    for parts in PARTS:
        force(1, UNSKIPPED=0)
        of_boxes = case(**parts)
        assert_near(of_boxes, case.expected(**parts))
        norms = ops.conv2d_weight_norm(case.weight)  # which this kernel reads, and changes nothing
        assert torch.equal(case(**parts, norm_weight=norms), of_boxes)
        for value in ("1", *TILES):
            force(1, UNSKIPPED=value)
            got = case(**parts)
            assert got.is_contiguous(**LAST)
            assert torch.equal(got, of_boxes), value


@pytest.mark.parametrize("layer", LAYERS)
def test_tf32_has_the_bits_of_the_kernel_of_boxes(layer, force, set_tf32):
    set_tf32(True)
    case = Layer(LAYERS[layer], torch.float32)
    own = {"pixel_block": (1, 8, 8)}  # an image does not depend on its batch: never cuDNN's
    force(1, UNSKIPPED=0)
    of_boxes = case(**PLAIN, **own)
    epilogue = of_boxes.double() + case.bias.view(-1, 1, 1) + case.residual
    for value in ("1", *TILES):
        if value.startswith("128x208"):  # has no room for three stages
            continue
        force(1, UNSKIPPED=value)
        got = case(**PLAIN, **own)
        assert torch.equal(got, of_boxes), value
        for activation in ("relu", "silu"):
            expected = ACTIVATIONS[activation](epilogue).float()
            torch.testing.assert_close(case(activation=activation, **own), expected)


@HALF
@pytest.mark.parametrize("layer", FEW_CHANNELS, ids=str)
def test_few_channels(dtype, layer):
    case, eps = Layer(layer, dtype), torch.finfo(dtype).eps
    for parts in (*PARTS, {"activation": "silu"}, PLAIN):
        actual, norms = case(**parts, return_norms=True)
        assert actual.is_contiguous(**LAST)
        # A rounding alone, where there is no residual.
        near = {"rtol": eps, "atol": 512 * torch.finfo(torch.float32).eps + eps / 64}
        near = near if "residual" in parts else {"rtol": 4 * eps, "atol": 4 * eps}
        for found in (actual, case(**parts)):
            torch.testing.assert_close(found.double(), case.expected(**parts), **near)
        space.expect_norms(norms, convolutions.norms_of(actual, 64))


@HALF
@pytest.mark.parametrize("images", [1, 8, 33, 70])
@pytest.mark.parametrize("layer", [(1, 32, 5), (2, 64, 2), (3, 136, 3), (5, 72, 4), (7, 8, 11)])
def test_few_channels_of_which_some_are_skipped(dtype, layer, images):
    channels, outs, kernel = layer
    input = uneven(images, channels, 13, 37, seed=1, dtype=dtype)
    weight = uneven(outs, channels, kernel, kernel, seed=2, dtype=dtype)
    setting = {"stride": (2, 1 + outs % 16 // 8), "padding": (1, 2)}
    tau, _ = Im2col(input.double(), weight.double(), **setting).decide(0.5)
    for number in (1.0, torch.inf, torch.nan):  # meets padding, and none of what is skipped
        if number != 1:
            weight[3, 0, 1, 0], input[0, 0, 5, 6] = number, number
        reference = Im2col(input.double(), weight.double(), **setting)
        expected = reference.product(~(norm_products(*reference.norms()[::2]) < tau))
        got = spamm_torch.conv2d(input.cuda(), weight.cuda(), tau=tau, **setting).cpu()
        assert got.isnan().equal(expected.isnan())
        assert_near(*(x.nan_to_num(0, 0, 0) for x in (got, expected)))


def test_the_rule_changes_no_bit(force):
    """If the kernel of boxes has no segments, no result tells which of the two ran."""
    case = Layer(LAYERS["3 x 3"], torch.float16)
    chosen = case()
    force(1, UNSKIPPED=0)
    assert torch.equal(case(), chosen)


@HALF
@pytest.mark.parametrize("layer", LONG, ids=str)
def test_every_number_of_segments_gives_the_convolution(layer, dtype, force):
    """Only the order of sums differs: those of small integers are the same in any order."""
    case, results = Layer(layer, dtype), []
    assert_near(case(), case.expected())
    for segments in (1, 2, 4):
        force(segments)
        assert_near(case(), case.expected())
        results.append(case(**PLAIN))
    if (layer, dtype) == (LONG[0], torch.float16):
        for one, other in itertools.pairwise(results):
            assert torch.equal(one, other) != hopper_kernels_run()
    case.input, case.weight, results = case.input.sign(), case.weight.sign(), []
    for segments in (1, 2, 4):
        force(segments)
        results.append(case(**PLAIN))
        assert torch.equal(results[-1], results[0])


FORCED = [{"segments": 2}, {"segments": 4}]
FORCED += [{"segments": 1, "UNSKIPPED": of} for of in ("0", "1", "64x192w", "128x256p")]


@HALF
@pytest.mark.parametrize("values", FORCED, ids=str)
@pytest.mark.usefixtures("set_tf32")  # which cases change
def test_drawn_convolutions(values, dtype, force):
    """Cases of the fuzzer: layouts, odd addresses, epilogues that follow the whole sum, NaN that
    stay in their windows.
    """
    force(**values)
    for number in range(150):
        case = fuzz.drawn(6 + len(values), number, "convolution") | {"dtype": str(dtype)[6:]}
        if "UNSKIPPED" in values:
            case |= {"share": 0.0, "groups": 1}
            case |= {"inner": (8, 64, 72)[number % 3], "outer": (8, 136)[number % 2]}
        assert fuzz.problem(case, "cuda") is None, json.dumps(case)


@pytest.mark.parametrize(
    ("name", "layer", "value"),
    [
        *(("segments", LONG[2], value) for value in ("0", "3", "64", "two")),
        *(("UNSKIPPED", LAYERS["one pixel"], of) for of in ("2", "128x100w", "128x192wp")),
    ],
)
def test_other_values_are_refused(name, layer, value, force, hopper):
    case = Layer(layer, torch.float16)
    force(**{name: value})
    with pytest.raises(ValueError, match=f"SPAMM_TORCH_{name.upper()} must be .* got {value}"):
        case()


# ---- Boxes --------------------------------------------------------------------------------------

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


@pytest.mark.parametrize("images", [65, 100, 128, 256])
@pytest.mark.parametrize(
    ("channels", "kernel", "stride"),
    [(64, 3, 1), (72, 3, (2, 1)), (128, (1, 2), 1), (8, (4, 3), 1)],
)
def test_more_output_channels_change_no_bit_of_the_others(
    boxed_dtype, images, channels, kernel, stride, force
):
    """But for the number of segments, which grows with the output."""
    force(1)
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
