"""mm_shards and mm(devices=): the bits of one device, wherever the operands lie.

On the CPU and on one GPU several shards share the device, which tries the plan, the stages and the
copies. With two GPUs the shards lie on both. tests/cpp/spamm_host_test.cpp tries the code for
operands in host memory on the CPU.
"""

import itertools
import os
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import matrices
import pytest
import torch
from matrices import fading as decay
from support import (
    TWO_GPUS,
    check_overwritten,
    cut,
    hopper_kernels_run,
    memory_limit,
    norm_maps,
    refuses,
)

import spamm_torch
from spamm_torch.distributed.plan import needed_units

ops = torch.ops.spamm_torch
KNOBS = [{"tau": 0.02}, {"valid_ratio": 0.3}, {"max_error": 0.05}, {"tau": 0.0}]
TWO = [pytest.mark.cuda, pytest.mark.multi_gpu]
pytestmark = pytest.mark.usefixtures("new_memory_holds_nan")


@pytest.fixture(
    params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
    + [pytest.param(current, marks=TWO, id=f"two GPUs, {current} current") for current in (0, 1)]
)
def places(request, monkeypatch):
    """The devices of shards, in turn: one, or two GPUs while either is the current one."""
    if isinstance(request.param, str):
        yield [torch.device(request.param)]
        return
    monkeypatch.setenv("SPAMM_TORCH_ALL_DEVICES", "1")
    with torch.cuda.device(request.param):
        yield TWO_GPUS


def pair(m, k, n, dtype=torch.float32, device="cpu"):
    """Operands of a product, of which parts need different blocks."""
    return decay(m, k, dtype, device), decay(k, n, dtype, device, seed=1)


