"""Products of sparse matrices by torch.sparse, in the CSR format and float32.

It takes cuSPARSE's default algorithm. Called directly, ALG1 was as fast, ALG2 and ALG3 slower, and
only ALG3 could make a product that the default refuses: docs/results/tables.json.
"""

import contextlib
import gc
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
PEERS = {"cpu": "MKL (torch.sparse)", "cuda": "cuSPARSE (torch.sparse, CUSPARSE_SPGEMM_DEFAULT)"}
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


def calls(matrix, expected, device):
    """Calls that multiply a sparse matrix by itself, each checked once.

    Args:
        matrix: dense, with zeros. expected: its square in float64. device: of both.

    Returns:
        {peer: Checked}, and {peer: why there is none}, as where memory does not suffice.
    """
    csr, peer = to_csr(matrix), PEERS[device.type]
    try:
        how, found = _first_that_works(ways(csr), expected)
    except _FAILURES as error:
        return {}, {peer: _why(error, csr)}
    return {peer + how: found}, {}


def ways(csr):
    """{how: call}, of which the first that works counts; the later need less memory.

    Whole; on CUDA, where there are too many products of entries for that, in slices of rows.
    """
    found = {"": lambda: csr @ csr}
    if csr.is_cuda and count_products(csr) > _MOST_PRODUCTS:
        parts = slices(csr)
        found[f", A in {len(parts)} slices of rows"] = lambda: stacked([x @ csr for x in parts])
    return found


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
    error = ((product.to_dense().double() - expected).norm() / expected.norm()).item()
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


# ---- Slices of rows -----------------------------------------------------------------------------


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
