"""Table 3: against a library's product of sparse matrices (SpGEMM), at equal error.

Entries below TRUN are dropped for the sparse product, so that the paper's share of nonzeros is
left; tau is searched so that what skipping loses has as large a Frobenius norm. Both errors are
against the whole product in float64.
"""

import contextlib
import gc
import re
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

import spamm_torch
from cases.mm import relative_error
from common.machine import TOLERANCE, use_precision
from common.measuring import cell, require_near
from common.operands import operands
from common.timing import by_clock, interleaved, medians, synchronize
from models.files import first_line
from tables import GPU_COUNTS, gpu_counts, paper, sizes

TITLE = "against sparse products at equal error"
SIZES = {"cpu": (512, 1024), "cuda": (1024, 8192)}
BLOCKS = (32, 64)  # the paper's and this library's
_STEPS = 40  # of the bisection of tau
_SLOW_MS = 2000.0  # a sparse product that takes so long is timed by its first call alone


def settings(run):
    return {"sizes": sizes(run, SIZES), "peer": PEERS[run.device.type]}


def cells(run):
    """The cells, of each size the least work first: what a run is too short for is the slowest."""
    return {
        f"N = {n}, {share:.2%} nonzero": cell(
            "at equal error", partial(_rows, run), n=n, share=share
        )
        for n in sizes(run, SIZES)
        for share in sorted(shares_of(n))
    }


def shares_of(n):
    """The paper's shares of nonzeros at this size; where it has none, those of its smaller one."""
    known = {size for size, _ in paper.SPGEMM}
    return [share for size, share in paper.SPGEMM if size == (n if n in known else min(known))]


@torch.inference_mode()
def _rows(run, n, share):
    """Rows of the sparse products, and one of SpAMM for each block."""
    use_precision("float32")
    a, b = operands("decay", n, torch.float32, run.device)
    exact = a.double() @ b.double()
    trun = truncation(a, share)
    truncated = torch.where(a >= trun, a, 0)
    product = truncated.double() @ truncated.double()
    target = (exact - product).norm().item()
    of_paper = paper.SPGEMM.get((n, share))
    timed = {"dense": partial(torch.mm, a, b)}
    found, absent = calls(truncated, product, run.device)
    slow = {name: of.ms for name, of in found.items() if of.ms > _SLOW_MS}
    timed |= {name: of.call for name, of in found.items() if name not in slow}
    ours, on_device = {}, {}
    for block in BLOCKS:
        ours[block] = _at_error(a, b, exact, target, block, of_paper)
        call = partial(spamm_torch.mm, a, b, tau=ours[block]["tau"], block=block)
        timed[f"block {block}"] = on_device[block] = call
        for gpus in gpu_counts(run) if len(run.gpus) > 1 else ():
            timed[f"block {block}, {gpus} GPUs"] = partial(call, devices=run.gpus[:gpus])
    convert = {"convert": lambda: [to_csr(torch.where(x >= trun, x, 0)) for x in (a, b)]}
    times = slow | medians(by_clock(timed | convert, run.repeats, run.gpus))
    if run.gpus:
        graphs = medians(interleaved(on_device, run.device, run.repeats))
        for block, of in ours.items():
            of["graph_ms"] = graphs[block]
    fastest = min(found, key=times.get, default=None)
    sparse = {
        "conversion_ms": times["convert"],
        "dense_ms": times["dense"],
        "trun": trun,
        "nonzeros": (truncated != 0).double().mean().item(),
        "products": count_products(to_csr(truncated)),
        "error": target,
        "norm": exact.norm().item(),
    }
    measured = [{"peer": name, "ms": times[name]} | sparse for name in found]
    failed = [{"peer": name, "absent": why} for name, why in absent.items()]
    more = {"sparse_error": target, "peer": fastest, "peer_ms": times.get(fastest)}
    if of_paper:
        names = ("paper_valid", "paper_sparse_error", "paper_error")
        more |= dict(zip(names, of_paper, strict=False))
        more |= {f"paper_speedup_{gpus}": speedup for gpus, speedup in of_paper[3].items()}
    ours = [_row(block, of, more["peer_ms"], times) | more for block, of in ours.items()]
    return {"at equal error": ours, "sparse products": measured + failed}


