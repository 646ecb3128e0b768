"""mm_shards and mm(devices=): the bits of one device, wherever the operands lie.

On the CPU and on one GPU several shards share the device, which tries the plan, the stages and the
copies. With two GPUs the shards lie on both.
"""

import itertools
import os
from unittest import mock

import matrices
import pytest
import torch
from matrices import fading as decay
from support import TWO_GPUS, check_overwritten, cut, hopper_kernels_run, memory_limit
from torch.library import opcheck

import spamm_torch

KNOBS = [{"tau": 0.02}, {"valid_ratio": 0.3}, {"max_error": 0.05}, {"tau": 0.0}]
pytestmark = pytest.mark.usefixtures("new_memory_holds_nan")


def check_shards(a, b, cuts_a, cuts_b, devices, **options):
    """Shards of B, all of which travel to GPUs or what is needed, and B whole on each device."""
    expected = spamm_torch.mm(a, b, **options)
    a_shards, b_shards = cut(a, cuts_a, devices), cut(b, cuts_b, devices)
    ways = [(b_shards, "0"), (b_shards, "1"), ([b.to(device) for device in devices], "0")]
    for b_shards, is_planned in ways:
        with mock.patch.dict(os.environ, SPAMM_TORCH_PLAN_SHARDS=is_planned):
            shards = spamm_torch.mm_shards(a_shards, b_shards, **options)
        assert [c.device for c in shards] == [x.device for x in a_shards]
        assert torch.equal(torch.cat([c.to(a.device) for c in shards]), expected)


@pytest.mark.parametrize(("dtype", "knob"), zip(matrices.DTYPES, KNOBS, strict=True), ids=str)
def test_shards_on_one_device(device, dtype, knob):
    """Every type and knob, in several stages; the fuzzer draws both in one."""
    a = decay(640, 512, dtype, device)
    b = decay(512, 5000, dtype, device, seed=1)
    check_shards(a, b, (0, 256, 640), (0, 192, 512), [device] * 2, **knob)


@pytest.mark.parametrize("block", [*matrices.EDGES, (64, 32, 128)])
@pytest.mark.parametrize(
    ("cuts_a", "cuts_b"),
    [((0, 128, 384, 500), (0, 256, 256, 333)), ((0, 0, 500, 500), (0, 128, 128, 333))],
)
def test_uneven_and_empty_shards(device, block, cuts_a, cuts_b):
    a, b = decay(500, 333, device=device), decay(333, 4500, device=device, seed=1)
    check_shards(a, b, cuts_a, cuts_b, [device] * 3, valid_ratio=0.2, block=block)


@pytest.mark.parametrize("block", [32, 64])
def test_entries_of_many_magnitudes(device, block):
    """Kernels that scale float32 by blocks scale them alike in every part."""
    a, b = decay(480, 512, device=device), decay(512, 4500, device=device, seed=1)
    shuffled = torch.randperm(512, generator=torch.Generator().manual_seed(2))
    scales = torch.logspace(-6, 6, 512)[shuffled].to(device)
    a, b = a * scales, b * scales[:, None]
    check_shards(
        a, b, (0, 64 + block, 480), (0, 192 + block, 512), [device] * 2, max_error=1e-9, block=block
    )


