"""Canvases with digits of MNIST at random places, drawn from a seed."""

from dataclasses import dataclass

import torch
from torch.nn.functional import interpolate

CLASSES = 11  # the background, then digits 0 to 9
_INK = 0.4  # pixels at least as bright belong to a digit
_SCALES = (1.0, 2.0)
_OVERLAPPING = 0.1  # share of the digits that may lie on others
_TRIES = 50  # at a free place, before any place will do
_TEXTURE = 0.1  # brightness of a textured background, on average


@dataclass(frozen=True)
class Scene:
    """A batch of canvases.

    Attributes:
        pictures: (N, 1, S, S) float32 in [0, 1].
        labels: (N, S, S) int64: 0 for the background, 1 + digit elsewhere.
        instances: (N, S, S) int64: 0 for the background, else which digit of the canvas, from 1.
    """

    pictures: torch.Tensor
    labels: torch.Tensor
    instances: torch.Tensor


def draw_scene(digits, count, size, digits_each, seed, textured=False):
    """Draws canvases; the same arguments give the same ones.

    Args:
        digits: models.data.Digits to take from. count: number of canvases. size: their sides.
        digits_each: how many digits lie on each; a pair (least, most) is drawn from.
        seed: an integer. textured: noise in the place of a black background.
    """
    generator = torch.Generator().manual_seed(seed)
    scene = Scene(
        torch.zeros(count, 1, size, size),
        torch.zeros(count, size, size, dtype=torch.int64),
        torch.zeros(count, size, size, dtype=torch.int64),
    )
    for canvas in range(count):
        many = digits_each
        if not isinstance(many, int):
            many = int(torch.randint(many[0], many[1] + 1, (), generator=generator))
        for number in range(1, many + 1):
            _place(scene, canvas, number, digits, generator)
    if textured:
        texture = 2 * _TEXTURE * torch.rand(scene.pictures.shape, generator=generator)
        scene.pictures.copy_(torch.maximum(scene.pictures, texture))
    return scene


def _place(scene, canvas, number, digits, generator):
    """Puts one more digit on a canvas; where it meets another one, the brighter pixel stays."""
    size = scene.labels.shape[-1]
    chosen = int(torch.randint(len(digits), (), generator=generator))
    low, high = _SCALES
    scale = low + (high - low) * float(torch.rand((), generator=generator))
    image = _cropped(digits.images[chosen].float() / 255)
    image = interpolate(image[None, None], scale_factor=scale, mode="bilinear")[0, 0]
    image = image[:size, :size]
    height, width = image.shape
    may_overlap = float(torch.rand((), generator=generator)) < _OVERLAPPING
    for _ in range(_TRIES):
        row = int(torch.randint(size - height + 1, (), generator=generator))
        column = int(torch.randint(size - width + 1, (), generator=generator))
        here = (canvas, slice(row, row + height), slice(column, column + width))
        if may_overlap or not scene.instances[here].any():
            break
    picture = scene.pictures[:, 0][here]
    is_above = image > picture
    picture[is_above] = image[is_above]
    is_ink = is_above & (image >= _INK)
    scene.labels[here][is_ink] = 1 + int(digits.labels[chosen])
    scene.instances[here][is_ink] = number


def _cropped(image):
    """An image without the dark rows and columns around it."""
    rows, columns = (image.amax(axis).nonzero().flatten() for axis in (1, 0))
    return image[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
