"""Table 1: the thresholds that keep a share of the block products."""

from functools import partial

import torch

import spamm_torch
import tables
from common.measuring import cell
from common.operands import decay_rows
from tables import paper

DEFAULTS, add_options = tables.DEFAULTS, tables.add_options_with_sizes
TITLE = "Table 1: thresholds for a valid ratio"
BLOCK = 32
_STRIP = 1024  # rows that are made at a time: the largest matrix has 4 GiB


def cells(run):
    rows = partial(_rows, run.device)
    return {f"N = {n}": cell("thresholds", rows, n=n) for n in run.sizes or paper.SIZES}


def said(tables):
    """The largest difference from the paper's thresholds."""
    off = [row["difference"] for row in tables["thresholds"] if row.get("difference") is not None]
    if not off:
        return f"{len(tables['thresholds'])} thresholds, none at a size of the paper's."
    return (
        f"{len(off)} thresholds at the paper's sizes and ratios; the largest difference is "
        f"{max(off, key=abs):+.2%}."
    )


@torch.inference_mode()
def _rows(device, n):
    """One row for each ratio of the paper's, of the square of its matrix."""
    strips = (decay_rows(n, at, min(n, at + _STRIP), device) for at in range(0, n, _STRIP))
    norms = torch.cat([spamm_torch.norm_map(strip, BLOCK) for strip in strips])
    rows = []
    for ratio in paper.RATIOS:
        tau = spamm_torch.find_tau(norms, norms, ratio)
        valid_ratio = spamm_torch.valid_ratio(norms, norms, tau).item()
        row = {"ratio": ratio, "tau": tau.item(), "valid_ratio": valid_ratio}
        if of_paper := paper.TAU.get((n, ratio)):
            row["valid_at_papers"] = spamm_torch.valid_ratio(norms, norms, of_paper).item()
            row |= {"paper": of_paper, "difference": row["tau"] / of_paper - 1}
        rows.append(row)
    return rows
