"""Calls of each pipeline from many threads and streams, after a fork, with any number of threads,
over and over; and without memory at each allocation: torch's error, nothing broken.
"""

import concurrent.futures
import contextlib
import hashlib
import itertools
import multiprocessing
import resource
import threading
from pathlib import Path

import matrices
import pytest
import torch
from support import is_torchs, memory_limit, threads
from torch import nn

import spamm_torch
from spamm_torch import linalg, sparse

OPS, MIB = torch.ops.spamm_torch, 2**20
# cuDNN takes another algorithm where its workspace does not fit; products of blocks are made in
# strips then, whose sums are rounded in another order.
BY_MEMORY = {"torch's own": 1e-3, "torch's own, pooled": 1e-3, "purify": 1e-7}  # the tolerance


# ---- One call of each pipeline, by name, of any type, in small sizes and in large ones -----------


def products(device, dtype, is_large):
    m, k, n = (3000, 2600, 3400) if is_large else (300, 260, 330)
    given = {"dtype": dtype, "device": device}
    a, b = matrices.normal(m, k, **given), matrices.normal(k, n, **given)
    square = matrices.normal(m, m, **given)
    square = square + square.mT
    norm_a, norm_b = spamm_torch.norm_map(a, 32), spamm_torch.norm_map(b, 32)
    return {
        "tau": lambda: spamm_torch.mm(a, b, tau=4096.0),
        "valid ratio": lambda: spamm_torch.mm(a, b, valid_ratio=0.5, return_norms=True),
        "max error": lambda: spamm_torch.mm(a, b, max_error=0.1, return_info=True),
        "copied operands": lambda: spamm_torch.mm(
            a[:, 1:], b[1:, ::2], tau=2900.0, block=(128, 32, 64)
        ),
        "symmetric": lambda: spamm_torch.mm(square, square, tau=8190.0, symmetric=True),
        "in place": lambda: spamm_torch.addmm(
            y := square.clone(), y, y, beta=2, alpha=-1, tau=8190.0, out=y
        ),
        "batches": lambda: spamm_torch.bmm(
            a.expand(3, -1, -1), b.expand(3, -1, -1), valid_ratio=0.5
        ),
        "counts": lambda: spamm_torch.valid_counts(norm_a, norm_b, 1024.0),
        "bound": lambda: spamm_torch.error_bound(norm_a, norm_b, 1024.0),
    }


def convolutions(device, dtype, is_large):
    images, channels, outs, size = (140, 72, 136, 30) if is_large else (5, 40, 72, 12)
    x = matrices.normal(images, channels, size, size, dtype=dtype, device=device)
    weight = matrices.normal(outs, channels, 3, 3, seed=1, dtype=dtype, device=device)
    last = x.contiguous(memory_format=torch.channels_last)
    unskipped, tau = {"padding": 1, "tau": 0.0}, 500.0 if is_large else 60.0
    name = "torch's own" if is_torchs(last, weight, **unskipped) else "nothing skipped"
    pooled = "torch's own, pooled" if is_torchs(last, weight, tau=0.0) else "pooled convolution"
    return {
        name: lambda: spamm_torch.conv2d(last, weight, **unskipped, relu=True),
        "tau": lambda: spamm_torch.conv2d(last, weight, padding=1, tau=tau, return_norms=True),
        "other layouts": lambda: spamm_torch.conv2d(x, weight, padding=1, valid_ratio=0.5),
        "images": lambda: spamm_torch.conv2d(x, weight, pixel_block=(1, 8, 8), valid_ratio=0.6),
        "an im2col matrix": lambda: spamm_torch.conv2d(
            x[:, :6], weight[:, :3], groups=2, valid_ratio=0.5
        ),
        "info": lambda: spamm_torch.conv2d(
            last, weight, padding=1, max_error=0.1, return_info=True
        ),
        "pool": lambda: OPS.max_pool2d(last, 3, 2, 1),
        pooled: lambda: OPS.conv2d_max_pool(last, weight, activation="relu"),
    }


def block_sparse(device, dtype, is_large):
    size = 2048 if is_large else 320
    distance = (torch.arange(size)[:, None] - torch.arange(size)).abs()
    a = sparse.from_dense(torch.exp(-distance / 50.0).to(dtype), 64, drop=1e-6).to(device)
    levels = torch.diag(2.0 * (-1.0) ** torch.arange(size)).double()  # with a gap in the middle
    h = sparse.from_dense(levels + 0.1 * torch.exp(-distance / 5.0), 64, drop=1e-9).to(device)
    dense = matrices.normal(size, 1000, dtype=dtype, device=device)
    return {
        "blocks": lambda: spamm_torch.mm(
            a, a, max_error=1e-3, drop=1e-4, return_norms=True, return_info=True
        ),
        "sum of blocks": lambda: spamm_torch.addmm(a, a, a, tau=1e-3, symmetric=True),
        "blocks times dense": lambda: spamm_torch.mm(a, dense, tau=1e-3),
        "add": lambda: sparse.add(a, sparse.transpose(a)),
        "purify": lambda: sparse.to_dense(linalg.purify(h, size, max_error=1e-8).matrix),
    }


def network(device, dtype, is_large):
    torch.manual_seed(0)
    layers = [nn.Conv2d(72, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)]
    model = nn.Sequential(*layers, nn.Conv2d(64, 136, 3), nn.ReLU()).to(device, dtype).eval()
    spamm_torch.convert_(model, spamm_torch.SpAMMConfig(tau=0.01))
    images, size = (140, 30) if is_large else (5, 12)
    x = matrices.normal(images, 72, size, size, dtype=dtype, device=device)
    x = x.contiguous(memory_format=torch.channels_last)

    def call():
        with torch.no_grad():
            return model(x)

    return {"network": call}


FAMILIES = [products, convolutions, block_sparse, network]


def bits(result):
    """Copies on the CPU of all tensors in a result."""
    if isinstance(result, torch.Tensor):
        found = result.values() if result.layout != torch.strided else result
        return [found.cpu()]
    return [
        x for part in result if isinstance(part, (torch.Tensor, tuple, list)) for x in bits(part)
    ]


# ---- Threads, forks and repeated calls -----------------------------------------------------------


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


def test_memory_stays_flat():
    """By the third of several rounds every buffer has its size, and no bit changes."""
    made, pages = calls(), []
    expected = digests(made)
    for _ in range(6):
        assert digests(made) == expected
        pages.append(int(Path("/proc/self/statm").read_text().split()[1]))
    assert (pages[-1] - pages[1]) * resource.getpagesize() < 64 * MIB


@pytest.mark.cuda
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
