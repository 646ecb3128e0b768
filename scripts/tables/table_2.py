"""Table 2: speedup over torch.mm by size, valid ratio and type, on one GPU and on several."""

import itertools
from functools import partial

import torch

from cases.mm import bench_operands
from cases.multi_gpu import Product
from common.measuring import cell
from common.timing import by_clock, medians
from tables import first_gpus, gpu_counts, paper, sizes

TITLE = "speedup over the dense product"
LARGE, REPEATS_OF_LARGE = 16384, 3  # from this size on so many rounds of a timing at most
SIZES = {"cpu": (1024, 2048, 4096), "cuda": paper.SIZES}
TYPES = {"cpu": ("float32", "bfloat16"), "cuda": ("float32", "float16")}
_BLOCKS = (32, 64)  # the paper's and this library's
_LAYOUTS = ("0", "S")  # where operands lie on several devices: all on the first; in shards
_PAPERS_TYPE = {"float32": "float32", "float16": "float16", "bfloat16": "float16"}


def cells(run):
    """Small sizes first, and those of one GPU."""
    found, types, edges = {}, TYPES[run.device.type], sizes(run, SIZES)
    for n, precision, block in itertools.product(edges, types, _BLOCKS):
        place = {"precision": precision, "block": block, "n": n}
        name = f"{precision}, block {block}, N = {n}"
        found[name] = cell("speedups", partial(_one, run), **place)
    for gpus, n, precision in itertools.product(gpu_counts(run), edges, types):
        place = {"gpus": gpus, "precision": precision, "n": n}
        name = f"{gpus} GPUs, {precision}, N = {n}"
        found[name] = cell("speedups, several GPUs", partial(_several, run), **place)
    return found


def _repeats(run, n):
    """Rounds of each timing: fewer of large products, which take long and spread little."""
    return run.repeats if n < LARGE else min(run.repeats, REPEATS_OF_LARGE)


def said(tables):
    """In how many of the paper's cells ours is the higher speedup."""
    found = {}
    for row in tables["speedups"]:
        if row.get("paper"):
            higher = found.setdefault(f"{row['precision']}, block {row['block']}", [])
            higher.append(row["speedup"] > row["paper"])
    parts = [f"{name}: {sum(of)} of {len(of)} cells" for name, of in found.items()]
    if not parts:
        return "No cell is of a size and ratio of the paper's."
    return f"Speedup over the dense product above the paper's: {'; '.join(parts)}."


@torch.inference_mode()
def _one(run, precision, block, n):
    """One device against torch.mm: rows of bench.py mm, with the paper's speedup."""
    case = ("decay", precision, block, n)
    found = bench_operands(case, paper.RATIOS, run.device, _repeats(run, n))["products"]
    at = _PAPERS_TYPE.get(precision), n
    return [row | {"paper": paper.SPEEDUP.get((*at, row["ratio"]))} for row in found]


@torch.inference_mode()
def _several(run, gpus, precision, n):
    """mm on several GPUs against torch.mm on one, by where the operands lie, in blocks of 64."""
    product = Product("decay", precision, n, first_gpus(run, gpus))
    calls = {"dense": partial(torch.mm, product.a, product.b)}
    for ratio, layout in itertools.product(paper.RATIOS, _LAYOUTS):
        call = calls[ratio, layout] = product.calls(layout, ratio)["all"]
        product.require_same(ratio, layout, call())
    ms = medians(by_clock(calls, _repeats(run, n), product.devices))
    dense = ms.pop("dense")
    return [
        {"ratio": ratio, "layout": layout, "valid_ratio": product.valid_ratio(ratio)}
        | {"ms": own, "dense_ms": dense, "speedup": dense / own}
        for (ratio, layout), own in ms.items()
    ]
