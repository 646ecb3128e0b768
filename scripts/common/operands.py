"""The matrices that products are measured with."""

import torch

from models.water.geometry import ATOMS, water_cluster
from models.water.overlap import functions_of, overlap

_SCALES = -12, 0  # powers of ten of the rows and columns in "scaled"
_BASIS = "6-31G"  # of "overlap"
DATA = ("decay", "normal", "scaled", "overlap")


def operands(data, n, dtype, device):
    """Both operands of a product.

    Args:
        data: "decay": the paper's algebraic decay, 0.1 / (|i-j|^0.1 + 1), for both operands.
            "normal": two of N(0, 1).
            "scaled": two of N(0, 1) whose rows and columns are scaled by 1e-12 to 1, in a random
            order that is the same along K of both. "overlap": the overlap matrix of a cluster of
            waters, for both. In the last two, entries of one block span many powers of two.
        n: rows and columns.

    Raises:
        ValueError: another name.
    """
    if data not in DATA:
        raise ValueError(f"data must be one of {', '.join(DATA)}; got {data!r}")
    if data in ("decay", "overlap"):
        a = decay_rows(n, 0, n, device) if data == "decay" else _overlap(n, device)
        return a.to(dtype), a.to(dtype, copy=True)
    generator = torch.Generator(device).manual_seed(0)

    def make():
        matrix = torch.randn(n, n, device=device, generator=generator)
        if data == "scaled":
            matrix *= scales[:, None] * scales
        return matrix.to(dtype)

    scales = torch.logspace(*_SCALES, n, device=device)
    scales = scales[torch.randperm(n, device=device, generator=generator)]
    return make(), make()


def _overlap(n, device):
    """The first n rows and columns of the overlap matrix of the smallest cluster that has them."""
    waters = -(-n // sum(functions_of(symbol, _BASIS) for symbol in ATOMS))
    return overlap(water_cluster(waters, seed=0), _BASIS)[:n, :n].to(device)


def decay_rows(n, first, last, device):
    """Rows ``first`` to before ``last`` of n with the paper's algebraic decay, in float32."""
    i = torch.arange(n, device=device, dtype=torch.float32)
    return 0.1 / (i[first:last, None] - i).abs_().pow_(0.1).add_(1)
