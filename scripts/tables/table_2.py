"""Table 2: speedup over torch.mm by size, valid ratio and type, on one GPU and on several."""

from functools import partial

import torch

import spamm_torch
from cases.mm import bench_operands, copy_bandwidth, relative_error
from cases.multi_gpu import layouts
from cases.multi_gpu.product import Product
from common.clock import by_clock
from common.measuring import cell, not_measured
from common.operands import operands
from common.precisions import TOLERANCE, use_precision
from common.sparse import quiet_sparse
from models.errors import UserError
from tables import paper

TITLE = "speedup over the dense product"
LARGE, REPEATS_OF_LARGE = 16384, 3  # from this size on so many rounds of a timing at most
SIZES = {"cpu": (1024, 2048, 4096), "cuda": paper.SIZES}
TYPES = {"cpu": ("float32", "bfloat16"), "cuda": ("float32", "float16")}  # of the paper's cells
_MORE_TYPES = {"cpu": ("float64",), "cuda": ("bfloat16", "float64")}
_PAPERS_BLOCK, _BLOCK, _LARGE_BLOCK = 32, 64, (128, 64, 128)
_LAYOUTS = ("0", "S")  # where operands lie on two devices: all on the first; in shards
_PAPERS_TYPE = {"float32": "float32", "float16": "float16", "bfloat16": "float16"}
_MOST_BSR = {"cpu": 2048, "cuda": 16384}  # MKL's needs minutes a ratio at twice that


def settings(run):
    return {"sizes": run.sizes(SIZES)}


def cells(run):
    """The paper's cells first, those that only stand beside them last."""
    kind = run.device.type
    types, more = TYPES[kind], _MORE_TYPES[kind]
    papers = [(name, block) for name in types for block in (_PAPERS_BLOCK, _BLOCK)]
    others = [(name, _BLOCK) for name in more] + [(name, _LARGE_BLOCK) for name in types]
    bandwidth = _Once(lambda: copy_bandwidth(run.device, run.repeats))
    one = partial(_one, run, bandwidth)
    found = _each_size(run, "", papers, "speedups", one)
    of_types = [(name,) for name in types]
    found |= _each_size(run, "two GPUs, ", of_types, "speedups, two GPUs", partial(_two, run))
    found |= _each_size(run, "", others, "speedups", one)
    return found | _each_size(run, "BSR, ", of_types, "block-sparse products", partial(_bsr, run))


def _each_size(run, title, cases, kind, measure):
    """Cells of some (precision,) or (precision, block), the small sizes first."""
    found = {}
    for n in run.sizes(SIZES):
        for precision, *block in cases:
            place = {"precision": precision, "n": n} | ({"block": block[0]} if block else {})
            name = f"{precision}, block {block[0]}" if block else precision
            found[f"{title}{name}, N = {n}"] = cell(kind, measure, **place)
    return found


def _repeats(run, n):
    """Rounds of each timing: fewer of large products, which take long and spread little."""
    return run.repeats if n < LARGE else min(run.repeats, REPEATS_OF_LARGE)


def said_of(found):
    [rows] = found.values()
    if "absent" in rows[0]:
        return not_measured(rows[0])
    return ", ".join(f"{row['ratio']:.0%}: {row['speedup']:.2f}x" for row in rows)


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


class _Once:
    """A number that is measured when it is first asked for."""

    def __init__(self, measure):
        self._measure, self._value = measure, None

    def __call__(self):
        if self._value is None:
            self._value = self._measure()
        return self._value


@torch.inference_mode()
def _one(run, bandwidth, precision, block, n):
    """One device against torch.mm: rows of bench.py mm, with the paper's speedup."""
    case = ("decay", precision, block, n)
    found = bench_operands(
        case, paper.RATIOS, bandwidth(), run.device, _repeats(run, n), norms_apart=False
    )
    of_type = _PAPERS_TYPE.get(precision)
    return [
        row
        | {"copy_bandwidth": bandwidth(), "paper": paper.SPEEDUP.get((of_type, n, row["ratio"]))}
        for row in found["products"]
    ]


@torch.inference_mode()
def _bsr(run, precision, n):
    """torch's product of a block-sparse A with a dense B.

    A has the blocks that take part in a valid product. That is what such a format can leave out:
    the valid products of a block are not the same in each column of blocks of B.
    """
    if n > _MOST_BSR[run.device.type]:
        raise RuntimeError(f"left out above N = {_MOST_BSR[run.device.type]}, where it takes long")
    dtype = use_precision(precision)
    a, b = operands("decay", n, dtype, run.device)
    norms = spamm_torch.norm_map(a, _BLOCK)
    calls, rows = {"dense": partial(torch.mm, a, b)}, []
    for ratio in paper.RATIOS:
        tau = spamm_torch.find_tau(norms, norms, ratio)
        kept = ~(norms * norms.amax(1) < tau)  # with the largest norm that a block meets in B
        calls[ratio] = _bsr_call(a, b, kept, norms, precision)
        rows.append({"ratio": ratio, "kept": kept.double().mean().item()})
    times = by_clock(calls, _repeats(run, n), run.synchronize)
    dense = times["dense"].median
    for row in rows:
        ms = times[row["ratio"]].median
        row |= {"ms": ms, "dense_ms": dense, "speedup": dense / ms}
    return rows


def _bsr_call(a, b, kept, norms, precision):
    """The product, after its result was compared with that of the same blocks."""
    mask = kept.repeat_interleave(_BLOCK, 0).repeat_interleave(_BLOCK, 1)
    masked = a * mask[: a.shape[0], : a.shape[1]]
    edges = (_BLOCK, _BLOCK)
    if a.shape[0] % _BLOCK:
        raise RuntimeError(f"needs a multiple of the block, {_BLOCK}; got N = {a.shape[0]}")
    with quiet_sparse():
        call = partial(torch.mm, masked.to_sparse_bsr(edges), b)
    error = relative_error(call(), masked, b, norms, norms, 0, _BLOCK)
    if not error <= TOLERANCE[precision]:
        raise RuntimeError(
            f"wrong result: expected an error of at most {TOLERANCE[precision]}; got {error}"
        )
    return call


@torch.inference_mode()
def _two(run, precision, n):
    """mm on two GPUs against torch.mm on one, by where the operands lie, in blocks of 64."""
    if len(run.gpus) < 2:
        raise RuntimeError(f"needs 2 GPUs; got {len(run.gpus)}")
    return _on_devices(Product("decay", precision, n, run.gpus[:2]), _repeats(run, n))


def _on_devices(product, repeats):
    calls, rows = {"dense": partial(torch.mm, product.a, product.b)}, []
    for ratio in paper.RATIOS:
        for layout in _LAYOUTS:
            call = layouts.calls_of(layout, product, ratio)["all"]
            if not layouts.is_same(product, ratio, call()):
                raise UserError(
                    f"wrong result on several devices at ratio {ratio}, layout {layout}: expected "
                    "the bits of one"
                )
            calls[ratio, layout] = call
            rows.append(
                {"ratio": ratio, "layout": layout, "valid_ratio": product.valid_ratio(ratio)}
            )
    times = by_clock(calls, repeats, product.synchronize)
    dense = times["dense"].median
    for row in rows:
        ms = times[row["ratio"], row["layout"]].median
        row |= {"ms": ms, "dense_ms": dense, "speedup": dense / ms}
    return rows
