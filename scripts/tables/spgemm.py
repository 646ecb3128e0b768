"""Products of sparse matrices by other libraries, in the CSR format and float32."""

import gc
import importlib
import importlib.util

import torch

from common.errors import first_line
from common.precisions import TOLERANCE
from common.sparse import quiet_sparse


def peers(device):
    """{name: what makes a call of two matrices of to_csr}: those that can be had here."""
    if device.type == "cuda":
        found = {"cuSPARSE (torch.sparse, CUSPARSE_SPGEMM_DEFAULT)": _by_torch}
        if importlib.util.find_spec("cupy"):
            found[f"cuSPARSE (CuPy {_version('cupy')})"] = _by_cupy
        return found
    found = {"MKL (torch.sparse)": _by_torch}
    if importlib.util.find_spec("scipy"):
        found[f"SciPy {_version('scipy')}"] = _by_scipy
    return found


def _version(module):
    return importlib.import_module(module).__version__


def calls(matrix, expected, device):
    """Calls that multiply a sparse matrix by itself, each checked once.

    Args:
        matrix: dense, with zeros. expected: its square in float64.

    Returns:
        {peer: call}, and {peer: why there is none}, as where memory does not suffice.
    """
    found, absent = {}, {}
    for name, make in peers(device).items():
        try:
            call = make(to_csr(matrix))
            _check(call(), expected)
            found[name] = call
        except (RuntimeError, MemoryError) as error:  # out of memory is a RuntimeError on CUDA
            absent[name] = first_line(error)
        gc.collect()
        torch.cuda.empty_cache()
    return found, absent


def to_csr(matrix):
    """A dense matrix as torch's CSR with indices of 32 bits, as the libraries take them."""
    with quiet_sparse():
        csr = matrix.to_sparse_csr()
        indices = (index.int() for index in (csr.crow_indices(), csr.col_indices()))
        return torch.sparse_csr_tensor(*indices, csr.values(), size=csr.shape)


def _check(product, expected):
    dense = product.to_dense() if torch.is_tensor(product) else _dense(product, expected.device)
    error = ((dense.double() - expected).norm() / expected.norm()).item()
    if not error <= TOLERANCE["float32"]:
        raise RuntimeError(
            f"wrong result: expected an error of at most {TOLERANCE['float32']}; got {error}"
        )


def _dense(product, device):
    return torch.as_tensor(product.toarray(), device=device)


def _by_torch(csr):
    return lambda: csr @ csr


def _by_scipy(csr):
    from scipy.sparse import csr_matrix

    parts = (csr.values(), csr.col_indices(), csr.crow_indices())
    matrix = csr_matrix(tuple(part.numpy() for part in parts), shape=tuple(csr.shape))
    return lambda: matrix @ matrix


def _by_cupy(csr):
    import cupy
    from cupyx.scipy.sparse import csr_matrix

    parts = (csr.values(), csr.col_indices(), csr.crow_indices())
    matrix = csr_matrix(tuple(cupy.from_dlpack(part) for part in parts), shape=tuple(csr.shape))
    return lambda: matrix @ matrix
