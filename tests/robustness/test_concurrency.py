"""Calls from many threads and streams, after a fork, with any number of threads, over and over."""

import concurrent.futures
import contextlib
import hashlib
import itertools
import os
import resource
import threading
from pathlib import Path

import pytest
import torch
from pipelines import BY_MEMORY, FAMILIES, bits
from support import threads


def calls(device="cpu"):
    """The library's own pipelines, at sizes at which every loop has parts for threads."""
    return {
        (family.__name__, name, dtype): call
        for dtype, family in itertools.product((torch.float32, torch.bfloat16), FAMILIES)
        for name, call in family(device, dtype, is_large=False).items()
        if name not in BY_MEMORY
    }


def digest(result):
    """The hash of all bits of a result."""
    found = hashlib.sha256()
    for tensor in bits(result):
        found.update(tensor.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def digests(made):
    return {name: digest(call()) for name, call in made.items()}


def own_stream():
    return torch.cuda.stream(torch.cuda.Stream())


@pytest.mark.parametrize(
    ("device", "place"),
    [
        ("cpu", contextlib.nullcontext),
        pytest.param("cuda", contextlib.nullcontext, marks=pytest.mark.cuda),
        pytest.param("cuda", own_stream, marks=pytest.mark.cuda),
    ],
    ids=["cpu", "one stream", "streams"],
)
def test_sixteen_threads_at_once(device, place):
    """Calls of other threads, in whatever order and on whatever stream, change no bit; nor do their
    first calls, which make buffers, in threads that end, again and again.
    """
    made = calls(device)
    expected, start = digests(made), threading.Barrier(16)

    def work(number):
        start.wait()
        names = list(made)[number % len(made) :] + list(made)[: number % len(made)]
        with place():
            return {(name, digest(made[name]())) for name in names}

    for _ in range(3):
        with concurrent.futures.ThreadPoolExecutor(16) as pool:  # whose threads end with it
            assert list(pool.map(work, range(16))) == [{*expected.items()}] * 16


def test_any_number_of_threads_gives_the_same_bits():
    made = calls()
    with threads(1):
        expected = digests(made)
    for count in (2, 3, 5, 8, 16, 31, 64):
        with threads(count):
            assert digests(made) == expected


def in_a_fork(work):
    """The result of ``work()``, a text, in a child of this process."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, work().encode())
        finally:
            os._exit(0)
    os.close(write)
    found = b""
    while more := os.read(read, 65536):
        found += more
    os.close(read)
    assert os.waitpid(child, 0)[1] == 0
    return found.decode()


def test_a_fork_after_import_and_after_calls():
    """As a worker of a DataLoader, which torch lets compute with one thread."""
    made = calls()
    expected = digests(made)

    def work():
        torch.set_num_threads(1)
        return str(digests(made))

    assert in_a_fork(work) == str(expected)
    assert digests(made) == expected


def test_memory_stays_flat():
    """By the third of several rounds every buffer has its size, and no bit changes."""
    made, pages = calls(), []
    expected = digests(made)
    for _ in range(6):
        assert digests(made) == expected
        pages.append(int(Path("/proc/self/statm").read_text().split()[1]))
    assert (pages[-1] - pages[1]) * resource.getpagesize() < 64 * 2**20
