"""S and the model of F of large clusters as block-sparse matrices: nothing has N^2 numbers."""

import math

import torch
from torch.nn.functional import pad

from models.water.geometry import ATOMS
from models.water.model import molecule_focks
from models.water.overlap import FAR, near_pairs, pair_overlaps
from spamm_torch.sparse.blocks import Blocks

MATRICES = ("overlap", "fock")
_PAIRS = 1 << 19  # of molecules that are computed at once


def block_sparse(
    cluster,
    basis,
    *,
    block=64,
    drop=1e-9,
    device="cpu",
    matrices=MATRICES,
    molecules=slice(None),
):
    """S and the model of F, without blocks whose entries are all below ``drop``.

    ``molecules``: those whose rows are made, from and to a multiple of the block or the end.
    Returns some ``matrices`` as torch.sparse_bsr, float64, exactly symmetric, padded with zeros.
    """
    atoms = torch.from_numpy(cluster.positions).to(device).view(-1, len(ATOMS), 3)
    far = min(FAR, math.log(1e3 / drop)) if drop else FAR
    each = torch.arange(len(atoms), device=device)
    fock = molecule_focks(cluster, basis).to(device)
    to_fock = torch.linalg.solve(pair_overlaps(atoms, basis, each, each), fock).mT / 2
    functions = fock.shape[1]
    columns = -(-len(atoms) * functions // block)
    neighbours = len(near_pairs(atoms, basis, slice(1), far)[0])
    step = block * max(1, _PAIRS // (block * 2 * neighbours))  # they fill whole block rows
    found = {name: [] for name in matrices}
    first, last, _ = molecules.indices(len(atoms))
    for start in range(first, max(last, first + 1), step):
        i, j = near_pairs(atoms, basis, slice(start, min(start + step, last)), far)
        low, high = torch.minimum(i, j), torch.maximum(i, j)
        values = {"overlap": pair_overlaps(atoms, basis, low, high, far)}
        if "fock" in found:
            s = values["overlap"]
            half = _products(to_fock[low], s) + _products(s, to_fock[high].mT)
            own = (i == j).nonzero()[:, 0]
            half[own] = (half[own] + half[own].mT) / 2
            values["fock"] = half
        turned = (i > j)[:, None, None]
        keys, place = _places(i, j, functions, block, columns)
        for name, parts in found.items():
            pairs = torch.where(turned, values[name].mT, values[name])
            filled = pairs.new_zeros(len(keys), block, block)
            filled.view(-1)[place] = pairs.flatten()
            stays = filled.abs().amax((1, 2)) >= drop
            parts.append((keys[stays], filled[stays]))
    rows = [-(-molecule * functions // block) for molecule in (first, last)]
    return [_joined(found.pop(name), rows, columns) for name in matrices]


def _products(a, b):
    """a @ b of many small matrices; bits do not depend on their places, as ``torch.bmm``'s may."""
    found = torch.zeros_like(b)
    for k in range(b.shape[1]):
        found += a[:, :, k, None] * b[:, None, k]
    return found


def _places(i, j, functions, block, columns):
    """The blocks that pairs of molecules touch, ascending, and the place in them of each entry."""
    row, column = (x[:, None] * functions + torch.arange(functions).to(x) for x in (i, j))
    of_row, of_column = row // block, column // block  # one, or two neighbours
    ends = of_row[:, (0, -1), None] * columns + of_column[:, None, (0, -1)]
    keys, slot = ends.unique(return_inverse=True)
    corner = 2 * (of_row - of_row[:, :1])[:, :, None] + (of_column - of_column[:, :1])[:, None]
    place = slot.flatten(1).gather(1, corner.flatten(1)) * block**2
    within = (row % block * block)[:, :, None] + (column % block)[:, None]
    return keys, (place + within.flatten(1)).flatten()


def _joined(parts, rows, columns):
    keys, values = (torch.cat(x) for x in zip(*parts, strict=True))
    row = keys // columns - rows[0]
    crow = pad(torch.bincount(row, minlength=rows[1] - rows[0]).cumsum(0), (1, 0))
    return Blocks(crow, keys % columns, values, columns).matrix()
