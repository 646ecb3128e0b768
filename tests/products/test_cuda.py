"""Subjects of CUDA alone: streams, graphs, no host synchronisation, tiles, huge operands, segments.

Whatever kernel, tile or copy serves, the bits are the same.
"""

import itertools
import os
import random
import sys

import matrices
import pytest
import reference
import torch
from processes import python
from support import captured, hopper_kernels_run, norm_maps, operands, relative_error

import fuzz
import spamm_torch
from fuzzing import products as drawn
from fuzzing import space
from spamm_torch import mm, norm_map

pytestmark = pytest.mark.cuda

KNOBS = [{"tau": 60.0}, {"valid_ratio": 0.4}, {"max_error": 0.1}]
GIB = 2**30
HALF = [torch.float16, torch.bfloat16]
MOST = {
    torch.float16: 1e-3,
    torch.bfloat16: 8e-3,
    torch.float32: 2e-6,
    torch.float64: 1e-14,
}  # of an error


# ---- Streams, graphs, synchronisation -----------------------------------------------------------


@pytest.mark.parametrize("knob", KNOBS)
def test_work_is_ordered_on_the_current_stream(knob):
    """Operands are written on a side stream, after a long delay there, just before the product."""
    a, b = operands()
    expected = mm(a, b, **knob)
    late_a, late_b = torch.zeros_like(a), torch.zeros_like(b)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        late_a.copy_(a)
        late_b.copy_(b)
        actual = mm(late_a, late_b, **knob)
        late_a.zero_()  # ordered after the product as well
    side.synchronize()
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("knob", KNOBS)
def test_products_in_a_row_wait_for_each_other(dtype, knob):
    """Kernels start while the one before ends, and must not read its product before it is there."""
    a, b = operands(dtype, m=512, k=512, n=512)
    b /= 512**0.5

    def chain(after_each):
        x = a
        for _ in range(8):
            x = mm(x, b, **knob)
            after_each()
        return x

    expected = chain(torch.cuda.synchronize)
    for _ in range(20):
        assert torch.equal(chain(lambda: None), expected)


@pytest.mark.parametrize("knob", [*KNOBS, {"tau": "tensor"}])
def test_a_graph_replays_with_new_data(dtype, knob):
    a, b = (x.clone() for x in operands(dtype))
    knob = {"tau": torch.tensor(60.0, device="cuda")} if knob == {"tau": "tensor"} else knob
    graph, result = captured(lambda: mm(a, b, **knob))
    for seed in (0, 10, 20):
        new_a, new_b = operands(dtype, seed)
        a.copy_(new_a)
        b.copy_(new_b)
        if isinstance(knob.get("tau"), torch.Tensor):
            knob["tau"].fill_(50.0 + seed)
        graph.replay()
        assert torch.equal(result, mm(new_a, new_b, **knob))


def stages(norm_a, norm_b):
    tau = spamm_torch.find_tau(norm_a, norm_b, 0.4)
    by_error = torch.ops.spamm_torch.find_tau(norm_a, norm_b, max_error=0.1)
    at_tau = (spamm_torch.valid_counts, spamm_torch.valid_ratio, spamm_torch.error_bound)
    return tau, by_error, *(function(norm_a, norm_b, tau) for function in at_tau)


# One thread block finds tau, or many with norms in one and in two turns, or counts beyond 32 bits.
SEARCHES = [(5, 7, 4), (20, 48, 30), (70, 1100, 70), (1700, 1700, 1700)]


@pytest.mark.parametrize("shape", SEARCHES)
def test_every_stage_can_be_captured(shape):
    mb, kb, nb = shape

    def maps(seed):
        generator = torch.Generator("cuda").manual_seed(seed)
        sizes = ((mb, kb), (kb, nb))
        return [torch.rand(of, device="cuda", generator=generator) for of in sizes]

    static = maps(0)
    graph, results = captured(lambda: stages(*static))
    for seed in (1, 2):
        new = maps(seed)
        for into, values in zip(static, new, strict=True):
            into.copy_(values)
        graph.replay()
        assert all(map(torch.equal, results, stages(*new)))
        assert results[3].item() == pytest.approx(0.4, abs=max(1e-6, 1 / (mb * kb * nb)))


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


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("block", [32, 64, 128, (128, 64, 128), (32, 64, 128), (64, 32, 32)])
def test_a_block_of_c_does_not_depend_on_its_neighbours(dtype, block):
    """Kernels do what is valid for a whole tile in one go, and anything else piece by piece."""
    m, k, n = reference.edges(block)
    a, b = operands(dtype, m=640, k=2000, n=768)
    norm_a = torch.ones_like(norm_map(a, (m, k)))
    norm_b = torch.ones_like(norm_map(b, (k, n)))
    dense = mm(a, b, tau=0.5, block=block, norm_a=norm_a, norm_b=norm_b)
    generator = torch.Generator().manual_seed(0)
    kept_rows = torch.rand(norm_a.shape[0], generator=generator) < 0.5
    kept_columns = torch.rand(norm_b.shape[1], generator=generator) < 0.5
    norm_a[~kept_rows.cuda()] = torch.rand(norm_a.shape[1], generator=generator).cuda()
    norm_b[:, ~kept_columns.cuda()] = torch.rand(norm_b.shape[0], 1, generator=generator).cuda()
    actual = mm(a, b, tau=0.5, block=block, norm_a=norm_a, norm_b=norm_b)
    for i in kept_rows.nonzero().flatten().tolist():
        for j in kept_columns.nonzero().flatten().tolist():
            rows, columns = slice(i * m, (i + 1) * m), slice(j * n, (j + 1) * n)
            assert torch.equal(actual[rows, columns], dense[rows, columns])
    assert not torch.equal(actual, dense)


