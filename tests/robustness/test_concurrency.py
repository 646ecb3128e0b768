"""Calls from many threads and streams, after a fork, with any number of threads, over and over."""

import concurrent.futures
import contextlib
import hashlib
import os
import threading

import pytest
import torch
from support import threads
from torch import nn

import fuzz
import spamm_torch
from spamm_torch import sparse

OPS = torch.ops.spamm_torch


def calls(device="cpu"):
    """One call of each pipeline, by name: sizes at which every loop has parts for threads."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(shape, generator=generator).to(device)

    a, b = randn(300, 260), randn(260, 330)
    square = torch.exp(-(torch.arange(320)[:, None] - torch.arange(320)).abs() / 20.0)
    square = square.double().to(device)
    blocks = sparse.from_dense(square, 32, drop=1e-9)
    x, weight = randn(5, 40, 12, 11), randn(72, 40, 3, 3)
    torch.manual_seed(0)
    layers = [nn.Conv2d(40, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 8, 3)]
    model = nn.Sequential(*layers).eval().to(device)
    spamm_torch.convert_(model, spamm_torch.SpAMMConfig(tau=1e-3))

    def network():
        with torch.no_grad():
            return model(x)

    return {
        "tau": lambda: spamm_torch.mm(a, b, tau=250.0, block=32),
        "valid_ratio": lambda: spamm_torch.mm(a, b, valid_ratio=0.5, return_norms=True),
        "max_error": lambda: spamm_torch.mm(a.half(), b.half(), max_error=0.1, block=(32, 64, 128)),
        "float64": lambda: spamm_torch.mm(a.double(), b.double(), valid_ratio=0.3),
        "bfloat16": lambda: spamm_torch.mm(a.bfloat16(), b.bfloat16(), max_error=0.1),
        "counts": lambda: spamm_torch.valid_counts(
            spamm_torch.norm_map(a, 32), spamm_torch.norm_map(b, 32), 200.0
        ),
        "symmetric": lambda: spamm_torch.mm(square, square, tau=0.1, symmetric=True),
        "bmm": lambda: spamm_torch.bmm(a.reshape(5, 60, 260), b.expand(5, 260, 330), tau=100.0),
        "blocks": lambda: [
            c.values()
            for c in spamm_torch.mm(blocks, blocks, max_error=1e-3, drop=1e-4, return_norms=True)
        ],
        "bound": lambda: spamm_torch.error_bound(
            spamm_torch.norm_map(a, 32), spamm_torch.norm_map(b, 32), 200.0
        ),
        "conv2d": lambda: spamm_torch.conv2d(x, weight, padding=1, tau=60.0, return_norms=True),
        "images": lambda: spamm_torch.conv2d(
            x.bfloat16(), weight.bfloat16(), pixel_block=(1, 8, 8), valid_ratio=0.6
        ),
        "pool": lambda: OPS.max_pool2d(x, 2, norms=True),
        "network": network,
    }


def digest(result):
    """The hash of all bits of a result."""
    tensors = result if isinstance(result, (list, tuple)) else [result]
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.reshape(-1).contiguous().view(torch.uint8).cpu().numpy().tobytes())
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
            return {(name, digest(made[name]())) for _ in range(3) for name in names}

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


def test_memory_stays_flat(capsys):
    """Rounds of cases of all kinds; scripts/fuzz.py --soak goes on for a given time."""
    fuzz.main(["--soak", "--minutes", "0.01", "--device", "cpu", "--cases", "40"])
    assert "rounds of 40 cases with the same bits: memory grew by" in capsys.readouterr().out
