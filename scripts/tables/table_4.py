"""Table 4: squares of matrices of electronic structure theory, with blocks skipped.

Errors are against the dense product in float64, so they hold rounding, too; beside them stands the
bound of what skipping loses.
"""

import itertools
from dataclasses import asdict, dataclass
from functools import partial

import torch

import spamm_torch
import tables
from common.measuring import TOLERANCE, cell, require_near, use_precision
from common.timing import interleaved
from models.water.geometry import ATOMS
from models.water.matrices import MATRICES, load
from models.water.model import model_density, model_fock, overlap, water_cluster
from models.water.overlap import functions_of
from tables import paper

DEFAULTS, add_options = tables.DEFAULTS, tables.add_options
TITLE = "Table 4: matrices of electronic structure theory"
TAUS = (1e-10, 1e-8, 1e-6, 1e-4, 1e-2)
BLOCKS = (32, 64)
PRECISIONS = ("float64", "float32")
# Clusters without a program, by device: the paper's own size needs a GPU.
MODELS = {"cpu": (300, "STO-3G"), "cuda": (569, "6-31G**")}


def cells(run):
    found = {}
    for source in sources(run.device):
        n = source.waters * sum(functions_of(symbol, source.basis) for symbol in ATOMS)
        for name in MATRICES:
            if name == "core_hamiltonian" and source.origin == "model":
                continue  # which needs a program for integrals
            for precision in PRECISIONS:
                place = asdict(source) | {"n": n, "matrix": name, "precision": precision}
                key = f"{name}, {source.waters} waters, {source.basis}, {source.origin}"
                found[f"{key}, {precision}"] = cell("squares", partial(_rows, run), **place)
    found["the paper's"] = lambda: {"the paper's squares": _papers()}
    return found


def _papers():
    return [
        {"number": number, "norm": norm, "tau": tau, "error": error}
        for number, (norm, errors) in paper.SQUARES.items()
        for tau, error in errors.items()
    ] + [{"number": "mean", "tau": tau, "speedup": of} for tau, of in paper.SQUARES_SPEEDUP.items()]


def _rows(run, origin, waters, basis, n, matrix, precision):
    a = matrix_of(Source(origin, waters, basis), matrix, run.device)
    return measure(a, precision, run.repeats)


# ---- Squares ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """A cluster of so many waters in a basis, whose matrices are squared: "embedded" (data/ergo),
    or "model" (exact S, a model of F and its density).
    """

    origin: str
    waters: int
    basis: str


def sources(device):
    """The cells of a device, before anything is computed."""
    embedded = load()
    return [
        Source("embedded", embedded.atoms // 3, embedded.basis),
        Source("model", *MODELS[device.type]),
    ]


def matrix_of(source, name, device):
    """One of MATRICES of a source, (N, N) float64."""
    if source.origin == "embedded":
        return getattr(load(), name).to(device)
    cluster = water_cluster(source.waters)
    s = overlap(cluster, source.basis).to(device)
    if name == "overlap":
        return s
    fock = model_fock(cluster, source.basis, s)
    return fock if name == "fock" else model_density(fock, s, cluster.electrons)


@torch.inference_mode()
def measure(a, precision, repeats):
    """Rows of C = A A for each block and tau, against torch.mm, A being rounded first. Errors are
    Frobenius norms against the float64 product of the rounded A; "bound" is that of what skipping
    loses; "ms" is of mm, norms included, and "unskipped_ms" of mm at tau = 0. UserError: an error
    is larger than its bound and rounding allow.
    """
    a = a.to(use_precision(precision))
    exact = a.double() @ a.double()
    places = list(itertools.product(BLOCKS, (0.0, *TAUS)))
    calls = {"dense": partial(torch.mm, a, a)}
    for block, tau in places:
        calls[block, tau] = partial(spamm_torch.mm, a, a, tau=tau, block=block)
    errors = {key: _distance(call(), exact) for key, call in calls.items()}
    rounding, rows = TOLERANCE[precision] * a.double().square().sum().item(), []
    times = interleaved(calls, a.device, repeats)
    for block, tau in places:
        norms, own = spamm_torch.norm_map(a, block), times[block, tau]
        bound = spamm_torch.error_bound(norms, norms, tau).item()
        of = f"in {precision}, block {block}, tau {tau:g}"
        require_near(errors[block, tau], bound + rounding, of)
        row = {
            "block": block,
            "tau": tau,
            "norm": exact.norm().item(),
            "error": errors[block, tau],
            "dense_error": errors["dense"],
            "bound": bound,
            "valid_ratio": spamm_torch.valid_ratio(norms, norms, tau).item(),
            "dense_ms": times["dense"].median,
            "unskipped_ms": times[block, 0.0].median,
            "speedup_unskipped": times[block, 0.0].median / own.median,
        }
        rows += [row | own.over(times["dense"])] if tau else []
    return rows


def _distance(product, exact):
    """Frobenius norm of a difference, row by row: a large one needs no second matrix of float64."""
    rows = zip(product.split(1024), exact.split(1024), strict=True)
    return sum((p.double() - e).square().sum() for p, e in rows).sqrt().item()
