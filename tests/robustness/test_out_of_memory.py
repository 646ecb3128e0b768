"""A device without memory, at each allocation of every pipeline: torch's error, nothing broken."""

import contextlib

import pytest
import torch
from pipelines import BY_MEMORY, FAMILIES, bits
from support import memory_limit

pytestmark = pytest.mark.cuda
MIB = 2**20


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_no_memory_at_any_allocation(family, dtype):
    """With 0, 2, 4, ... MiB until it is enough: step by step a later allocation fails."""
    calls, failed = family("cuda", dtype, is_large=True), 0
    for name, call in calls.items():
        expected = bits(call())
        torch.cuda.synchronize()
        found, more = None, 0
        while found is None:
            with memory_limit([0], more), contextlib.suppress(torch.OutOfMemoryError):
                found = bits(call())
            more += 2 * MIB if more < 64 * MIB else more // 4
        failed += more > 2 * MIB  # the allocator's pieces may hold enough for small results
        for result in (found, bits(call())):  # cuDNN keeps the algorithm of a call without memory
            for wanted, got in zip(expected, result, strict=True):
                if name in BY_MEMORY:
                    close = {"rtol": BY_MEMORY[name], "atol": BY_MEMORY[name]}
                    torch.testing.assert_close(wanted, got, **close)
                else:
                    assert torch.equal(wanted, got), name
        torch.cuda.synchronize()  # no error is left behind
    assert failed > 0
