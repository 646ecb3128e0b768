"""multiply_part and multiply(whole=): each part of a product has the bits of the whole."""

import itertools

import matrices
import pytest
import torch
from support import hopper_kernels_run
from torch.library import opcheck

import spamm_torch

ops = torch.ops.spamm_torch


def product(device, dtype, m, k, n, block):
    """Operands, their norm maps, and a threshold that skips about half of the block products."""
    a = matrices.normal(m, k, dtype=dtype, device=device, seed=1)
    b = matrices.normal(k, n, dtype=dtype, device=device, seed=2)
    norm_a, norm_b = ops.norm_maps(a, b, (block,) * 3)
    return a, b, norm_a, norm_b, spamm_torch.find_tau(norm_a, norm_b, 0.5)


def by_parts(out, a, b, norm_a, norm_b, tau, block, row_cuts, column_cuts):
    """Writes the product to ``out``, part by part. Cuts are numbers of blocks."""
    for (i, i_end), (j, j_end) in itertools.product(
        itertools.pairwise(row_cuts), itertools.pairwise(column_cuts)
    ):
        rows, columns = slice(i * block, i_end * block), slice(j * block, j_end * block)
        part = a[rows], b[:, columns], norm_a[i:i_end], norm_b[:, j:j_end]
        ops.multiply_part(*part, tau, (block,) * 3, out[rows, columns], whole=out.shape)


