"""Long lists of steps, cut into segments that several thread blocks of a GPU multiply.

The number of segments follows from the sizes; SPAMM_TORCH_SEGMENTS forces it.
"""

import itertools

import pytest
import torch
import torch.nn.functional as F
from reference import Im2col, gap_near, norm_products
from support import ACTIVATIONS, captured, hopper_kernels_run, norms_of_layer
from support import uneven as plain_uneven

import spamm_torch

pytestmark = pytest.mark.cuda

DTYPES = [torch.float16, torch.bfloat16]
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.2e-2}  # relative to the largest result
FORCED = [2, 4]
# images, channels, out_channels, height, width, kernel, stride
LAYERS = [
    (128, 512, 512, 4, 4, 3, 1),
    (128, 512, 512, 2, 2, 3, 1),
    (128, 256, 512, 4, 4, 3, 1),
    (100, 200, 136, 5, 3, 3, 1),  # the last images and channels fill their blocks in part
    (3, 520, 264, 7, 7, 3, 2),
    (9, 1032, 72, 6, 5, 1, 1),
    (70, 64, 128, 3, 3, 1, 1),  # one step
]


def uneven(*shape, **options):
    values = plain_uneven(*shape, least=0.2, **options)
    return values.to("cuda", memory_format=torch.channels_last)


