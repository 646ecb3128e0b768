"""Block-sparse products and the density matrix in them, by the size of a water cluster.

Products: the square of the overlap matrix S of a cluster, in blocks of 64, by how many block
products a block row keeps. Density: S^(-1/2), F in that basis and SP2 purification, with their
times, energies and memory. Rivals of a product: pairs expanded on the device, torch.bmm of gathered
blocks and index_add_; and dense storage.

Times are medians in ms on the host's clock, candidates in turns. mm is the whole call: norms,
pattern and list of products (plan), and the products, whose rate counts valid ones. Energies are
compared with that of a budget a hundred times smaller.
"""

import functools
import itertools
import resource
import time

import torch

import spamm_torch
from common import options as cli
from common.measuring import PRECISIONS, TOLERANCE, cell, require_near, use_precision
from common.timing import by_clock, medians, synchronize
from models.water import geometry
from models.water.model import block_sparse
from spamm_torch import linalg, sparse
from spamm_torch.sparse.blocks import places_of, read

TITLE = "Block-sparse products and density matrices"
BASIS, BLOCK, DROP = "STO-3G", 64, 1e-8
MAX_ERROR = 5e-8  # of the purification
DEFAULTS = {
    "cpu": {"waters": (300, 2000), "density": (300, 2000), "precisions": ("float64",)},
    "cuda": {"waters": (2000, 10_000, 142_857), "density": (2000, 10_000, 40_000, 142_857)},
}
DEFAULTS["cuda"]["precisions"] = ("float64", "float32", "float16")
_SMALL = 20_000  # waters from which on float64 alone, and 200 products a row alone, are measured
_EXPANDED = 4096  # block products that the rival gathers at once
_PRODUCTS, _DENSITY = "stored products", "block-sparse density"


def add_options(parser):
    cli.add_device_option(parser)
    kind = {"metavar": "COUNT", "type": cli.natural_number, "nargs": "+"}
    cli.add(parser, "--waters", "waters of clusters whose S is squared; 0: none", DEFAULTS, **kind)
    cli.add(parser, "--density", "waters of those that are purified; 0: none", DEFAULTS, **kind)
    cli.add_choices(parser, "--precisions", "number formats", DEFAULTS, PRECISIONS)
    cli.add_numbers(parser, "--valid", "valid products a block row", (50, 200), "COUNT")
    cli.add_repeats_option(parser, 3)


def header(options):
    return {"matrices": f"{BASIS}, blocks of {BLOCK}, entries below {DROP:g} left out"}


def cells(options):
    found = {}
    rest = {"device": options.device, "repeats": options.repeats}
    for waters in filter(None, options.waters):
        for precision in options.precisions[: 1 if waters > _SMALL else None]:
            for valid in options.valid[-1 if waters > _SMALL else None :]:
                place = {"n": 7 * waters, "precision": precision, "valid": valid}
                call = functools.partial(square, **rest)
                found[f"{waters} waters, {precision}, {valid}"] = cell(_PRODUCTS, call, **place)
    for waters in filter(None, options.density):
        call = functools.partial(density, waters=waters, **rest)
        found[f"density of {waters} waters"] = cell(_DENSITY, lambda n, of=call: of(), n=7 * waters)
    return found


# ---- Products -----------------------------------------------------------------------------------


