"""Nothing skipped, on a GPU: tiles of consecutive output pixels, for which no box is cut.

A rule of sizes chooses the kernel and its tile; SPAMM_TORCH_UNSKIPPED forces them.
"""

import itertools

import pytest
import torch
import torch.nn.functional as F
from support import ACTIVATIONS, captured

import spamm_torch

pytestmark = pytest.mark.cuda

DTYPES = [torch.float16, torch.bfloat16]
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.2e-2}  # relative to the largest result
_WIDE = [f"128x{pixels}" for pixels in (96, 128, 160, 192, 208, 256)]
_NARROW = [f"64x{pixels}" for pixels in (192, 256, 320, 384)]
TILES = ["".join(pair) for pair in itertools.product([*_WIDE, *_NARROW], "wp")]
# images, channels, out_channels, height and width; then kernel, stride, padding, dilation, all as
# (rows, columns)
ONE = ((1, 1), (1, 1), (0, 0), (1, 1))
THREE = ((3, 3), (1, 1), (1, 1), (1, 1))
LAYERS = {
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
def force(monkeypatch):
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


def assert_near(got, expected):
    limit = TOLERANCE[got.dtype] * expected.abs().max()
    assert (got.double() - expected).abs().max() <= limit


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layer", LAYERS)
def test_every_tile_gives_the_bits_of_the_kernel_of_boxes(layer, dtype, force):
    case = Case(LAYERS[layer], dtype)
    for parts in ({}, {"residual": False, "activation": "none"}, {"bias": False}):
        force("0")
        of_boxes = case(**parts)
        assert_near(of_boxes, case.expected(**parts))
        for value in ("1", *TILES):
            force(value)
            got = case(**parts)
            assert got.is_contiguous(memory_format=torch.channels_last)
            assert torch.equal(got, of_boxes), value


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation, dtype, force):
    case = Case(LAYERS["3 x 3"], dtype)
    force("1")
    for residual in (False, True):
        parts = {"activation": activation, "residual": residual}
        assert_near(case(**parts), case.expected(**parts))


def test_the_rule_changes_no_bit(force):
    """Where the kernel of boxes has no segments, no result tells which of the two ran."""
    case = Case((64, 64, 128, 14, 14, *THREE), torch.float16)
    chosen = case()
    force("0")
    assert torch.equal(case(), chosen)


def test_infinite_weights_meet_the_padding(force):
    case = Case(LAYERS["3 x 3"], torch.float16)
    case.weight[3, 5, 0, 0] = torch.inf
    force("1")
    got = case(residual=False, activation="none")
    expected = F.conv2d(case.input.float(), case.weight.float(), **case.geometry)
    assert torch.equal(got.isnan(), expected.isnan())
    assert got[:, 3].isnan().any()


def test_nan_stays(force):
    case = Case(LAYERS["1 x 1"], torch.bfloat16)
    case.residual[1, 2, 3, 4] = torch.nan
    force("1")
    assert case().isnan().nonzero().tolist() == [[1, 2, 3, 4]]


@pytest.mark.parametrize("layer", ["1 x 1", "3 x 3, many tiles"])
def test_repeated_runs_and_replays_give_the_same_bits(layer, force):
    case = Case(LAYERS[layer], torch.float16)
    force("1")
    expected = case()
    for _ in range(20):
        assert torch.equal(case(), expected)
    graph, (first, second) = captured(lambda: (case(), F.relu(case(residual=False))))
    alone = F.relu(case(residual=False))
    for _ in range(10):
        graph.replay()
        assert torch.equal(first, expected)
        assert torch.equal(second, alone)


def test_other_layouts(force):
    case = Case(LAYERS["3 x 3"], torch.float16)
    force("1")
    expected = case()
    case.input = case.input.contiguous()
    case.weight = torch.stack((case.weight, case.weight), -1)[..., 0]
    case.residual = case.residual.contiguous()
    assert torch.equal(case(), expected)


@pytest.mark.parametrize("value", ["2", "128x100w", "128x192", "128x192wp"])
def test_other_values_are_refused(value, force, hopper):
    case = Case(LAYERS["one pixel"], torch.float16)
    force(value)
    with pytest.raises(ValueError, match=f"SPAMM_TORCH_UNSKIPPED must be .* got {value}"):
        case()
