"""The op max_pool2d: torch's max pooling of a batch, without indices, bit for bit."""

import pytest
import torch
from torch.nn import functional as F

import spamm_torch

OPS = torch.ops.spamm_torch

POOLS = [
    {"kernel_size": 2},
    {"kernel_size": 3, "stride": 2, "padding": 1},
    {"kernel_size": (3, 2), "stride": (1, 2), "dilation": (2, 1)},
    {"kernel_size": 2, "stride": 3, "ceil_mode": True},
    {"kernel_size": 5, "stride": 1, "padding": 2},
]
SIZES = [(1, 8, 7, 5), (65, 72, 8, 7), (3, 5, 5, 6), (2, 136, 9, 16)]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def bits_of(tensor):
    """Entries as integers in rows of memory, so that -0 is not 0 and NaN equals itself."""
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(kinds[tensor.element_size()])


def assert_is_torchs(input, **pool):
    found, expected = OPS.max_pool2d(input, **pool), F.max_pool2d(input, **pool)
    assert torch.equal(bits_of(found), bits_of(expected))
    assert found.stride() == expected.stride()


@pytest.mark.parametrize("pool", POOLS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format], ids=str)
def test_is_torchs(device, pool, dtype, sizes, layout):
    input = torch.randn(sizes, generator=torch.Generator().manual_seed(2)).round(decimals=1)
    assert_is_torchs(input.to(device, dtype, memory_format=layout), **pool)


@pytest.mark.parametrize("dtype", DTYPES)
def test_odd_values(device, dtype):
    """NaN wins, and of equal values the first, zeros of both signs among them."""
    info = torch.finfo(dtype)
    odd = torch.tensor([0.0, -0.0, torch.nan, torch.inf, -torch.inf, info.tiny / 4, -info.max])
    places = torch.randint(len(odd), (4, 16, 20, 20), generator=torch.Generator().manual_seed(3))
    places[:2][places[:2] == 2] = 0  # a NaN hides the rest
    input = odd.to(device, dtype)[places.to(device)].contiguous(memory_format=torch.channels_last)
    for pool in POOLS:
        assert_is_torchs(input, **pool)


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format], ids=str)
def test_images_of_one_pixel(device, layout):
    input = torch.randn(3, 8, 1, 1).to(device, torch.float16).contiguous(memory_format=layout)
    assert_is_torchs(input, kernel_size=1)
    assert_is_torchs(input, kernel_size=2, padding=1)


def test_off_the_grid_of_16_bytes(device):
    memory = torch.randn(3 * 8 * 6 * 6 + 1, device=device).half()[1:]
    assert_is_torchs(memory.view(3, 6, 6, 8).permute(0, 3, 1, 2), kernel_size=2)


def test_empty(device):
    empty = torch.empty(0, 8, 4, 4, device=device).to(memory_format=torch.channels_last)
    assert_is_torchs(empty, kernel_size=2)


@pytest.mark.parametrize("name", ["max_pool2d", "max_pool2d_with_norms"])
def test_refuses(device, name):
    op = getattr(OPS, name)
    input = torch.ones(1, 8, 4, 4, device=device)
    with pytest.raises(RuntimeError, match=r"input must be a batch \(N, C, H, W\); got shape"):
        op(input[0], 2)
    with pytest.raises(TypeError, match=r"input must be float16.*; got int32"):
        op(input.int(), 2)
    with pytest.raises(RuntimeError, match=f"{name} is for inference"):
        op(input.requires_grad_(), 2)


@pytest.mark.strength(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("pool", POOLS, ids=str)
def test_opcheck(device, dtype, pool):
    input = torch.randn(3, 16, 9, 8, device=device).to(dtype, memory_format=torch.channels_last)
    torch.library.opcheck(OPS.max_pool2d.default, (input,), pool)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES[:3])
def test_one_kernel_pools_by_pixels_on_hopper(dtype):
    if not spamm_torch.backend_for("cuda", torch.float16).startswith("sm90"):
        pytest.skip("needs Hopper's kernels")
    input = torch.randn(2, 32, 8, 8, device="cuda").to(dtype, memory_format=torch.channels_last)
    with torch.profiler.profile() as profile:
        OPS.max_pool2d(input, 2)
        torch.cuda.synchronize()
    kernels = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert len(kernels) == 1
    assert "pixel_pool" in kernels[0]
