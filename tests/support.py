"""Parts that tests share: activations, pictures and their norms, operands, errors, the machine."""

import contextlib
import itertools
import os
from collections import Counter
from dataclasses import replace

import matrices
import pytest
import reference
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import spamm_torch
from spamm_torch import _arguments, _library
from spamm_torch._timing import Timing

ACTIVATIONS = {"none": lambda x: x}
ACTIVATIONS |= {name: getattr(F, name) for name in _arguments.ACTIVATIONS if name != "none"}


@contextlib.contextmanager
def _changed(get, set, value):
    before = get()
    set(value)
    try:
        yield
    finally:
        set(before)


def float32_precision(precision):
    """The setting of matrix products, which conv2d follows: "high" allows TF32."""
    return _changed(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, precision
    )


def is_torchs(input, weight, **given):
    """Tells whether torch's convolution serves a call that skips nothing."""
    return conv2d_backend(input, weight, **given) in ("cudnn", "onednn")


def conv2d_backend(input, weight, **given):
    """The kernel of a convolution."""
    convolution = {"input": input.shape, "weight": weight.shape, **given}
    return spamm_torch.backend_for(input.device, input.dtype, convolution=convolution)


def waiting_is_an_error():
    """Lets torch raise where the host waits for the device."""
    return _changed(torch.cuda.get_sync_debug_mode, torch.cuda.set_sync_debug_mode, "error")


def threads(count):
    """Lets torch compute with so many threads."""
    return _changed(torch.get_num_threads, torch.set_num_threads, count)


@contextlib.contextmanager
def raises_line(error, match=None):
    """The block raises ``error`` with one line, which matches."""
    with pytest.raises(error, match=match) as caught:
        yield caught
    assert "\n" not in str(caught.value)


def refuses(error, call, *fragments):
    """The call raises ``error`` with one line that holds every fragment."""
    with raises_line(error) as caught:
        call()
    for fragment in fragments:
        assert fragment in str(caught.value)


def cut(x, cuts, devices):
    """Shards of a tensor's rows, on these devices."""
    pairs = zip(itertools.pairwise(cuts), devices, strict=True)
    return [x[first:last].to(device) for (first, last), device in pairs]


TWO_GPUS = [torch.device("cuda", 0), torch.device("cuda", 1)]


def check_overwritten(call, operands, expected, rounds):
    """Calls on side streams of two GPUs, whose operands are overwritten at once.

    ``call`` gets lists of copies of the operands, and gives the parts of what is expected.
    """
    streams = [torch.cuda.Stream(device) for device in TWO_GPUS]
    for device in TWO_GPUS:
        torch.cuda.synchronize(device)
    with torch.cuda.stream(streams[0]), torch.cuda.stream(streams[1]):
        for _ in range(rounds):
            given = [[x.clone() for x in some] for some in operands]
            found = call(*given)
            for x in itertools.chain(*given):
                x.fill_(float("nan"))
            del given, x
            for got, wanted in zip(found, expected, strict=True):
                assert torch.equal(got.cpu(), wanted.cpu())


def uneven(*shape, seed, dtype, least=0.1):
    """Numbers whose size differs from pixel to pixel and from 16 channels to the next."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    for d, size in enumerate(shape[1:], start=1):
        run = 16 if d == 1 else 1
        scale = torch.rand(-(-size // run), generator=generator) + least
        view = [1] * len(shape)
        view[d] = size
        values *= scale.repeat_interleave(run)[:size].view(view)
    return values.to(dtype)


def operands(dtype=torch.float32, seed=0, m=300, k=400, n=200, device="cuda"):
    a = matrices.normal(m, k, dtype=dtype, device=device, seed=seed)
    return a, matrices.normal(k, n, dtype=dtype, device=device, seed=seed + 1)


def norm_maps(a, b, block=64):
    m, k, n = reference.edges(block)
    return spamm_torch.norm_map(a, (m, k)), spamm_torch.norm_map(b, (k, n))


def relative_error(got, exact):
    """norm(got - exact) / norm(exact), where the exact is in float64."""
    return ((got.double() - exact).norm() / exact.norm()).item()


# A few roundings of a type, relative to the largest result.
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.2e-2, torch.float32: 1e-5, torch.float64: 1e-13}


def assert_near(got, expected, tolerance=None):
    """No entry is off by more than the tolerance times the largest."""
    assert got.shape == expected.shape
    off, size = got.double() - expected.to(got.device), expected.abs()
    largest = max(size.max().item() if size.numel() else 0, 1e-3)
    assert not (off.abs() > (tolerance or TOLERANCE[got.dtype]) * largest).any()
    assert got.isfinite().all()


class Made(nn.Module):
    """A module of layers by name, and of a forward, which gets the module and its input."""

    def __init__(self, forward, **layers):
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, layer)
        self._forward = forward

    def forward(self, x):
        return self._forward(self, x)


class Watching(TorchDispatchMode):
    """Calls a function with the name, arguments and options of each op before it runs."""

    def __init__(self, note):
        super().__init__()
        self._note = note

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self._note(function.name().removeprefix("spamm_torch::"), args, kwargs or {})
        return function(*args, **(kwargs or {}))


def hopper_kernels_run():
    built = {"9.0a", "9.0a+PTX"} & set(_library.BUILT["cuda_targets"])
    forced = os.environ.get("SPAMM_TORCH_FORCE_SM80") == "1"
    return bool(built) and not forced and torch.cuda.get_device_capability() == (9, 0)


def captured(call):
    """A graph of a call, which is run once before on another stream, and the call's result."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


@contextlib.contextmanager
def memory_limit(devices, more_bytes):
    """Lets torch take only so many more bytes of each device."""
    if torch.cuda.get_allocator_backend() == "cudaMallocAsync":
        pytest.skip("cudaMallocAsync does not tell which memory it keeps")
    for device in devices:
        torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    held = _free_pieces()
    for device in devices:
        total = torch.cuda.mem_get_info(device)[1]
        limit = (torch.cuda.memory_reserved(device) + more_bytes) / total
        torch.cuda.set_per_process_memory_fraction(limit, device)
    try:
        yield
    finally:
        for device in devices:
            torch.cuda.set_per_process_memory_fraction(1.0, device)
        del held


def _free_pieces():
    """Takes what is free beside tensors of earlier tests, in memory that torch keeps for them."""
    sizes = [
        (segment["device"], min(most, block["size"] - begin))
        for segment in torch.cuda.memory_snapshot()
        if segment["stream"] == 0 and segment["segment_pool_id"] == (0, 0)
        for most in [2**20 if segment["segment_type"] == "small" else segment["total_size"]]
        for block in segment["blocks"]
        if block["state"] == "inactive"
        for begin in range(0, block["size"], most)
    ]
    return [torch.empty(size, dtype=torch.uint8, device=device) for device, size in sizes]


def linear_time(trial):
    """Time in proportion to what is computed; converting alone saves a tenth."""
    return 110.0 if trial.what == "as it was" else 100.0 * trial.valid_ratio


def made_up(time_of):
    """Measures runs of calibrate: each part takes ``time_of(trial)`` in each of its calls."""

    def times_of_parts(call, _):
        counts = Counter()
        call(lambda trial: counts.update([trial]))
        times = {trial: time_of(trial) for trial in counts if trial}
        times = {t: x if isinstance(x, Timing) else Timing(x) for t, x in times.items()}
        return {t: replace(x, median=x.median * counts[t]) for t, x in times.items()}

    return times_of_parts


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Operators this small gain nothing from threads and lose much on a busy machine."""
    with threads(1):
        yield
