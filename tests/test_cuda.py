"""What only CUDA has: streams, graphs, no host synchronisation, TF32, huge operands."""

import contextlib
import os
import subprocess
import sys

import matrices
import numpy as np
import pytest
import reference
import torch
from hypothesis import given
from hypothesis import strategies as st

import spamm_torch
from spamm_torch import _library

pytestmark = pytest.mark.cuda

KNOBS = [{"tau": 60.0}, {"valid_ratio": 0.4}, {"max_error": 0.1}]
GIB = 2**30


def operands(dtype=torch.float32, seed=0, m=300, k=400, n=200, device="cuda"):
    a = matrices.normal(m, k, dtype=dtype, device=device, seed=seed)
    return a, matrices.normal(k, n, dtype=dtype, device=device, seed=seed + 1)


def norm_maps(a, b, block=64):
    return spamm_torch.norm_map(a, block), spamm_torch.norm_map(b, block)


# ---- Streams, graphs, synchronisation -----------------------------------------------------------


@contextlib.contextmanager
def no_synchronisation():
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", matrices.DTYPES)
@pytest.mark.parametrize("knob", KNOBS)
def test_the_host_never_waits(dtype, knob):
    a, b = operands(dtype)
    spamm_torch.mm(a, b, **knob)
    torch.cuda.synchronize()
    with no_synchronisation():
        spamm_torch.mm(a, b, **knob)
        spamm_torch.bmm(a.expand(3, -1, -1), b.expand(3, -1, -1), **knob)
        spamm_torch.linear(a, b.t(), b[0], **knob)


def test_no_stage_waits():
    a, b = operands()
    tau = torch.tensor(60.0, device="cuda")
    with no_synchronisation():
        maps = norm_maps(a, b)
        spamm_torch.find_tau(*maps, 0.4)
        torch.ops.spamm_torch.find_tau_for_error(*maps, 0.1)
        spamm_torch.valid_counts(*maps, tau)
        spamm_torch.valid_ratio(*maps, tau)
        spamm_torch.error_bound(*maps, tau)
        spamm_torch.mm(a, b, tau=tau)


@pytest.mark.parametrize("knob", KNOBS)
def test_work_is_ordered_on_the_current_stream(knob):
    """Operands are written on a side stream, after a long delay there, just before the product."""
    a, b = operands()
    expected = spamm_torch.mm(a, b, **knob)
    late_a, late_b = torch.zeros_like(a), torch.zeros_like(b)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        late_a.copy_(a)
        late_b.copy_(b)
        actual = spamm_torch.mm(late_a, late_b, **knob)
        late_a.zero_()  # ordered after the product as well
    side.synchronize()
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("dtype", matrices.DTYPES)
@pytest.mark.parametrize("knob", KNOBS)
def test_products_in_a_row_wait_for_each_other(dtype, knob):
    """Kernels start while the one before ends, and must not read its product before it is there."""
    a, b = operands(dtype, m=512, k=512, n=512)
    b /= 512**0.5

    def chain(after_each):
        x = a
        for _ in range(8):
            x = spamm_torch.mm(x, b, **knob)
            after_each()
        return x

    expected = chain(torch.cuda.synchronize)
    for _ in range(20):
        assert torch.equal(chain(lambda: None), expected)


@pytest.mark.parametrize("dtype", matrices.DTYPES)
@pytest.mark.parametrize("knob", [*KNOBS, {"tau": "tensor"}])
def test_a_graph_replays_with_new_data(dtype, knob):
    a, b = (x.clone() for x in operands(dtype))
    knob = {"tau": torch.tensor(60.0, device="cuda")} if knob == {"tau": "tensor"} else knob
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        spamm_torch.mm(a, b, **knob)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = spamm_torch.mm(a, b, **knob)
    for seed in (0, 10, 20):
        new_a, new_b = operands(dtype, seed)
        a.copy_(new_a)
        b.copy_(new_b)
        if isinstance(knob.get("tau"), torch.Tensor):
            knob["tau"].fill_(50.0 + seed)
        graph.replay()
        assert torch.equal(result, spamm_torch.mm(new_a, new_b, **knob))


