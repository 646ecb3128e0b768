"""Table 2: speedup over torch.mm by size, valid ratio and type, on one GPU and on several."""

import functools
from functools import partial

import torch

from cases import shards
from cases.mm import bench_operands, copy_bandwidth
from common.measuring import cell
from common.timing import by_clock, medians
from models.files import UserError
from tables import first_gpus, gpu_counts, paper, sizes

TITLE = "speedup over the dense product"
LARGE, REPEATS_OF_LARGE = 16384, 3  # from this size on so many rounds of a timing at most
SIZES = {"cpu": (1024, 2048, 4096), "cuda": paper.SIZES}
TYPES = {"cpu": ("float32", "bfloat16"), "cuda": ("float32", "float16")}  # of the paper's cells
_MORE_TYPES = {"cpu": ("float64",), "cuda": ("bfloat16", "float64")}
_PAPERS_BLOCK, _BLOCK, _LARGE_BLOCK = 32, 64, (128, 64, 128)
_LAYOUTS = ("0", "S")  # where operands lie on several devices: all on the first; in shards
_PAPERS_TYPE = {"float32": "float32", "float16": "float16", "bfloat16": "float16"}


def settings(run):
    return {"sizes": sizes(run, SIZES)}


def cells(run):
    """The paper's cells first, those that only stand beside them last."""
    kind = run.device.type
    types, more = TYPES[kind], _MORE_TYPES[kind]
    papers = [(name, block) for name in types for block in (_PAPERS_BLOCK, _BLOCK)]
    others = [(name, _BLOCK) for name in more] + [(name, _LARGE_BLOCK) for name in types]
    bandwidth = functools.cache(lambda: copy_bandwidth(run.device, run.repeats))
    one = partial(_one, run, bandwidth)
    found = _each_size(run, "", papers, "speedups", one)
    of_types = [(name,) for name in types]
    several = "speedups, several GPUs", partial(_several, run)
    for gpus in gpu_counts(run):
        found |= _each_size(run, f"{gpus} GPUs, ", of_types, *several, gpus=gpus)
    return found | _each_size(run, "", others, "speedups", one)


def _each_size(run, title, cases, kind, measure, **others):
    """Cells of some (precision,) or (precision, block), the small sizes first."""
    found = {}
    for n in sizes(run, SIZES):
        for precision, *block in cases:
            place = others | {"precision": precision, "n": n}
            place |= {"block": block[0]} if block else {}
            name = f"{precision}, block {block[0]}" if block else precision
            found[f"{title}{name}, N = {n}"] = cell(kind, measure, **place)
    return found


def _repeats(run, n):
    """Rounds of each timing: fewer of large products, which take long and spread little."""
    return run.repeats if n < LARGE else min(run.repeats, REPEATS_OF_LARGE)


def said(tables):
    """In how many of the paper's cells ours is the higher speedup."""
    found = {}
    for row in tables["speedups"]:
        if row.get("paper") and row["block"] in (_PAPERS_BLOCK, _BLOCK):
            higher = found.setdefault(f"{row['precision']}, block {row['block']}", [])
            higher.append(row["speedup"] > row["paper"])
    parts = [f"{name}: {sum(of)} of {len(of)} cells" for name, of in found.items()]
    if not parts:
        return "No cell is of a size and ratio of the paper's."
    return f"Speedup over the dense product above the paper's: {'; '.join(parts)}."


@torch.inference_mode()
def _one(run, bandwidth, precision, block, n):
    """One device against torch.mm: rows of bench.py mm, with the paper's speedup."""
    case = ("decay", precision, block, n)
    found = bench_operands(
        case, paper.RATIOS, bandwidth, run.device, _repeats(run, n), norms_apart=False
    )
    of_type = _PAPERS_TYPE.get(precision)
    return [
        row
        | {"copy_bandwidth": bandwidth(), "paper": paper.SPEEDUP.get((of_type, n, row["ratio"]))}
        for row in found["products"]
    ]


@torch.inference_mode()
def _several(run, gpus, precision, n):
    """mm on several GPUs against torch.mm on one, by where the operands lie, in blocks of 64."""
    product = shards.Product("decay", precision, n, first_gpus(run, gpus))
    calls, rows = {"dense": partial(torch.mm, product.a, product.b)}, []
    for ratio in paper.RATIOS:
        for layout in _LAYOUTS:
            call = shards.calls_of(layout, product, ratio)["all"]
            if not shards.is_same(product, ratio, call()):
                raise UserError(
                    f"wrong result on several devices at ratio {ratio}, layout {layout}: expected "
                    "the bits of one"
                )
            calls[ratio, layout] = call
            rows.append(
                {"ratio": ratio, "layout": layout, "valid_ratio": product.valid_ratio(ratio)}
            )
    times = medians(by_clock(calls, _repeats(run, n), product.devices))
    for row in rows:
        dense, ms = times["dense"], times[row["ratio"], row["layout"]]
        row |= {"ms": ms, "dense_ms": dense, "speedup": dense / ms}
    return rows
