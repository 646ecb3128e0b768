"""multiply(whole=): a part of a batch of products has the bits of the whole."""

import itertools

import matrices
import pytest
import torch
from torch.library import opcheck

import spamm_torch

ops = torch.ops.spamm_torch
BLOCK = (64, 64, 64)


def batch(device, dtype, count, m, k, n):
    """Operands, their norm maps, a threshold that skips about half, and something to add."""
    a = matrices.normal(count, m, k, dtype=dtype, device=device, seed=1)
    b = matrices.normal(count, k, n, dtype=dtype, device=device, seed=2)
    norm_a, norm_b = ops.norm_maps(a, b, BLOCK)
    tau = spamm_torch.find_tau(norm_a, norm_b, 0.5)
    return a, b, norm_a, norm_b, tau, matrices.normal(n, dtype=dtype, device=device, seed=3)


def check_parts(cuts, a, b, norm_a, norm_b, tau, input):
    """Rows of C, cut at numbers of blocks, against the whole."""
    whole = ops.multiply(a, b, norm_a, norm_b, tau, BLOCK, input=input)
    parts = []
    for first, last in itertools.pairwise(cuts):
        rows = slice(64 * first, 64 * last)
        maps = norm_a[:, first:last], norm_b
        size = {"whole": whole.shape[1:], "input": input}
        parts.append(ops.multiply(a[:, rows], b, *maps, tau, BLOCK, **size))
    assert torch.equal(torch.cat(parts, 1), whole)


@pytest.mark.parametrize("dtype", matrices.DTYPES)
def test_parts_of_a_batch(device, dtype):
    check_parts((0, 1, 4), *batch(device, dtype, 3, 200, 100, 90))


# The whole takes large tiles, a part by itself would take small ones, and the two round float32
# differently.
@pytest.mark.cuda
@pytest.mark.parametrize("dtype", matrices.DTYPES)
def test_parts_take_the_tiles_of_the_whole(dtype):
    check_parts((0, 4, 40), *batch("cuda", dtype, 4, 2560, 512, 2560))


def test_opcheck(device):
    *arguments, input = batch(device, torch.float32, 2, 100, 70, 130)
    opcheck(ops.multiply.default, (*arguments, BLOCK), {"whole": (200, 130), "input": input})


def test_a_whole_that_is_too_small(device):
    *arguments, _ = batch(device, torch.float32, 2, 128, 64, 128)
    with pytest.raises(ValueError, match=r"whole must be \(M, N\) .* at least \[128, 128\]; got"):
        ops.multiply(*arguments, BLOCK, whole=(64, 128))