def test_every_stage_can_be_captured():
    a, b = operands()
    static_a, static_b = a.clone(), b.clone()

    def stages(a, b):
        maps = norm_maps(a, b)
        tau = spamm_torch.find_tau(*maps, 0.4)
        return (
            *maps,
            tau,
            torch.ops.spamm_torch.find_tau_for_error(*maps, 0.1),
            spamm_torch.valid_counts(*maps, tau),
            spamm_torch.valid_ratio(*maps, tau),
            spamm_torch.error_bound(*maps, tau),
        )

    stages(a, b)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = stages(static_a, static_b)
    new_a, new_b = operands(seed=7)
    static_a.copy_(new_a)
    static_b.copy_(new_b)
    graph.replay()
    assert all(map(torch.equal, results, stages(new_a, new_b)))


# One thread block finds tau, or many with norms in one and in two turns, or counts beyond 32 bits.
SEARCHES = [(5, 7, 4), (20, 48, 30), (70, 1100, 70), (1700, 1700, 1700)]


@pytest.mark.parametrize("shape", SEARCHES)
def test_every_search_can_be_captured(shape):
    mb, kb, nb = shape

    def maps(seed):
        generator = torch.Generator("cuda").manual_seed(seed)
        sizes = ((mb, kb), (kb, nb))
        return [torch.rand(of, device="cuda", generator=generator) for of in sizes]

    static = maps(0)
    spamm_torch.find_tau(*static, 0.4)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tau = spamm_torch.find_tau(*static, 0.4)
    for seed in (1, 2):
        new = maps(seed)
        for into, values in zip(static, new, strict=True):
            into.copy_(values)
        graph.replay()
        assert torch.equal(tau, spamm_torch.find_tau(*new, 0.4))
        ratio = spamm_torch.valid_ratio(*new, tau).item()
        assert ratio == pytest.approx(0.4, abs=max(1e-6, 1 / (mb * kb * nb)))


# Large enough for thread blocks to claim tiles from each other, which takes a counter. Which kernel
# clears it depends on whether the norm maps are given.
SIDE = 2560


@pytest.fixture(params=[False, True], ids=["norms taken", "norms given"])
def claiming_product(request):
    a = matrices.patchy(SIDE, 256, dtype=torch.float16, device="cuda")
    b = matrices.patchy(256, SIDE, dtype=torch.float16, device="cuda", seed=1)
    maps = dict(zip(("norm_a", "norm_b"), norm_maps(a, b), strict=True)) if request.param else {}
    return lambda tau: spamm_torch.mm(a, b, tau=tau, **maps)


def test_concurrent_streams_do_not_meet(claiming_product):
    expected = [claiming_product(tau) for tau in (0.0, 40.0, 90.0)]
    streams = [torch.cuda.Stream() for _ in expected]
    torch.cuda.synchronize()
    results = []
    for _ in range(20):
        for stream, tau in zip(streams, (0.0, 40.0, 90.0), strict=True):
            with torch.cuda.stream(stream):
                results.append(claiming_product(tau))
    torch.cuda.synchronize()
    assert all(map(torch.equal, results, expected * 20))


def test_graphs_side_by_side_do_not_meet(claiming_product):
    expected = claiming_product(40.0)
    captured = []
    for _ in range(3):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = [claiming_product(40.0) for _ in range(3)]
        captured.append((graph, torch.cuda.Stream(), results))
    torch.cuda.synchronize()
    for _ in range(10):
        for graph, stream, _results in captured:
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for _graph, _stream, results in captured:
        assert all(torch.equal(result, expected) for result in results)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
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
        actual = spamm_torch.mm(a, b, tau=tau, norm_a=norm_a, norm_b=norm_b)
        error = (actual.double() - expected).norm() / expected.norm()
        assert error < {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 2e-6}[dtype]
        assert not actual[8 * 64 : 25 * 64].any()


# ---- Which kernel runs --------------------------------------------------------------------------


