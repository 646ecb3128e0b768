"""cuSPARSE's product of two sparse matrices (SpGEMM) through its C API, by a chosen algorithm.

torch.sparse takes the default algorithm, ALG1. ALG2 and ALG3 need less memory: ALG3 forms the
products of entries in chunks. Source: cusparseSpGEMM in NVIDIA's documentation of the generic API;
the numbers below are those of its header, cusparse.h.
"""

import ctypes
import functools

import torch

ALGORITHMS = {"ALG1": 3, "ALG2": 4, "ALG3": 5}  # cusparseSpGEMMAlg_t
CHUNK = 0.2  # of all products of entries, that ALG3 forms at a time; as in NVIDIA's example
_LIBRARY = "libcusparse.so.12"  # loaded with torch, and found by this name then
_NON_TRANSPOSE = 0  # cusparseOperation_t
_INT32, _FROM_ZERO, _FLOAT32 = 2, 0, 0  # cusparseIndexType_t, cusparseIndexBase_t, cudaDataType

_POINTER, _ENUM, _SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(ctypes.c_size_t)
_LONG = ctypes.c_int64
_PRODUCT = (_POINTER, _ENUM, _ENUM, *[_POINTER] * 5, _ENUM, _ENUM, _POINTER)  # of all its phases
_ARGUMENTS = {
    "cusparseCreate": (_POINTER,),
    "cusparseSetStream": (_POINTER, _POINTER),
    "cusparseCreateCsr": (_POINTER, *[_LONG] * 3, *[_POINTER] * 3, *[_ENUM] * 4),
    "cusparseCsrSetPointers": (_POINTER,) * 4,
    "cusparseSpMatGetSize": (_POINTER,) * 4,
    "cusparseDestroySpMat": (_POINTER,),
    "cusparseSpGEMM_createDescr": (_POINTER,),
    "cusparseSpGEMM_destroyDescr": (_POINTER,),
    "cusparseSpGEMM_workEstimation": (*_PRODUCT, _SIZE, _POINTER),
    "cusparseSpGEMM_estimateMemory": (*_PRODUCT, ctypes.c_float, _SIZE, _POINTER, _SIZE),
    "cusparseSpGEMM_compute": (*_PRODUCT, _SIZE, _POINTER),
    "cusparseSpGEMM_copy": _PRODUCT,
}


def multiply(a, b, algorithm, chunk=CHUNK):
    """A B on the current stream, as a CSR tensor of torch.

    Args:
        a, b: (M, K) and (K, N) CSR tensors of torch on one CUDA device, float32 with indices of 32
            bits. algorithm: of ALGORITHMS. chunk: as CHUNK, for ALG3.

    Raises:
        RuntimeError: cuSPARSE refuses, as where memory does not suffice; says which function did.
        OSError: there is no such library.
    """
    with _Product(a, b, algorithm) as product:
        estimate = product.sized("workEstimation")
        if algorithm == "ALG1":
            work = product.sized("compute")
        else:
            work = product.estimated(chunk)
            product.phase("compute", ctypes.c_size_t(len(work)), work.data_ptr())
        c = product.result()
        del estimate, work  # in use until here
    return c


class _Product:
    """A product under way: its descriptors, which are gone when it ends."""

    def __init__(self, a, b, algorithm):
        self._device, self._algorithm = a.device, ALGORITHMS[algorithm]
        self._rows, self._columns = a.shape[0], b.shape[1]
        self._offsets = torch.zeros(self._rows + 1, dtype=torch.int32, device=a.device)
        self._operands = a, b
        self._one, self._zero = ctypes.c_float(1), ctypes.c_float(0)
        self._matrices, self._descriptor = [], _POINTER()

    def __enter__(self):
        try:
            for x in self._operands:
                parts = (x.crow_indices(), x.col_indices(), x.values())
                self._matrix(*x.shape, len(parts[-1]), *(part.data_ptr() for part in parts))
            self._matrix(self._rows, self._columns, 0, self._offsets.data_ptr(), None, None)
            _call("cusparseSpGEMM_createDescr", ctypes.byref(self._descriptor))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        if self._descriptor:
            _call("cusparseSpGEMM_destroyDescr", self._descriptor)
        for matrix in self._matrices:
            _call("cusparseDestroySpMat", matrix)

    def _matrix(self, *of):
        """Describes a matrix by its rows, columns, nonzeros, offsets, columns' indices, values."""
        matrix = _POINTER()
        types = (_INT32, _INT32, _FROM_ZERO, _FLOAT32)
        _call("cusparseCreateCsr", ctypes.byref(matrix), *of, *types)
        self._matrices.append(matrix)

    def phase(self, name, *rest):
        """Makes the call of one phase, with what it takes beside the product itself."""
        a, b, c = self._matrices
        _call(
            f"cusparseSpGEMM_{name}",
            *(_handle(self._device), _NON_TRANSPOSE, _NON_TRANSPOSE),
            *(ctypes.byref(self._one), a, b, ctypes.byref(self._zero), c),
            *(_FLOAT32, self._algorithm, self._descriptor, *rest),
        )

    def sized(self, name):
        """A phase that first says how large a buffer it needs. Gives the buffer."""
        size = ctypes.c_size_t()
        self.phase(name, size, None)
        buffer = self._buffer(size)
        self.phase(name, size, buffer.data_ptr())
        return buffer

    def estimated(self, chunk):
        """The buffer that ALG2 and ALG3 compute in."""
        scratch_size, size = ctypes.c_size_t(), ctypes.c_size_t()
        self.phase("estimateMemory", chunk, scratch_size, None, None)
        scratch = self._buffer(scratch_size)
        self.phase("estimateMemory", chunk, scratch_size, scratch.data_ptr(), size)
        del scratch  # its memory may be part of what is made now
        return self._buffer(size)

    def result(self):
        """C, once it is computed."""
        c, sizes = self._matrices[-1], [_LONG() for _ in range(3)]
        _call("cusparseSpMatGetSize", c, *map(ctypes.byref, sizes))
        count = sizes[-1].value
        indices = torch.empty(count, dtype=torch.int32, device=self._device)
        values = torch.empty(count, dtype=torch.float32, device=self._device)
        parts = (self._offsets, indices, values)
        _call("cusparseCsrSetPointers", c, *(part.data_ptr() for part in parts))
        self.phase("copy")
        return torch.sparse_csr_tensor(*parts, size=(self._rows, self._columns))

    def _buffer(self, size):
        """So many bytes, and at least one: no address at all would be a question for the size."""
        return torch.empty(max(size.value, 1), dtype=torch.uint8, device=self._device)


@functools.cache
def _library():
    library = ctypes.CDLL(_LIBRARY)
    for name, arguments in _ARGUMENTS.items():
        getattr(library, name).argtypes = arguments
    library.cusparseGetErrorString.argtypes = (_ENUM,)
    library.cusparseGetErrorString.restype = ctypes.c_char_p
    return library


@functools.cache
def _handle_of(device):
    handle = _POINTER()
    with torch.cuda.device(device):
        _call("cusparseCreate", ctypes.byref(handle))
    return handle


def _handle(device):
    """cuSPARSE's state of a device, working on torch's current stream."""
    handle = _handle_of(device)
    _call("cusparseSetStream", handle, torch.cuda.current_stream(device).cuda_stream)
    return handle


def _call(name, *arguments):
    status = getattr(_library(), name)(*arguments)
    if status:
        reason = _library().cusparseGetErrorString(status).decode()
        raise RuntimeError(f"{reason} in {name}")