def operands(layer, dtype):
    images, channels, out_channels, height, width, kernel, stride = layer
    input = uneven(images, channels, height, width, seed=1, dtype=dtype)
    weight = uneven(out_channels, channels, kernel, kernel, seed=2, dtype=dtype)
    return input, weight, {"stride": stride, "padding": kernel // 2}


def exact(input, weight, **geometry):
    return F.conv2d(input.double(), weight.double(), **geometry)


def assert_near(got, expected):
    limit = TOLERANCE[got.dtype] * expected.abs().max()
    assert (got.double() - expected).abs().max() <= limit


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_every_number_of_segments_gives_the_convolution(layer, dtype, force):
    input, weight, geometry = operands(layer, dtype)
    expected = exact(input, weight, **geometry)
    for segments in (None, 1, *FORCED):
        force(segments)
        assert_near(spamm_torch.conv2d(input, weight, **geometry, tau=0.0), expected)


def test_the_number_changes_the_order_of_sums_alone(force):
    input, weight, geometry = operands(LAYERS[0], torch.float16)
    results = []
    for segments in (1, *FORCED):
        force(segments)
        results.append(spamm_torch.conv2d(input, weight, **geometry, tau=0.0))
    for one, other in itertools.pairwise(results):
        assert torch.equal(one, other) != hopper_kernels_run()
    # Sums of small integers are the same in any order.
    input, weight = (x.sign() for x in (input, weight))
    force(1)
    expected = spamm_torch.conv2d(input, weight, **geometry, tau=0.0)
    for segments in FORCED:
        force(segments)
        assert torch.equal(spamm_torch.conv2d(input, weight, **geometry, tau=0.0), expected)


@pytest.mark.parametrize("segments", FORCED)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_the_epilogue_follows_the_whole_sum(segments, dtype, activation, force):
    force(segments)
    for layer in (LAYERS[3], LAYERS[4]):
        input, weight, geometry = operands(layer, dtype)
        bias = uneven(1, weight.size(0), 1, 1, seed=3, dtype=dtype).flatten()
        expected = exact(input, weight, **geometry)
        scale = expected.abs().max() / 10  # so that sums are near the bends of activations
        weight = weight / scale.to(dtype)
        expected = exact(input, weight, **geometry)
        residual = uneven(*expected.shape, seed=4, dtype=dtype)
        expected += bias.double().view(1, -1, 1, 1) + residual.double()
        for tau in (0.0, 1e-30):
            options = {"residual": residual, "activation": activation, "return_norms": True}
            got, norms = spamm_torch.conv2d(input, weight, bias, **geometry, tau=tau, **options)
            assert_near(got, ACTIVATIONS[activation](expected))
            torch.testing.assert_close(norms.double(), norms_of_layer(got), rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("images", [8, 70, 128])  # 8: each pixel of a box is judged by itself
def test_what_is_skipped_does_not_depend_on_segments(images, dtype, force):
    input = uneven(images, 200, 4, 5, seed=5, dtype=dtype)
    weight = uneven(136, 200, 3, 3, seed=6, dtype=dtype)
    reference = Im2col(input.cpu(), weight.cpu(), padding=1)
    norm_a, _, skip_norm = reference.norms()
    products = norm_products(norm_a, skip_norm)
    for share in (0.4, 0.95):
        tau = gap_near(products, share)
        expected = reference.product(~(products < tau)).cuda()
        for segments in (None, 1, *FORCED):
            force(segments)
            assert_near(spamm_torch.conv2d(input, weight, padding=1, tau=tau), expected)
    tau = 2 * products.max().item()  # no product is left
    for segments in FORCED:
        force(segments)
        assert not spamm_torch.conv2d(input, weight, padding=1, tau=tau).any()


@pytest.mark.parametrize("segments", FORCED)
def test_what_is_skipped_elsewhere_changes_no_bit(segments, force):
    force(segments)
    input = uneven(128, 200, 4, 4, seed=7, dtype=torch.float16)
    weight = uneven(136, 200, 3, 3, seed=8, dtype=torch.float16)
    whole = spamm_torch.conv2d(input, weight, padding=1, tau=60.0)
    assert not torch.equal(whole, spamm_torch.conv2d(input, weight, padding=1, tau=0.0))
    alone = torch.zeros_like(input)  # but for the window of the output's first pixel
    alone[:, :, :2, :2] = input[:, :, :2, :2]
    got = spamm_torch.conv2d(alone, weight, padding=1, tau=60.0)
    assert torch.equal(got[:, :, 0, 0], whole[:, :, 0, 0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tau", [0.0, 60.0])
@pytest.mark.parametrize("segments", [None, *FORCED])
def test_repeated_runs_and_replays_give_the_same_bits(segments, tau, dtype, force):
    force(segments)
    input, weight, geometry = operands(LAYERS[1], dtype)
    call = lambda: spamm_torch.conv2d(input, weight, **geometry, tau=tau)  # noqa: E731
    expected = call()
    for _ in range(5):
        assert torch.equal(call(), expected)
    graph, results = captured(lambda: [call() for _ in range(3)])
    for _ in range(2):
        for result in results:
            result.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(result, expected) for result in results)


@pytest.mark.parametrize("tau", [0.0, 60.0])
def test_blocks_of_one_image_have_no_segments(tau, force):
    input = uneven(20, 264, 7, 7, seed=11, dtype=torch.float16)
    weight = uneven(128, 264, 3, 3, seed=12, dtype=torch.float16)
    setting = {"padding": 1, "tau": tau, "pixel_block": (1, 8, 8)}
    together = spamm_torch.conv2d(input, weight, **setting)
    for segments in (None, 4):
        force(segments)
        for i in (0, 19):
            assert torch.equal(
                spamm_torch.conv2d(input[i : i + 1], weight, **setting)[0], together[i]
            )


@pytest.mark.parametrize("value", ["0", "3", "16", "two"])
def test_other_numbers_are_refused(value, force, hopper):
    force(value)
    input, weight, geometry = operands(LAYERS[3], torch.float16)
    with pytest.raises(ValueError, match=f"SPAMM_TORCH_SEGMENTS must be 1, 2 or 4; got {value}"):
        spamm_torch.conv2d(input, weight, **geometry, tau=0.0)


# ---- Nothing skipped: tiles of consecutive output pixels, for which no box is cut ----------------


_WIDE = [f"128x{pixels}" for pixels in (96, 128, 160, 192, 208, 256)]
_NARROW = [f"64x{pixels}" for pixels in (192, 256, 320, 384)]
TILES = ["".join(pair) for pair in itertools.product([*_WIDE, *_NARROW], "wp")]
# images, channels, out_channels, height and width; then kernel, stride, padding, dilation, all as
# (rows, columns)
ONE = ((1, 1), (1, 1), (0, 0), (1, 1))
THREE = ((3, 3), (1, 1), (1, 1), (1, 1))
UNSKIPPED = {
    "1 x 1": (9, 264, 136, 14, 14, *ONE),
    "1 x 1, a single step": (3, 40, 72, 17, 19, *ONE),
    "1 x 1, stride 2": (5, 128, 256, 15, 13, (1, 1), (2, 2), (0, 0), (1, 1)),
    "3 x 3": (11, 64, 128, 14, 14, *THREE),
    "3 x 3, many tiles": (40, 72, 200, 28, 28, *THREE),
    "3 x 3, stride 2": (7, 128, 64, 15, 14, (3, 3), (2, 2), (1, 1), (1, 1)),
    "rows unlike columns": (5, 72, 264, 9, 21, (2, 5), (3, 1), (2, 1), (1, 3)),
    "columns unlike rows": (4, 136, 64, 23, 8, (4, 1), (1, 2), (0, 2), (4, 1)),
    "no pixel twice": (3, 64, 64, 12, 12, (3, 3), (3, 3), (0, 0), (1, 1)),
    "padding beyond the kernel": (2, 64, 64, 5, 6, (3, 3), (1, 1), (4, 5), (1, 1)),
    "one pixel": (1, 64, 64, 1, 1, *ONE),
}


@pytest.fixture
def force_unskipped(monkeypatch):
    """Forces a tile, the kernel ("1") or that of boxes, without segments ("0")."""

    def set_value(value):
        monkeypatch.setenv("SPAMM_TORCH_UNSKIPPED", value)
        monkeypatch.setenv("SPAMM_TORCH_SEGMENTS", "1")

    return set_value


def normal(*shape, seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator).to("cuda", dtype)
    return values.to(memory_format=torch.channels_last) if len(shape) == 4 else values


class Case:
    """A layer's operands, and its call."""

    def __init__(self, layer, dtype):
        images, channels, outs, height, width, kernel, stride, padding, dilation = layer
        self.input = normal(images, channels, height, width, seed=1, dtype=dtype)
        self.weight = normal(outs, channels, *kernel, seed=2, dtype=dtype)
        self.weight /= (channels * kernel[0] * kernel[1]) ** 0.5
        self.bias = normal(outs, seed=3, dtype=dtype)
        self.geometry = {"stride": stride, "padding": padding, "dilation": dilation}
        shape = self.sums().shape
        self.residual = normal(*shape, seed=4, dtype=dtype)

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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layer", UNSKIPPED)
def test_every_tile_gives_the_bits_of_the_kernel_of_boxes(layer, dtype, force_unskipped):
    case = Case(UNSKIPPED[layer], dtype)
    for parts in ({}, {"residual": False, "activation": "none"}, {"bias": False}):
        force_unskipped("0")
        of_boxes = case(**parts)
        assert_near(of_boxes, case.expected(**parts))
        for value in ("1", *TILES):
            force_unskipped(value)
            got = case(**parts)
            assert got.is_contiguous(memory_format=torch.channels_last)
            assert torch.equal(got, of_boxes), value


@pytest.mark.parametrize("layer", UNSKIPPED)
def test_tf32_has_the_bits_of_the_kernel_of_boxes(layer, force_unskipped, set_tf32):
    set_tf32(True)
    case = Case(UNSKIPPED[layer], torch.float32)
    own = {"pixel_block": (1, 8, 8)}  # an image does not depend on its batch: never cuDNN's
    force_unskipped("0")
    of_boxes = case(bias=False, residual=False, activation="none", **own)
    epilogue = of_boxes.double() + case.bias.view(-1, 1, 1) + case.residual
    for value in ("1", *TILES):
        if value.startswith("128x208"):  # has no room for three stages
            continue
        force_unskipped(value)
        got = case(bias=False, residual=False, activation="none", **own)
        assert torch.equal(got, of_boxes), value
        for activation in ("relu", "silu"):
            expected = ACTIVATIONS[activation](epilogue).float()
            torch.testing.assert_close(case(activation=activation, **own), expected)


def test_the_rule_changes_no_bit(force_unskipped):
    """If the kernel of boxes has no segments, no result tells which of the two ran."""
    case = Case((64, 64, 128, 14, 14, *THREE), torch.float16)
    chosen = case()
    force_unskipped("0")
    assert torch.equal(case(), chosen)


def test_nan_stays(force_unskipped):
    case = Case(UNSKIPPED["1 x 1"], torch.bfloat16)
    case.residual[1, 2, 3, 4] = torch.nan
    force_unskipped("1")
    assert case().isnan().nonzero().tolist() == [[1, 2, 3, 4]]


@pytest.mark.parametrize("layer", ["1 x 1", "3 x 3, many tiles"])
def test_repeated_runs_and_replays_of_tiles_give_the_same_bits(layer, force_unskipped):
    case = Case(UNSKIPPED[layer], torch.float16)
    force_unskipped("1")
    expected = case()
    for _ in range(20):
        assert torch.equal(case(), expected)
    graph, (first, second) = captured(lambda: (case(), F.relu(case(residual=False))))
    alone = F.relu(case(residual=False))
    for _ in range(10):
        graph.replay()
        assert torch.equal(first, expected)
        assert torch.equal(second, alone)


def test_other_layouts(force_unskipped):
    case = Case(UNSKIPPED["3 x 3"], torch.float16)
    force_unskipped("1")
    expected = case()
    case.input = case.input.contiguous()
    case.weight = torch.stack((case.weight, case.weight), -1)[..., 0]
    case.residual = case.residual.contiguous()
    assert torch.equal(case(), expected)


@pytest.mark.parametrize("value", ["2", "128x100w", "128x192", "128x192wp"])
def test_other_values_are_refused(value, force_unskipped, hopper):
    case = Case(UNSKIPPED["one pixel"], torch.float16)
    force_unskipped(value)
    with pytest.raises(ValueError, match=f"SPAMM_TORCH_UNSKIPPED must be .* got {value}"):
        case()