@pytest.mark.parametrize("dtype", [*HALF, torch.float64])
@pytest.mark.parametrize("block", [32, 64, (32, 64, 128), (128, 32, 64)])
@pytest.mark.parametrize("poisoned", ["a", "b"])
def test_what_is_skipped_is_not_even_multiplied_by_zero(force, dtype, block, poisoned):
    """Given maps, entries that are not finite can be skipped; they must not reach any result, in
    whichever of two segments they are.
    """
    force(2)
    m, k, n = reference.edges(block)
    a = matrices.patchy(300, 520, dtype=dtype, device="cuda")
    b = matrices.patchy(520, 400, dtype=dtype, device="cuda", seed=1)
    norm_a, norm_b = norm_map(a, (m, k)), norm_map(b, (k, n))
    tau = spamm_torch.find_tau(norm_a, norm_b, 0.5)
    norm_a[-1, :], norm_b[:, -1] = 0.0, 0.0  # whole lines of blocks of C
    norm_a[1, 2] = norm_b[3, 1] = 0.0
    expected = mm(a, b, tau=tau, block=block, norm_a=norm_a, norm_b=norm_b)
    if poisoned == "a":
        a[m : 2 * m, 2 * k : 3 * k] = float("nan")
        a[a.shape[0] // m * m :] = float("inf")
    else:
        b[3 * k : 4 * k, n : 2 * n] = float("nan")
        b[:, b.shape[1] // n * n :] = float("inf")
    actual = mm(a, b, tau=tau, block=block, norm_a=norm_a, norm_b=norm_b)
    assert torch.equal(actual, expected)


def middle(a, b):
    """A tau that skips about half of the block products."""
    return 1.0001 * (norm_map(a).median() * norm_map(b).median()).item()


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("edges", [(1040, 1100), (2056, 2060), (2049, 2112), (4104, 1300)])
def test_parts_have_the_bits_of_the_whole(dtype, edges):
    """The tiles of the whole and of its parts are of different shapes."""
    a, b = operands(dtype, m=edges[0], k=300, n=edges[1])
    for tau in (0.0, middle(a, b)):
        whole = mm(a, b, tau=tau)
        slices = [((0, 64), (512, 1024), (960, edge)) for edge in edges]  # of whole blocks
        for rows, columns in itertools.product(*slices):
            part = mm(a[slice(*rows)], b[:, slice(*columns)], tau=tau)
            assert torch.equal(part, whole[slice(*rows), slice(*columns)])


@pytest.mark.parametrize("dtype", matrices.DTYPES)
@pytest.mark.parametrize("shape", [(1100, 700, 1030), (2056, 130, 2056), (70, 2500, 90)])
def test_layouts_change_no_bit(dtype, shape):
    """The norm pass copies what the kernels cannot read in place, or not as fast."""
    a, b = operands(dtype, 0, *shape)
    tau = middle(a, b)
    expected, given = mm(a, b, tau=tau), {"norm_a": norm_map(a), "norm_b": norm_map(b)}
    for names in itertools.product(("misaligned", "transposed", "wide rows"), repeat=2):
        x, y = (matrices.LAYOUTS[name](of) for name, of in zip(names, (a, b), strict=True))
        assert torch.equal(mm(x, y, tau=tau), expected), names
        assert torch.equal(mm(x, y, tau=tau, **given), expected), names
    square = a[:, : len(a)][: a.shape[1]]
    odd = matrices.LAYOUTS["misaligned"](square)
    assert torch.equal(mm(odd, odd, tau=tau), mm(square, square.clone(), tau=tau))


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


# ---- Two devices --------------------------------------------------------------------------------


@pytest.mark.multi_gpu
@pytest.mark.parametrize("knob", KNOBS)
def test_operands_on_another_than_the_current_device(dtype, knob):
    a, b = operands(dtype)
    expected = mm(a, b, **knob)
    actual = mm(a.to("cuda:1"), b.to("cuda:1"), **knob)
    assert actual.device == torch.device("cuda:1")
    assert torch.equal(actual.to("cuda:0"), expected)
    assert torch.cuda.current_device() == 0


@pytest.mark.multi_gpu
def test_operands_on_two_cuda_devices():
    a, b = operands()
    with pytest.raises(RuntimeError, match="cuda:0 and cuda:1"):
        mm(a, b.to("cuda:1"), tau=1.0)


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
def test_each_segment_has_the_bits_of_a_product_of_its_steps(
    force, shape, tau, block, segments, dtype
):
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


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("segments", [2, 8])
def test_the_same_bits_every_time(force, dtype, segments):
    """Whichever thread block is last, in graphs and on two streams at once."""
    force(segments)
    a, b = operands(dtype, 0, 700, 900, 700)
    expected = [mm(a, b, tau=tau) for tau in (0.0, 4096.0)]
    outs = [[torch.empty_like(c) for c in expected] for _ in range(20)]
    streams = [torch.cuda.Stream() for _ in expected]
    for i, (tau, stream) in enumerate(zip((0.0, 4096.0), streams, strict=True)):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for out in outs:
                mm(a, b, tau=tau, out=out[i])
    torch.cuda.synchronize()
    assert all(torch.equal(*pair) for out in outs for pair in zip(out, expected, strict=True))
    graph, result = captured(lambda: mm(a, b, tau=4096.0))
    for _ in range(5):
        result.zero_()
        graph.replay()
        assert torch.equal(result, expected[1])
