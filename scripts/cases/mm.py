"""mm against torch.mm (cuBLAS, oneDNN or MKL) by size, valid ratio, dtype and block.

Times are medians in ms, all candidates in turns; mm includes the norm maps of both operands, tau is
held. The JSON file has the multiply alone, the share of the floor (the operands read once at copy
bandwidth, plus the larger of valid ratio x torch.mm and all three matrices at copy bandwidth),
spreads, and relative errors against float64 with the same block products skipped.
"""

import argparse
import functools
import itertools

import torch

import spamm_torch
from common import options as cli
from common.machine import PRECISIONS, TOLERANCE, use_precision
from common.measuring import require_near
from common.operands import operands
from common.timing import interleaved

TITLE = "mm against torch.mm"
MODE = torch.inference_mode
RATIOS = (1.0, 0.9, 0.5, 0.3, 0.2, 0.1, 0.05)
_SIZES = (1024, 2048, 4096, 8192, 16384)
DEFAULTS = {
    "cpu": {"sizes": (2048, 4096), "precisions": ("float32", "bfloat16"), "repeats": 7},
    "cuda": {"sizes": _SIZES, "precisions": tuple(PRECISIONS), "repeats": 15},
}
_SEARCHED_ERROR = 1e-6  # the max_error of the second search


def block_edges(text):
    """An edge, or (m, k, n)."""
    edges = tuple(int(edge) if edge.isdecimal() else 0 for edge in text.split("x"))
    if len(edges) not in (1, 3) or not set(edges) <= {32, 64, 128}:
        raise argparse.ArgumentTypeError(
            f"expected 32, 64 or 128, or three of these as in 128x64x128; got {text!r}"
        )
    return edges if len(edges) == 3 else edges[0]


def add_options(parser):
    cli.add_device_option(parser)
    cli.add_sizes_option(parser, DEFAULTS)
    cli.add_choices(parser, "--precisions", "number formats", DEFAULTS, PRECISIONS)
    what = "edges of the blocks: 32, 64, 128, or three of these as in 128x64x128"
    cli.add(parser, "--blocks", what, [64], metavar="BLOCK", type=block_edges, nargs="+")
    what = (
        "decay: the paper's decay matrix; normal: random ones of N(0, 1); scaled: these with rows "
        "and columns scaled by 1e-12 to 1; overlap: a water cluster's"
    )
    cli.add_choices(parser, "--data", what, ["decay"], ("decay", "normal", "scaled", "overlap"))
    cli.add_ratios_option(parser, RATIOS)
    cli.add_repeats_option(parser, DEFAULTS)
    cli.add_cold_option(parser)


def cells(options):
    bandwidth = functools.cache(lambda: copy_bandwidth(options.device, options.repeats))
    cases = itertools.product(options.data, options.precisions, options.blocks, options.sizes)
    rest = options.ratios, bandwidth, options.device, options.repeats, options.cold
    return {" ".join(map(str, c)): functools.partial(bench_operands, c, *rest) for c in cases}


def relative_error(product, a, b, norm_a, norm_b, tau, block):
    """Error of the block rows at a third and at the end, against float64 with the same skips."""
    m, k, n = (block,) * 3 if isinstance(block, int) else block
    rows = norm_a.shape[0]
    error = norm = 0.0
    for i in {rows // 3, rows - 1}:
        valid = ~(norm_a[i][:, None] * norm_b < tau)
        mask = valid.repeat_interleave(k, 0).repeat_interleave(n, 1)
        kept = b.double() * mask[: b.shape[0], : b.shape[1]]
        part = slice(i * m, (i + 1) * m)
        expected = a[part].double() @ kept
        error += (product[part].double() - expected).square().sum().item()
        norm += expected.square().sum().item()
    return (error / norm) ** 0.5 if norm else error**0.5


def copy_bandwidth(device, repeats):
    """Bytes read plus written in a millisecond by a large elementwise kernel.

    A plain copy would become a memcpy node of the CUDA graph, which runs at two thirds of that.
    """
    elements = (1 << 28) if device.type == "cuda" else (1 << 26)
    source = torch.ones(elements, device=device)
    target = torch.empty_like(source)
    timing = interleaved({"copy": lambda: torch.abs(source, out=target)}, device, repeats)["copy"]
    return 8 * elements / timing.median


def bench_operands(case, ratios, bandwidth, device, repeats, cold=False, norms_apart=True):
    """All ratios of one case (data, precision, block, n), the dense product in turns with them:
    rows of "products", one a ratio, and of "norm maps". ``bandwidth``: a call that gives what
    copy_bandwidth gives. ``norms_apart``: time the product without the norms, too.
    """
    data, precision, block, n = case
    dtype = use_precision(precision)
    a, b = operands(data, n, dtype, device)
    norm_maps = functools.partial(torch.ops.spamm_torch.norm_maps, a, b, block)
    norm_a, norm_b = norm_maps()
    taus = {}
    errors = {}
    candidates = {
        "dense": lambda: torch.mm(a, b),
        "norms": norm_maps,
        "search": lambda: spamm_torch.find_tau(norm_a, norm_b, 0.3),
        "error search": lambda: spamm_torch.find_tau(norm_a, norm_b, max_error=_SEARCHED_ERROR),
    }
    for ratio in ratios:
        tau = torch.zeros_like(norm_a[0, 0])
        if ratio < 1:
            tau = spamm_torch.find_tau(norm_a, norm_b, ratio)
        product = spamm_torch.mm(a, b, tau=tau, block=block)
        errors[ratio] = relative_error(product, a, b, norm_a, norm_b, tau, block)
        require_near(errors[ratio], TOLERANCE[precision], f"for {case} at ratio {ratio}")
        taus[ratio] = tau
        candidates[f"mm {ratio}"] = lambda tau=tau: spamm_torch.mm(a, b, tau=tau, block=block)
        if norms_apart:
            candidates[f"multiply {ratio}"] = lambda tau=tau: torch.ops.spamm_torch.multiply(
                a, b, norm_a, norm_b, tau, block
            )
    dense_error = relative_error(torch.mm(a, b), a, b, norm_a, norm_b, 0, block)
    times = interleaved(candidates, device, repeats, cold=cold)
    dense = times["dense"].median
    operand_ms = 2 * n * n * a.element_size() / bandwidth()
    place = {"data": data, "precision": precision, "block": block, "n": n}

    def row(ratio):
        valid = spamm_torch.valid_ratio(norm_a, norm_b, taus[ratio]).item()
        mm, multiply = times[f"mm {ratio}"], times.get(f"multiply {ratio}")
        floor = operand_ms + max(valid * dense, 1.5 * operand_ms)
        return place | {
            "ratio": ratio,
            "cold": cold,
            "valid_ratio": valid,
            "backend": spamm_torch.backend_for(device, dtype, block),
            "dense_ms": dense,
            "multiply_ms": multiply and multiply.median,
            "mm_ms": mm.median,
            "spread": mm.spread / mm.median,
            "speedup": dense / mm.median,
            "speedup_multiply": multiply and dense / multiply.median,
            "share_of_floor": floor / mm.median,
            "error": errors[ratio],
            "dense_error": dense_error,
        }

    norms = times["norms"].median
    norm_maps = place | {
        "cold": cold,
        "norms_ms": norms,
        "norms_share_of_copy": operand_ms / norms,
        "copy_bandwidth": bandwidth(),
        "search_ms": times["search"].median,
        "error_search_ms": times["error search"].median,
    }
    return {"products": [row(ratio) for ratio in ratios], "norm maps": [norm_maps]}
