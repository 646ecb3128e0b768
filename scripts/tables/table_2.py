"""Table 2: speedup over torch.mm by size, valid ratio and type."""

import itertools
from functools import partial

import torch

import tables
from cases.mm import bench_operands
from common.measuring import cell
from tables import paper, sizes

DEFAULTS, add_options = tables.DEFAULTS, tables.add_options_with_sizes
TITLE = "Table 2: speedup over the dense product"
LARGE, REPEATS_OF_LARGE = 16384, 3  # from this size on so many rounds of a timing at most
SIZES = {"cpu": (1024, 2048, 4096), "cuda": paper.SIZES}
TYPES = {"cpu": ("float32", "bfloat16"), "cuda": ("float32", "float16")}
_BLOCKS = (32, 64)  # the paper's and this library's
_PAPERS_TYPE = {"float32": "float32", "float16": "float16", "bfloat16": "float16"}


def cells(run):
    """Small sizes first."""
    found, types, edges = {}, TYPES[run.device.type], sizes(run, SIZES)
    for n, precision, block in itertools.product(edges, types, _BLOCKS):
        place = {"precision": precision, "block": block, "n": n}
        name = f"{precision}, block {block}, N = {n}"
        found[name] = cell("speedups", partial(_one, run), **place)
    return found


@torch.inference_mode()
def _one(run, precision, block, n):
    """One device against torch.mm: rows of bench.py mm, with the paper's speedup."""
    repeats = run.repeats if n < LARGE else min(run.repeats, REPEATS_OF_LARGE)
    case = ("decay", precision, block, n)
    found = bench_operands(case, paper.RATIOS, run.device, repeats)["products"]
    at = _PAPERS_TYPE.get(precision), n
    return [row | {"paper": paper.SPEEDUP.get((*at, row["ratio"]))} for row in found]
