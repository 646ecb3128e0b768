"""Products of sparse matrices by other libraries, in the CSR format and float32.

torch.sparse takes cuSPARSE's default algorithm. Called directly, ALG1 was as fast, ALG2 and ALG3
slower, and only ALG3 could make a product that the default refuses: docs/results/tables.md.
"""

import contextlib
import gc
import importlib
import importlib.util
import re
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch

from common.machine import TOLERANCE
from models.errors import first_line

_MOST_PRODUCTS = 2**31 - 1  # of entries, that an integer of 32 bits counts
_SLICE = 2**28  # of them a slice of rows has, which takes a few GB of buffers
_LONGEST_MS = 10_000.0  # of a product; the other peers would take as long, or fail
_FAILURES = (RuntimeError, MemoryError, OSError)  # out of memory is the first on CUDA


@contextlib.contextmanager
def quiet_sparse():
    """Inside, making a compressed sparse matrix warns of nothing."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse .* tensor support is in beta state")
        warnings.filterwarnings("ignore", "Sparse invariant checks are implicitly disabled")
        yield


@dataclass(frozen=True)
class Checked:
    """A product that was made once, and was right."""

    call: Callable
    ms: float  # that it took, its first time


def peers(device):
    """{name: what makes {how: call} of a matrix of to_csr}: those that can be had here.

    Of the ways of one peer the first that works counts; the later need less memory.
    """
    if device.type == "cuda":
        return {"cuSPARSE (torch.sparse, CUSPARSE_SPGEMM_DEFAULT)": _by_torch_on_cuda}
    found = {"MKL (torch.sparse)": _by_torch}
    if importlib.util.find_spec("scipy"):
        found[f"SciPy {importlib.import_module('scipy').__version__}"] = _by_scipy
    return found


def calls(matrix, expected, device):
    """Calls that multiply a sparse matrix by itself, each checked once.

    Where a peer takes long, those behind it are not tried.

    Args:
        matrix: dense, with zeros. expected: its square in float64.

    Returns:
        {peer: Checked}, and {peer: why there is none}, as where memory does not suffice.
    """
    csr = to_csr(matrix)
    found, absent = {}, {}
    for name, ways in peers(device).items():
        if slow := next((of for of in found.values() if of.ms > _LONGEST_MS), None):
            absent[name] = f"not tried: a product took {slow.ms / 1e3:.2g} s by another way"
            continue
        try:
            how, found_so = _first_that_works(ways(csr), expected)
            found[name + how] = found_so
        except _FAILURES as error:
            absent[name] = _why(error, csr)
    return found, absent


def _first_that_works(ways, expected):
    """(how, Checked) of a peer; what the last of its ways raised if none works."""
    for how, call in ways.items():
        try:
            return how, Checked(call, _checked_ms(call, expected))
        except _FAILURES as error:
            failure = error.with_traceback(None)  # which would hold the product's memory
        finally:
            gc.collect()
            torch.cuda.empty_cache()
    raise failure


def to_csr(matrix):
    """A dense matrix as torch's CSR with indices of 32 bits, as the libraries take them."""
    with quiet_sparse():
        csr = matrix.to_sparse_csr()
        indices = (index.int() for index in (csr.crow_indices(), csr.col_indices()))
        return torch.sparse_csr_tensor(*indices, csr.values(), size=csr.shape)


def count_products(csr):
    """How many products of two entries the square of a matrix sums up."""
    return _products_before_rows(csr)[-1].item()


def _products_before_rows(csr):
    """For each row, and for the end, the products of entries that the rows before it take."""
    offsets = csr.crow_indices().long()
    of_entries = offsets.diff()[csr.col_indices().long()].cumsum(0)
    return torch.nn.functional.pad(of_entries, (1, 0))[offsets]


def _checked_ms(call, expected):
    """Milliseconds of a call whose result was compared.

    Raises:
        RuntimeError: the result is wrong.
    """
    start = time.perf_counter()
    product = call()
    if expected.is_cuda:
        torch.cuda.synchronize(expected.device)
    ms = 1e3 * (time.perf_counter() - start)
    dense = product.to_dense() if torch.is_tensor(product) else torch.as_tensor(product.toarray())
    error = ((dense.double() - expected).norm() / expected.norm()).item()
    if not error <= TOLERANCE["float32"]:
        raise RuntimeError(
            f"wrong result: expected an error of at most {TOLERANCE['float32']}; got {error}"
        )
    return ms


def _why(error, csr):
    """Why a product could not be made, in a line."""
    said = first_line(error)
    if isinstance(error, torch.OutOfMemoryError):
        said = "does not fit in memory: " + said.partition(". GPU")[0]  # not how much is free
    elif refused := re.search(r"insufficient resources.*?(cusparse\w+)", said):
        said = f"{refused[1]} has insufficient resources"
    else:
        return said
    return f"{said} (for {count_products(csr):.2g} products of entries)"


# ---- Peers --------------------------------------------------------------------------------------


def _by_torch(csr):
    return {"": lambda: csr @ csr}


def _by_torch_on_cuda(csr):
    """Whole; where there are too many products of entries for that, in slices of rows."""
    ways = _by_torch(csr)
    if count_products(csr) > _MOST_PRODUCTS:
        parts = slices(csr)
        ways[f", A in {len(parts)} slices of rows"] = lambda: stacked([x @ csr for x in parts])
    return ways


def slices(csr, products=_SLICE):
    """A matrix as several of contiguous rows, whose product with it takes so many of entries."""
    before = _products_before_rows(csr)
    steps = torch.arange(0, before[-1].item(), products, device=before.device)
    first = torch.searchsorted(before[:-1], steps).unique().tolist()
    offsets, found = csr.crow_indices(), []
    for at, end in zip(first, [*first[1:], len(csr)], strict=True):
        entries = slice(offsets[at].item(), offsets[end].item())
        parts = (csr.col_indices()[entries], csr.values()[entries])
        shape = (end - at, csr.shape[1])
        with quiet_sparse():
            of_part = offsets[at : end + 1] - offsets[at]
            found.append(torch.sparse_csr_tensor(of_part, *parts, size=shape))
    return found


def stacked(parts):
    """Matrices of equal width as one, the rows of one below those of the other."""
    before, offsets = 0, [parts[0].crow_indices()[:1]]
    for part in parts:
        offsets.append(part.crow_indices()[1:] + before)
        before += len(part.values())
    columns = torch.cat([part.col_indices() for part in parts])
    values = torch.cat([part.values() for part in parts])
    shape = (sum(len(part) for part in parts), parts[0].shape[1])
    with quiet_sparse():
        return torch.sparse_csr_tensor(torch.cat(offsets), columns, values, size=shape)


def _by_scipy(csr):
    from scipy.sparse import csr_matrix

    parts = (csr.values(), csr.col_indices(), csr.crow_indices())
    matrix = csr_matrix(tuple(part.numpy() for part in parts), shape=tuple(csr.shape))
    return {"": lambda: matrix @ matrix}
