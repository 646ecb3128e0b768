"""Subjects of CUDA alone: tiles, kernels, huge operands, segments.

Whatever kernel, tile or copy serves, the bits are the same. tests/serving has graphs and streams.
"""

import functools
import itertools
import os
import random
import sys
from concurrent.futures import ThreadPoolExecutor

import matrices
import pytest
import torch
from processes import python
from support import hopper_kernels_run, norm_maps, operands, relative_error

import fuzz
import spamm_torch
from fuzzing import products as drawn
from fuzzing import space
from spamm_torch import mm, norm_map

pytestmark = pytest.mark.cuda

GIB = 2**30
HALF = [torch.float16, torch.bfloat16]
MOST = dict(zip(matrices.DTYPES, (1e-3, 8e-3, 2e-6, 1e-14), strict=True))  # of an error


# ---- Tiles ---------------------------------------------------------------------------------------


SIDE = 2560  # large enough for thread blocks to claim tiles from each other


@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
@pytest.mark.parametrize("k", [64, 20000])
def test_tiles_with_no_few_and_many_valid_steps(dtype, k):
    """Lists that are empty, that hold a part of a tile, and more tiles than thread blocks."""
    a = matrices.normal(SIDE, k, dtype=dtype, device="cuda")
    b = matrices.normal(k, SIDE, dtype=dtype, device="cuda", seed=1)
    norm_a, norm_b = norm_maps(a, b)
    few = torch.arange(norm_a.shape[1], device="cuda") % 5 == 2
    norm_a[3:5, ~few] = 0.0  # a few steps of one tile row
    norm_a[8:25] = 0.0  # none of several
    valid = (norm_a != 0).repeat_interleave(64, 0).repeat_interleave(64, 1)[:, :k]
    expected = (a.double() * valid) @ b.double()
    for tau in (1e-30, torch.tensor(1e-30, device="cuda")):
        actual = mm(a, b, tau=tau, norm_a=norm_a, norm_b=norm_b)
        assert relative_error(actual, expected) < MOST[dtype] / 2 ** (dtype in HALF)
        assert not actual[8 * 64 : 25 * 64].any()


# ---- Which kernel runs --------------------------------------------------------------------------


FORCES = [
    ({"SPAMM_TORCH_FORCE_SM80": "1"}, "sm80-mma-f16"),
    ({"SPAMM_TORCH_FORCE_SM80": "yes"}, "0 or 1; got yes"),
    (
        {"SPAMM_TORCH_TILE": "huge"},
        "SPAMM_TORCH_TILE must be small, large, medium or square; got huge",
    ),
]


@pytest.mark.parametrize(("environment", "answer"), FORCES, ids=str)
def test_the_portable_kernels_can_be_forced_and_an_unknown_tile_cannot(environment, answer):
    # The sums are exact, and K is so long that several warps list its steps.
    program = """
import torch, spamm_torch
a = torch.randint(-2, 3, (70, 4200), device="cuda").half()
assert spamm_torch.mm(a, a.T, tau=0.0).equal((a.float() @ a.T.float()).half())
print(spamm_torch.backend_for("cuda", torch.half))"""
    path = os.pathsep.join(sys.path)
    result = python("-c", program, PYTHONPATH=path, **environment)
    assert answer in (result.stdout + result.stderr).splitlines()[-1]


def middle(a, b, block=64):
    """A tau that skips about half of the block products."""
    norm_a, norm_b = norm_maps(a, b, block)
    return 1.0001 * (norm_a.median() * norm_b.median()).item()


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("edges", [(1040, 1100), (2056, 2060), (2049, 2112), (4104, 1300)])
@pytest.mark.parametrize("block", [64, 32, 128, (128, 64, 128), (32, 64, 128), (64, 32, 32)])
def test_parts_have_the_bits_of_the_whole(force, dtype, edges, block):
    """The tiles of the whole and of its parts are of different shapes; kernels do what is valid for
    a whole tile in one go, and anything else piece by piece.
    """
    force(1)
    a, b = operands(dtype, m=edges[0], k=300, n=edges[1])
    for tau in (0.0, middle(a, b, block)):
        whole = mm(a, b, tau=tau, block=block)
        slices = [((0, 128), (512, 1024), (896, edge)) for edge in edges]  # of whole blocks
        for rows, columns in itertools.product(*slices):
            part = mm(a[slice(*rows)], b[:, slice(*columns)], tau=tau, block=block)
            assert torch.equal(part, whole[slice(*rows), slice(*columns)])


