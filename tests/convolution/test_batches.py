"""Batches that do not fill their blocks of images, and what a held tau means for every batch."""

import functools

import matrices
import pytest
import torch
from reference import Im2col, default_pixel_block, norm_products
from support import ACTIVATIONS, assert_near, float32_precision, uneven

import spamm_torch

BATCHES = [1, 2, 8, 32, 63, 64, 65, 100]
KINDS = (*matrices.DTYPES, "tf32")
CHANNELS = 72  # a full block and a partial one


@pytest.fixture(params=KINDS, ids=str)
def dtype(request):
    """Every type, float32 also with torch's setting that allows TF32."""
    is_tf32 = request.param == "tf32"
    with float32_precision("high" if is_tf32 else "highest"):
        yield torch.float32 if is_tf32 else request.param


@functools.cache
def operands():
    """The largest batch and a weight, exact in every type; norms differ by image and position."""
    generator = torch.Generator().manual_seed(0)
    randn = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    input, weight = randn(100, CHANNELS, 3, 4), randn(CHANNELS, CHANNELS, 3, 3)
    input *= torch.tensor([0.1, 0.4, 1.0, 2.0]) * torch.linspace(0.5, 2, 100).view(-1, 1, 1, 1)
    weight *= torch.tensor([0.3, 1.0, 0.6])
    return input.bfloat16(), weight.bfloat16()


@functools.cache
def half_tau():
    """A tau that skips half of the whole batch."""
    input, weight = operands()
    return Im2col(input.double(), weight.double(), padding=1).decide(0.5)[0]


def convolve(device, dtype, images=slice(None), **setting):
    input, weight = operands()
    return spamm_torch.conv2d(
        input[images].to(device, dtype), weight.to(device, dtype), padding=1, **setting
    )


@pytest.mark.parametrize("images", BATCHES)
@pytest.mark.parametrize(
    "setting",
    [
        *[{"block": block} for block in (None, (64, 64, 128), 32)],
        *({"valid_ratio": 0.5}, {"max_error": 0.05}),
    ],
    ids=str,
)
def test_the_default_pixel_block(device, dtype, images, setting):
    """The block of a tau is the same for every batch; that of a search follows the batch."""
    if "block" in setting:
        n = {None: 64, 32: 32}.get(setting["block"], 128)
        setting, pixel_block = {**setting, "tau": half_tau()}, (n, 1, 1)
    else:
        pixel_block = default_pixel_block(*setting, images, 64)
    got = convolve(device, dtype, slice(images), **setting)
    expected = convolve(device, dtype, slice(images), **setting, pixel_block=pixel_block)
    assert torch.equal(got, expected)


def test_whole_blocks_are_the_same_in_every_batch(device, dtype):
    tau = half_tau()
    alone, together = (convolve(device, dtype, slice(images), tau=tau) for images in (64, 100))
    assert torch.equal(together[:64], alone)
    last = convolve(device, dtype, slice(64, 100), tau=tau)
    assert torch.equal(together[64:], last)


@pytest.mark.parametrize("pixel_block", [(1, 8, 8), (1, 2, 16)])
@pytest.mark.parametrize("shape", [(37, 16, 13, 11), (12, 64, 48, 48)], ids=str)
@pytest.mark.parametrize("skips", [False, True])
def test_an_image_with_blocks_of_its_own_does_not_depend_on_its_batch(
    device, dtype, pixel_block, shape, skips
):
    """In float32 on Hopper the pixels of twelve images have larger tiles than those of one."""
    input = uneven(*shape, seed=1, dtype=dtype).to(device)
    weight = uneven(64, shape[1], 3, 3, seed=2, dtype=dtype).to(device)
    call = functools.partial(spamm_torch.conv2d, weight=weight, padding=1, pixel_block=pixel_block)
    tau = call(input, valid_ratio=0.5, return_info=True)[1].tau * 0.999 if skips else 0.0
    together = call(input, tau=tau)
    assert together.any()
    assert torch.equal(together, call(input, tau=0.0)) != skips
    for images in (slice(0, 1), slice(5, 6), slice(3, None), 7):
        assert torch.equal(call(input[images], tau=tau), together[images])


