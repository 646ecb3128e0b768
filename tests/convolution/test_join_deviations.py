"""The op join_deviations: a concatenation with norms of pixels."""

import pytest
import torch
from torch.library import opcheck
from torch.nn import functional as F

import spamm_torch  # noqa: F401  loads the ops

JOIN = torch.ops.spamm_torch.join_deviations
FORMATS = {"last": torch.channels_last, "first": torch.contiguous_format}


def pictures(channels, device, dtype, *, seed, rows=6, columns=10, images=3):
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(images, channels, rows, columns, generator=generator)
    made[:, :, 2:4, 3:7] = 0
    return made.to(device, dtype)


def norms_of_pixels(images):
    blocks = F.pad(images.double(), (0, 0, 0, 0, 0, -images.shape[1] % 64)).unflatten(1, (-1, 64))
    return blocks.norm(dim=2).movedim(1, -1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
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
        ([(2, 8, 4)], r"parts must be batches \(N, C, H, W\); got shape"),
        ([(2, 8, 4, 4), (2, 8, 8, 8)], "2 of 4 x 4; got 2 of 8 x 8"),
        ([(2, 8, 4, 4), (3, 8, 4, 4)], "2 of 4 x 4; got 3 of 4 x 4"),
    ],
)
def test_bad_arguments(parts, line):
    with pytest.raises(RuntimeError, match=line):
        JOIN([torch.zeros(shape) for shape in parts])


def test_bad_types():
    zeros = torch.zeros(1, 8, 4, 4)
    for other in (zeros.half(), zeros.int()):
        with pytest.raises(TypeError, match="parts must"):
            JOIN([zeros, other])


def test_the_op_is_registered_as_torch_wants_it(device):
    images = pictures(8, device, torch.float32, seed=0)
    opcheck(JOIN.default, ([images, images],))


def test_a_gradient_is_refused():
    with pytest.raises(RuntimeError, match="join_deviations is for inference"):
        JOIN([torch.zeros(1, 8, 4, 4, requires_grad=True)])
