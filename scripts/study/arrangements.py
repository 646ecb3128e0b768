"""Digits that are not where they are expected: shifted, scaled, rotated, scattered.

Each arrangement makes pictures (n, 3, 32, 32) as models.data.to_pictures does, from images
(n, 28, 28) uint8 and a generator of random numbers.
"""

import math

import torch
from torch.nn.functional import affine_grid, grid_sample, interpolate, pad

from models.data import IMAGE_SIZE, PICTURE_SIZE, draw_shifts, to_pictures

_SCALES = (0.4, 1.2)
_HALF = IMAGE_SIZE // 2


def centred(images, generator):
    """As they come."""
    return to_pictures(images)


def shifted(images, generator):
    """Each by up to 6 pixels either way."""
    return to_pictures(images, draw_shifts(len(images), generator))


def scaled(images, generator):
    """Each to 0.4 to 1.2 times its size, in the centre."""
    low, high = _SCALES
    scales = low + (high - low) * torch.rand(len(images), generator=generator)
    return _warped(to_pictures(images), scales, torch.zeros(len(images)))


def rotated(images, generator):
    """Each by any angle, in the centre."""
    angles = 2 * math.pi * torch.rand(len(images), generator=generator)
    return _warped(to_pictures(images), torch.ones(len(images)), angles)


def scattered(images, generator):
    """Two at half their size, anywhere: each image and another one."""
    others = images[torch.randperm(len(images), generator=generator)]
    grey = torch.maximum(*(_placed(of, generator) for of in (images, others)))
    pictures = grey.unsqueeze(1).expand(-1, 3, -1, -1)
    return pictures.contiguous(memory_format=torch.channels_last)


ARRANGEMENTS = {place.__name__: place for place in (centred, shifted, scaled, rotated, scattered)}


def _warped(pictures, scales, angles):
    """Each picture scaled and rotated about its centre."""
    along, across = torch.cos(angles) / scales, torch.sin(angles) / scales
    nothing = torch.zeros_like(along)
    maps = torch.stack((along, -across, nothing, across, along, nothing), 1).view(-1, 2, 3)
    grid = affine_grid(maps, pictures.shape, align_corners=False).to(pictures.device)
    warped = grid_sample(pictures, grid, align_corners=False)
    return warped.contiguous(memory_format=torch.channels_last)


def _placed(images, generator):
    """At half their size on black, (n, 32, 32) in [0, 1]."""
    small = interpolate(images.unsqueeze(1).float() / 255, (_HALF, _HALF), mode="area").squeeze(1)
    room = PICTURE_SIZE - _HALF
    corners = torch.randint(0, room + 1, (len(images), 2), generator=generator)
    sides = ((left, room - left, top, room - top) for top, left in corners.tolist())
    return torch.stack([pad(image, side) for image, side in zip(small, sides, strict=True)])