def truncation(a, share):
    """The entry such that, as nearly as ties allow, ``share`` of all are no smaller."""
    ordered = a.flatten().sort(descending=True).values
    wanted = round(share * len(ordered))
    inside = ordered[max(wanted, 1) - 1]  # ties with it are kept
    above = ordered[ordered > inside]  # the other choice: none of the ties
    kept = int((ordered >= inside).sum())
    if len(above) and wanted - len(above) < kept - wanted:
        return above[-1].item()
    return inside.item()


def _at_error(a, b, exact, target, block, of_paper=None):
    """The largest threshold, by bisection, with which at most ``target`` is lost; with the paper's
    figures also what is lost at its valid ratio.
    """
    norm_a, norm_b = (spamm_torch.norm_map(x, block) for x in (a, b))

    def lost(tau):
        product = spamm_torch.mm(a, b, tau=tau, block=block, norm_a=norm_a, norm_b=norm_b)
        return product, (exact - product.double()).norm().item()

    low, high = 0.0, 2 * (norm_a.max() * norm_b.max()).item()
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if lost(middle)[1] <= target:
            low = middle
        else:
            high = middle
    product, error = lost(low)
    rounding = relative_error(product, a, b, norm_a, norm_b, low, block)
    require_near(rounding, TOLERANCE["float32"], f"at N = {len(a)}, block {block}, tau {low}")
    valid = spamm_torch.valid_ratio(norm_a, norm_b, low).item()
    found = {"tau": low, "error": error, "valid_ratio": valid}
    if of_paper:
        at_papers = spamm_torch.find_tau(norm_a, norm_b, of_paper[0])
        found["error_at_papers"] = lost(at_papers)[1]
    return found


def _row(block, found, sparse_ms, times):
    ms = times[f"block {block}"]
    row = found | {"block": block, "ms": ms, "speedup": sparse_ms and sparse_ms / ms}
    for gpus in GPU_COUNTS:
        several = times.get(f"block {block}, {gpus} GPUs")
        row[f"speedup_{gpus}"] = several and sparse_ms and sparse_ms / several
    return row


# ---- Sparse products -----------------------------------------------------------------------------

# By torch.sparse, in the CSR format and float32. It takes cuSPARSE's default algorithm. Called
# directly, ALG1 was as fast, ALG2 and ALG3 slower, and only ALG3 could make a product that the
# default refuses: docs/results/tables.json.


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


class Checked(NamedTuple):
    """A product that was made once, and was right."""

    call: Callable
    ms: float  # that it took, its first time


def calls(matrix, expected, device):
    """Calls that multiply a sparse matrix, given dense, by itself, each checked once against its
    square in float64: {peer: Checked}, and {peer: why there is none}.
    """
    csr, peer = to_csr(matrix), PEERS[device.type]
    try:
        how, found = _first_that_works(ways(csr), expected)
    except _FAILURES as error:
        return {}, {peer: _why(error, csr)}
    return {peer + how: found}, {}


def ways(csr):
    """{how: call}, of which the first that works counts; the later need less memory: whole; on
    CUDA, where there are too many products of entries for that, in slices of rows.
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
    """The number of products of two entries that the square of a matrix sums up."""
    return _products_before_rows(csr)[-1].item()


def _products_before_rows(csr):
    """For each row, and for the end, the products of entries that the rows before it take."""
    offsets = csr.crow_indices().long()
    of_entries = offsets.diff()[csr.col_indices().long()].cumsum(0)
    return torch.nn.functional.pad(of_entries, (1, 0))[offsets]


def _checked_ms(call, expected):
    """Milliseconds of a call whose result was compared; RuntimeError: it is wrong."""
    start = time.perf_counter()
    product = call()
    synchronize([expected.device])
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
