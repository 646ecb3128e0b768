"""Max pools, bit for bit torch's: of a batch without indices, and of what a convolution makes."""

import itertools

import matrices
import pytest
import torch
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import spamm_torch  # noqa: F401  loads the ops

OPS = torch.ops.spamm_torch

POOLS = [
    {"kernel_size": 2},
    {"kernel_size": 3, "stride": 2, "padding": 1},
    {"kernel_size": (3, 2), "stride": (1, 2), "dilation": (2, 1)},
    {"kernel_size": 2, "stride": 3, "ceil_mode": True},
    {"kernel_size": 5, "stride": 1, "padding": 2},
]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def bits_of(tensor):
    """Entries as integers in rows of memory, so that -0 is not 0 and NaN equals itself."""
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(kinds[tensor.element_size()])


def assert_is_torchs(input, **pool):
    found, expected = OPS.max_pool2d(input, **pool), F.max_pool2d(input, **pool)
    assert torch.equal(bits_of(found), bits_of(expected))
    assert found.stride() == expected.stride()


def test_odd_values(device, dtype):
    """NaN wins, and of equal values the first, zeros of both signs among them."""
    info = torch.finfo(dtype)
    odd = torch.tensor([0.0, -0.0, torch.nan, torch.inf, -torch.inf, info.tiny / 4, -info.max])
    places = torch.randint(len(odd), (4, 16, 20, 20), generator=torch.Generator().manual_seed(3))
    places[:2][places[:2] == 2] = 0  # a NaN hides the rest
    input = odd.to(device, dtype)[places.to(device)]
    for pool, layout in itertools.product(POOLS, (torch.channels_last, torch.contiguous_format)):
        assert_is_torchs(input.contiguous(memory_format=layout), **pool)


def test_off_the_grid_of_16_bytes(device):
    memory = torch.randn(3 * 8 * 6 * 6 + 1, device=device).half()[1:]
    assert_is_torchs(memory.view(3, 6, 6, 8).permute(0, 3, 1, 2), kernel_size=2)


def operands(*sizes, device="cuda", dtype=torch.float16, layout=torch.channels_last, seed=0):
    """Operands of (images, channels, rows, columns), (out channels, kernel edge)."""
    (images, channels, *pixels), (out_channels, kernel) = sizes
    shapes = (images, channels, *pixels), (out_channels, channels, kernel, kernel), (out_channels,)
    made = [matrices.normal(*shape, seed=seed + i) for i, shape in enumerate(shapes)]
    made[1] *= (channels * kernel * kernel) ** -0.5
    input, weight, bias = (x.to(device, dtype) for x in made)
    return input.to(memory_format=layout), weight.to(memory_format=layout), bias


def assert_is_separate(*args, **options):
    found = OPS.conv2d_max_pool(*args, **options)
    expected = F.max_pool2d(OPS.conv2d(*args, threshold=0.0, **options), 2)
    assert torch.equal(found.nan_to_num(1e4), expected.nan_to_num(1e4))
    assert torch.equal(found.isnan(), expected.isnan())
    assert found.stride() == expected.stride()


