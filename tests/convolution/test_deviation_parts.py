"""Deviations of several parts: convolved, their results in phases in their places, and joined."""

import pytest
import torch
from support import FORMATS, hopper_kernels_run, norms_of_pixels
from torch.nn import functional as F

import spamm_torch  # noqa: F401  loads the ops

OPS = torch.ops.spamm_torch
JOIN = OPS.join_deviations


def convolved(*args, **options):
    return OPS.conv2d_deviation(*args, norms=True, **options)


ZEROS = {"threshold": 2.0**-149, "pixel_block": (1, 8, 8), "activation": "relu"}


def together(images, columns):
    """Neighbouring columns as channels of one pixel."""
    return images.unflatten(3, (-1, columns)).permute(0, 4, 1, 2, 3).flatten(1, 2)


def placed(images):
    """By definition: channel c of phase (y, x) is pixel (2 i + y, 2 j + x) of channel c."""
    return F.pixel_shuffle(images.unflatten(1, (4, -1)).transpose(1, 2).flatten(1, 2), 2)


def operands(device, channels=(64, 40), outputs=64, size=(20, 27), dtype=torch.float32, images=3):
    """Parts that are zero but in places of their own, a weight, and a base."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype)

    parts = [random(images, count, *size) for count in channels]
    for i, part in enumerate(parts):
        part[:, :, 5 + 3 * i :], part[:, :, :, : 2 * i] = 0, 0
        part[:, :, :, 6 + 4 * i :] = 0
    parts[0][-1, :, -1, -1] = 1
    return parts, random(outputs, sum(channels), 3, 3) / 20, random(1, outputs, *size) * 3


def expected(parts, weight, base, in_phases=False):
    """In float64."""
    sums = F.conv2d(torch.cat(parts, 1).double(), weight.double(), None, 1, 1)
    found = F.relu(sums + base.double()) - F.relu(base.double())
    return placed(found) if in_phases else found


def norms_of(parts):
    return [norms_of_pixels(part).to(torch.float32) for part in parts]


def check(found, norms, wanted, in_phases, layout=torch.channels_last):
    digits = 1e-5 if found.dtype == torch.float32 else 4 * torch.finfo(found.dtype).eps
    torch.testing.assert_close(found.double(), wanted, rtol=digits, atol=5 * digits)
    assert found.is_contiguous(memory_format=layout)

    columns = 2 if in_phases and found.shape[1] == 32 else 1
    pixels = norms_of_pixels(together(found, columns))
    torch.testing.assert_close(norms.double(), pixels, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "channels", [(64, 40), (128, 64), (40,), (72,), (96, 8), (64, 64, 8)], ids=str
)
@pytest.mark.parametrize("outputs", [32, 64, 128, 136, 256, 768])
@pytest.mark.parametrize("size", [(20, 27), (7, 9), (33, 8)])
@pytest.mark.parametrize("in_phases", [False, True])
@pytest.mark.parametrize(
    ("with_norms", "of_parts"), [(False, "first"), (False, "last"), (True, "first")]
)
def test_parts_side_by_side_and_phases_in_their_places(
    device, dtype, channels, outputs, size, in_phases, with_norms, of_parts
):
    given = operands(device, channels, outputs, size, dtype)
    parts, weight, base = given
    options = {"norm_parts": norms_of(parts) if with_norms else [], "in_phases": in_phases, **ZEROS}
    some = [part.contiguous(memory_format=FORMATS[of_parts]) for part in parts]
    found, norms = convolved(some, weight, base, 1, 1, **options)
    layout = FORMATS["last" if in_phases or len(parts) > 1 else of_parts]
    check(found, norms, expected(*given, in_phases=in_phases), in_phases, layout)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("kernel", [1, 3, 5])
@pytest.mark.parametrize("setting", [{"threshold": 1e-30}, {"pixel_block": (1, 16, 4)}])
@pytest.mark.parametrize("outputs", [128, 256, 64])
def test_phases_of_other_kernels(device, dtype, kernel, setting, outputs):
    parts, _, base = operands(device, (72,), outputs, (20, 27), dtype)
    weight = torch.randn(outputs, 72, kernel, kernel, generator=torch.Generator().manual_seed(1))
    weight = (weight / 20).to(parts[0])
    options = {"norm_parts": norms_of(parts), "in_phases": True, **ZEROS, **setting}
    padding = [kernel // 2, kernel // 2]
    found, norms = convolved(parts, weight, base, 1, padding, **options)
    sums = F.conv2d(parts[0].double(), weight.double(), None, 1, padding)
    wanted = placed(F.relu(sums + base.double()) - F.relu(base.double()))
    check(found, norms, wanted, in_phases=True)


@pytest.mark.parametrize("in_phases", [False, True])
@pytest.mark.parametrize("moved", [0, 1])
def test_a_part_whose_memory_begins_anywhere(device, in_phases, moved):
    """Two bytes behind a multiple of 16."""
    given = operands(device, (64, 40), 128, dtype=torch.float16)
    parts, weight, base = given
    parts = [part.contiguous(memory_format=torch.channels_last) for part in parts]
    memory = torch.full((parts[moved].numel() + 1,), float("nan")).to(base)
    shifted = memory.as_strided(parts[moved].shape, parts[moved].stride(), 1)
    parts[moved] = shifted.copy_(parts[moved])
    assert shifted.data_ptr() % 16 == 2
    options = {"norm_parts": norms_of(parts), "in_phases": in_phases, **ZEROS}
    found, norms = convolved(parts, weight, base, 1, 1, **options)
    check(found, norms, expected(*given, in_phases=in_phases), in_phases)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("part", [0, 1])
def test_pixels_that_are_not_finite_meet_weights_of_zero(device, value, part):
    parts, weight, base = operands(device, (64, 64), 128, (40, 40), torch.float16)
    weight[:64, :, 0, 1] = 0
    parts[part][1, 7, 17, 23] = value
    options = {"norm_parts": norms_of(parts), **ZEROS, "activation": "none"}
    found, _ = convolved(parts, weight, base, 1, 1, **options)
    wanted = F.conv2d(torch.cat(parts, 1).double(), weight.double(), None, 1, 1).isnan()
    assert wanted[1, :64, 18, 23].all()
    assert torch.equal(found.isnan(), wanted)


def test_where_all_parts_are_zero_nothing_is_read(device):
    parts, weight, base = operands(device, (64, 64), 64, (40, 40), torch.float16)
    parts[0][-1, :, -1, -1] = 0
    base.fill_(float("nan"))
    found, norms = convolved(parts, weight, base, 1, 1, norm_parts=norms_of(parts), **ZEROS)
    assert found[:, :, :5, :5].isnan().all()
    if device.type == "cuda" and hopper_kernels_run():
        assert not found[:, :, 16:].any()
        assert not found[:, :, :, 24:].any()
        assert not norms[:, 16:].any()


def test_one_pixel_is_found_wherever_it_is(device):
    """A weight of ones shows which pixels a sum has seen, at every border of tiles and strips."""
    size, channels = (35, 26), (64, 8)
    weight = torch.ones(64, sum(channels), 3, 3, dtype=torch.float16, device=device)
    base = torch.full((1, 64, *size), 100.0, dtype=torch.float16, device=device)
    places = [(y, x) for y in (0, 1, 7, 8, 15, 16, 17, 31, 34) for x in (0, 7, 8, 25)]
    for part in range(2):
        parts = [torch.zeros(len(places), c, *size).to(weight) for c in channels]
        for image, (y, x) in enumerate(places):
            parts[part][image, -1, y, x] = 1
        found, _ = convolved(parts, weight, base, 1, 1, norm_parts=norms_of(parts), **ZEROS)
        assert torch.equal(found.double(), expected(parts, weight, base))


@pytest.mark.parametrize("in_phases", [False, True])
def test_no_pictures(device, in_phases):
    shape = (0, 64, 8, 8)
    parts = [torch.zeros(shape, device=device)] * 2
    weight = torch.ones(128, 128, 3, 3, device=device)
    base = torch.ones(1, 128, *shape[2:], device=device)
    found, norms = convolved(parts, weight, base, 1, 1, norm_parts=[], in_phases=in_phases, **ZEROS)
    sizes = (32, 2 * shape[2], 2 * shape[3]) if in_phases else (128, *shape[2:])
    assert found.shape == (shape[0], *sizes)
    assert norms.numel() == 0


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"parts": []}, "parts must have at least one tensor; got none"),
        ({"parts": [torch.zeros(3, 104, 20)]}, r"parts must be batches \(N, C, H, W\)"),
        ({"parts": [torch.zeros(3, 64, 20, 27)]}, "input must have 104 channels"),
        (
            {"parts": [torch.zeros(3, 64, 20, 27), torch.zeros(3, 40, 20, 27).double()]},
            "parts must have one dtype; got float32 and float64",
        ),
        (
            {"parts": [torch.zeros(3, 64, 20, 27), torch.zeros(3, 40, 20, 26)]},
            "parts must be pictures of one size, 3 of 20 x 27; got 3 of 20 x 26",
        ),
        ({"norm_parts": [torch.zeros(3, 20, 27, 1)]}, "one tensor for each of the 2 parts"),
        ({"norm_parts": [torch.zeros(3, 20, 27, 2)] * 2}, "norm_parts must have shape"),
        ({"norm_parts": [torch.zeros(3, 20, 27, 1).half()] * 2}, "norm_parts must be float32"),
        ({"base": torch.zeros(1, 66, 20, 20)}, "base must have (the )?shape"),
        ({"activation": "gelu"}, "activation must be one of"),
        ({"in_phases": True}, "must have a multiple of 4 channels; got 66"),
        ({"weight": torch.zeros(66, 104, 3, 3, requires_grad=True)}, "is for inference"),
        *[
            (
                {
                    "parts": [
                        torch.zeros(3, 64, 20, 27, device=a),
                        torch.zeros(3, 40, 20, 27, device=b),
                    ]
                },
                r"parts must be on the operands' device .*; got",
            )
            for a, b in (("meta", "cpu"), ("cpu", "meta"))
        ],
    ],
)
def test_bad_arguments(changes, line):
    parts, weight, base = operands("cpu", outputs=66)
    given = {"parts": parts, "weight": weight, "base": base, "padding": [1, 1], "norm_parts": []}
    with pytest.raises((RuntimeError, ValueError, TypeError), match=line):
        convolved(**{**given, **ZEROS, **changes})


@pytest.mark.parametrize("in_phases", [False, True])
def test_autocast_casts_all_operands(device, in_phases):
    parts, weight, base = operands(device, outputs=128)
    options = {"norm_parts": norms_of(parts), "in_phases": in_phases, **ZEROS}
    with torch.autocast(device.type, torch.bfloat16):
        found, _ = convolved(parts, weight, base, 1, 1, **options)
    low = [x.bfloat16() for x in (*parts, weight, base)]
    *parts, weight, base = low
    wanted, _ = convolved(parts, weight, base, 1, 1, **{**options, "norm_parts": norms_of(parts)})
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, wanted)


# ---- A concatenation with norms of pixels -------------------------------------------------------


def pictures(channels, device, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(3, channels, 6, 10, generator=generator)
    made[:, :, 2:4, 3:7] = 0
    return made.to(device, dtype)


@pytest.mark.parametrize("of_parts", FORMATS)
@pytest.mark.parametrize(
    "channels", [(32, 32), (8,), (64, 72), (5, 3), (16, 8, 40, 24), (8, 8, 8, 8, 8)], ids=str
)
def test_parts_lie_side_by_side(device, dtype, of_parts, channels):
    images = [pictures(count, device, dtype, seed=count + i) for i, count in enumerate(channels)]
    found, norms = JOIN([image.contiguous(memory_format=FORMATS[of_parts]) for image in images])
    assert torch.equal(found, torch.cat(images, 1))
    assert found.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(norms.double(), norms_of_pixels(found), rtol=1e-5, atol=0)


def test_many_rows(device):
    """More than a kernel has thread blocks for."""
    images = torch.arange(900 * 8 * 300, device=device).reshape(900, 8, 300, 1) % 100 - 50.0
    found, norms = JOIN([images])
    assert torch.equal(found, images)
    torch.testing.assert_close(norms.double(), norms_of_pixels(found), rtol=1e-5, atol=0)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite(device, value):
    images = pictures(32, device, torch.float32, seed=0)
    images[1, 3, 2, 4] = value
    _, norms = JOIN([images])
    expected = norms_of_pixels(images).float()
    assert torch.equal(norms.isfinite(), expected.isfinite())


@pytest.mark.parametrize(
    ("parts", "line"),
    [
        ([], "parts must have at least one tensor; got none"),
        ([torch.zeros(2, 8, 4)], r"parts must be batches \(N, C, H, W\); got shape"),
        ([torch.zeros(2, 8, 4, 4), torch.zeros(2, 8, 8, 8)], "2 of 4 x 4; got 2 of 8 x 8"),
        ([torch.zeros(2, 8, 4, 4), torch.zeros(3, 8, 4, 4)], "2 of 4 x 4; got 3 of 4 x 4"),
        ([torch.zeros(1, 8, 4, 4), torch.zeros(1, 8, 4, 4).half()], "parts must"),
        ([torch.zeros(1, 8, 4, 4), torch.zeros(1, 8, 4, 4).int()], "parts must"),
        ([torch.zeros(1, 8, 4, 4, requires_grad=True)], "join_deviations is for inference"),
    ],
)
def test_parts_that_cannot_be_joined(parts, line):
    with pytest.raises((RuntimeError, TypeError), match=line):
        JOIN(parts)
