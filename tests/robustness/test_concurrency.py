"""Calls from many threads and streams, after a fork, with any number of threads, over and over."""

import concurrent.futures
import contextlib
import hashlib
import itertools
import multiprocessing
import threading

import pytest
import torch
from pipelines import BY_MEMORY, FAMILIES, bits
from support import threads

import fuzz


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
    """The result of ``work()`` in a child of this process."""
    fork = multiprocessing.get_context("fork")
    found, send = fork.Pipe(duplex=False)
    child = fork.Process(target=lambda: send.send(work()))
    child.start()
    send.close()
    result = found.recv()
    child.join()
    assert child.exitcode == 0
    return result


def test_a_fork_after_import_and_after_calls():
    """As a worker of a DataLoader, which torch lets compute with one thread."""
    made = calls()
    expected = digests(made)

    def work():
        torch.set_num_threads(1)
        return digests(made)

    assert in_a_fork(work) == expected
    assert digests(made) == expected


def test_memory_stays_flat(capsys):
    """Rounds of cases of all kinds; scripts/fuzz.py --soak goes on for a given time."""
    fuzz.main(["--soak", "--minutes", "0.01", "--device", "cpu", "--cases", "40"])
    assert "rounds of 40 cases with the same bits: memory grew by" in capsys.readouterr().out