@pytest.mark.parametrize("block", matrices.EDGES)
@pytest.mark.parametrize("sizes", [(512, 256, 640), (500, 257, 645), (300, 96, 40)])
def test_parts_have_the_bits_of_the_whole(device, dtype, block, sizes):
    m, k, n = sizes
    arguments = product(device, dtype, m, k, n, block)
    whole = ops.multiply(*arguments, (block,) * 3)
    out = torch.full_like(whole, float("nan"))
    rows, columns = -(-m // block), -(-n // block)
    by_parts(
        out, *arguments, block, (0, 1, min(3, rows), rows), (0, min(2, columns), columns, columns)
    )
    assert torch.equal(out, whole)


# 40 x 40 areas of 128 x 128 take large tiles, a part by itself would take small ones, and the two
# round float32 differently.
@pytest.mark.cuda
@pytest.mark.parametrize("block", [32, 64])
def test_parts_take_the_tiles_of_the_whole(dtype, block):
    arguments = product("cuda", dtype, 5120, 1024, 5120, block)
    whole = ops.multiply(*arguments, (block,) * 3)
    out = torch.full_like(whole, float("nan"))
    edge = 5120 // block
    by_parts(out, *arguments, block, (0, edge // 8, edge), (0, edge // 2, edge - 2, edge))
    assert torch.equal(out, whole)


# On 132 multiprocessors: 1024^3 takes one segment, and its quarter by itself would take two. 1040^3
# takes two, and its part of 768 x 768 by itself would take one. Segments round differently.
@pytest.mark.cuda
@pytest.mark.parametrize(("edge", "cut"), [(1024, 512), (1040, 768)])
def test_parts_take_the_segments_of_the_whole(edge, cut):
    a, b, norm_a, norm_b, tau = arguments = product("cuda", torch.float64, edge, edge, edge, 64)
    whole = ops.multiply(*arguments, (64,) * 3)
    out = torch.full_like(whole, float("nan"))
    cuts = (0, cut // 64, -(-edge // 64))
    by_parts(out, *arguments, 64, cuts, cuts)
    assert torch.equal(out, whole)
    if hopper_kernels_run() and torch.cuda.get_device_properties(0).multi_processor_count == 132:
        blocks = cut // 64
        norms = norm_a[:blocks].contiguous(), norm_b[:, :blocks].contiguous()
        alone = ops.multiply(a[:cut], b[:, :cut], *norms, tau, (64,) * 3)
        assert not torch.equal(alone, whole[:cut, :cut])  # or nothing was tested


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_any_strides_of_the_result(device, dtype):
    arguments = product(device, dtype, 192, 128, 192, 64)
    whole = ops.multiply(*arguments, (64, 64, 64))
    across = torch.full_like(whole, float("nan")).t()
    shifted = torch.full((192, 201), float("nan"), dtype=dtype, device=device)
    for out in (across, shifted[:, 5:197]):
        by_parts(out, *arguments, 64, (0, 2, 3), (0, 1, 3))
        assert torch.equal(out, whole)
    assert shifted[:, :5].isnan().all()
    assert shifted[:, 197:].isnan().all()


def test_opcheck(device):
    a, b, *rest = product(device, torch.float32, 100, 70, 130, 64)
    out = torch.zeros(100, 130, device=device)
    opcheck(ops.multiply_part.default, (a, b, *rest, (64, 64, 64), out), {"whole": (200, 130)})


def test_bad_arguments(device):
    a, b, *rest = product(device, torch.float32, 128, 128, 128, 64)
    block = (64, 64, 64)
    with pytest.raises(RuntimeError, match=r"out must have the product's shape \[128, 128\]; got"):
        ops.multiply_part(a, b, *rest, block, a.new_empty(128, 64), whole=(128, 128))
    with pytest.raises(TypeError, match="out must have the operands' dtype float32; got float64"):
        ops.multiply_part(a, b, *rest, block, a.double(), whole=(128, 128))
    with pytest.raises(ValueError, match=r"whole must be \(M, N\) .* at least \[128, 128\]; got"):
        ops.multiply_part(a, b, *rest, block, torch.empty_like(a), whole=(64, 128))
    a = a.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="multiply_part is for inference and has no gradient"):
        ops.multiply_part(a, b, *rest, block, torch.empty_like(b), whole=(128, 128))


# ---- multiply(whole=), for a part of a batch of products ----------------------------------------


def batch(device, dtype, count, m, k, n):
    """Operands, their norm maps, a threshold that skips about half, and something to add."""
    a = matrices.normal(count, m, k, dtype=dtype, device=device, seed=1)
    b = matrices.normal(count, k, n, dtype=dtype, device=device, seed=2)
    norm_a, norm_b = ops.norm_maps(a, b, (64, 64, 64))
    tau = spamm_torch.find_tau(norm_a, norm_b, 0.5)
    return a, b, norm_a, norm_b, tau, matrices.normal(n, dtype=dtype, device=device, seed=3)


def check_parts(cuts, a, b, norm_a, norm_b, tau, input):
    """Rows of C, cut at numbers of blocks, against the whole."""
    whole = ops.multiply(a, b, norm_a, norm_b, tau, (64, 64, 64), input=input)
    parts = []
    for first, last in itertools.pairwise(cuts):
        rows = slice(64 * first, 64 * last)
        maps = norm_a[:, first:last], norm_b
        size = {"whole": whole.shape[1:], "input": input}
        parts.append(ops.multiply(a[:, rows], b, *maps, tau, (64, 64, 64), **size))
    assert torch.equal(torch.cat(parts, 1), whole)


def test_parts_of_a_batch(device, dtype):
    check_parts((0, 1, 4), *batch(device, dtype, 3, 200, 100, 90))


# The whole takes large tiles, a part by itself would take small ones, and the two round float32
# differently.
@pytest.mark.cuda
def test_parts_of_a_batch_take_the_tiles_of_the_whole(dtype):
    check_parts((0, 4, 40), *batch("cuda", dtype, 4, 2560, 512, 2560))


def test_opcheck_of_a_whole(device):
    *arguments, input = batch(device, torch.float32, 2, 100, 70, 130)
    opcheck(ops.multiply.default, (*arguments, (64, 64, 64)), {"whole": (200, 130), "input": input})


def test_a_whole_that_is_too_small(device):
    *arguments, _ = batch(device, torch.float32, 2, 128, 64, 128)
    with pytest.raises(ValueError, match=r"whole must be \(M, N\) .* at least \[128, 128\]; got"):
        ops.multiply(*arguments, (64, 64, 64), whole=(64, 128))
