"""Kernels that start while those ahead of them on the stream still run.

Every op is called with each tensor that it reads written late by a kernel that lets its successor
start at once, and with its own memory lying where such a kernel still reads. On chips without this
feature (programmatic dependent launch, from sm_90 on) the late kernels cannot be built.
"""

import functools

import pytest
import torch
from late_cases import FAMILIES, Values, late_copy
from support import captured, norm_maps

import spamm_torch


@pytest.fixture
def overlaps():
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("needs programmatic dependent launch, of compute capability 9.0 and newer")


def let_the_host_get_ahead():
    torch.cuda.synchronize()
    torch.cuda._sleep(20_000_000)  # cycles: some 10 ms


def is_read_too_early(case, operand):
    """Tells whether the call reads an operand before an earlier kernel has written it."""
    old, new = case.tensors[operand], case.changed(operand)
    expected, stale = case.run(**{operand: new}), case.run(**{operand: old})
    if all(map(torch.equal, expected, stale)):
        assert operand in case.unread, f"{case.name}: {operand} does not count"
        return False
    late = torch.empty_like(old)
    for _ in range(2):
        late.copy_(old)
        let_the_host_get_ahead()
        late_copy(new, late)
        actual = case.run(**{operand: late})
        torch.cuda.synchronize()
        if not all(map(torch.equal, actual, expected)):
            return True
    return False


def is_overwritten_too_early(case, size):
    """Tells whether the call writes memory of `size` bytes, freed before it, that is still read."""
    copy = torch.empty(size // 4, dtype=torch.int32, device="cuda")
    case.run()
    pool = torch.cuda.MemPool()
    torch.cuda.synchronize()
    with torch.cuda.use_mem_pool(pool):
        read = torch.arange(size // 4, dtype=torch.int32, device="cuda")
        let_the_host_get_ahead()
        late_copy(read, copy, thread_blocks=32)
        del read
        results = case.run()
        torch.cuda.synchronize()
        del results
    return not torch.equal(copy, torch.arange(size // 4, dtype=torch.int32, device="cuda"))


TYPES = (torch.float16, torch.bfloat16, torch.float32)
SMALL, LARGE = 960 * 1024, 48 * 2**20  # bytes, in the allocator's blocks of either kind


@pytest.mark.cuda
@pytest.mark.parametrize("family", FAMILIES)
def test_no_operand_is_read_and_no_memory_is_written_too_early(overlaps, family):
    for case in FAMILIES[family]("cuda"):
        early = [operand for operand in case.tensors if is_read_too_early(case, operand)]
        early += [size for size in (SMALL, LARGE) if is_overwritten_too_early(case, size)]
        assert early == [], case.name


@pytest.mark.cuda
@pytest.mark.usefixtures("exact_reference")
@pytest.mark.parametrize("family", FAMILIES)
def test_every_call_is_captured_and_replayed(family):
    """A graph reads operands and thresholds where they lie, and no launch leaves anything."""
    for case in FAMILIES[family]("cuda"):
        given = {name: x.clone() for name, x in case.tensors.items()}
        graph, found = captured(functools.partial(case.run, **given))
        for _ in range(3):
            for x in given.values():
                x.mul_(0.5)
            for x in found:
                x.zero_()
            graph.replay()
            expected = case.run(**given)
            assert all(map(torch.equal, found, expected)), case.name


def calls():
    """Searches for a threshold, which are cooperative launches, and what surrounds them."""
    values, partial, calls = Values("cuda"), functools.partial, []
    for edge in (8, 40, 200, 600):
        maps = [values.normal(edge, edge, dtype=torch.float32).abs() for _ in range(2)]
        calls += [partial(spamm_torch.find_tau, *maps, ratio) for ratio in (0.05, 0.5)]
    for dtype in (*TYPES[::2], torch.float64):
        shapes = (2560, 256), (256, 2560)
        mm = partial(spamm_torch.mm, *(values.normal(*shape, dtype=dtype) for shape in shapes))
        # Thread blocks claim tiles by a counter, which another kernel clears where maps are given.
        maps = dict(zip(("norm_a", "norm_b"), norm_maps(*mm.args), strict=True))
        given = ({"valid_ratio": 0.3}, {"tau": 250.0}, maps | {"tau": 250.0})
        calls += [partial(mm, **each) for each in given]
    x = values.pictures(128, 64, 16, 16)
    for weight in (values.pictures(channels, 64, 3, 3) for channels in (64, 256)):
        given = ({"valid_ratio": 0.4}, {"tau": 1500.0})
        calls += [partial(spamm_torch.conv2d, x, weight, padding=1, **knob) for knob in given]
    return calls


def assert_expected(results, expected):
    torch.cuda.synchronize()
    for found, wanted in zip(results, expected, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.cuda
def test_graphs_beside_calls():
    made, expected = calls(), []
    for call in made:
        expected.append(call())
        torch.cuda.synchronize()
    graphs, replayed, wanted = [], [], []
    for first in (0, 5, 10):
        some = [i % len(made) for i in range(first, first + 8)]
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            replayed += [made[i]() for i in some]
        wanted += [expected[i] for i in some]
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    for _ in range(10):
        for graph, stream in zip(graphs, streams, strict=False):
            with torch.cuda.stream(stream):
                graph.replay()
        with torch.cuda.stream(streams[-1]):
            results = [call() for call in made]
        assert_expected(results, expected)
        assert_expected(replayed, wanted)
