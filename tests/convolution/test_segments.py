"""Long lists of steps, cut into segments that several thread blocks of a GPU multiply.

The number of segments follows from the sizes; SPAMM_TORCH_SEGMENTS forces it.
"""

import itertools
import json

import pytest
import torch
import torch.nn.functional as F
from support import assert_near, hopper_kernels_run
from support import uneven as plain_uneven

import fuzz
import spamm_torch

pytestmark = pytest.mark.cuda

DTYPES = [torch.float16, torch.bfloat16]
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
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.usefixtures("set_tf32")  # which cases change
def test_drawn_convolutions(segments, dtype, force):
    """Cases of the fuzzer: epilogues follow the whole sum, and segments skip nothing more."""
    force(segments)
    for number in range(150):
        case = fuzz.drawn(7, number, "convolution") | {"dtype": dtype}
        assert fuzz.problem(case, "cuda") is None, json.dumps(case)


@pytest.mark.parametrize("value", ["0", "3", "64", "two"])
def test_other_numbers_are_refused(value, force, hopper):
    force(value)
    input, weight, geometry = operands(LAYERS[3], torch.float16)
    with pytest.raises(ValueError, match=f"must be 1, 2, 4, 8, 16 or 32; got {value}"):
        spamm_torch.conv2d(input, weight, **geometry, tau=0.0)