@pytest.mark.parametrize("sizes", [(128, 0, 64), (0, 128, 64), (128, 128, 0), (64, 64, 1)])
def test_empty_and_tiny_products(device, sizes):
    m, k, n = sizes
    a, b = torch.ones(m, k, device=device), torch.ones(k, n, device=device)
    check_shards(a, b, (0, m // 128 * 64, m), (0, k // 128 * 64, k), [device] * 2, tau=0.5)


def test_the_plan_skips_units():
    """The operands of these tests leave units out, so that the poisoned memory means something."""
    a, b = decay(640, 512), decay(512, 5000, seed=1)
    norm_a, norm_b = spamm_torch.norm_map(a), spamm_torch.norm_map(b)
    tau = spamm_torch.find_tau(norm_a, norm_b, 0.3)
    largest = torch.stack([norm_a[:4].amax(0), norm_a[4:].amax(0)])
    needed = torch.ops.spamm_torch.needed_units(largest, norm_b, tau, 32)
    assert 0.1 < needed.double().mean() < 0.9


def test_bad_values_are_never_skipped(device):
    a, b = decay(256, 256, device=device), decay(256, 4200, device=device, seed=1)
    a[200, 7], b[77, 4100] = float("nan"), float("inf")
    shards = spamm_torch.mm_shards([a[:128], a[128:]], [b[:64], b[64:]], tau=1e30)
    expected = spamm_torch.mm(a, b, tau=1e30)
    assert expected.isnan().any()
    assert torch.equal(torch.cat(shards).nan_to_num(7), expected.nan_to_num(7))


def test_products_equal_to_tau_are_needed(device):
    a, b = torch.ones(256, 128, device=device), torch.ones(128, 4200, device=device)
    tau = (spamm_torch.norm_map(a)[0, 0] * spamm_torch.norm_map(b)[0, 0]).item()
    shards = spamm_torch.mm_shards([a[:128], a[128:]], [b[:64], b[64:]], tau=tau)
    # The last block of B's columns is not full, and its norms are less.
    assert torch.equal(torch.cat(shards)[:, :4160], torch.full((256, 4160), 128.0, device=device))
    assert not torch.cat(shards)[:, 4160:].any()


@pytest.mark.parametrize("one_shard", [True, False])
def test_caller_may_overwrite_shards_at_once(device, one_shard):
    a, b = decay(512, 512, device=device), decay(512, 5000, device=device, seed=1)
    expected = spamm_torch.mm(a, b, tau=0.02)
    for _ in range(3):
        cuts = (0, 512) if one_shard else (0, 256, 512)
        devices = [device] * (len(cuts) - 1)
        a_shards, b_shards = cut(a.clone(), cuts, devices), cut(b.clone(), cuts, devices)
        shards = spamm_torch.mm_shards(a_shards, b_shards, tau=0.02)
        for x in (*a_shards, *b_shards):
            x.fill_(float("nan"))
        assert torch.equal(torch.cat(shards), expected)


@pytest.mark.parametrize("whole", [True, False])
def test_gradients_are_dense(device, whole):
    a, b = decay(300, 200, device=device), decay(200, 100, device=device, seed=1)
    rows = [x.clone().requires_grad_() for x in (a[:128], a[128:])]
    depths = [x.clone().requires_grad_() for x in ((b, b) if whole else (b[:64], b[64:]))]
    shards = spamm_torch.mm_shards(rows, depths, tau=0.02)
    weights = torch.arange(300 * 100, dtype=torch.float32, device=device).view(300, 100) / 30000
    sum((c * w).sum() for c, w in zip(shards, weights.split([128, 172]), strict=True)).backward()
    torch.testing.assert_close(torch.cat([x.grad for x in rows]), weights @ b.t())
    grads = [x.grad for x in depths]
    torch.testing.assert_close(sum(grads) if whole else torch.cat(grads), a.t() @ weights)
    [c] = spamm_torch.mm_shards([a], [b], tau=0.02)
    assert not c.requires_grad
    with torch.no_grad():
        assert not any(c.requires_grad for c in spamm_torch.mm_shards(rows, depths, tau=0.02))


A, B = torch.ones(256, 128), torch.ones(128, 64)
TAU = {"tau": 0.1}


@pytest.mark.parametrize(
    ("given", "options", "error", "message"),
    [
        (([], []), TAU, ValueError, "a_shards must hold at least one tensor; got none"),
        (([A], [B, B]), TAU, ValueError, "b_shards must hold as many .* as a_shards, 1; got 2"),
        ((A, [B]), TAU, TypeError, "a_shards must be a list of tensors; got Tensor"),
        (([A, A], [B[:50], B[:50]]), TAU, RuntimeError, "128 rows together.*; got 100 together"),
        (([A[:100], A[100:]], [B, B]), TAU, RuntimeError, "cut at .* 64; got a cut at row 100"),
        (([A, A], [B[:8], B[8:]]), TAU, RuntimeError, "b_shards must .* 64; got a cut at row 8"),
        (([A, A[:, :64]], [B, B]), TAU, RuntimeError, "one number of columns"),
        (([A], [B.double()]), TAU, TypeError, "one dtype; got float32 and float64"),
        (([A], [B]), {}, ValueError, "exactly one of tau, valid_ratio and max_error"),
        (([A], [B]), {**TAU, "block": 48}, ValueError, "block must be 32, 64 or 128"),
    ],
)
def test_errors(given, options, error, message):
    with pytest.raises(error, match=message):
        spamm_torch.mm_shards(*given, **options)


@pytest.mark.cuda
def test_one_device_of_devices_and_errors():
    a, b = A.cuda(), B.cuda()
    with pytest.raises(ValueError, match=r"devices must be less than .*; got 99"):
        spamm_torch.mm(a, b, tau=0.1, devices=[0, 99])
    spamm_torch.mm_shards([a, a], [b, b], tau=0.1)
    refused = pytest.raises(RuntimeError, match="cannot be captured in a graph")
    with refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
        spamm_torch.mm_shards([a, a], [b, b], tau=0.1)
    a, b = decay(512, 512, device="cuda"), decay(512, 5000, device="cuda", seed=1)
    shared = spamm_torch.mm(a, b, tau=0.02, devices=[0])
    assert torch.equal(shared, spamm_torch.mm(a, b, tau=0.02))


@pytest.mark.cuda
@pytest.mark.multi_gpu
@pytest.mark.usefixtures("either_gpu_is_current")
class TestTwoGpus:
    @pytest.mark.parametrize("knob", KNOBS, ids=lambda knob: next(iter(knob)))
    def test_shards(self, dtype, knob):
        a = decay(640, 512, dtype, "cuda:0")
        b = decay(512, 5000, dtype, "cuda:0", seed=1)
        check_shards(a, b, (0, 256, 640), (0, 192, 512), TWO_GPUS, **knob)

    @pytest.mark.parametrize("block", [32, (64, 32, 128)])
    def test_three_shards(self, block):
        a, b = decay(500, 333, device="cuda:0"), decay(333, 4500, device="cuda:0", seed=1)
        devices = [TWO_GPUS[1], TWO_GPUS[0], TWO_GPUS[1]]
        check_shards(
            a, b, (0, 128, 384, 500), (0, 256, 256, 333), devices, valid_ratio=0.2, block=block
        )

    @pytest.mark.parametrize("knob", KNOBS, ids=lambda knob: next(iter(knob)))
    @pytest.mark.parametrize("home", [0, 1])
    def test_devices(self, dtype, knob, home):
        a = decay(1100, 512, dtype, f"cuda:{home}")
        b = decay(512, 5000, dtype, f"cuda:{home}", seed=1)
        expected = spamm_torch.mm(a, b, **knob)
        for devices in ([0, 1], TWO_GPUS[::-1], [torch.device("cuda", 1 - home)]):
            c = spamm_torch.mm(a, b, **knob, devices=devices)
            assert c.device == a.device
            assert torch.equal(c, expected)

    def test_a_tau_on_a_device_without_shards(self):
        """It is read after what its device's current stream does before."""
        a, b = decay(640, 512, device="cuda:0"), decay(512, 5000, device="cuda:0", seed=1)
        expected = spamm_torch.mm(a, b, tau=0.02)
        a_shards, b_shards = (cut(x, (0, 256, len(x)), TWO_GPUS[:1] * 2) for x in (a, b))
        with torch.cuda.stream(torch.cuda.Stream(TWO_GPUS[1])):
            tau = torch.zeros((), device=TWO_GPUS[1])
            torch.cuda._sleep(10**8)
            shards = spamm_torch.mm_shards(a_shards, b_shards, tau=tau.fill_(0.02))
        assert torch.equal(torch.cat(shards), expected)

    def test_gradients_of_devices(self):
        operands = [decay(300, 256, device="cuda:0"), decay(256, 200, device="cuda:0", seed=1)]
        grads = []
        for devices in (None, [0, 1]):
            a, b = (x.clone().requires_grad_() for x in operands)
            spamm_torch.mm(a, b, tau=0.02, devices=devices).square().sum().backward()
            grads.append((a.grad, b.grad))
        assert all(torch.equal(x, y) for x, y in zip(*grads, strict=True))

    def test_norm_maps_as_they_lie(self):
        a, b = decay(512, 1100, device="cuda:0").t(), decay(5000, 512, device="cuda:0", seed=1).t()
        of = {"norm_a": a, "norm_b": b}
        maps = {name: spamm_torch.norm_map(x.t()).t() for name, x in of.items()}
        shared = spamm_torch.mm(a, b, tau=0.02, devices=[0, 1], **maps)
        assert torch.equal(shared, spamm_torch.mm(a, b, tau=0.02, **maps))

    def test_a_small_product_stays_on_one_device(self, monkeypatch):
        monkeypatch.delenv("SPAMM_TORCH_ALL_DEVICES")
        a = decay(1024, 1024, torch.float16, "cuda:0")
        expected = spamm_torch.mm(a, a, tau=0.02)
        torch.cuda.reset_peak_memory_stats(1)
        before = torch.cuda.max_memory_allocated(1)
        assert torch.equal(spamm_torch.mm(a, a, tau=0.02, devices=[1, 0]), expected)
        assert torch.cuda.max_memory_allocated(1) == before
        assert torch.equal(spamm_torch.mm(a, a, tau=0.02, devices=[1]), expected)
        assert torch.cuda.max_memory_allocated(1) > before  # where its own device is not named

    def test_little_work_of_a_large_product(self, monkeypatch):
        """The home device starts before the cuts are known, and may get all rows."""
        monkeypatch.delenv("SPAMM_TORCH_ALL_DEVICES")
        a = torch.eye(28_000, dtype=torch.float16, device="cuda:0")
        for tau in (0.5, 100.0):
            shared = spamm_torch.mm(a, a, tau=tau, devices=[0, 1])
            assert torch.equal(shared, spamm_torch.mm(a, a, tau=tau))

    def test_without_peer_access(self, monkeypatch):
        monkeypatch.setenv("SPAMM_TORCH_NO_PEER", "1")
        a, b = decay(640, 512, device="cuda:0"), decay(512, 5000, device="cuda:0", seed=1)
        check_shards(a, b, (0, 256, 640), (0, 192, 512), TWO_GPUS, tau=0.02)
        shared = spamm_torch.mm(a, b, tau=0.02, devices=[0, 1])
        assert torch.equal(shared, spamm_torch.mm(a, b, tau=0.02))

    def test_side_streams_and_operands_overwritten(self):
        a, b = decay(2048, 2048, device="cuda:0"), decay(2048, 8192, device="cuda:0", seed=1)
        expected = spamm_torch.mm(a, b, tau=0.02)
        cuts = (0, 1024, 2048)
        check_overwritten(
            lambda a, b: spamm_torch.mm_shards(a, b, tau=0.02),
            [cut(x, cuts, TWO_GPUS) for x in (a, b)],
            expected.split(1024),
            rounds=50,
        )

    def test_out_of_memory_names_the_device(self):
        a, b = decay(1024, 1024, device="cuda:0"), decay(1024, 8192, device="cuda:0", seed=1)
        a_shards, b_shards = (cut(x, (0, 512, 1024), TWO_GPUS) for x in (a, b))
        refused = pytest.raises(torch.OutOfMemoryError, match=r"bytes on cuda:1")
        with memory_limit([1], 24 * 2**20), refused:
            spamm_torch.mm_shards(a_shards, b_shards, tau=0.02)
        shards = spamm_torch.mm_shards(a_shards, b_shards, tau=0.02)
        assert torch.equal(shards[1].to("cuda:0"), spamm_torch.mm(a, b, tau=0.02)[512:])


# ---- The op multiply_part ------------------------------------------------------------------------


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
    *arguments, input = batch(device, torch.float32, 2, 100, 70, 130)
    opcheck(ops.multiply.default, (*arguments, (64, 64, 64)), {"whole": (200, 130), "input": input})


def test_bad_arguments(device):
    a, b, *rest = product(device, torch.float32, 128, 128, 128, 64)
    block = (64, 64, 64)
    with pytest.raises(RuntimeError, match=r"out must have the product's shape \[128, 128\]; got"):
        ops.multiply_part(a, b, *rest, block, a.new_empty(128, 64), whole=(128, 128))
    with pytest.raises(TypeError, match="out must have the operands' dtype float32; got float64"):
        ops.multiply_part(a, b, *rest, block, a.double(), whole=(128, 128))
    with pytest.raises(ValueError, match=r"whole must be \(M, N\) .* at least \[128, 128\]; got"):
        ops.multiply_part(a, b, *rest, block, torch.empty_like(a), whole=(64, 128))
    with pytest.raises(ValueError, match=r"whole must be \(M, N\) .* at least \[128, 128\]; got"):
        ops.multiply(a, b, *rest, block, whole=(64, 128))
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
