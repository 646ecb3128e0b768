"""mm(devices=) of operands in host memory: the bits of one device, in pinned memory.

tests/cpp/spamm_host_test.cpp tries the same code on the CPU.
"""

from concurrent.futures import ThreadPoolExecutor

import matrices
import pytest
import torch
from matrices import fading as decay
from support import memory_limit

import spamm_torch

KNOBS = [{"tau": 0.02}, {"valid_ratio": 0.3}, {"max_error": 0.05}, {"tau": 0.0}]
DEVICES = [[0], pytest.param([0, 1], marks=pytest.mark.multi_gpu)]
pytestmark = pytest.mark.usefixtures("new_memory_holds_nan")


def check(a, b, devices, **options):
    """The product of host operands against that of the same operands on one device."""
    c = spamm_torch.mm(a, b, devices=devices, **options)
    assert c.device.type == "cpu"
    assert c.is_pinned()
    maps = {name: options.pop(name).cuda() for name in ("norm_a", "norm_b") if name in options}
    on_device = spamm_torch.mm(a.contiguous().cuda(), b.contiguous().cuda(), **options, **maps)
    assert torch.equal(c, on_device.cpu())
    return c


@pytest.mark.cuda
@pytest.mark.parametrize("devices", DEVICES)
class TestHostOperands:
    @pytest.mark.parametrize("pinned", [True, False])
    @pytest.mark.parametrize("knob", KNOBS, ids=lambda knob: next(iter(knob)))
    def test_bits_of_one_device(self, devices, dtype, knob, pinned):
        a, b = decay(640, 512, dtype), decay(512, 17000, dtype, seed=1)  # 5 stages of half types
        if pinned:
            a, b = a.pin_memory(), b.pin_memory()
        check(a, b, devices, **knob)

    @pytest.mark.parametrize("block", [*matrices.EDGES, (64, 32, 128), (128, 64, 128)])
    @pytest.mark.parametrize("sizes", [(500, 333, 9001), (129, 65, 1), (1, 1, 4500)])
    @pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
    def test_odd_sizes(self, devices, block, sizes, dtype):
        m, k, n = sizes
        a, b = decay(m, k, dtype), decay(k, n, dtype, seed=1)
        check(a, b.pin_memory(), devices, valid_ratio=0.3, block=block)

    @pytest.mark.parametrize("sizes", [(0, 64, 64), (128, 0, 64), (64, 64, 0)])
    @pytest.mark.parametrize("knob", KNOBS[:2], ids=lambda knob: next(iter(knob)))
    def test_empty_products(self, devices, sizes, knob):
        m, k, n = sizes
        c = spamm_torch.mm(torch.ones(m, k), torch.ones(k, n), devices=devices, **knob)
        assert c.shape == (m, n)
        assert not c.any()

    # The tiles of a large product, which the parts must take as well: they round float32
    # differently.
    @pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
    def test_takes_the_tiles_of_the_whole(self, devices, dtype):
        check(decay(5120, 1024, dtype), decay(1024, 9216, dtype, seed=1), devices, tau=0.02)

    def test_any_strides(self, devices):
        a, b = decay(512, 640).t(), decay(1024, 5001, seed=1)[::2, 1:]
        check(a, b, devices, tau=0.02)
        check(a, torch.ones(1, 4500).expand(512, 4500), devices, tau=0.02)

    def test_given_norm_maps(self, devices):
        a, b = decay(640, 512), decay(512, 5000, seed=1)
        maps = {"norm_a": spamm_torch.norm_map(a), "norm_b": spamm_torch.norm_map(b).flip(1)}
        for knob in KNOBS:
            check(a, b, devices, **maps, **knob)
            check(a, b, devices, norm_b=maps["norm_b"], **knob)

    def test_tau_as_a_tensor(self, devices):
        a, b = decay(640, 512), decay(512, 5000, seed=1)
        c = spamm_torch.mm(a, b, tau=torch.tensor(0.02), devices=devices)
        assert torch.equal(c, check(a, b, devices, tau=0.02))

    @pytest.mark.parametrize("pinned", [True, False])
    def test_caller_may_overwrite_operands_at_once(self, devices, pinned):
        kept = [decay(2048, 1024), decay(1024, 9000, seed=1)]
        expected = check(*kept, devices, tau=0.02).clone()
        for _ in range(5):
            a, b = (x.pin_memory() if pinned else x.clone() for x in kept)
            c = spamm_torch.mm(a, b, tau=0.02, devices=devices)
            a.fill_(float("nan"))
            b.fill_(float("nan"))
            assert torch.equal(c, expected)

    def test_side_streams(self, devices):
        a, b = decay(640, 512).pin_memory(), decay(512, 9000, seed=1).pin_memory()
        expected = check(a, b, devices, tau=0.02).clone()
        with torch.cuda.stream(torch.cuda.Stream(devices[0])):
            assert torch.equal(spamm_torch.mm(a, b, tau=0.02, devices=devices), expected)

    # A's rows, the stages of B and those of C are more than the limit: only panels fit.
    @pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
    @pytest.mark.parametrize("pinned", [True, False])
    def test_panels(self, devices, dtype, pinned):
        k, n = 1024, 8192
        m = 16384 * len(devices)
        a, b = decay(m, k, dtype), decay(k, n, dtype, seed=1)
        if pinned:
            a, b = a.pin_memory(), b.pin_memory()
        expected = spamm_torch.mm(a.cuda(), b.cuda(), tau=0.02).cpu()
        a_bytes = m // len(devices) * k * a.element_size()
        stages_of_c = 2 * m // len(devices) * 8192
        with memory_limit(devices, (a_bytes + stages_of_c) // 2):
            c = spamm_torch.mm(a, b, tau=0.02, devices=devices)
        assert torch.equal(c, expected)

    def test_out_of_memory_names_the_device_and_bytes(self, devices):
        a, b = decay(256, 16384, torch.float16), decay(16384, 4096, torch.float16, seed=1)
        line = rf"host memory needs at least \d+ bytes on cuda:{devices[-1]}"
        refused = pytest.raises(torch.OutOfMemoryError, match=line)
        with memory_limit(devices[-1:], 64 * 2**20), refused:
            spamm_torch.mm(a, b, tau=0.02, devices=devices)
        check(a, b, devices, tau=0.02)

    def test_gradients(self, devices):
        operands = [decay(300, 256), decay(256, 200, seed=1)]
        a, b = (x.clone().requires_grad_() for x in operands)
        c = spamm_torch.mm(a, b, tau=0.02, devices=devices)
        grad = torch.ones_like(c)
        c.backward(grad)
        torch.testing.assert_close(a.grad, grad @ operands[1].t())
        torch.testing.assert_close(b.grad, operands[0].t() @ grad)

    def test_calls_from_several_threads(self, devices):
        a, b = decay(640, 512), decay(512, 9000, seed=1)
        expected = check(a, b, devices, tau=0.02)
        with ThreadPoolExecutor(3) as pool:
            calls = [pool.submit(spamm_torch.mm, a, b, tau=0.02, devices=devices) for _ in range(3)]
        assert all(torch.equal(call.result(), expected) for call in calls)

    def test_tau_must_be_on_the_host(self, devices):
        a, b = decay(128, 128), decay(128, 128)
        with pytest.raises(RuntimeError, match=r"tau must be on the operands' device cpu"):
            spamm_torch.mm(a, b, tau=torch.tensor(0.02, device="cuda"), devices=devices)

    def test_capture(self, devices):
        a, b = decay(128, 128), decay(128, 128)
        refused = pytest.raises(RuntimeError, match="cannot be captured in a graph")
        with refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
            spamm_torch.mm(a, b, tau=0.02, devices=devices)


@pytest.mark.cuda
@pytest.mark.multi_gpu
def test_without_peer_access(monkeypatch):
    monkeypatch.setenv("SPAMM_TORCH_NO_PEER", "1")
    for knob in KNOBS[:2]:
        check(decay(640, 512), decay(512, 9000, seed=1), [0, 1], **knob)


@pytest.mark.cuda
@pytest.mark.multi_gpu
def test_second_device_alone_and_reversed():
    a, b = decay(640, 512), decay(512, 9000, seed=1)
    for devices in ([1], [1, 0]):
        check(a, b, devices, tau=0.02)
        check(a, b, devices, valid_ratio=0.3)
