"""Table 3: against a library's product of sparse matrices (SpGEMM), at equal error.

Entries below TRUN are dropped for the sparse product, so that the paper's share of nonzeros is
left; tau is searched so that what skipping loses has as large a Frobenius norm. Both errors are
against the whole product in float64.
"""

import gc
import math
import time
import warnings
from functools import partial

import torch

import spamm_torch
import tables
from cases.mm import relative_error
from common.measuring import TOLERANCE, cell, require_near, use_precision
from common.operands import operands
from common.timing import by_clock, interleaved, medians, synchronize
from models.files import first_line
from tables import paper, sizes

DEFAULTS, add_options = tables.DEFAULTS, tables.add_options_with_sizes
TITLE = "Table 3: against sparse products at equal error"
SIZES = {"cpu": (512, 1024), "cuda": (1024, 8192)}
BLOCKS = (32, 64)  # the paper's and this library's
_STEPS = 40  # of the bisection of tau
_SLOW_MS = 2000.0  # a sparse product that takes so long is timed by its first call alone


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
    call, sparse = sparse_product(truncated, product, run.device)
    ours = {block: _at_error(a, b, exact, target, block) for block in BLOCKS}
    on_device = {
        block: partial(spamm_torch.mm, a, b, tau=of["tau"], block=block)
        for block, of in ours.items()
    }
    is_fast = sparse.get("ms", math.inf) <= _SLOW_MS
    timed = on_device | ({"sparse": call} if is_fast else {})
    times = {"sparse": sparse.get("ms")}
    times |= medians(by_clock(timed, run.repeats, [run.device]))
    if run.device.type == "cuda":
        graphs = medians(interleaved(on_device, run.device, run.repeats))
        for block, of in ours.items():
            of["graph_ms"] = graphs[block]
    more = {"sparse_error": target, "peer_ms": times["sparse"]}
    if "ms" in sparse:
        more["peer"] = sparse["peer"]
        sparse |= {
            "ms": times["sparse"],
            "trun": trun,
            "nonzeros": (truncated != 0).double().mean().item(),
            "products": count_products(to_csr(truncated)),
            "error": target,
            "norm": exact.norm().item(),
        }
    names = ("paper_valid", "paper_sparse_error", "paper_error", "paper_speedup_1")
    more |= dict(zip(names, paper.SPGEMM.get((n, share), ()), strict=False))
    rows = []
    for block, of in ours.items():
        speedup = times["sparse"] and times["sparse"] / times[block]
        rows.append(of | more | {"block": block, "ms": times[block], "speedup": speedup})
    return {"at equal error": rows, "sparse products": [sparse]}


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


def _at_error(a, b, exact, target, block):
    """The largest threshold, by bisection, with which at most ``target`` is lost."""
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
    return {"tau": low, "error": error, "valid_ratio": valid}


# Sparse products by torch.sparse, in the CSR format and float32. It takes cuSPARSE's default
# algorithm. Called directly, ALG1 was as fast, ALG2 and ALG3 slower, and only ALG3 could make a
# product that the default refuses: docs/results/tables.json.


_MOST_PRODUCTS = 2**31 - 1  # of entries, that an integer of 32 bits counts
_SLICE = 2**28  # of them a slice of rows has, which takes a few GB of buffers
PEERS = {"cpu": "MKL (torch.sparse)", "cuda": "cuSPARSE (torch.sparse, CUSPARSE_SPGEMM_DEFAULT)"}
_FAILURES = (RuntimeError, MemoryError, OSError)  # out of memory is the first on CUDA


def sparse_product(matrix, expected, device):
    """The call that multiplies a sparse matrix, given dense, by itself, and the figures of one call
    whose result was compared with the square in float64: "peer", and "ms" or "absent". Where there
    are too many products of entries for a whole one, A is in slices of rows.
    """
    csr, name = to_csr(matrix), PEERS[device.type]
    products, parts = count_products(csr), [csr]
    if products > _MOST_PRODUCTS:
        parts = [to_csr(rows) for rows in matrix.chunk(math.ceil(products / _SLICE))]
        name += f", A in {len(parts)} slices of rows"
    call = partial(_product, parts, csr)
    try:
        return call, {"peer": name, "ms": _checked_ms(call, expected)}
    except _FAILURES as error:
        said = first_line(error).partition(". GPU")[0]  # not how much is free
        absent = f"{said} (for {products:.2g} products of entries)"
        return call, {"peer": name, "absent": absent}
    finally:
        gc.collect()
        torch.cuda.empty_cache()


def _product(parts, csr):
    """The rows of a product, a matrix for each part."""
    return [part @ csr for part in parts]


def to_csr(matrix):
    """A dense matrix as torch's CSR with indices of 32 bits, as the libraries take them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse ")  # in beta, and unchecked
        csr = matrix.to_sparse_csr()
        indices = (index.int() for index in (csr.crow_indices(), csr.col_indices()))
        return torch.sparse_csr_tensor(*indices, csr.values(), size=csr.shape)


def count_products(csr):
    """The number of products of two entries that the square of a matrix sums up."""
    return csr.crow_indices().long().diff()[csr.col_indices().long()].sum().item()


def _checked_ms(call, expected):
    """Milliseconds of a call whose result was compared; RuntimeError: it is wrong."""
    start = time.perf_counter()
    product = call()
    synchronize([expected.device])
    ms = 1e3 * (time.perf_counter() - start)
    whole = torch.cat([part.to_dense() for part in product]).double()
    error = ((whole - expected).norm() / expected.norm()).item()
    if not error <= TOLERANCE["float32"]:
        raise RuntimeError(
            f"wrong result: expected an error of at most {TOLERANCE['float32']}; got {error}"
        )
    return ms
