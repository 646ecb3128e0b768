"""Squares of a water cluster's matrices with blocks skipped: what the paper's Table 4 measures.

Errors are against the dense product in float64, so they hold rounding, too; beside them stands the
bound of what skipping loses.
"""

from dataclasses import dataclass
from functools import partial

import torch

import spamm_torch
from common.errors import UserError
from common.precisions import TOLERANCE, use_precision
from common.timing import interleaved
from ergo.embedded import load
from ergo.matrices import read
from ergo.model import model_density, model_fock, overlap, water_cluster

TAUS = (1e-10, 1e-8, 1e-6, 1e-4, 1e-2)
BLOCKS = (32, 64)
PRECISIONS = ("float64", "float32")
# Clusters without a program, by device: the paper's own size needs a GPU.
MODELS = {"cpu": (300, "STO-3G"), "cuda": (569, "6-31G**")}


@dataclass(frozen=True)
class Source:
    """A cluster whose matrices are squared.

    Attributes:
        origin: "embedded", "model" (exact S, a model of F and its density), or a file's path.
        waters: how many molecules. basis: of ergo.basis.BASES.
    """

    origin: str
    waters: int
    basis: str


def sources(device, files=()):
    """What is measured on a device, before anything is computed.

    Args:
        device: a torch.device.
        files: paths of files of make_ergo_matrices.py, measured too.

    Raises:
        UserError: a file is missing or damaged.
    """
    embedded = load()
    found = [Source("embedded", embedded.atoms // 3, embedded.basis)]
    for path in files:
        of_file = read(path)
        found.append(Source(str(path), of_file.atoms // 3, of_file.basis))
    return [*found, Source("model", *MODELS[device.type])]


def matrix(source, name, device):
    """One matrix of a source: (N, N) float64 on a device.

    Args:
        name: of ergo.matrices.MATRICES.

    Raises:
        RuntimeError: the source has no such matrix; says how to get it.
    """
    if source.origin != "model":
        known = load() if source.origin == "embedded" else read(source.origin)
        found = getattr(known, name)
        if found is None:
            raise RuntimeError("needs Hartree-Fock; the file was made with --no-scf")
        return found.to(device)
    if name == "core_hamiltonian":
        raise RuntimeError(
            "needs ergo: `python scripts/make_ergo_matrices.py --waters "
            f"{source.waters} --basis '{source.basis}' --no-scf`, then `--matrices` with its file"
        )
    cluster = water_cluster(source.waters)
    s = overlap(cluster, source.basis).to(device)
    if name == "overlap":
        return s
    fock = model_fock(cluster, source.basis, s)
    return fock if name == "fock" else model_density(fock, s, cluster.electrons)


@torch.inference_mode()
def measure(a, precision, repeats):
    """C = A A at each tau in each block, against torch.mm.

    Args:
        a: (N, N) float64, on the device that is measured. precision: "float64" or "float32", to
            which it is rounded first. repeats: rounds of each timing.

    Returns:
        A row for each block and tau, as plain data: "block", "tau"; "norm" of C and "error",
        Frobenius norms against the float64 product of the rounded A; "dense_error", that of
        torch.mm; "bound" of what skipping loses; "valid_ratio"; "ms" of mm, norms included, with
        "spread"; "dense_ms" of torch.mm and "unskipped_ms" of mm at tau = 0; "speedup" over
        torch.mm and "speedup_unskipped" over mm at tau = 0.

    Raises:
        UserError: an error is larger than its bound and rounding allow.
    """
    a = a.to(use_precision(precision))
    exact = a.double() @ a.double()
    calls = {"dense": partial(torch.mm, a, a)}
    for block in BLOCKS:
        for tau in (0.0, *TAUS):
            calls[block, tau] = partial(spamm_torch.mm, a, a, tau=tau, block=block)
    dense_error = _distance(calls["dense"](), exact)
    rows = []
    for block in BLOCKS:
        norms = spamm_torch.norm_map(a, block)
        for tau in TAUS:
            error = _distance(calls[block, tau](), exact)
            bound = spamm_torch.error_bound(norms, norms, tau).item()
            rounding = TOLERANCE[precision] * norms.double().square().sum().item()
            if not error <= bound + rounding:
                raise UserError(
                    f"wrong result in {precision}, block {block}, tau {tau:g}: expected an error "
                    f"of at most {bound + rounding:g}; got {error:g}"
                )
            rows.append(
                {
                    "block": block,
                    "tau": tau,
                    "norm": exact.norm().item(),
                    "error": error,
                    "dense_error": dense_error,
                    "bound": bound,
                    "valid_ratio": spamm_torch.valid_ratio(norms, norms, tau).item(),
                }
            )
    times = interleaved(calls, a.device, repeats)
    dense = times["dense"].median
    for row in rows:
        timing, unskipped = times[row["block"], row["tau"]], times[row["block"], 0.0].median
        row |= {
            "ms": timing.median,
            "spread": timing.spread / timing.median,
            "dense_ms": dense,
            "unskipped_ms": unskipped,
            "speedup": dense / timing.median,
            "speedup_unskipped": unskipped / timing.median,
        }
    return rows


def _distance(product, exact):
    """Frobenius norm of a difference, row by row: a large one needs no second matrix of float64."""
    rows = zip(product.split(1024), exact.split(1024), strict=True)
    return sum((p.double() - e).square().sum() for p, e in rows).sqrt().item()