@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
@pytest.mark.parametrize("shape", [(64, 20_000, 64), (1, 4096, 1000), (100, 5000, 300)])
def test_long_sums_on_few_tiles(dtype, shape):
    a, b = operands(dtype, 0, *shape)
    assert relative_error(mm(a, b, tau=0.0), a.double() @ b.double()) < MOST[dtype]
    for tau in (0.0, middle(a, b), 1e30):
        expected = mm(a, b, tau=tau)
        assert all(torch.equal(mm(a, b, tau=tau), expected) for _ in range(10))
        assert torch.equal(mm(a, b, tau=tau, norm_a=norm_map(a), norm_b=norm_map(b)), expected)
    assert not mm(a, b, tau=1e30).any()


# ---- Beyond 2^31 elements -----------------------------------------------------------------------


def needs_memory(gib):
    free, _ = torch.cuda.mem_get_info()
    if free < gib * GIB:
        pytest.skip(f"needs {gib} GiB of GPU memory")


def small_integers(rows, columns):
    """Values of -1, 0 and 1 that depend on row and column, half of the 64-blocks zero."""
    row = torch.arange(rows, device="cuda", dtype=torch.int32)[:, None]
    column = torch.arange(columns, device="cuda", dtype=torch.int32)
    matrix = torch.empty(rows, columns, dtype=torch.float16, device="cuda")
    for part, r in zip(matrix.split(4096), row.split(4096), strict=True):
        keep = ((r // 64) * 3 + column // 64) % 2
        part.copy_(((r * 5 + column * 7) % 3 - 1) * keep)
    return matrix


def assert_dense_product(actual, a, b):
    """Block by block of rows, in float32, where sums of small integers are exact."""
    for rows, left in zip(actual.split(4096), a.split(4096), strict=True):
        assert torch.equal(rows, (left.float() @ b.float()).to(actual.dtype))


@pytest.mark.parametrize(
    ("m", "k", "n"), [(70_001, 31_000, 65), (65, 31_000, 70_001), (46_500, 96, 46_500)]
)
def test_a_huge_matrix(m, k, n):
    """A, B or the result; for each row of blocks also A's norms."""
    needs_memory(24)
    a, b = small_integers(m, k), small_integers(k, n)
    result = mm(a, b, tau=0.5)
    assert max(a.numel(), b.numel(), result.numel()) > 2**31
    assert_dense_product(result, a, b)
    del result
    last = norm_map(a[m // 64 * 64 :].clone())
    assert torch.equal(norm_map(a)[-1], last[-1])


def test_a_huge_stride():
    """Few elements, far apart."""
    needs_memory(24)
    wide = torch.empty(66, 2**26, dtype=torch.float16, device="cuda")
    a = wide[:, :100]
    a.copy_(matrices.patchy(66, 100, dtype=torch.float16))
    b = matrices.patchy(100, 70, dtype=torch.float16, device="cuda", seed=1)
    assert torch.equal(mm(a, b, tau=1.0), mm(a.clone(), b, tau=1.0))


def test_more_batches_and_block_rows_than_a_grid_dimension_holds():
    a = matrices.patchy(70_000, 3, 5, dtype=torch.float16, device="cuda")
    b = matrices.patchy(70_000, 5, 2, dtype=torch.float16, device="cuda", seed=1)
    expected = (a.float() @ b.float()).half()
    assert torch.equal(spamm_torch.bmm(a, b, tau=0.0), expected)
    a = torch.ones(32 * 65_600, 2, dtype=torch.float16, device="cuda")
    b = torch.ones(2, 3, dtype=torch.float16, device="cuda")
    assert (mm(a, b, tau=0.5, block=32) == 2).all()
    assert (mm(b.t(), a.t(), tau=0.5, block=32) == 2).all()


def test_thread_blocks_that_keep_pace(force):
    """With so many steps, thread blocks of Hopper's kernels wait for each other."""
    force(1)
    a, b = operands(torch.float16, m=64, k=2**17, n=64)
    batch = 34 * torch.cuda.get_device_properties(a.device).multi_processor_count
    actual = spamm_torch.bmm(a.expand(batch, -1, -1), b.expand(batch, -1, -1), tau=0.0)
    expected = mm(a, b, tau=0.0)
    assert torch.equal(actual, expected.expand(batch, -1, -1))


def test_first_calls_of_threads():
    """A thread has no context before, and the driver asks for one where it encodes tensor maps."""
    x, pixels = (torch.ones(*size, device="cuda").half() for size in ((256, 256), (64, 64, 8, 8)))
    conv = functools.partial(spamm_torch.conv2d, pixels, pixels[:, :, :3, :3], tau=0.0)
    for call in (functools.partial(mm, x, x, tau=0.0), conv):
        call()  # leaves memory to the thread, which then allocates none
        with ThreadPoolExecutor(1) as pool:
            assert torch.equal(pool.submit(call).result(), call())


# ---- Two devices --------------------------------------------------------------------------------


@pytest.mark.multi_gpu
@pytest.mark.parametrize("knob", [{"tau": 60.0}, {"valid_ratio": 0.4}, {"max_error": 0.1}])
def test_operands_on_another_than_the_current_device(dtype, knob):
    a, b = operands(dtype)
    expected = mm(a, b, **knob)
    actual = mm(a.to("cuda:1"), b.to("cuda:1"), **knob)
    assert actual.device == torch.device("cuda:1")
    assert torch.equal(actual.to("cuda:0"), expected)
    assert torch.cuda.current_device() == 0


# ---- Products whose tiles several thread blocks of a GPU multiply, a segment of K each -----------


STEP = 64  # of K
SHAPES = [(1040, 1040, 1040), (64, 2000, 64), (130, 300, 70), (1, 65, 200), (500, 40, 100)]


def of_segment(a, b, segment, segments):
    """The columns of a and rows of b that one segment multiplies."""
    steps = range(segment, -(-a.size(-1) // STEP), segments)
    columns = [k for step in steps for k in range(a.size(-1))[step * STEP : (step + 1) * STEP]]
    return a[..., columns].contiguous(), b[..., columns, :].contiguous()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tau", [0.0, 4096.0, 1e30])
@pytest.mark.parametrize("block", [64, 32])
@pytest.mark.parametrize("segments", [2, 4, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_each_segment_has_the_bits_of_its_own_product(force, shape, tau, block, segments, dtype):
    """And they are added in their order, as float64."""
    a, b = operands(dtype, 0, *shape)
    tau *= (block / 64) ** 2
    force(1)
    whole = mm(a, b, tau=tau, block=block)
    parts = [of_segment(a, b, segment, segments) for segment in range(segments)]
    expected = sum(mm(*part, tau=tau, block=block).double() for part in parts).to(dtype)
    force(segments)
    got = mm(a, b, tau=tau, block=block)
    if hopper_kernels_run():
        assert torch.equal(got, expected)
    assert (got - whole).norm() <= MOST[dtype] * whole.norm()


@pytest.mark.usefixtures("set_tf32")
def test_drawn_products(force):
    """Every form, layout and pattern; tests/robustness has those of one segment."""
    rng = random.Random(0)
    for _ in range(200):
        force(rng.choice((2, 4, 32)))
        case = {"family": "dense", **space.draw(drawn.DENSE, rng)}
        assert fuzz.problem(case, "cuda") is None, case
