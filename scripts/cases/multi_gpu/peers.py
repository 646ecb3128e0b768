"""Dense products of other libraries on several devices, driven by one process."""

import ctypes

import torch

from cases.multi_gpu.product import equal_cuts
from common.clock import by_clock

_XT_EDGES = (2048, 4096, 8192)  # of cuBLASXt's blocks: the fastest counts
_CHECKED_ROWS = 16
_TOLERANCE = 1e-12


def torch_mm(product, repeats):
    """The Timing of torch.mm on all devices at once: rows of A, and the whole of B on each."""
    a_shards = product.shards(product.a, equal_cuts(len(product.a), len(product.devices)))
    b = product.b_everywhere
    call = lambda: [torch.mm(*pair) for pair in zip(a_shards, b, strict=True)]  # noqa: E731
    return by_clock({"call": call}, repeats, product.synchronize)["call"]


def cublas_xt(product, repeats):
    """The Timing of cublasXtDgemm from pinned host memory into it, at its best block size.

    Raises:
        RuntimeError: cuBLAS is missing or refuses, or the result is wrong.
    """
    a, b = product.on_host
    c = torch.empty(len(a), b.shape[1], dtype=a.dtype, pin_memory=True)
    with CublasXt([device.index for device in product.devices]) as library:

        def call_of(edge):
            return lambda: library.multiply(a, b, c, edge)

        calls = {edge: call_of(edge) for edge in _XT_EDGES if edge <= len(a)}
        tried = by_clock(calls, 1, product.synchronize)
        best = min(tried, key=lambda edge: tried[edge].median)
        timing = by_clock({"call": calls[best]}, repeats, product.synchronize)["call"]
    expected = product.a[:_CHECKED_ROWS] @ product.b
    error = (c[:_CHECKED_ROWS].to(expected.device) - expected).norm() / expected.norm()
    if not error <= _TOLERANCE:
        raise RuntimeError(f"cuBLASXt is wrong: expected an error of {_TOLERANCE}; got {error}")
    return timing


class CublasXt:
    """A handle of cuBLASXt: products in float64 of matrices in host memory, on several GPUs."""

    def __init__(self, devices):
        """
        Args:
            devices: numbers of CUDA devices.

        Raises:
            RuntimeError: the library is missing, or cannot use the devices.
        """
        name = f"libcublas.so.{torch.version.cuda.partition('.')[0]}"
        try:
            self._library = ctypes.CDLL(name)  # torch has loaded its own
        except OSError as error:
            raise RuntimeError(f"cannot load {name}: {error}") from error
        self._handle = ctypes.c_void_p()
        self._call("cublasXtCreate", ctypes.byref(self._handle))
        numbers = (ctypes.c_int * len(devices))(*devices)
        self._call("cublasXtDeviceSelect", self._handle, ctypes.c_int(len(devices)), numbers)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._call("cublasXtDestroy", self._handle)

    def multiply(self, a, b, c, edge):
        """c = a @ b for contiguous float64 matrices in host memory; waits for the result.

        cuBLAS sees columns where these have rows: it computes c.T = b.T @ a.T.
        """
        (m, k), n = a.shape, b.shape[1]
        self._call("cublasXtSetBlockDim", self._handle, ctypes.c_int(edge))
        one, zero = ctypes.c_double(1), ctypes.c_double(0)
        plain = ctypes.c_int(0)  # CUBLAS_OP_N
        sizes = [ctypes.c_size_t(size) for size in (n, m, k)]
        matrices = [ctypes.c_void_p(matrix.data_ptr()) for matrix in (b, a, c)]
        wide, deep = ctypes.c_size_t(n), ctypes.c_size_t(k)
        self._call(
            "cublasXtDgemm",
            self._handle,
            *(plain, plain, *sizes, ctypes.byref(one)),
            *(matrices[0], wide, matrices[1], deep, ctypes.byref(zero), matrices[2], wide),
        )

    def _call(self, name, *arguments):
        status = getattr(self._library, name)(*arguments)
        if status:
            raise RuntimeError(f"{name} failed: expected status 0; got {status}")
