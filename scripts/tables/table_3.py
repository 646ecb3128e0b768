"""Table 3: against a library's product of sparse matrices (SpGEMM), at equal error.

Entries below TRUN are dropped for the sparse product, so that the paper's share of nonzeros is
left; tau is searched so that what skipping loses has as large a Frobenius norm. Both errors are
against the whole product in float64.
"""

from functools import partial

import torch

import spamm_torch
from cases.mm import relative_error
from common.machine import TOLERANCE, use_precision
from common.measuring import cell
from common.operands import operands
from common.timing import by_clock, interleaved, medians
from models.errors import UserError
from tables import paper, spgemm

TITLE = "against sparse products at equal error"
SIZES = {"cpu": (512, 1024), "cuda": (1024, 8192)}
BLOCKS = (32, 64)  # the paper's and this library's
_STEPS = 40  # of the bisection of tau
_SLOW_MS = 2000.0  # a sparse product that takes so long is timed by its first call alone


def settings(run):
    return {"sizes": run.sizes(SIZES), "peer": spgemm.PEERS[run.device.type]}


def cells(run):
    """Of each size the least work first: what a run is too short for is the slowest."""
    return {
        f"N = {n}, {share:.2%} nonzero": cell(
            "at equal error", partial(_rows, run), n=n, share=share
        )
        for n in run.sizes(SIZES)
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
    calls = {"dense": partial(torch.mm, a, b)}
    found, absent = spgemm.calls(truncated, product, run.device)
    slow = {name: of.ms for name, of in found.items() if of.ms > _SLOW_MS}
    calls |= {name: of.call for name, of in found.items() if name not in slow}
    ours, on_device = {}, {}
    for block in BLOCKS:
        ours[block] = _at_error(a, b, exact, target, block, of_paper)
        call = partial(spamm_torch.mm, a, b, tau=ours[block]["tau"], block=block)
        calls[f"block {block}"] = on_device[block] = call
        if len(run.gpus) > 1:
            calls[f"block {block}, 2 GPUs"] = partial(call, devices=run.gpus[:2])
    convert = {"convert": lambda: [spgemm.to_csr(torch.where(x >= trun, x, 0)) for x in (a, b)]}
    times = slow | medians(by_clock(calls | convert, run.repeats, run.synchronize))
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
        "products": spgemm.count_products(spgemm.to_csr(truncated)),
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
    """The largest threshold, by bisection, with which at most ``target`` is lost.

    With the paper's figures also what is lost at its valid ratio.
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
    if not rounding <= TOLERANCE["float32"]:
        raise UserError(
            f"wrong result at N = {len(a)}, block {block}, tau {low}: expected an error of at "
            f"most {TOLERANCE['float32']}; got {rounding}"
        )
    valid = spamm_torch.valid_ratio(norm_a, norm_b, low).item()
    found = {"tau": low, "error": error, "valid_ratio": valid}
    if of_paper:
        at_papers = spamm_torch.find_tau(norm_a, norm_b, of_paper[0])
        found["error_at_papers"] = lost(at_papers)[1]
    return found


def _row(block, found, sparse_ms, times):
    ms, two = times[f"block {block}"], times.get(f"block {block}, 2 GPUs")
    return found | {
        "block": block,
        "ms": ms,
        "speedup": sparse_ms and sparse_ms / ms,
        "speedup_two": two and sparse_ms and sparse_ms / two,
    }