def overlap_of(n, dtype, device):
    """S of a cluster with n functions, n a multiple of 7."""
    cluster = geometry.water_cluster(n // 7)
    made = {"block": BLOCK, "drop": DROP, "device": device, "matrices": ("overlap",)}
    [s] = block_sparse(cluster, BASIS, **made)
    return s.to(dtype)


def square(n, precision, valid, device, repeats):
    """The row of S S with so many valid products a block row."""
    a = overlap_of(n, use_precision(precision), device)
    norms, rows = spamm_torch.norm_map(a, BLOCK), a.shape[0] // BLOCK
    stored = a.crow_indices().diff()[a.col_indices()].sum().item()
    tau = spamm_torch.find_tau(norms, norms, min(1.0, valid * rows / stored))
    plan = sparse.plan(a, a, tau=tau)
    c = spamm_torch.mm(a, a, tau=tau)
    error = distance(c, *expanded(a, tau))
    # The rival's sums are in the type itself, and its norms may differ in the last bit.
    most = 10 * TOLERANCE[precision] + 10 * (tau.double() / sparse.norm(c)).item()
    require_near(error, most, f"for the square of S, N = {n}, {precision}, beside expanded pairs")
    candidates = {
        "mm": lambda: spamm_torch.mm(a, a, tau=tau),
        "multiply": lambda: spamm_torch.mm(a, a, plan=plan),
        "rival": lambda: expanded(a, tau),
    }
    if dense_fits(a):
        dense = sparse.to_dense(a)
        candidates["dense"] = lambda: spamm_torch.mm(dense, dense, tau=tau, block=BLOCK)
    ms = medians(by_clock(candidates, repeats, [device]))
    row = {f"{name}_ms": of for name, of in ms.items()} | {
        "stored": len(norms.values()) / rows,
        "products": plan.products / rows,
        "tflops": 2 * BLOCK**3 * plan.products / ms["multiply"] / 1e9,
        "share_before": 1 - ms["multiply"] / ms["mm"],
        "speedup": ms["rival"] / ms["mm"],
        "error": error,
    }
    if "dense" in ms:
        row["over_dense"] = ms["dense"] / ms["mm"]
    return [row]


def expanded(a, tau):
    """Squares a matrix as users do today: all valid pairs of blocks, their products, and their
    sums. Returns the numbers of the result's blocks among all, ascending, and their values.
    """
    crow, col, values = a.crow_indices(), a.col_indices(), a.values()
    columns = len(crow) - 1
    norms = torch.linalg.vector_norm(values, dim=(1, 2), dtype=torch.float64).to(tau.dtype)
    counts = crow.diff()[col]
    left = torch.arange(len(col), device=col.device).repeat_interleave(counts)
    right = crow[col] - (counts.cumsum(0) - counts)
    right = torch.arange(len(left), device=col.device) + right.repeat_interleave(counts)
    valid = (norms[left] * norms[right] >= tau).nonzero()[:, 0]
    left, right = left[valid], right[valid]
    row = torch.arange(columns, device=col.device).repeat_interleave(crow.diff())
    keys, place = (row[left] * columns + col[right]).unique(return_inverse=True)
    c = values.new_zeros(len(keys), *values.shape[1:])
    parts = (x.split(_EXPANDED) for x in (left, right, place))
    for of_a, of_b, to in zip(*parts, strict=True):
        c.index_add_(0, to, torch.bmm(values[of_a], values[of_b]))
    return keys, c


def distance(c, keys, values):
    """The relative distance of a matrix from one of such blocks; blocks of one count whole."""
    place = places_of(read(c, "c", "distance").keys(), keys)
    missing = torch.ones(len(keys), dtype=torch.bool, device=keys.device)
    missing[place[place >= 0]] = False
    off = values[missing].double().square().sum()
    for part in torch.arange(len(place), device=place.device).split(_EXPANDED):
        at = place[part]
        expected = torch.where((at >= 0)[:, None, None], values[at].double(), 0)
        off += (c.values()[part] - expected).square().sum()
    return (off.sqrt() / torch.linalg.vector_norm(values, dtype=torch.float64)).item()


def dense_fits(a):
    """Tells whether the matrix, its square and room to spare fit as whole matrices."""
    bytes_of_three = 3 * a.shape[0] ** 2 * a.values().element_size()
    if a.device.type == "cuda":
        return bytes_of_three < 0.95 * torch.cuda.mem_get_info(a.device)[0]
    return bytes_of_three < 8e9


# ---- Density matrices ---------------------------------------------------------------------------


def density(waters, device, repeats):
    """The row of a cluster: F in the basis S^(-1/2), and SP2."""
    cluster = geometry.water_cluster(waters)
    size, atoms, electrons = 7 * waters, 3 * waters, cluster.electrons
    made = {"block": BLOCK, "drop": DROP, "device": device}
    if device.type == "cuda":
        torch.cuda.empty_cache()  # dense storage before left memory in pieces
        torch.cuda.reset_peak_memory_stats()
    clock, fine = [now(device)], MAX_ERROR / 100
    # Lists give their matrices to calls, which let them go when they are done with them.
    s = block_sparse(cluster, BASIS, **made, matrices=("overlap",))
    one = sparse.identity(size, like=s[0])
    clock.append(now(device))
    short = s.pop().float()  # a million functions leave no room for both beside Z
    z = linalg.inverse_factor(short, max_error=max(MAX_ERROR / 10, 1e-8) * size, size=size)
    z = z.matrix.double()
    del short
    s = block_sparse(cluster, BASIS, **made, matrices=("overlap",))
    # 1 + V mends what Z lacks in float32 and with a tenth of the budget.
    zsz = linalg.in_basis(s.pop(), z, max_error=fine, size=size).matrix
    v = sparse.add(zsz, one, alpha=-0.5, beta=0.5, drop=MAX_ERROR / 10).float()
    del zsz
    clock.append(now(device))
    fock = block_sparse(cluster, BASIS, **made, matrices=("fock",))
    clock.append(now(device))
    fock = [linalg.in_basis(fock.pop(), z, max_error=fine, size=size).matrix]
    del z
    basis = sparse.add(v.double(), one)
    fock = linalg.in_basis(fock.pop(), basis, max_error=fine, size=size).matrix
    del basis
    clock.append(now(device))
    purify = functools.partial(linalg.purify, fock, electrons, size=size)
    runs = [purify(energy_error=MAX_ERROR) for _ in range(repeats if waters < _SMALL else 1)]
    found = min(runs, key=lambda run: run.seconds)
    energy = energy_of(found.matrix, fock)
    took = [1e3 * (end - start) for start, end in itertools.pairwise(clock)]
    row = dict(zip(("s_ms", "z_ms", "f_ms", "zfz_ms"), took, strict=True)) | {
        "peak_gb": peak_bytes(device) / 1e9,
        "waters": waters,
        "sp2_ms": 1e3 * found.seconds,
        "iterations": len(found.iterations),
        "stored_x": len(found.matrix.col_indices()) * BLOCK / found.matrix.shape[0],
        "energy": energy / atoms,
    }
    if waters < _SMALL:
        right = energy_of(purify(energy_error=MAX_ERROR / 100).matrix, fock)
        row["energy_error"] = (energy - right) / atoms
    if dense_fits(fock) and waters <= 2000:
        dense = sparse.to_dense(fock, (size, size))
        options = {"block": BLOCK, "energy_error": MAX_ERROR}
        runs = [linalg.purify(dense, electrons, **options) for _ in range(repeats)]
        row["over_dense"] = min(run.seconds for run in runs) / found.seconds
    return [row]


def energy_of(projector, fock):
    """2 tr(X F)."""
    return 2 * sparse.inner(projector, fock).item()


def peak_bytes(device):
    """The most memory so far: of tensors on CUDA, else of the process since it started."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def now(device):
    synchronize([device])
    return time.perf_counter()
