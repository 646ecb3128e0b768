"""Convolutions that skip nothing: tiles of consecutive output pixels, for which no box is cut, and
kernels for few input channels.
"""

import itertools
import json

import pytest
import torch
import torch.nn.functional as F
from support import ACTIVATIONS, assert_near

import fuzz
import spamm_torch
from fuzzing import convolutions, space

pytestmark = pytest.mark.cuda
OPS = torch.ops.spamm_torch

HALF = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
LAST = {"memory_format": torch.channels_last}
_WIDE = [f"128x{pixels}" for pixels in (96, 128, 160, 192, 208, 256)]
_NARROW = [f"64x{pixels}" for pixels in (192, 256, 320, 384)]
TILES = ["".join(pair) for pair in itertools.product([*_WIDE, *_NARROW], "wp")]
# images, channels, out_channels, height and width; then kernel, stride, padding, dilation
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
    (1, 1, 8, 5, 3, (3, 3), 1, 1),
    (65, 3, 72, 6, 9, (3, 3), 1, (0, 2)),
    (130, 7, 136, 5, 17, (1, 1)),
    (70, 3, 64, 15, 19, (7, 7), 2, 3),
    (33, 5, 16, 12, 11, (5, 4), (1, 3), (4, 1), (2, 1)),
    (3, 2, 24, 7, 30, (2, 9), (3, 1)),
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
    return values.to(**LAST) if len(shape) == 4 else values


class Case:
    """A layer's operands, whose sums are about 1, and its call."""

    def __init__(self, layer, dtype):
        images, channels, outs, height, width, kernel, *geometry = layer
        self.input = normal(images, channels, height, width, seed=1, dtype=dtype)
        self.weight = normal(outs, channels, *kernel, seed=2, dtype=dtype)
        self.weight /= (channels * kernel[0] * kernel[1]) ** 0.5
        self.bias = normal(outs, seed=3, dtype=dtype)
        self.geometry = dict(zip(("stride", "padding", "dilation"), geometry, strict=False))
        self.residual = normal(*self.sums().shape, seed=4, dtype=dtype)

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


PARTS = ({}, {"residual": False, "activation": "none"}, {"bias": False})


@HALF
@pytest.mark.parametrize("layer", LAYERS)
def test_every_tile_gives_the_bits_of_the_kernel_of_boxes(layer, dtype, force_unskipped):
    case = Case(LAYERS[layer], dtype)
    for parts in PARTS:
        force_unskipped("0")
        of_boxes = case(**parts)
        assert_near(of_boxes, case.expected(**parts))
        norms = OPS.conv2d_weight_norm(case.weight)  # which this kernel reads, and changes nothing
        assert torch.equal(case(**parts, norm_weight=norms), of_boxes)
        for value in ("1", *TILES):
            force_unskipped(value)
            got = case(**parts)
            assert got.is_contiguous(**LAST)
            assert torch.equal(got, of_boxes), value


@pytest.mark.parametrize("layer", LAYERS)
def test_tf32_has_the_bits_of_the_kernel_of_boxes(layer, force_unskipped, set_tf32):
    set_tf32(True)
    case = Case(LAYERS[layer], torch.float32)
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


@HALF
@pytest.mark.parametrize("layer", FEW_CHANNELS, ids=str)
def test_few_channels(dtype, layer):
    case, eps = Case(layer, dtype), torch.finfo(dtype).eps
    for parts in (*PARTS, {"activation": "silu"}, PARTS[1] | {"bias": False}):
        actual, norms = case(**parts, return_norms=True)
        assert actual.is_contiguous(**LAST)
        # A rounding alone, where there is no residual.
        near = {"rtol": eps, "atol": 512 * torch.finfo(torch.float32).eps + eps / 64}
        near = near if "residual" in parts else {"rtol": 4 * eps, "atol": 4 * eps}
        for found in (actual, case(**parts)):
            torch.testing.assert_close(found.double(), case.expected(**parts), **near)
        space.expect_norms(norms, convolutions.norms_of(actual, 64))


def test_the_rule_changes_no_bit(force_unskipped):
    """If the kernel of boxes has no segments, no result tells which of the two ran."""
    case = Case((64, 64, 128, 14, 14, (3, 3), 1, 1), torch.float16)
    chosen = case()
    force_unskipped("0")
    assert torch.equal(case(), chosen)


@pytest.mark.parametrize("value", ["0", "1", "64x192w", "128x256p"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.usefixtures("set_tf32")  # which cases change
def test_drawn_convolutions(value, dtype, force_unskipped):
    """Cases of the fuzzer: layouts, odd addresses, epilogues, NaN that stay in their windows."""
    force_unskipped(value)
    for number in range(120):
        case = fuzz.drawn(8, number, "convolution") | {"dtype": dtype, "share": 0.0, "groups": 1}
        case |= {"inner": (8, 64, 72)[number % 3], "outer": (8, 136)[number % 2]}
        assert fuzz.problem(case, "cuda") is None, json.dumps(case)


@pytest.mark.parametrize("value", ["2", "128x100w", "128x192", "128x192wp"])
def test_other_values_are_refused(value, force_unskipped, hopper):
    case = Case(LAYERS["one pixel"], torch.float16)
    force_unskipped(value)
    with pytest.raises(ValueError, match=f"SPAMM_TORCH_UNSKIPPED must be .* got {value}"):
        case()
