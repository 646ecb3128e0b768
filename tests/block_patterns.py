"""Block-sparse matrices that tests share, and what they should give."""

import reference
import torch

from spamm_torch import sparse


def _arrow(rows, columns, draw):
    stored = torch.eye(max(rows, columns), dtype=torch.bool)[:rows, :columns].clone()
    stored[0] = stored[:, 0] = True
    return stored


def _gaps(rows, columns, draw):
    """Empty rows and columns, the first and the last among them."""
    stored = draw(rows, columns) < 0.6
    stored[::3] = False
    stored[-1] = False
    stored[:, ::4] = False
    return stored


PATTERNS = {
    "random": lambda rows, columns, draw: draw(rows, columns) < 0.4,
    "banded": lambda rows, columns, draw: (
        (torch.arange(rows)[:, None] - torch.arange(columns)).abs() <= 1
    ),
    "arrow": _arrow,
    "gaps": _gaps,
    "one": lambda rows, columns, draw: (
        torch.arange(rows * columns) == rows // 2 * columns + columns // 2
    ).view(rows, columns),
    "full": lambda rows, columns, draw: torch.ones(rows, columns, dtype=torch.bool),
    "none": lambda rows, columns, draw: torch.zeros(rows, columns, dtype=torch.bool),
}


def matrix(
    pattern, rows, columns, edge, dtype=torch.float64, *, seed=0, index=torch.int64, device="cpu"
):
    """So many block rows and columns; blocks of norms from about 1e-3 to 1 times their size."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    stored = PATTERNS[pattern](rows, columns, draw)
    values = draw(int(stored.sum()), edge, edge) - 0.5
    values *= 10.0 ** (-3 * draw(len(values), 1, 1))
    return of_blocks(stored, values.to(dtype), index).to(device)


def of_blocks(stored, values, index=torch.int64):
    """The matrix with these values in the places of a mask, row by row."""
    crow = torch.nn.functional.pad(stored.sum(1).cumsum(0), (1, 0)).to(index)
    col = stored.nonzero()[:, 1].to(index)
    edge = values.shape[-1]
    size = tuple(edge * n for n in stored.shape)
    return torch.sparse_bsr_tensor(crow, col, values, size=size, check_invariants=True)


def symmetric(a):
    return sparse.add(a, sparse.transpose(a))


def stored_in(a, edge=None):
    """A mask of the stored blocks, from a matrix or a norm map."""
    rows, columns = (n // (edge or 1) for n in a.shape)
    mask = torch.zeros(rows, columns, dtype=torch.bool)
    row = torch.arange(rows).repeat_interleave(a.crow_indices().cpu().diff().long())
    mask[row, a.col_indices().cpu().long()] = True
    return mask


def kept(a, b, norm_a, norm_b, tau):
    """(MB, KB, NB): which products of stored blocks are valid, by the oracle."""
    decided = reference.kept(norm_a.to_dense().cpu(), norm_b.to_dense().cpu(), tau)
    both = stored_in(norm_a)[:, :, None] & stored_in(norm_b)[None]
    return decided & both.numpy()


def quantile(norm_a, norm_b, share):
    """A threshold that skips about this share of the products of stored blocks."""
    products = norm_a.to_dense()[:, :, None] * norm_b.to_dense()[None]
    values = products[products > 0]
    return values.quantile(share).item() if len(values) else 1.0
