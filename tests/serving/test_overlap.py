"""Kernels that start while those ahead of them on the stream still run.

Every op is called with each tensor that it reads written late by a kernel that lets its successor
start at once, and with its own memory lying where such a kernel still reads. On chips without this
feature (programmatic dependent launch, from sm_90 on) the late kernels cannot be built.
"""

import functools

import pytest
import torch
from late_cases import FAMILIES, late_copy
from support import captured


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


def assert_expected(results, expected):
    torch.cuda.synchronize()
    for found, wanted in zip(results, expected, strict=True):
        assert all(map(torch.equal, found, wanted))


MIXED = {"searches": "search", "products of float16": "product", "products of float64": "product"}
MIXED |= {"products of float32": "product 2560", "convolutions of float16": "few channels out"}


@pytest.mark.cuda
def test_graphs_beside_calls():
    """Searches are cooperative launches; tiles are claimed by a counter, which another kernel
    clears where norms are given.
    """
    made, expected = [], []
    for family, name in MIXED.items():
        made += [case.run for case in FAMILIES[family]("cuda") if case.name.startswith(name)]
    for call in made:
        expected.append(call())
        torch.cuda.synchronize()
    graphs, replayed, wanted = [], [], []
    for first in range(3):
        some = range(first, len(made), 4)
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