def check_shards(a, b, cuts_a, cuts_b, places, **options):
    """Shards of B, all of which travel to GPUs or what is needed, and B whole on each device."""
    devices = list(itertools.islice(itertools.cycle(places), len(cuts_a) - 1))
    expected = spamm_torch.mm(a, b, **options)
    a_shards, b_shards = cut(a, cuts_a, devices), cut(b, cuts_b, devices)
    ways = [(b_shards, "0"), (b_shards, "1"), ([b.to(device) for device in devices], "0")]
    for b_shards, is_planned in ways:
        with mock.patch.dict(os.environ, SPAMM_TORCH_PLAN_SHARDS=is_planned):
            shards = spamm_torch.mm_shards(a_shards, b_shards, **options)
        assert [c.device for c in shards] == [x.device for x in a_shards]
        found = torch.cat([c.to(a.device) for c in shards])
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.strength(3)
@pytest.mark.parametrize(
    ("dtype", "knob", "block"),
    [
        *zip(matrices.DTYPES, KNOBS, (64, 32, 64, 128), strict=True),
        (torch.float32, {"valid_ratio": 0.2}, (64, 32, 128)),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("n", "cuts_a", "cuts_b"),
    [
        (5000, (0, 256, 640), (0, 256, 512)),
        # Large tiles, where a part by itself would take small ones, which round otherwise.
        pytest.param(5120, (0, 640, 5120), (0, 256, 1024), marks=pytest.mark.cuda),
        (4500, (0, 128, 384, 500), (0, 256, 256, 333)),
        (4500, (0, 0, 500, 500), (0, 128, 128, 333)),
        (64, (0, 0, 0), (0, 0, 128)),
        (64, (0, 128, 200), (0, 0, 0)),
        (0, (0, 128, 200), (0, 0, 128)),
        (1, (0, 0, 64), (0, 0, 64)),
    ],
)
def test_shards(places, dtype, knob, block, n, cuts_a, cuts_b):
    """In several stages, of one or of none, and empty shards; the fuzzer draws one stage."""
    a, b = pair(cuts_a[-1], cuts_b[-1], n, dtype, places[0])
    check_shards(a, b, cuts_a, cuts_b, places, **knob, block=block)


@pytest.mark.parametrize("block", [32, 64])
@pytest.mark.parametrize("values", ["of many magnitudes", "that are no numbers", "ties"])
def test_special_values(device, values, block):
    """Kernels scale float32 alike in every part, and what equals a threshold travels."""
    a, b = pair(480, 512, 4500, device=device)
    options = {"tau": 1e30, "block": block}
    if values == "of many magnitudes":
        shuffled = torch.randperm(512, generator=torch.Generator().manual_seed(2))
        scales = torch.logspace(-6, 6, 512)[shuffled].to(device)
        a, b, options = a * scales, b * scales[:, None], {"max_error": 1e-9, "block": block}
    elif values == "ties":
        a, b = torch.ones_like(a), torch.ones_like(b)
        norms = norm_maps(a, b, block)
        options["tau"] = (norms[0][0, 0] * norms[1][0, 0]).item()
    else:
        a[200, 7], b[77, 4100] = float("nan"), float("inf")
    check_shards(a, b, (0, 64 + block, 480), (0, 192 + block, 512), [device], **options)


def test_the_plan_skips_units():
    """The operands of these tests leave units out, so that the poisoned memory means something."""
    norm_a, norm_b = map(spamm_torch.norm_map, pair(640, 512, 5000))
    tau = spamm_torch.find_tau(norm_a, norm_b, 0.3)
    largest = torch.stack([norm_a[:4].amax(0), norm_a[4:].amax(0)])
    assert 0.1 < needed_units(largest, norm_b, tau, 32).double().mean() < 0.9


@pytest.mark.parametrize("cuts", [(0, 512), (0, 256, 512)])
def test_caller_may_overwrite_shards_at_once(device, cuts):
    a, b = pair(512, 512, 5000, device=device)
    expected = spamm_torch.mm(a, b, tau=0.02)
    for _ in range(3):
        a_shards, b_shards = (cut(x.clone(), cuts, [device] * (len(cuts) - 1)) for x in (a, b))
        shards = spamm_torch.mm_shards(a_shards, b_shards, tau=0.02)
        for x in (*a_shards, *b_shards):
            x.fill_(float("nan"))
        assert torch.equal(torch.cat(shards), expected)


@pytest.mark.parametrize("whole", [True, False])
def test_gradients_are_dense(device, whole):
    a, b = pair(300, 200, 100, device=device)
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


# ---- mm(devices=) -------------------------------------------------------------------------------


@pytest.mark.cuda
def test_one_device_of_devices_and_errors():
    on_host = torch.ones(256, 128), torch.ones(128, 64)
    a, b = (x.cuda() for x in on_host)
    with pytest.raises(ValueError, match=r"devices must be less than .*; got 99"):
        spamm_torch.mm(a, b, tau=0.1, devices=[0, 99])
    spamm_torch.mm_shards([a, a], [b, b], tau=0.1)
    for call in (
        lambda: spamm_torch.mm_shards([a, a], [b, b], tau=0.1),
        lambda: spamm_torch.mm(*on_host, tau=0.1, devices=[0]),
    ):
        refused = pytest.raises(RuntimeError, match="cannot be captured in a graph")
        with refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
            call()
    a, b = pair(512, 512, 5000, device="cuda")
    shared = spamm_torch.mm(a, b, tau=0.02, devices=[0])
    assert torch.equal(shared, spamm_torch.mm(a, b, tau=0.02))


@pytest.mark.cuda
@pytest.mark.multi_gpu
@pytest.mark.usefixtures("either_gpu_is_current")
class TestTwoGpus:
    @pytest.mark.parametrize("knob", KNOBS, ids=lambda knob: next(iter(knob)))
    @pytest.mark.parametrize("home", [0, 1])
    def test_devices(self, dtype, knob, home):
        a, b = pair(1100, 512, 5000, dtype, f"cuda:{home}")
        expected = spamm_torch.mm(a, b, **knob)
        for devices in ([0, 1], TWO_GPUS[::-1], [torch.device("cuda", 1 - home)]):
            c = spamm_torch.mm(a, b, **knob, devices=devices)
            assert c.device == a.device
            assert torch.equal(c, expected)

    def test_a_tau_on_a_device_without_shards(self):
        """It is read after what its device's current stream does before."""
        a, b = pair(640, 512, 5000, device="cuda:0")
        expected = spamm_torch.mm(a, b, tau=0.02)
        a_shards, b_shards = (cut(x, (0, 256, len(x)), TWO_GPUS[:1] * 2) for x in (a, b))
        with torch.cuda.stream(torch.cuda.Stream(TWO_GPUS[1])):
            tau = torch.zeros((), device=TWO_GPUS[1])
            torch.cuda._sleep(10**8)
            shards = spamm_torch.mm_shards(a_shards, b_shards, tau=tau.fill_(0.02))
        assert torch.equal(torch.cat(shards), expected)

    def test_norm_maps_as_they_lie(self):
        b, a = (x.t() for x in pair(5000, 512, 1100, device="cuda:0"))
        maps = {
            "norm_a": spamm_torch.norm_map(a.t()).t(),
            "norm_b": spamm_torch.norm_map(b.t()).t(),
        }
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
        a, b = pair(640, 512, 5000, device="cuda:0")
        check_shards(a, b, (0, 256, 640), (0, 192, 512), TWO_GPUS, tau=0.02)
        shared = spamm_torch.mm(a, b, tau=0.02, devices=[0, 1])
        assert torch.equal(shared, spamm_torch.mm(a, b, tau=0.02))
        for knob in KNOBS[:2]:
            check_host(*pair(640, 512, 9000), [0, 1], **knob)

    def test_side_streams_and_operands_overwritten(self):
        a, b = pair(2048, 2048, 8192, device="cuda:0")
        expected = spamm_torch.mm(a, b, tau=0.02)
        cuts = (0, 1024, 2048)
        check_overwritten(
            lambda a, b: spamm_torch.mm_shards(a, b, tau=0.02),
            [cut(x, cuts, TWO_GPUS) for x in (a, b)],
            expected.split(1024),
            rounds=50,
        )

    def test_out_of_memory_names_the_device(self):
        a, b = pair(1024, 1024, 8192, device="cuda:0")
        a_shards, b_shards = (cut(x, (0, 512, 1024), TWO_GPUS) for x in (a, b))
        refused = pytest.raises(torch.OutOfMemoryError, match=r"bytes on cuda:1")
        with memory_limit([1], 24 * 2**20), refused:
            spamm_torch.mm_shards(a_shards, b_shards, tau=0.02)
        shards = spamm_torch.mm_shards(a_shards, b_shards, tau=0.02)
        assert torch.equal(shards[1].to("cuda:0"), spamm_torch.mm(a, b, tau=0.02)[512:])


# ---- Operands in host memory --------------------------------------------------------------------


def check_host(a, b, devices, **options):
    """The product of host operands, in pinned memory, against that of one device."""
    c = spamm_torch.mm(a, b, devices=devices, **options)
    assert c.device.type == "cpu"
    assert c.is_pinned()
    maps = {name: options.pop(name).cuda() for name in ("norm_a", "norm_b") if name in options}
    on_device = spamm_torch.mm(a.contiguous().cuda(), b.contiguous().cuda(), **options, **maps)
    assert torch.equal(c, on_device.cpu())
    return c


@pytest.mark.cuda
@pytest.mark.parametrize(
    "devices",
    [[0], *(pytest.param(x, marks=pytest.mark.multi_gpu) for x in ([0, 1], [1], [1, 0]))],
    ids=str,
)
class TestHostOperands:
    @pytest.mark.parametrize("pinned", [True, False])
    @pytest.mark.parametrize("knob", KNOBS, ids=lambda knob: next(iter(knob)))
    @pytest.mark.parametrize("block", [*matrices.EDGES, (64, 32, 128), (128, 64, 128)])
    @pytest.mark.parametrize(
        "sizes",
        [
            (640, 512, 17000),  # 5 stages of half types
            *((500, 333, 9001), (129, 65, 1), (1, 1, 4500)),
            (5120, 1024, 9216),  # of large tiles, which round float32 as parts must, too
        ],
    )
    def test_bits_of_one_device(self, devices, dtype, sizes, block, knob, pinned):
        a, b = pair(*sizes, dtype)
        if pinned:
            a, b = a.pin_memory(), b.pin_memory()
        check_host(a, b, devices, **knob, block=block)

    @pytest.mark.parametrize("sizes", [(0, 64, 64), (128, 0, 64), (64, 64, 0)])
    def test_empty_products(self, devices, sizes):
        m, k, n = sizes
        for knob in KNOBS[:2]:
            c = spamm_torch.mm(torch.ones(m, k), torch.ones(k, n), devices=devices, **knob)
            assert c.shape == (m, n)
            assert not c.any()

    def test_any_strides_norm_maps_and_a_tau_that_is_a_tensor(self, devices):
        a, b = decay(512, 640).t(), decay(1024, 5001, seed=1)[::2, 1:]
        c = check_host(a, b, devices, tau=0.02)
        assert torch.equal(c, spamm_torch.mm(a, b, tau=torch.tensor(0.02), devices=devices))
        check_host(a, torch.ones(1, 4500).expand(512, 4500), devices, tau=0.02)
        maps = {"norm_a": spamm_torch.norm_map(a), "norm_b": spamm_torch.norm_map(b).flip(1)}
        for knob in KNOBS:
            check_host(a, b, devices, **maps, **knob)
            check_host(a, b, devices, norm_b=maps["norm_b"], **knob)
        refuses(
            RuntimeError,
            lambda: spamm_torch.mm(a, b, tau=torch.tensor(0.02, device="cuda"), devices=devices),
            "tau must be on the operands' device cpu",
        )

    @pytest.mark.parametrize("pinned", [True, False])
    def test_caller_may_overwrite_operands_at_once(self, devices, pinned):
        given = pair(2048, 1024, 9000)
        expected = check_host(*given, devices, tau=0.02).clone()
        for _ in range(5):
            a, b = (x.pin_memory() if pinned else x.clone() for x in given)
            c = spamm_torch.mm(a, b, tau=0.02, devices=devices)
            a.fill_(float("nan"))
            b.fill_(float("nan"))
            assert torch.equal(c, expected)

    def test_side_streams_and_several_threads(self, devices):
        a, b = (x.pin_memory() for x in pair(640, 512, 9000))
        expected = check_host(a, b, devices, tau=0.02).clone()

        def call(_):
            with torch.cuda.stream(torch.cuda.Stream(devices[0])):
                return spamm_torch.mm(a, b, tau=0.02, devices=devices)

        with ThreadPoolExecutor(3) as pool:
            assert all(torch.equal(c, expected) for c in [call(0), *pool.map(call, range(3))])

    # A's rows, the stages of B and those of C are more than the limit: only panels fit.
    @pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
    @pytest.mark.parametrize("pinned", [True, False])
    def test_panels(self, devices, dtype, pinned):
        k, n = 1024, 8192
        m = 16384 * len(devices)
        a, b = pair(m, k, n, dtype)
        if pinned:
            a, b = a.pin_memory(), b.pin_memory()
        expected = spamm_torch.mm(a.cuda(), b.cuda(), tau=0.02).cpu()
        a_bytes = m // len(devices) * k * a.element_size()
        stages_of_c = 2 * m // len(devices) * 8192
        with memory_limit(devices, (a_bytes + stages_of_c) // 2):
            c = spamm_torch.mm(a, b, tau=0.02, devices=devices)
        assert torch.equal(c, expected)

    def test_out_of_memory_names_the_device_and_bytes(self, devices):
        a, b = pair(256, 16384, 4096, torch.float16)
        line = rf"host memory needs at least \d+ bytes on cuda:{devices[-1]}"
        refused = pytest.raises(torch.OutOfMemoryError, match=line)
        with memory_limit(devices[-1:], 64 * 2**20), refused:
            spamm_torch.mm(a, b, tau=0.02, devices=devices)
        check_host(a, b, devices, tau=0.02)

    def test_gradients(self, devices):
        a, b = (x.requires_grad_() for x in pair(300, 256, 200))
        c = spamm_torch.mm(a, b, tau=0.02, devices=devices)
        grad = torch.ones_like(c)
        c.backward(grad)
        torch.testing.assert_close(a.grad, grad @ b.detach().t())
        torch.testing.assert_close(b.grad, a.detach().t() @ grad)


# ---- Parts of a product -------------------------------------------------------------------------


EDGES = (64, 64, 64)


def product(device, dtype, m, k, n, batch=()):
    """Operands, their norm maps, and a threshold that skips about half of the block products."""
    a = matrices.normal(*batch, m, k, dtype=dtype, device=device, seed=1)
    b = matrices.normal(*batch, k, n, dtype=dtype, device=device, seed=2)
    norm_a, norm_b = ops.norm_maps(a, b, EDGES)
    return a, b, norm_a, norm_b, spamm_torch.find_tau(norm_a, norm_b, 0.5)


def by_parts(out, arguments, row_cuts, column_cuts):
    """Writes the product to ``out``, part by part. Cuts are numbers of blocks."""
    a, b, norm_a, norm_b, tau = arguments
    for (i, i_end), (j, j_end) in itertools.product(
        itertools.pairwise(row_cuts), itertools.pairwise(column_cuts)
    ):
        rows, columns = slice(64 * i, 64 * i_end), slice(64 * j, 64 * j_end)
        part = a[rows], b[:, columns], norm_a[i:i_end], norm_b[:, j:j_end]
        ops.multiply_part(*part, tau, EDGES, out[rows, columns], whole=out.shape)


# On 132 multiprocessors, float64: 1024^3 takes one segment, and its quarter by itself would take
# more. 1040^3 takes two, and its part of 768 x 768 by itself would take one. Others take more where
# K is long, and more for less of C. Segments round differently.
@pytest.mark.cuda
@pytest.mark.parametrize(
    ("dtype", "edge", "cut", "k"),
    [
        (torch.float64, 1024, 512, 1024),
        (torch.float64, 1040, 768, 1040),
        (torch.float32, 512, 192, 4096),
        (torch.bfloat16, 512, 192, 4096),
    ],
)
def test_parts_take_the_segments_of_the_whole(dtype, edge, cut, k):
    a, b, norm_a, norm_b, tau = arguments = product("cuda", dtype, edge, k, edge)
    blocks, whole = cut // 64, ops.multiply(*arguments, EDGES)
    out = torch.full_like(whole, float("nan"))
    by_parts(out, arguments, *[(0, blocks, -(-edge // 64))] * 2)
    assert torch.equal(out, whole)
    if hopper_kernels_run() and torch.cuda.get_device_properties(0).multi_processor_count == 132:
        norms = norm_a[:blocks].contiguous(), norm_b[:, :blocks].contiguous()
        alone = ops.multiply(a[:cut], b[:, :cut], *norms, tau, EDGES)
        assert not torch.equal(alone, whole[:cut, :cut])  # or nothing was tested


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_any_strides_of_the_result(device, dtype):
    arguments = product(device, dtype, 192, 128, 192)
    whole = ops.multiply(*arguments, EDGES)
    across = torch.full_like(whole, float("nan")).t()
    shifted = torch.full((192, 201), float("nan"), dtype=dtype, device=device)
    for out in (across, shifted[:, 5:197]):
        by_parts(out, arguments, (0, 2, 3), (0, 1, 3))
        assert torch.equal(out, whole)
    assert shifted[:, :5].isnan().all()
    assert shifted[:, 197:].isnan().all()


def test_parts_of_a_batch(device, dtype):
    """multiply(whole=): rows of C, cut at numbers of blocks; on CUDA also of large tiles."""
    for count, m, k, n, cuts in (
        (3, 200, 100, 90, (0, 1, 4)),
        *([(4, 2560, 512, 2560, (0, 4, 40))] if device.type == "cuda" else []),
    ):
        a, b, norm_a, norm_b, tau = product(device, dtype, m, k, n, batch=(count,))
        options = {"input": matrices.normal(n, dtype=dtype, device=device, seed=3)}
        whole = ops.multiply(a, b, norm_a, norm_b, tau, EDGES, **options)
        options["whole"], parts = whole.shape[1:], []
        for first, last in itertools.pairwise(cuts):
            operands = a[:, 64 * first : 64 * last], b, norm_a[:, first:last], norm_b
            parts.append(ops.multiply(*operands, tau, EDGES, **options))
        assert torch.equal(torch.cat(parts, 1), whole)
