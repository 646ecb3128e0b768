"""The plan of a product over several devices, against brute force."""

import itertools
import math

import pytest
import torch

import spamm_torch  # noqa: F401  registers the operators

ops = torch.ops.spamm_torch

NORM_DTYPES = (torch.float32, torch.float64)


def host(tau, dtype=torch.float64):
    return torch.tensor(tau, dtype=dtype)


def random_map(generator, rows, columns, dtype):
    """Norms of few different values, so that products tie with thresholds; some of them special."""
    info = torch.finfo(dtype)
    subnormal = info.smallest_normal / 8
    values = torch.tensor(
        [0.0, 0.1, 0.25, 0.3, 0.5, 1.0, 3.0, 7.0, subnormal, info.max, math.inf, math.nan],
        dtype=dtype,
    )
    # Special values are rare in half of the maps, and absent from the others.
    usual = 8 if torch.rand((), generator=generator) < 0.5 else len(values)
    weights = torch.ones(usual)
    weights[8:] = 0.05
    picks = torch.multinomial(weights, rows * columns, replacement=True, generator=generator)
    return values[picks].reshape(rows, columns)


def random_cuts(generator, rows, parts):
    inner = torch.randint(1, rows + 1, (parts - 1,), generator=generator).clamp(max=rows)
    return [0, *sorted(inner.tolist()), rows]


def largest_by_part(norm_a, cuts):
    return torch.stack(
        [norm_a[begin:end].amax(0) for begin, end in itertools.pairwise(cuts) if begin < end]
    )


def needed_by_brute_force(norm_a, norm_b, tau, cuts, stage_blocks):
    """Any valid product in the part's rows and the stage's columns, one product at a time."""
    valid = ~(norm_a[:, :, None] * norm_b[None] < tau.to(norm_a.dtype))  # (MB, KB, NB)
    by_part = [valid[begin:end].any(0) for begin, end in itertools.pairwise(cuts) if begin < end]
    by_stage = [stage.any(2) for stage in torch.stack(by_part).split(stage_blocks, 2)]
    return torch.stack(by_stage, 2)


class TestNeededUnits:
    @pytest.mark.parametrize("seed", range(200))
    def test_is_any_valid_product(self, device, seed):
        generator = torch.Generator().manual_seed(seed)
        dtype = NORM_DTYPES[seed % 2]
        rows, depth, columns = torch.randint(1, 9, (3,), generator=generator).tolist()
        norm_a = random_map(generator, rows, depth, dtype)
        norm_b = random_map(generator, depth, columns, dtype)
        cuts = random_cuts(generator, rows, 1 + seed % 4)
        tie = (norm_a[0, 0] * norm_b[0, 0]).nan_to_num(1.0, posinf=1.0).item()
        for tau, stage_blocks in itertools.product((tie, 0.075, 1.0, 1e-44, math.inf), (1, 2, 5)):
            expected = needed_by_brute_force(norm_a, norm_b, host(tau), cuts, stage_blocks)
            largest = largest_by_part(norm_a, cuts).to(device)
            for threshold in (host(tau), host(tau, dtype).to(device)):
                needed = ops.needed_units(largest, norm_b.to(device), threshold, stage_blocks)
                assert needed.dtype == torch.bool
                assert needed.device.type == device.type
                assert torch.equal(needed.cpu(), expected)

    @pytest.mark.parametrize("tau", [0.0, -0.0, -1.0, -math.inf, math.nan])
    def test_nothing_skipped_needs_everything(self, device, tau):
        largest = torch.tensor([[0.0, 1.0]], device=device)
        norm_b = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]], device=device)
        assert ops.needed_units(largest, norm_b, host(tau), 2).all()

    def test_tau_is_rounded_to_the_norms_type(self, device):
        product = torch.tensor(0.1, device=device).reshape(1, 1)
        above = host(0.1)  # in float64 below float32's 0.1, in float32 equal to it
        just_above = host(torch.nextafter(torch.tensor(0.1), torch.tensor(1.0)).item())
        assert ops.needed_units(product, torch.ones_like(product), above, 1).item()
        assert not ops.needed_units(product, torch.ones_like(product), just_above, 1).item()


def cuts_by_brute_force(work, parts, multiple):
    """The smallest work of the largest part over all cuts."""
    grid = [*range(0, len(work), multiple), len(work)]
    before = [0, *itertools.accumulate(work)]
    return min(
        max(
            before[end] - before[begin] for begin, end in itertools.pairwise((0, *inner, len(work)))
        )
        for inner in itertools.combinations_with_replacement(grid, parts - 1)
    )


class TestRowCuts:
    @pytest.mark.parametrize("seed", range(40))
    def test_smallest_largest_part(self, device, seed):
        generator = torch.Generator().manual_seed(seed)
        dtype = NORM_DTYPES[seed % 2]
        rows, depth, columns = torch.randint(1, 11, (3,), generator=generator).tolist()
        norm_a = random_map(generator, rows, depth, dtype).to(device)
        norm_b = random_map(generator, depth, columns, dtype).to(device)
        work = ops.row_work(norm_a, norm_b, host(0.3))
        counts = ops.valid_counts(norm_a, norm_b, host(0.3)).sum(1)
        assert work.dtype == torch.int64
        assert work.tolist() == [1000 * c + 23 * depth * columns for c in counts.tolist()]
        for parts, multiple in itertools.product((1, 2, 3, 4), (1, 2, 4)):
            cuts = ops.row_cuts(norm_a, norm_b, host(0.3), parts, multiple)
            assert cuts[0] == 0
            assert cuts[-1] == rows
            assert len(cuts) == parts + 1
            assert cuts == sorted(cuts)
            assert all(cut % multiple == 0 or cut == rows for cut in cuts)
            largest = max(sum(work.tolist()[p:q]) for p, q in itertools.pairwise(cuts))
            assert largest == cuts_by_brute_force(work.tolist(), parts, multiple)
