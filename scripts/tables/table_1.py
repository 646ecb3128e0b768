"""Table 1: the thresholds that keep a share of the block products, and where these products lie."""

from functools import partial

import torch

import spamm_torch
from bench.operands import decay_rows
from tables import paper
from tables.frame import cell
from tables.table_1_report import PICTURED

BLOCK = 32
_STRIP = 1024  # rows that are made at a time: the largest matrix has 4 GiB
_PICTURE = 32  # rows and columns of the picture of V
_SHARE = 4  # blocks of C that one of the paper's thread blocks computes, at equal stride


def settings(run):
    return {"sizes": run.sizes({"cpu": paper.SIZES, "cuda": paper.SIZES})}


def cells(run):
    sizes = settings(run)["sizes"]
    return {
        f"N = {n}": cell(partial(_rows, run.device), n=n, pictured=n == max(sizes)) for n in sizes
    }


def said_of(found):
    if found["absent"]:
        return f"not measured: {found['absent']}"
    return ", ".join(f"{row['ratio']:.0%}: {row['tau']:.6g}" for row in found["rows"])


@torch.inference_mode()
def _rows(device, n, pictured):
    """One row for each ratio of the paper's, with a picture of V where it is asked for."""
    norms = _norm_map(n, device)
    return [_row(n, norms, ratio, pictured) for ratio in paper.RATIOS]


def _norm_map(n, device):
    """Of the paper's matrix, which stands on both sides of the product."""
    strips = range(0, n, _STRIP)
    maps = [
        spamm_torch.norm_map(decay_rows("decay", n, at, min(n, at + _STRIP), device), BLOCK)
        for at in strips
    ]
    return torch.cat(maps)


def _row(n, norms, ratio, pictured):
    tau = spamm_torch.find_tau(norms, norms, ratio)
    counts = spamm_torch.valid_counts(norms, norms, tau)
    row = {
        "ratio": ratio,
        "tau": tau.item(),
        "valid_ratio": spamm_torch.valid_ratio(norms, norms, tau).item(),
        "imbalance": _imbalance(counts.flatten()),
        "imbalance_strided": _imbalance(_strided_sums(counts)),
    }
    if (n, ratio) in paper.TAU:
        at_papers = spamm_torch.valid_ratio(norms, norms, paper.TAU[n, ratio])
        row["valid_at_papers"] = at_papers.item()
    if pictured and ratio in PICTURED:
        row["counts"] = _pooled(counts)
    return row


def _imbalance(work):
    """The largest over the mean; 1 where there is no work."""
    mean = work.double().mean()
    return (work.max() / mean).item() if mean else 1.0


def _strided_sums(counts):
    """Work of each of the paper's thread blocks: _SHARE blocks of C each, at equal stride."""
    flat = counts.flatten()
    stride = -(-len(flat) // _SHARE)
    padded = torch.nn.functional.pad(flat, (0, stride * _SHARE - len(flat)))
    return padded.view(_SHARE, stride).sum(0)


def _pooled(counts):
    """V as a picture of at most _PICTURE rows and columns: means, over the largest possible V."""
    edge = min(_PICTURE, len(counts))
    share = counts[None].float() / len(counts)
    pooled = torch.nn.functional.adaptive_avg_pool2d(share, edge)[0]
    return [[round(value, 3) for value in line] for line in pooled.tolist()]
