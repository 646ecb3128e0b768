"""``spatial_order``: a permutation that follows places and makes blocks skippable."""

import itertools

import pytest
import torch
from support import refuses

import spamm_torch


def points(n, dimensions=3, *, seed=0, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(n, dimensions, generator=generator, dtype=torch.float64).to(device)


def bisected(positions):
    """The order in its plainest form, from a list of places: piece after piece, level by level."""
    pieces = [list(range(len(positions)))]
    while max(map(len, pieces)) > 1:
        boxes = [box(positions, piece) for piece in pieces]
        middles = [[low / 2 + high / 2 for low, high in of_piece] for of_piece in boxes]
        halves = []
        for at, piece in enumerate(pieces):
            edges = [high / 2 - low / 2 for low, high in boxes[at]]
            axis = edges.index(max(edges))
            before, behind = middles[max(at - 1, 0)], middles[min(at + 1, len(pieces) - 1)]
            sign = -1 if before[axis] > behind[axis] else 1
            ordered = sorted(piece, key=lambda i: sign * positions[i][axis])
            middle = (len(piece) + 1) // 2
            halves += [half for half in (ordered[:middle], ordered[middle:]) if half]
        pieces = halves
    return [i for piece in pieces for i in piece]


def box(positions, indices):
    return [
        (min(along), max(along)) for along in zip(*(positions[i] for i in indices), strict=True)
    ]


@pytest.mark.parametrize("n", [1, 2, 3, 7, 64, 129])
@pytest.mark.parametrize("dimensions", [1, 2, 3, 5])
def test_it_is_recursive_bisection(device, n, dimensions):
    positions = points(n, dimensions, seed=n, device=device)
    order = spamm_torch.spatial_order(positions)
    assert order.dtype == torch.int64
    assert order.device == positions.device
    assert order.tolist() == bisected(positions.tolist())


def test_no_points(device):
    assert spamm_torch.spatial_order(torch.empty(0, 3, device=device)).shape == (0,)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.int64, torch.uint8])
def test_any_real_dtype_with_ties(device, dtype):
    positions = (8 * points(100, seed=1, device=device)).floor().to(dtype)
    order = spamm_torch.spatial_order(positions)
    assert order.tolist() == bisected(positions.tolist())


def test_points_at_one_place_keep_their_order(device):
    order = spamm_torch.spatial_order(torch.ones(50, 3, device=device))
    assert order.tolist() == list(range(50))


def test_strides_and_gradients_do_not_matter(device):
    positions = points(60, seed=2, device=device)
    strided = positions.t().contiguous().t().requires_grad_()
    assert torch.equal(spamm_torch.spatial_order(strided), spamm_torch.spatial_order(positions))


def test_groups_stay_together_in_the_order_of_their_middles(device):
    positions = points(90, seed=3, device=device)
    labels = torch.tensor([7, -2, 10**12], device=device)[torch.arange(90, device=device) % 3]
    groups = labels + torch.arange(90, device=device) // 30 * 100
    order = spamm_torch.spatial_order(positions, groups)
    assert sorted(order.tolist()) == list(range(90))
    ordered = [(int(groups[i]), i) for i in order.tolist()]
    runs = [(label, list(run)) for label, run in itertools.groupby(ordered, lambda pair: pair[0])]
    assert len(runs) == 9  # each in one piece
    for label, run in runs:
        assert [i for _, i in run] == (groups == label).nonzero().flatten().tolist()
    of_group = [positions[groups == label] for label in groups.unique()]
    middles = [((of.amin(0) + of.amax(0)) / 2).tolist() for of in of_group]
    expected = [int(groups.unique()[place]) for place in bisected(middles)]
    assert [label for label, _ in runs] == expected


def test_groups_of_one_point_change_nothing(device):
    positions = points(77, seed=4, device=device)
    groups = torch.arange(77, device=device, dtype=torch.int32)
    expected = spamm_torch.spatial_order(positions)
    assert torch.equal(spamm_torch.spatial_order(positions, groups), expected)


def test_it_makes_blocks_skippable(device):
    """A matrix that decays with the distance of points, against its form before the order."""
    positions = points(600, seed=5, device=device)
    order = spamm_torch.spatial_order(positions)
    kept = []
    for places in (positions, positions[order]):
        norms = spamm_torch.norm_map(torch.exp(-100 * torch.cdist(places, places) ** 2), 32)
        kept.append(spamm_torch.valid_ratio(norms, norms, 1e-4).item())
    assert kept[1] < 0.6 * kept[0]


ONES = torch.ones(4, 3)
BAD = [
    (([[0.0]],), TypeError, "positions must be a tensor; got list"),
    ((ONES.cfloat(),), TypeError, "positions must be real numbers; got complex64"),
    ((ONES[0],), RuntimeError, "positions must be", "got shape [3]"),
    ((ONES[:, :0],), RuntimeError, "positions must be", "got shape [4, 0]"),
    ((ONES, [1, 2]), TypeError, "groups must be a tensor; got list"),
    ((ONES, ONES[:, 0]), TypeError, "groups must be integers; got float32"),
    ((ONES, torch.arange(3)), RuntimeError, "label for each of 4 points; got shape [3]"),
    ((ONES, torch.ones(4).long().to("meta")), RuntimeError, "positions' device, cpu; got meta"),
]


@pytest.mark.parametrize("case", BAD, ids=range(len(BAD)))
def test_bad_arguments(case):
    arguments, kind, *fragments = case
    refuses(kind, lambda: spamm_torch.spatial_order(*arguments), *fragments)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_places_that_are_none(device, value):
    positions = points(9, device=device)
    positions[4, 1] = positions[7, 0] = value
    with pytest.raises(ValueError, match=r"positions must be finite; got \[.*\] for point 4$"):
        spamm_torch.spatial_order(positions)
