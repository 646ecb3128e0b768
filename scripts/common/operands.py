"""The matrices that products are measured with."""

import torch

from models.water.geometry import ATOMS, water_cluster
from models.water.overlap import functions_of, overlap

_RUN = 64  # rows of equal weight in "heavy"

# Each gives a function of the distance from the diagonal, for matrices of n rows.
_DECAYS = {
    "decay": lambda distance, n: 0.1 / (distance.pow_(0.1).add_(1)),
    "exponential": lambda distance, n: distance.mul_(-8 / n).exp_(),
}
_SCALES = -12, 0  # powers of ten of the rows and columns in "scaled"
_BASIS = "6-31G"  # of "overlap"
DATA = (*_DECAYS, "normal", "heavy", "scaled", "overlap")


def operands(data, n, dtype, device):
    """Both operands of a product.

    Args:
        data: "decay": the paper's algebraic decay, 0.1 / (|i-j|^0.1 + 1), for both operands.
            "exponential": exp(-8 |i-j| / n), for both: its length grows with n, so that float16
            holds the corners and every valid ratio can be reached. "normal": two of N(0, 1).
            "heavy": two of N(0, 1) whose runs of 64 rows are scaled by exp(N(0, 1)).
            "scaled": two of N(0, 1) whose rows and columns are scaled by 1e-12 to 1, in a random
            order that is the same along K of both. "overlap": the overlap matrix of a cluster of
            waters, for both. In the last two, entries of one block span many powers of two.
        n: rows and columns.

    Raises:
        ValueError: another name.
    """
    if data not in DATA:
        raise ValueError(f"data must be one of {', '.join(DATA)}; got {data!r}")
    if data in _DECAYS:
        a = decay_rows(data, n, 0, n, device).to(dtype)
        return a, a.clone()
    if data == "overlap":
        a = _overlap(n, device).to(dtype)
        return a, a.clone()
    generator = torch.Generator(device).manual_seed(0)
    randn = lambda *shape: torch.randn(*shape, device=device, generator=generator)  # noqa: E731

    def make():
        matrix = randn(n, n)
        if data == "scaled":
            matrix *= scales[:, None] * scales
        if data == "heavy":
            matrix *= randn(-(-n // _RUN)).exp_().repeat_interleave(_RUN)[:n, None]
        return matrix.to(dtype)

    scales = torch.logspace(*_SCALES, n, device=device)
    scales = scales[torch.randperm(n, device=device, generator=generator)]
    return make(), make()


def _overlap(n, device):
    """The first n rows and columns of the overlap matrix of the smallest cluster that has them."""
    waters = -(-n // sum(functions_of(symbol, _BASIS) for symbol in ATOMS))
    return overlap(water_cluster(waters, seed=0), _BASIS)[:n, :n].to(device)


def decay_rows(data, n, first, last, device):
    """Rows ``first`` to before ``last`` of n with "decay" or "exponential" decay, in float32."""
    i = torch.arange(n, device=device, dtype=torch.float32)
    return _DECAYS[data]((i[first:last, None] - i).abs_(), n)
