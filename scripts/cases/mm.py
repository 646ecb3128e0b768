"""mm against torch.mm (cuBLAS, oneDNN or MKL) by size, valid ratio, dtype and block.

Times are medians in ms, all candidates in turns; mm includes the norm maps of both operands, tau is
held. The JSON file has spreads, and relative errors against float64 that skips the same.
"""

import argparse
import functools
import itertools

import torch

import spamm_torch
from common import options as cli
from common.measuring import PRECISIONS, TOLERANCE, require_near, use_precision
from common.operands import DATA, operands
from common.timing import interleaved

TITLE = "mm against torch.mm"
RATIOS = (1.0, 0.9, 0.5, 0.3, 0.2, 0.1, 0.05)
_SIZES = (1024, 2048, 4096, 8192, 16384)
DEFAULTS = {
    "cpu": {"sizes": (2048, 4096), "precisions": ("float32", "bfloat16"), "repeats": 7},
    "cuda": {"sizes": _SIZES, "precisions": tuple(PRECISIONS), "repeats": 15},
}


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
    cli.add_numbers(parser, "--sizes", "edges of the square matrices", DEFAULTS, "N")
    cli.add_choices(parser, "--precisions", "number formats", DEFAULTS, PRECISIONS)
    what = "edges of the blocks: 32, 64, 128, or three of these as in 128x64x128"
    cli.add(parser, "--blocks", what, [64], metavar="BLOCK", type=block_edges, nargs="+")
    cli.add_choices(parser, "--data", "as of common/operands.py", ["decay"], DATA)
    cli.add_ratios_option(parser, RATIOS)
    cli.add_repeats_option(parser, DEFAULTS)


def cells(options):
    cases = itertools.product(options.data, options.precisions, options.blocks, options.sizes)
    rest = options.ratios, options.device, options.repeats
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


def bench_operands(case, ratios, device, repeats):
    """All ratios of one case (data, precision, block, n), the dense product in turns with them:
    rows of "products", one a ratio, and of "norm maps".
    """
    data, precision, block, n = case
    dtype = use_precision(precision)
    a, b = operands(data, n, dtype, device)
    norm_maps = functools.partial(torch.ops.spamm_torch.norm_maps, a, b, block)
    norms = norm_maps()
    candidates = {
        "dense": functools.partial(torch.mm, a, b),
        "norms": norm_maps,
        "search": functools.partial(spamm_torch.find_tau, *norms, 0.3),
    }
    found = {}
    for ratio in ratios:
        tau = spamm_torch.find_tau(*norms, ratio) if ratio < 1 else torch.zeros_like(norms[0][0, 0])
        call = functools.partial(spamm_torch.mm, a, b, tau=tau, block=block)
        error = relative_error(call(), a, b, *norms, tau, block)
        require_near(error, TOLERANCE[precision], f"for {case} at ratio {ratio}")
        valid = spamm_torch.valid_ratio(*norms, tau).item()
        found[ratio] = {"ratio": ratio, "valid_ratio": valid, "error": error}
        candidates[ratio] = call
    times = interleaved(candidates, device, repeats)
    place = {"data": data, "precision": precision, "block": block, "n": n}
    rows = []
    for ratio, row in found.items():
        own = times[ratio].over(times["dense"])
        own |= {"mm_ms": own.pop("ms"), "dense_ms": times["dense"].median}
        rows.append(place | row | own)
    norms = {f"{name}_ms": times[name].median for name in ("norms", "search")}
    return {"products": rows, "norm maps": [place | norms]}
