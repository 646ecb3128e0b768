"""The orders of images that study_likeness.py compares.

Each takes pictures (n, channels, rows, columns) and gives a permutation of them. Moments are those
of the first channel less its minimum, as in spamm_torch.likeness_order.
"""

import math

import torch
from torch.nn.functional import adaptive_avg_pool2d

from spamm_torch import likeness_order

_BLOCK = 64
_THUMBNAIL = 8
_CURVE_BITS = 8


def as_they_come(pictures):
    return torch.arange(len(pictures), device=pictures.device)


def by_curve(pictures):
    """Centres of mass along a Hilbert curve."""
    return _hilbert(_moments(pictures)[:, :2]).argsort(stable=True)


def centres_halved(pictures):
    """Halved again and again across the wider spread of the centres of mass."""
    return _halved(_moments(pictures)[:, :2])


def moments_halved(pictures):
    """The same with the digits' height and width beside their centres."""
    return _halved(_moments(pictures))


def by_extent(pictures):
    """Sorted by the second moment alone."""
    return _moments(pictures)[:, 2:].norm(dim=1).argsort(stable=True)


def by_energy(pictures):
    """Sorted by the sum of squares."""
    return _ink(pictures).square().sum((1, 2)).argsort(stable=True)


def components_halved(pictures):
    """Halved again and again across the first principal component of the part's thumbnails."""
    thumbnails = adaptive_avg_pool2d(_ink(pictures).unsqueeze(1), _THUMBNAIL).flatten(1)

    def project(part):
        deviations = part - part.mean(0)
        return deviations @ torch.linalg.svd(deviations, full_matrices=False)[2][0]

    return _halved(thumbnails, project)


ORDERS = {
    "as they come": as_they_come,
    "centres, to and fro (likeness_order)": likeness_order,
    "centres, Hilbert curve": by_curve,
    "centres, halved": centres_halved,
    "centres and extents, halved": moments_halved,
    "extent": by_extent,
    "energy": by_energy,
    "thumbnails' components, halved": components_halved,
}


def _ink(pictures):
    first = pictures[:, 0].double()
    return first - first.amin((1, 2), keepdim=True)


def _moments(pictures):
    """Centre and standard deviation, each by row and by column: (n, 4) in pixels."""
    ink = _ink(pictures)
    ink = ink / ink.sum((1, 2), keepdim=True)
    found = []
    for sums in (ink.sum(2), ink.sum(1)):
        places = torch.arange(sums.shape[1], dtype=sums.dtype, device=sums.device)
        centre = sums @ places
        found.append((centre, (sums * (places - centre[:, None]).square()).sum(1).sqrt()))
    (row, height), (column, width) = found
    return torch.stack((row, column, height, width), 1)


def _widest(part):
    """The coordinate that varies most."""
    return part[:, part.var(0).argmax()]


def _halved(features, coordinate=_widest):
    """A k-d tree: cut at whole blocks by a part's coordinate, until a part is one block."""

    def order(chosen):
        if len(chosen) <= _BLOCK:
            return chosen
        chosen = chosen[coordinate(features[chosen]).argsort(stable=True)]
        half = math.ceil(len(chosen) / _BLOCK) // 2 * _BLOCK
        return torch.cat((order(chosen[:half]), order(chosen[half:])))

    return order(torch.arange(len(features), device=features.device))


def _hilbert(points):
    """How far along a Hilbert curve points (n, 2) lie, in the square that holds them.

    The usual walk from the largest quadrant to the smallest, as in Warren, "Hacker's Delight".
    """
    low, high = points.amin(0), points.amax(0)
    side = 2**_CURVE_BITS
    x, y = ((points - low) / (high - low).clamp_min(1e-9) * (side - 1)).long().unbind(1)
    along = torch.zeros_like(x)
    while side > 1:
        side //= 2
        right, upper = (x & side > 0).long(), (y & side > 0).long()
        along += side * side * ((3 * right) ^ upper)
        x, y = x & (side - 1), y & (side - 1)
        mirrored = (upper == 0) & (right == 1)
        x, y = (torch.where(mirrored, side - 1 - value, value) for value in (x, y))
        x, y = torch.where(upper == 0, y, x), torch.where(upper == 0, x, y)
    return along
