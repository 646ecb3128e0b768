"""The error of any product, estimated by random probes (docs/error_bound.md)."""

import math

import torch
from torch import Tensor

from ._arguments import check_integer, check_number, check_tensor
from ._rounding import norm
from .sparse.blocks import is_sparse, read


def error_estimate(
    c: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    input: Tensor | None = None,
    beta: float = 1,
    alpha: float = 1,
    probes: int = 20,
    confidence: float = 0.999,
    generator: torch.Generator | None = None,
) -> Tensor:
    """A number that norm(c - (alpha * a @ b + beta * input)) is probably at most: no proven bound.

    Method: the norm of the error times random normal vectors, in float64, over what it is at least
    with this confidence, whatever the error (docs/error_bound.md). With 20 probes and 99.9% it is
    about twice the error. It costs 3 products with a matrix of as many columns as probes.

    Args:
        c: (M, N), the result, however it was computed. a, b: (M, K) and (K, N). Each dense or
            block-sparse.
        input, beta, alpha: as of :func:`addmm`.
        probes: at least 1; more make it tighter. confidence: in (0, 1).
        generator: of the random numbers, on c's device.

    Returns:
        0-d float64 on c's device. Its own rounding, some 1e-15 of the norms, is not in it: of
        float64 products it shows what skipping loses, not what rounding does.

    Raises:
        ValueError: no probes, or a confidence out of range. TypeError, RuntimeError: no dense or
        block-sparse matrices, or shapes that do not fit.
    """
    check_integer(probes, "probes")
    check_number(confidence, "confidence")
    if probes < 1 or not 0 < confidence < 1:
        raise ValueError(
            "expected at least 1 of probes and a confidence between 0 and 1; got "
            f"{probes} and {confidence}"
        )
    names = {"c": c, "a": a, "b": b} | ({} if input is None else {"input": input})
    for name, x in names.items():
        if is_sparse(x):
            read(x, name, "error_estimate")
        else:
            check_tensor(x, name)
    shapes = [tuple(x.shape) for x in (c, a, b)]
    if any(len(s) != 2 for s in shapes) or shapes[0] != (shapes[1][0], shapes[2][1]):
        raise RuntimeError(f"expected c (M, N), a (M, K) and b (K, N); got shapes {shapes}")
    if input is not None and is_sparse(input) and input.shape != c.shape:
        raise RuntimeError(
            f"a block-sparse input must have c's shape {shapes[0]}; got {tuple(input.shape)}"
        )
    with torch.no_grad():
        options = {"dtype": torch.float64, "device": c.device, "generator": generator}
        x = torch.randn(c.shape[1], probes, **options)
        error = _times(c, x) - alpha * _times(a, _times(b, x))
        if input is not None and beta != 0:
            error -= beta * _times(input if is_sparse(input) else input.expand(c.shape), x)
        # The mean square is below t times the error's with a probability of at most
        # (t exp(1 - t))^(probes / 2).
        share, t = (1 - confidence) ** (2 / probes), 0.0
        for _ in range(200):
            t = share * math.exp(t - 1)
        return norm(error) / math.sqrt(probes * t)


def _times(a: Tensor, x: Tensor) -> Tensor:
    """a @ x in float64, without a copy of all of a."""
    if is_sparse(a):
        blocks = read(a, "a", "error_estimate")
        found = x.new_zeros(blocks.rows, blocks.edge, x.shape[1])
        pieces = x.view(blocks.columns, blocks.edge, x.shape[1])
        whole = blocks.row_of(), blocks.col.long(), blocks.values
        for row, column, values in zip(*(of.split(1024) for of in whole), strict=True):
            # Adds up in order.
            found.index_put_((row,), values.double() @ pieces[column], accumulate=True)
        return found.flatten(0, 1)
    parts = [part.double() @ x for part in a.split(4096)]
    return torch.cat(parts) if parts else x.new_zeros(0, x.shape[1])