def hopper_kernels_run():
    built = {"9.0a", "9.0a+PTX"} & set(_library.BUILT["cuda_targets"])
    forced = os.environ.get("SPAMM_TORCH_FORCE_SM80") == "1"
    return bool(built) and not forced and torch.cuda.get_device_capability() == (9, 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_hopper_has_kernels_of_its_own(dtype):
    expected = "sm90-wgmma-" if hopper_kernels_run() else "sm80-mma-"
    for block in (32, 64, 128, (128, 64, 128), (64, 128, 32)):
        assert spamm_torch.backend_for("cuda", dtype, block).startswith(expected)


@pytest.mark.parametrize(("value", "answer"), [("1", "sm80-mma-f16"), ("yes", "0 or 1; got yes")])
def test_the_portable_kernels_can_be_forced(value, answer):
    program = "import torch, spamm_torch; print(spamm_torch.backend_for('cuda', torch.half))"
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={
            **os.environ,
            "SPAMM_TORCH_FORCE_SM80": value,
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
        capture_output=True,
        text=True,
    )
    assert answer in (result.stdout + result.stderr).splitlines()[-1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("block", [32, 64, 128, (128, 64, 128), (32, 64, 128), (64, 32, 32)])
def test_a_block_of_c_does_not_depend_on_its_neighbours(dtype, block):
    """Kernels do what is valid for a whole tile in one go, and anything else piece by piece."""
    m, k, n = reference.edges(block)
    a, b = operands(dtype, m=640, k=2000, n=768)
    norm_a = torch.ones_like(spamm_torch.norm_map(a, (m, k)))
    norm_b = torch.ones_like(spamm_torch.norm_map(b, (k, n)))
    dense = spamm_torch.mm(a, b, tau=0.5, block=block, norm_a=norm_a, norm_b=norm_b)
    generator = torch.Generator().manual_seed(0)
    kept_rows = torch.rand(norm_a.shape[0], generator=generator) < 0.5
    kept_columns = torch.rand(norm_b.shape[1], generator=generator) < 0.5
    norm_a[~kept_rows.cuda()] = torch.rand(norm_a.shape[1], generator=generator).cuda()
    norm_b[:, ~kept_columns.cuda()] = torch.rand(norm_b.shape[0], 1, generator=generator).cuda()
    actual = spamm_torch.mm(a, b, tau=0.5, block=block, norm_a=norm_a, norm_b=norm_b)
    for i in kept_rows.nonzero().flatten().tolist():
        for j in kept_columns.nonzero().flatten().tolist():
            rows, columns = slice(i * m, (i + 1) * m), slice(j * n, (j + 1) * n)
            assert torch.equal(actual[rows, columns], dense[rows, columns])
    assert not torch.equal(actual, dense)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("block", [32, 64, (32, 64, 128), (128, 32, 64)])
@pytest.mark.parametrize("poisoned", ["a", "b"])
def test_what_is_skipped_is_not_even_multiplied_by_zero(dtype, block, poisoned):
    """Given maps, entries that are not finite can be skipped; they must not reach any result."""
    m, k, n = reference.edges(block)
    a = matrices.patchy(300, 520, dtype=dtype, device="cuda")
    b = matrices.patchy(520, 400, dtype=dtype, device="cuda", seed=1)
    norm_a, norm_b = spamm_torch.norm_map(a, (m, k)), spamm_torch.norm_map(b, (k, n))
    tau = spamm_torch.find_tau(norm_a, norm_b, 0.5)
    norm_a[-1, :], norm_b[:, -1] = 0.0, 0.0  # whole lines of blocks of C
    norm_a[1, 2] = norm_b[3, 1] = 0.0
    expected = spamm_torch.mm(a, b, tau=tau, block=block, norm_a=norm_a, norm_b=norm_b)
    if poisoned == "a":
        a[m : 2 * m, 2 * k : 3 * k] = float("nan")
        a[a.shape[0] // m * m :] = float("inf")
    else:
        b[3 * k : 4 * k, n : 2 * n] = float("nan")
        b[:, b.shape[1] // n * n :] = float("inf")
    actual = spamm_torch.mm(a, b, tau=tau, block=block, norm_a=norm_a, norm_b=norm_b)
    assert torch.equal(actual, expected)


# ---- The same decisions as on the CPU -----------------------------------------------------------


@given(
    edges=st.tuples(*[st.integers(1, 70)] * 3),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    ratio=st.floats(0.001, 1),
    seed=st.integers(0, 1000),
)
def test_given_the_same_maps_the_same_blocks_are_skipped(edges, dtype, ratio, seed):
    m, k, n = edges
    maps = [
        matrices.normal(*shape, dtype=dtype, seed=seed + i).abs()
        for i, shape in enumerate(((m, k), (k, n)))
    ]
    there = [norm.cuda() for norm in maps]
    tau = spamm_torch.find_tau(*maps, ratio)
    assert torch.equal(spamm_torch.find_tau(*there, ratio).cpu(), tau)
    for threshold in (tau, torch.nextafter(tau, tau + 1), tau * 0.7):
        counts = spamm_torch.valid_counts(*there, threshold)
        assert torch.equal(counts.cpu(), spamm_torch.valid_counts(*maps, threshold))


@pytest.mark.parametrize("dtype", matrices.DTYPES)
@pytest.mark.parametrize("block", [32, 64, 128, (128, 64, 128)])
def test_products_with_given_maps_equal_the_cpus(dtype, block):
    """Exactly summable operands and the CPU's maps: no block more or less, so the same bits."""
    a = matrices.patchy(500, 700, dtype=dtype)
    b = matrices.patchy(700, 400, dtype=dtype, seed=1)
    m, k, n = reference.edges(block)
    norm_a, norm_b = spamm_torch.norm_map(a, (m, k)), spamm_torch.norm_map(b, (k, n))
    tau = spamm_torch.find_tau(norm_a, norm_b, 0.4)
    expected = spamm_torch.mm(a, b, tau=tau, block=block, norm_a=norm_a, norm_b=norm_b)
    a, b, norm_a, norm_b = (x.cuda() for x in (a, b, norm_a, norm_b))
    actual = spamm_torch.mm(a, b, tau=tau, block=block, norm_a=norm_a, norm_b=norm_b)
    assert torch.equal(actual.cpu(), expected)


# ---- float32 and TF32 ---------------------------------------------------------------------------


@pytest.fixture(params=[False, True], ids=["float32", "tf32"])
def tf32(request):
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = request.param
    yield request.param
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("ratio", [1.0, 0.3])
@pytest.mark.parametrize("block", [32, 64, 128, (128, 64, 128)])
def test_float32_follows_the_setting_of_torch(tf32, ratio, block):
    a, b = operands(m=500, k=800, n=300)
    m, k, n = reference.edges(block)
    maps = spamm_torch.norm_map(a, (m, k)), spamm_torch.norm_map(b, (k, n))
    tau = spamm_torch.find_tau(*maps, ratio)
    actual = reference.to_float64(spamm_torch.mm(a, b, tau=tau, block=block))
    error = np.abs(actual - reference.multiply(a, b, *maps, tau, block))
    bound = reference.rounding_bound(a, b, *maps, tau, block, tf32=tf32)
    assert (error <= bound).all()
    if tf32:  # or TF32 was not used where torch allows it
        strict = reference.rounding_bound(a, b, *maps, tau, block)
        assert (error > strict).any()


def frobenius_error(product, a, b):
    dense = a.double() @ b.double()
    return ((product.double() - dense).norm() / dense.norm()).item()


def distances(rows, columns):
    """The paper's decay matrix: entries fall off with their distance from the diagonal."""
    row, column = (torch.arange(n, device="cuda", dtype=torch.float32) for n in (rows, columns))
    return 0.1 / ((row[:, None] - column).abs().pow(0.1) + 1)


DATA = {
    "normal": lambda a, b: (a, b),
    "positive": lambda a, b: (a.abs(), b.abs()),
    "uniform": lambda a, b: (torch.special.ndtr(a), torch.special.ndtr(b)),
    "decay": lambda a, b: (distances(*a.shape), distances(*b.shape)),
}


@pytest.mark.parametrize("data", DATA)
def test_float32_is_as_accurate_as_cublas(tf32, data):
    a, b = DATA[data](*operands(m=1000, k=2000, n=1000))
    ours = frobenius_error(spamm_torch.mm(a, b, tau=0.0), a, b)
    allowed = 1
    if tf32:  # all of the error is that of rounding the operands; the portable kernel truncates too
        allowed = 1.02 if hopper_kernels_run() else 1.5
    elif data in ("positive", "uniform") and not hopper_kernels_run():
        allowed = 2  # cuBLAS cuts K here; the portable kernel sums in one go
    assert ours <= allowed * frobenius_error(a @ b, a, b)


# M and N, and K: from all that a tile can hold to where cuBLAS cuts K into parts, one tile or many.
SHAPES = [(256, 64), (256, 256), (256, 512), (256, 8192), (64, 8192), (512, 512), (1280, 8192)]
SHAPES += [(1536, 4096), (2048, 64), (2048, 256), (2048, 2048), (3000, 4096)]


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize(("edge", "k"), SHAPES)
def test_float32_by_halves_is_as_accurate_as_cublas(edge, k, data):
    if not hopper_kernels_run():
        pytest.skip("float32 in halves is Hopper's")
    a, b = DATA[data](*operands(m=edge, k=k, n=edge))
    ours = frobenius_error(spamm_torch.mm(a, b, tau=0.0), a, b)
    assert ours <= frobenius_error(a @ b, a, b)


@pytest.mark.parametrize("edge", [256, 2048])
def test_float32_sums_overflow_to_infinity(edge):
    """In the middle of K, and then whatever follows."""
    a, b = (x.abs() for x in operands(m=edge, k=512, n=edge))
    a[:, 128:384] *= 1e20
    b[128:384] *= 1e20
    a[: edge // 2, 448:] *= -1e10
    actual = spamm_torch.mm(a, b, tau=0.0)
    assert torch.equal(actual, torch.full_like(actual, torch.inf))


def test_float32_of_badly_scaled_operands_is_near_cublas(tf32):
    a, b = operands(m=500, k=1000, n=500)
    scale = torch.logspace(-8, 8, 1000, device="cuda")
    a, b = a * scale, b / scale[:, None]
    a *= torch.logspace(-4, 4, 500, device="cuda")[:, None]
    ours = frobenius_error(spamm_torch.mm(a, b, tau=0.0), a, b)
    assert ours <= 4 * frobenius_error(a @ b, a, b)


def test_float32_backend_by_block_and_setting(tf32):
    if not hopper_kernels_run():
        pytest.skip("float32 in halves is Hopper's")
    expected = "sm90-wgmma-f32x1" if tf32 else "sm90-wgmma-f32x3"
    assert spamm_torch.backend_for("cuda", torch.float32) == expected
    expected = "sm80-mma-tf32" if tf32 else "sm80-simt-f32"
    assert spamm_torch.backend_for("cuda", torch.float32, 32) == expected


SCALINGS = {
    "rows and columns": lambda a, b, s: (a * s(a, 0, 8)[:, None], b * s(b, 1, 8)),
    "along K": lambda a, b, s: (a * s(a, 1, 3), b / s(a, 1, 3)[:, None]),
    "far along K": lambda a, b, s: (a * s(a, 1, 8), b / s(a, 1, 8)[:, None]),
    "blocks along K": lambda a, b, s: (a * s(a, 1, 9, 64), b / s(a, 1, 9, 64)[:, None]),
    "one operand along K": lambda a, b, s: (a * s(a, 1, 8), b),
    "blocks of one operand along K": lambda a, b, s: (a * s(a, 1, 3, 64), b),
    "far blocks of one operand along K": lambda a, b, s: (a * s(a, 1, 17, 64), b),
    "entries": lambda a, b, s: (a * s(a, None, 6), b * s(b, None, 6)),
    "tiny": lambda a, b, s: (a * 1e-38, b * 1e6),
    "subnormal": lambda a, b, s: (a * 1e-41, b * 1e37),
    "huge": lambda a, b, s: (a * 1e36, b * 1e-37),
}


def powers_of_ten(x, dim, most, repeats=1):
    """Random powers 10^-most to 10^most for each line of x along `dim`, or for each entry; a value
    serves `repeats` neighbours. Of one x and dim they are always the same."""
    shape = x.shape if dim is None else (-(-x.shape[dim] // repeats),)
    generator = torch.Generator().manual_seed(sum(x.shape))
    exponents = torch.randint(-most, most + 1, shape, generator=generator).double()
    scales = (10.0**exponents).float().cuda()
    return scales if dim is None else scales.repeat_interleave(repeats)[: x.shape[dim]]


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "every third column"])
def test_float32_of_any_scaling_is_near_cublas(tf32, scaling, layout):
    a, b = (matrices.LAYOUTS[layout](x) for x in operands(m=500, k=1000, n=400))
    a, b = SCALINGS[scaling](a, b, powers_of_ten)
    ours = frobenius_error(spamm_torch.mm(a, b, tau=0.0), a, b)
    assert ours <= 4 * frobenius_error(a @ b, a, b)


@pytest.mark.parametrize("large", [slice(0, 64), slice(256, 320), slice(448, 512)])
@pytest.mark.parametrize("factor", [1e9, 1e20, 1e35])
def test_float32_sums_beside_large_ones_keep_their_digits(tf32, large, factor):
    """Columns of C of which large entries of A are no part, in blocks of which they are one."""
    a, b = operands(m=200, k=512, n=128)
    a *= 1e-5
    a[:, large] *= factor
    b[large, 32:] = 0
    ours = spamm_torch.mm(a, b, tau=0.0)
    assert frobenius_error(ours, a, b) <= 1.5 * frobenius_error(a @ b, a, b)
    mine, theirs = ours[:, 32:], (a @ b)[:, 32:]
    assert frobenius_error(mine, a, b[:, 32:]) <= 1.5 * frobenius_error(theirs, a, b[:, 32:])


@pytest.mark.parametrize("block", [64, (128, 64, 128)])
def test_float32_keeps_infinities_and_nan(tf32, block):
    a, b = operands(m=300, k=500, n=260)
    a[10, 100], a[70, 450], b[200, 130], b[300, 200] = torch.inf, -torch.inf, torch.nan, torch.inf
    a[150, 300] = 0  # times infinity
    expected = (a.double() @ b.double()).float()
    actual = spamm_torch.mm(a, b, tau=torch.inf, block=block)
    skipped = spamm_torch.mm(a, b, tau=0.0, block=block)
    assert not torch.equal(actual, skipped)  # finite products are skipped, others never
    atol = 0.1 if tf32 else 1e-3
    wrong = ~torch.isclose(skipped, expected, rtol=1e-4, atol=atol, equal_nan=True)
    assert not wrong.any()
    assert torch.equal(actual.isfinite(), expected.isfinite())


@pytest.mark.parametrize("block", [64, 128])
def test_a_block_of_float32_does_not_depend_on_others(tf32, block):
    """Whatever shares a tile, a batch or K with it, and whether that is skipped."""
    a, b = operands(m=512, k=2048, n=640)
    a[100] *= 1e-9
    b[:, 300:] *= 1e12
    rows, columns = slice(128, 256), slice(256, 384)
    whole = spamm_torch.mm(a, b, tau=0.0, block=block)
    part = spamm_torch.mm(a[rows].clone(), b[:, columns].clone(), tau=0.0, block=block)
    assert torch.equal(whole[rows, columns], part)
    batch = spamm_torch.bmm(torch.stack([-a, a]), b.expand(2, -1, -1), tau=0.0, block=block)
    assert torch.equal(batch[1], whole)
    maps = norm_maps(a, b, block)
    a_zeros = a.clone()
    a_zeros[:, 512:1024] = 0
    maps[0][:, 512 // block : 1024 // block] = 0
    skipped = spamm_torch.mm(a, b, tau=1e-30, block=block, norm_a=maps[0], norm_b=maps[1])
    assert torch.equal(skipped, spamm_torch.mm(a_zeros, b, tau=0.0, block=block))


@pytest.mark.parametrize("layout", matrices.LAYOUTS)
def test_norms_taken_with_the_halves_are_those_of_norm_map(tf32, layout):
    a, b = (matrices.LAYOUTS[layout](x) for x in operands(m=330, k=450, n=270))
    maps = norm_maps(a, b)
    products = (maps[0][:, :, None] * maps[1][None]).flatten().sort().values
    for tau in products[:: products.numel() // 7]:  # each the norm of one product, kept by it alone
        expected = spamm_torch.mm(a, b, tau=tau, norm_a=maps[0], norm_b=maps[1])
        assert torch.equal(spamm_torch.mm(a, b, tau=tau), expected)


def test_float32_says_how_much_memory_its_halves_need():
    if not hopper_kernels_run():
        pytest.skip("float32 in halves is Hopper's")
    a = torch.ones(16384, 16384, device="cuda")
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    room = torch.cuda.memory_reserved() + 1.2 * a.numel() * 4
    torch.cuda.set_per_process_memory_fraction(room / total)
    try:
        with pytest.raises(torch.OutOfMemoryError, match=r"need \d+ bytes .* \[1, 16384, 16384\]"):
            spamm_torch.mm(a, a, tau=0.0)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_the_setting_changes_no_norm(tf32):
    a, _ = operands()
    expected = reference.norm_map(a, 64)
    np.testing.assert_allclose(spamm_torch.norm_map(a).cpu().numpy(), expected, rtol=1e-5)


def test_the_setting_does_not_reach_the_cpu(tf32):
    a, b = operands(device="cpu")
    actual = spamm_torch.mm(a, b, tau=0.0)
    torch.backends.cuda.matmul.allow_tf32 = not tf32
    assert torch.equal(spamm_torch.mm(a, b, tau=0.0), actual)


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


def test_a_huge_operand():
    needs_memory(24)
    a, b = small_integers(70_001, 31_000), small_integers(31_000, 65)
    assert a.numel() > 2**31
    assert_dense_product(spamm_torch.mm(a, b, tau=0.5), a, b)
    norms = spamm_torch.norm_map(a)
    last = spamm_torch.norm_map(a[70_001 // 64 * 64 :].clone())
    assert torch.equal(norms[-1], last[-1])


def test_a_huge_second_operand():
    needs_memory(24)
    a, b = small_integers(65, 31_000), small_integers(31_000, 70_001)
    assert b.numel() > 2**31
    assert_dense_product(spamm_torch.mm(a, b, tau=0.5), a, b)


def test_a_huge_result():
    needs_memory(24)
    a, b = small_integers(46_500, 96), small_integers(96, 46_500)
    result = spamm_torch.mm(a, b, tau=0.5)
    assert result.numel() > 2**31
    assert_dense_product(result, a, b)


def test_a_huge_stride():
    """Few elements, far apart."""
    needs_memory(24)
    wide = torch.empty(66, 2**26, dtype=torch.float16, device="cuda")
    a = wide[:, :100]
    a.copy_(matrices.patchy(66, 100, dtype=torch.float16))
    b = matrices.patchy(100, 70, dtype=torch.float16, device="cuda", seed=1)
    assert torch.equal(spamm_torch.mm(a, b, tau=1.0), spamm_torch.mm(a.clone(), b, tau=1.0))


def test_more_batches_than_a_grid_dimension_holds():
    a = matrices.patchy(70_000, 3, 5, dtype=torch.float16, device="cuda")
    b = matrices.patchy(70_000, 5, 2, dtype=torch.float16, device="cuda", seed=1)
    expected = (a.float() @ b.float()).half()
    assert torch.equal(spamm_torch.bmm(a, b, tau=0.0), expected)


def test_more_block_rows_than_a_grid_dimension_holds():
    a = torch.ones(32 * 65_600, 2, dtype=torch.float16, device="cuda")
    b = torch.ones(2, 3, dtype=torch.float16, device="cuda")
    assert (spamm_torch.mm(a, b, tau=0.5, block=32) == 2).all()
    assert (spamm_torch.mm(b.t(), a.t(), tau=0.5, block=32) == 2).all()


# ---- Two devices --------------------------------------------------------------------------------


@pytest.fixture
def second_device():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    return torch.device("cuda:1")


@pytest.mark.parametrize("dtype", matrices.DTYPES)
@pytest.mark.parametrize("knob", KNOBS)
def test_operands_on_another_than_the_current_device(second_device, dtype, knob):
    a, b = operands(dtype)
    expected = spamm_torch.mm(a, b, **knob)
    actual = spamm_torch.mm(a.to(second_device), b.to(second_device), **knob)
    assert actual.device == second_device
    assert torch.equal(actual.to("cuda:0"), expected)
    assert torch.cuda.current_device() == 0


def test_operands_on_two_cuda_devices(second_device):
    a, b = operands()
    with pytest.raises(RuntimeError, match="cuda:0 and cuda:1"):
        spamm_torch.mm(a, b.to(second_device), tau=1.0)