# ---- Blocks of images that a batch does not fill ------------------------------------------------


@pytest.mark.cuda
@pytest.mark.parametrize("images", [1, 5, 16, 17, 33, 66])
@pytest.mark.parametrize("block", [None, 32, (32, 64, 64), (128, 64, 128)], ids=str)
@pytest.mark.parametrize("groups", [1, 2])
def test_rows_of_many_blocks_lie_side_by_side(dtype, images, block, groups):
    """Sums are exact, so each pixel shows what was skipped for its own block."""
    input, weight = operands()
    input, weight = input[:images].float(), weight[:, : CHANNELS // groups].float()
    setting = {"padding": 1, "groups": groups, "block": block}
    reference = Im2col(input, weight, **setting)
    tau, valid = reference.decide(0.5)
    got = spamm_torch.conv2d(input.cuda().to(dtype), weight.cuda().to(dtype), tau=tau, **setting)
    assert_near(got, reference.product(valid))
    weight[5] = torch.inf  # meets zeros of padding, and none of rows that are skipped
    reference = Im2col(input, weight, **setting)
    expected = reference.product(~(norm_products(*reference.norms()[::2]) < tau))
    got = spamm_torch.conv2d(input.cuda().to(dtype), weight.cuda().to(dtype), tau=tau, **setting)
    rest = [channel for channel in range(CHANNELS) if channel != 5]
    assert_near(got[:, rest], expected[:, rest])
    assert got[:, 5].isnan().cpu().equal(expected[:, 5].isnan())


@pytest.mark.parametrize("images", [5, 8, 68])
@pytest.mark.parametrize(
    ("channels", "out", "groups"),
    [(3, 16, 1), (5, 9, 1), (12, 12, 12), (9, 24, 3)],
)
def test_few_channels_of_a_group(device, dtype, images, channels, out, groups):
    """Blocks that are mostly empty, with outputs one by one and eight at a time."""
    input = uneven(images, channels, 7, 6, seed=1, dtype=torch.bfloat16).double()
    weight = uneven(out, channels // groups, 3, 2, seed=2, dtype=torch.bfloat16).double()
    setting = {"stride": (1, 2), "padding": (1, 2), "dilation": (2, 1), "groups": groups}
    reference = Im2col(input, weight, **setting)
    tau, valid = reference.decide(0.5)
    got = spamm_torch.conv2d(*(x.to(device, dtype) for x in (input, weight)), **setting, tau=tau)
    assert_near(got, reference.product(valid))


NARROW = [  # images, channels, those of a group, picture, kernel
    (1, 8, 1, (7, 5), (3, 3), {"padding": 1}),
    (3, 18, 1, (6, 11), (5, 2), {"stride": (2, 3), "padding": (2, 1), "dilation": (1, 2)}),
    (33, 17, 1, (4, 4), (3, 2), {}),
    (70, 20, 1, (5, 6), (3, 3), {"padding": (0, 2), "stride": 2}),
    (1, 36, 4, (7, 5), (3, 3), {"padding": 1}),
    (9, 40, 8, (6, 11), (5, 2), {"stride": (2, 3), "padding": (2, 1), "dilation": (1, 2)}),
    (33, 48, 16, (4, 4), (3, 2), {}),
    (70, 20, 4, (5, 6), (3, 3), {"padding": (0, 2), "stride": 2}),
    (6, 24, 8, (4, 4), (3, 1), {"padding": (1, 0)}),
]


@pytest.mark.parametrize(("images", "channels", "width", "size", "kernel", "setting"), NARROW)
def test_narrow_groups(device, dtype, images, channels, width, size, kernel, setting):
    """Half is skipped, beside squares out of range, and then beside what is no number."""
    input = uneven(images, channels, *size, seed=1, dtype=torch.bfloat16).double()
    weight = uneven(channels, width, *kernel, seed=2, dtype=torch.bfloat16).double()
    if kernel[1] == 1:  # a column, whose stride leads nowhere
        weight = weight.mT.contiguous().mT
    if dtype != torch.float16:
        input[:, :width] *= 2.0**-80
        weight[:width] *= 2.0**80
    setting = setting | {"groups": channels // width}
    tau, _ = Im2col(input, weight, **setting).decide(0.5)
    for special in (None, torch.inf, torch.nan):
        if special:
            input[images // 2, 3, 2, 2] = weight[5, 0, 0, 0] = special
        reference = Im2col(input, weight, **setting)
        expected = reference.product(~(norm_products(*reference.norms()[::2]) < tau))
        operands = input.to(device, dtype), weight.to(device, dtype)
        got = spamm_torch.conv2d(*operands, **setting, tau=tau).cpu()
        assert_near(got.nan_to_num(0, 0, 0), expected.nan_to_num(0, 0, 0))
        torch.testing.assert_close(got.isfinite(), expected.isfinite())


@pytest.mark.parametrize("images", [1, 6, 66])
@pytest.mark.parametrize(
    ("channels", "groups", "kernel", "stride"),
    [
        *((20, 20, 3, 1), (33, 33, 3, 2), (24, 24, 5, 1), (40, 40, 5, 2), (17, 17, 7, 1)),
        *((24, 24, 2, 3), (24, 6, 3, 1), (40, 5, 3, 2), (48, 3, 3, 1)),
    ],
)
def test_groups_that_share_a_vector_on_the_cpu(images, channels, groups, kernel, stride):
    input = uneven(images, channels, 4, 14, seed=1, dtype=torch.bfloat16)
    weight = uneven(channels, channels // groups, kernel, kernel, seed=2, dtype=torch.bfloat16)
    setting = {"stride": stride, "padding": kernel // 2, "groups": groups}
    call = functools.partial(spamm_torch.conv2d, input.float(), weight.float(), **setting)
    reference = Im2col(input.double(), weight.double(), **setting)
    tau, valid = reference.decide(0.5)
    assert_near(call(tau=tau), reference.product(valid))
    assert_near(call(tau=1e-30), reference.product(torch.ones_like(valid)))
    empty = spamm_torch.conv2d(
        input[..., :0].float(), weight.float(), **setting | {"padding": kernel}, tau=tau
    )
    assert not empty.any()
    weight[1] = torch.inf  # meets zeros of padding
    reference = Im2col(input.double(), weight.double(), **setting)
    expected = reference.product(~(norm_products(*reference.norms()[::2]) < tau))
    got = spamm_torch.conv2d(input.float(), weight.float(), **setting, tau=tau)
    rest = [channel for channel in range(channels) if channel != 1]
    assert_near(got[:, rest], expected[:, rest])
    assert got[:, 1].isnan().equal(expected[:, 1].isnan())


@pytest.mark.parametrize("images", [1, 3, 33, 70])
@pytest.mark.parametrize("segments", [None, 2, 4])
def test_what_is_skipped_elsewhere_changes_no_bit(device, images, dtype, segments, force):
    is_tf32 = dtype == torch.float32 and torch.get_float32_matmul_precision() == "high"
    force(segments if is_tf32 or dtype in (torch.float16, torch.bfloat16) else None)
    input = uneven(images, 136, 9, 8, seed=1, dtype=dtype)
    weight = uneven(72, 136, 3, 3, seed=2, dtype=dtype).to(device)
    tau, _ = Im2col(input, weight.cpu(), padding=1).decide(0.5)
    input = input.to(device)
    whole = spamm_torch.conv2d(input, weight, padding=1, tau=tau)
    for row, column in ((0, 0), (4, 3), (8, 7), (2, 6)):
        alone = torch.zeros_like(input)  # but for the window of one output pixel
        window = (..., slice(max(row - 1, 0), row + 2), slice(max(column - 1, 0), column + 2))
        alone[window] = input[window]
        got = spamm_torch.conv2d(alone, weight, padding=1, tau=tau)
        assert torch.equal(got[:, :, row, column], whole[:, :, row, column])


@pytest.mark.parametrize(
    ("dtype", "large"), [(torch.bfloat16, 256), (torch.float16, 2048)], ids=str
)
@pytest.mark.parametrize("activation", ["none", "relu", "relu6", "leaky_relu"])
def test_half_types_are_rounded_once(dtype, large, activation):
    # The sum, large + 1, is between two numbers of the type; sum + residual is 1 or -1.
    input = torch.ones(3, large + 1, 2, 2, dtype=dtype)
    weight = torch.ones(64, large + 1, 1, 1, dtype=dtype)
    weight[32:] = -1
    residual = torch.full((3, 64, 2, 2), -large, dtype=dtype)
    residual[:, 32:] = large
    got = spamm_torch.conv2d(
        input, weight, tau=1e-6, pixel_block=(64, 1, 1), residual=residual, activation=activation
    )
    one = torch.ones(3, 32, 2, 2)
    expected = ACTIVATIONS[activation](torch.cat([one, -one], dim=1)).to(dtype)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("tau", [0.0, -1.0, torch.tensor(0.0)])
@pytest.mark.parametrize("pixel_block", [None, (1, 8, 8)])
def test_a_tau_of_zero_takes_no_norms(tau, pixel_block):
    input = uneven(2, 64, 5, 5, seed=9, dtype=torch.float32)
    weight = uneven(64, 64, 3, 3, seed=10, dtype=torch.float32)
    call = lambda tau: spamm_torch.conv2d(input, weight, tau=tau, pixel_block=pixel_block)  # noqa: E731
    for threshold, takes_norms in ((tau, False), (1e-6, True)):
        with torch.profiler.profile() as profile:
            call(threshold)
        names = {event.key for event in profile.key_averages()}
        assert ("spamm_torch::norm_map" in names) == takes_norms


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("images", [1, 2, 3, 5, 8, 9, 20, 33])
def test_norms_of_few_images_are_those_among_zeros(images, dtype, set_tf32):
    set_tf32(True)
    tau = 1e-38 if dtype == torch.float32 else 0.0  # torch's TF32 may depend on the batch
    for channels, size in ((72, (9, 11)), (128, (3, 3)), (200, (1, 1))):
        input = uneven(images, channels, *size, seed=images, dtype=dtype).cuda()
        if dtype != torch.float16:  # plain sums of their squares overflow or underflow
            input[:, :64, ::2] *= 1e-30
            input[:, 64:, :, ::2] *= 1e25
        identity = torch.eye(channels, dtype=dtype, device="cuda")[:, :, None, None]
        norms = []
        for among in (images, 50):  # as many as one thread holds, or not
            batch = input.new_zeros(among, *input.shape[1:])
            batch[:images] = input
            batch = batch.contiguous(memory_format=torch.channels_last)
            output, of_pixels = spamm_torch.conv2d(batch, identity, tau=tau, return_norms=True)
            norms.append(of_pixels)
        if dtype == torch.float32:
            torch.testing.assert_close(norms[0], norms[1], rtol=2**-21, atol=0)
        else:
            assert torch.equal(norms[0], norms[1])
        groups = [output[:, first : first + 64] for first in range(0, channels, 64)]
        expected = torch.stack([x.double().norm(dim=(0, 1)) for x in groups], dim=-1)
        torch.testing.assert_close(norms[0][0].double(), expected, rtol=2**-19, atol=0)