# ---- conv2d_max_pool ----------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["none", "relu", "silu"])
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format], ids=str)
@pytest.mark.parametrize("pixels", [(6, 8), (7, 9), (2, 2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_is_two_calls(device, dtype, pixels, layout, activation):
    made = operands((5, 8, *pixels), (16, 3), device=device, dtype=dtype, layout=layout)
    assert_is_separate(*made, 1, 1, activation=activation)


def test_groups_strides_and_norms_of_the_weight(device):
    input, weight, bias = operands((3, 8, 9, 12), (16, 3), device=device, dtype=torch.float32)
    assert_is_separate(input, weight[:, :4], bias, (2, 1), (1, 2), (1, 2), 2, activation="relu")
    norms = OPS.conv2d_weight_norm(weight)
    assert_is_separate(input, weight, bias, norm_weight=norms, activation="relu")
    assert OPS.conv2d_max_pool(input[:0], weight, bias).shape == (0, 16, 3, 5)


# ---- Hopper's kernels ---------------------------------------------------------------------------

# (images, channels, rows, columns), (out channels, kernel edge), and which kernel they take.
LAYERS = [
    ((128, 64, 8, 8), (64, 3), "four boxes"),
    ((200, 24, 6, 10), (56, 3), "four boxes"),
    ((128, 64, 34, 36), (64, 3), "four boxes"),  # more windows than thread blocks
    ((77, 128, 4, 2), (8, 3), "four boxes"),
    ((64, 64, 6, 4), (64, 3), "four boxes"),
    ((150, 72, 4, 4), (40, 1), "four boxes"),
    ((128, 128, 16, 16), (128, 3), "four boxes"),
    ((330, 64, 16, 12), (136, 3), "four boxes"),
    ((128, 72, 8, 8), (256, 3), "two boxes"),
    ((70, 72, 4, 6), (136, 3), "two boxes"),
    ((128, 320, 4, 4), (512, 3), "two boxes"),
    ((130, 512, 2, 2), (200, 3), "two boxes"),
    ((600, 128, 2, 2), (72, 1), "two boxes"),
]
NAMES = {"four boxes": ", 4, 4>", "two boxes": ", 2, 6>"}


def kernels_of(call):
    """The names of the kernels that a call launches."""
    call()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        call()
        torch.cuda.synchronize()
    return [event.name for event in found.events() if event.device_type.name == "CUDA"]


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES[:3])
def test_one_kernel_pools_by_pixels(dtype, hopper):
    input = torch.randn(2, 32, 8, 8, device="cuda").to(dtype, memory_format=torch.channels_last)
    [kernel] = kernels_of(lambda: OPS.max_pool2d(input, 2))
    assert "pixel_pool" in kernel


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize(("input", "weight", "kernel"), LAYERS, ids=str)
def test_layers_are_two_calls(input, weight, kernel, dtype, hopper):
    made = operands(input, weight, dtype=dtype)
    padding = weight[1] // 2
    for norms in (None, OPS.conv2d_weight_norm(made[1])):
        assert_is_separate(*made, 1, padding, norm_weight=norms, activation="relu")
    launched = kernels_of(lambda: OPS.conv2d_max_pool(*made, 1, padding, activation="relu"))
    assert len(launched) == 1
    assert NAMES[kernel] in launched[0]


@pytest.mark.cuda
@pytest.mark.parametrize("segments", [1, 2, 4])
@pytest.mark.parametrize("images", [64, 70, 100, 128, 200])
def test_segments(segments, images, hopper, force):
    force(segments)
    for sizes in (((images, 136, 4, 6), (136, 3)), ((images, 72, 2, 2), (264, 3))):
        made = operands(*sizes)
        assert_is_separate(*made, 1, 1, activation="relu")
        assert_is_separate(*made, 1, 1, activation="relu")  # again: no launch leaves anything


@pytest.mark.cuda
@pytest.mark.parametrize("geometry", [(1, 1), (2, 1, 1), ((1, 2), (2, 1), 1), (1, 2, 2), (1, 0, 1)])
@pytest.mark.parametrize("activation", ["relu", "silu", "none"])  # others are two kernels
@pytest.mark.parametrize("out_channels", [64, 136])
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format], ids=str)
def test_geometries_and_layouts(geometry, activation, out_channels, layout, hopper):
    input, weight, bias = operands((128, 64, 14, 14), (out_channels, 3), layout=layout)
    assert_is_separate(input, weight, None, *geometry, activation=activation)
    some = (slice(None), slice(1, 57))
    assert_is_separate(input[some], weight[some], bias, *geometry, activation=activation)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("sizes", [LAYERS[0], LAYERS[6], LAYERS[8], LAYERS[11]], ids=str)
def test_odd_values_on_hopper(sizes, dtype, hopper):
    """NaN wins and infinity reaches the result, also where an infinite weight meets padding."""
    input, weight, bias = operands(*sizes[:2], dtype=dtype)
    input[1, 3, 0, 1], input[2, 5, 1, 0], input[3, 1, 1, 1] = torch.nan, torch.inf, -torch.inf
    assert_is_separate(input, weight, bias, 1, 1, activation="relu")
    bias[:] = -torch.inf
    assert_is_separate(input, weight, bias, 1, 1, activation="relu")
    weight[2, 1, 0, 0] = torch.inf
    for norms in (None, OPS.conv2d_weight_norm(weight)):
        assert_is_separate(input, weight, None, 1, 1, norm_weight=norms, activation="relu")
