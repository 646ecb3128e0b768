"""The functions of spamm_torch, on tensors.

With blocks (m, k, n), A (M x K) cut m x k and B (K x N) cut k x n, both padded with zeros,

    C[i,j] = sum over k of A[i,k] @ B[k,j]  where not (norm_a[i,k] * norm_b[k,j] < tau).

Method: SpAMM (Challacombe and Bock, 2010) in the flat form of the cuSpAMM paper ("Accelerating
Sparse Approximate Matrix Multiplication on GPUs").

Common to all functions:

* Operands are float16, bfloat16, float32 or float64, on the CPU or a CUDA device, of any size and
  strides, all of one dtype and on one device. Norms are float32 (float64 for float64 operands).
* On CUDA, float32 products have float32's accuracy, unless PyTorch is allowed to use TF32 for its
  own (``torch.backends.cuda.matmul.fp32_precision``): then operands are rounded to eleven bits.
* Exactly one *knob* says what is skipped, in all batches or groups of the call together:

  ``tau``
      Skip each block product whose two norms multiply to less than this. A float, or a 0-d tensor
      on the operands' device or the CPU that requires no gradient; on the device it is never read
      on the host. tau <= 0 skips nothing, inf all but products of NaN or Inf. A NaN is refused as a
      float; in a tensor, whose value is not looked at, it skips nothing.
  ``valid_ratio``
      Share of block products to keep, in (0, 1], met as nearly as whole block products and ties
      allow: with few blocks the nearest may be none of them, and the result zero (the first time
      a line on standard error says so). The threshold is searched for in each call, on the device.
  ``max_error``
      Bound >= 0 of the Frobenius norm of the error from skipping, relative to norm(A) * norm(B);
      inf skips all. Searched for likewise. For an absolute bound e,
      ``max_error = e / (norm_map(a).norm() * norm_map(b).norm()).item()``.
* A ``block`` is 32, 64 or 128, or a triple (m, k, n) of these.
* Norm maps, ``norm_a`` (..., MB, KB) and ``norm_b`` (..., KB, NB), are as from :func:`norm_map`, of
  one dtype, device and batch. Norms are >= 0; that is not checked, which would wait for the device.
  A product with a NaN or infinite norm is never skipped.
* ``devices`` are CUDA devices that may share the work, as numbers or ``torch.device``, distinct.
  Where one of them is faster alone, it works alone. The result lies where the first operand lies
  and, if they are of one model, has the bits of one.
* ``return_info=True`` adds a :class:`SkipInfo` of the same norm maps. It costs the counts and the
  bound of the maps, and a second search.
* Gradients are dense: those of the product without skipping. They can be differentiated again;
  forward mode and ``torch.func.grad`` are refused.
* Under ``torch.compile`` a ``tau`` may change freely: a 0-d tensor needs one graph, a float two.
  Each new ``valid_ratio`` or ``max_error`` compiles again.
* Errors are one line, with what was expected and the value got. ValueError: none or several knobs,
  a knob out of range, a block of other sizes. TypeError: a dtype that is not supported, operands of
  two dtypes, no dense tensor, no number, no bool. RuntimeError: shapes or devices that do not fit,
  a ``tau`` that requires a gradient.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad as _pad
from torch.nn.modules.utils import _pair

from ._arguments import (
    as_activation,
    as_devices,
    as_knobs,
    as_tau,
    check_block,
    check_block_pair,
    check_bool,
    check_integer,
    check_integers,
    check_number,
    check_optional_tensor,
    check_pixel_block,
    check_search,
    check_tensor,
    check_tensors,
    has_tau,
    holds_dtensor,
    is_threshold,
    norm_dtype,
)
from ._info import (
    NormMaps,
    SkipInfo,
    as_multiplied,
    conv2d_norm_maps,
    share_of_valid,
    skip_info,
)
from .sparse import maps, products
from .sparse.blocks import is_sparse

# Called by their only overload, ``default``, and without names of arguments: to look for others
# takes the host two microseconds, for a name a tenth.
_ops = torch.ops.spamm_torch
_spamm, _spamm_with_norms = _ops.spamm.default, _ops.spamm_with_norms.default
_conv2d, _conv2d_with_norms = _ops.conv2d.default, _ops.conv2d_with_norms.default


# ---- Norm maps and thresholds -------------------------------------------------------------------


def norm_map(a: Tensor, block: int | Sequence[int] = 64) -> Tensor:
    """Frobenius norms of the blocks of a matrix.

    Args:
        a: (..., M, K), leading batch dimensions allowed; or ``torch.sparse_bsr`` with one square
            block, whose norm map is ``torch.sparse_csr``, which the functions of norm maps take.
        block: 32, 64 or 128, or a pair (rows, columns) of these.

    Returns:
        (..., ceil(M / rows), ceil(K / columns)) norms on the matrix's device, right to 1e-5
        relative over the whole range of the dtype: nothing vanishes, nothing overflows before the
        norm itself does. Without a gradient.

    Example:
        >>> norm_map(torch.ones(128, 128), 64)
        tensor([[64., 64.],
                [64., 64.]])
    """
    if is_sparse(a):
        return maps.norm_map(a, block)
    check_tensor(a, "a")
    return _ops.norm_map.default(a, check_block_pair(block))


def find_tau(
    norm_a: Tensor,
    norm_b: Tensor,
    valid_ratio: float | None = None,
    *,
    max_error: float | None = None,
    max_iterations: int = 20,
    tolerance: float = 0.01,
) -> Tensor:
    """The threshold that keeps a given share of the block products, or bounds the error.

    Args:
        norm_a, norm_b: the norm maps.
        valid_ratio, max_error: exactly one of these knobs. The ratio reached is the nearest that
            ties allow, the larger at equal distance. For an error it is the largest threshold whose
            :func:`error_bound` is at most ``max_error * norm(A) * norm(B)``.
        max_iterations, tolerance: the paper's limit of its search, > 0, and its tolerated error of
            the ratio, >= 0. The search here is exact, and so satisfies all of them.

    Returns:
        0-d tensor of the norms' dtype on their device, in units of a product of two norms, found
        without host synchronisation.

    Example:
        >>> norms = norm_map(a)
        >>> tau = find_tau(norms, norms, 0.25)
        >>> print(f"{valid_ratio(norms, norms, tau):.0%} are kept")
        25% are kept
    """
    of_blocks = is_sparse(norm_a, norm_b)
    if not of_blocks:
        _check_norm_maps(norm_a, norm_b)
    check_search(valid_ratio, max_error, max_iterations, tolerance)
    if of_blocks:
        return maps.find_tau(*maps.of_maps("find_tau", norm_a, norm_b), valid_ratio, max_error)
    limits = {"max_iterations": max_iterations, "tolerance": tolerance}
    return _ops.find_tau(norm_a, norm_b, valid_ratio, max_error=max_error, **limits)


def valid_counts(norm_a: Tensor, norm_b: Tensor, tau: float | Tensor) -> Tensor:
    """The paper's V: for each block of C, the number of k whose product is valid.

    Args:
        norm_a, norm_b: the norm maps.
        tau: the threshold, as the knob.

    Returns:
        int32, (..., MB, NB), each from 0 to KB.
    """
    return _of_maps(valid_counts, norm_a, norm_b, tau)


def valid_ratio(norm_a: Tensor, norm_b: Tensor, tau: float | Tensor) -> Tensor:
    """The share of block products that are valid: sum(V) / number of block products.

    Args:
        norm_a, norm_b, tau: as :func:`valid_counts`.

    Returns:
        0-d tensor of the norms' dtype on their device, from 0 to 1; 1 for empty maps.
    """
    return _of_maps(valid_ratio, norm_a, norm_b, tau)


def error_bound(norm_a: Tensor, norm_b: Tensor, tau: float | Tensor) -> Tensor:
    """A proven bound of the Frobenius norm of what skipping loses.

    Args:
        norm_a, norm_b, tau: as :func:`valid_counts`.

    Returns:
        0-d tensor of the norms' dtype on their device, absolute, in the units of C: sqrt(sum over
        (i,j) of (sum over skipped k of norm_a[i,k] * norm_b[k,j])^2), rounded up; the rounding of
        the norms themselves is in it. Follows from the triangle inequality in each block of C and
        the submultiplicativity of the Frobenius norm.

    Example:
        >>> norms = norm_map(a)
        >>> bound = error_bound(norms, norms, 0.1)
        >>> bool((mm(a, a, tau=0.1) - a @ a).norm() <= bound)
        True
    """
    return _of_maps(error_bound, norm_a, norm_b, tau)


def _of_maps(function: Callable[..., Tensor], norm_a: Tensor, norm_b: Tensor, tau: Any) -> Tensor:
    """The result of a function of norm maps, by the op of its name if there is one."""
    if is_sparse(norm_a, norm_b):
        name, threshold = function.__name__, as_tau(tau)
        return getattr(maps, name)(*maps.of_maps(name, norm_a, norm_b), threshold)
    _check_norm_maps(norm_a, norm_b)
    op = share_of_valid if function is valid_ratio else getattr(_ops, function.__name__)
    return op(norm_a, norm_b, as_tau(tau))


def _check_norm_maps(norm_a: Tensor, norm_b: Tensor) -> None:
    check_tensor(norm_a, "norm_a")
    check_tensor(norm_b, "norm_b")


# ---- Products -----------------------------------------------------------------------------------


def _check_matrices(name: str, a: Tensor, b: Tensor, dims: int = 2) -> None:
    check_tensor(a, "a")
    check_tensor(b, "b")
    if a.dim() != dims or b.dim() != dims:
        hint = _HINTS.get((name, a.dim(), b.dim()), "")
        raise RuntimeError(
            f"{name} expects two {'batches of ' * (dims - 2)}matrices ({dims}-d); got shapes "
            f"{tuple(a.shape)} and {tuple(b.shape)}{hint}"
        )


_ONE_B = "; with one b for all batches use mm(a.flatten(0, 1), b)"
_HINTS = {
    ("mm", 3, 3): "; for batches use bmm",
    ("mm", 3, 2): _ONE_B,
    ("bmm", 3, 2): _ONE_B,
    ("mm", 2, 1): "; for a vector use mm(a, b[:, None])[:, 0]",
}


def _product(
    a: Tensor,
    b: Tensor,
    knobs: tuple[Any, Any, Any],
    block: Any,
    norm_a: Tensor | None = None,
    norm_b: Tensor | None = None,
    addition: tuple[Tensor | None, float, float] = (None, 1, 1),
    devices: list[int] | None = None,
    symmetric: bool = False,
    return_norms: bool = False,
    return_info: bool = False,
    out: Tensor | None = None,
) -> Any:
    """The product, then its norm map, then its info. ``addition``: input, beta and alpha."""
    if return_norms is not False or return_info is not False or symmetric is not False:
        _check_flags(return_norms, return_info, symmetric)
    if norm_a is not None:
        check_tensor(norm_a, "norm_a")
    if norm_b is not None:
        check_tensor(norm_b, "norm_b")
    knob, edges = as_knobs(*knobs), check_block(block)
    info: SkipInfo | None = None
    if return_info:  # of the same norm maps, and first: out may share memory with what it reads
        m, k, n = edges
        # With out, autocast does not change the operands.
        of_a, of_b = (as_multiplied(x) if out is None else x.detach() for x in (a, b))
        is_one = norm_a is None and a is b and m == k == n
        norm_a = _ops.norm_map(of_a, (m, k)) if norm_a is None else norm_a
        if norm_b is None:
            norm_b = norm_a if is_one else _ops.norm_map(of_b, (k, n))
        info = skip_info(NormMaps(norm_a, norm_b, norm_b, edges), knob)
    given = (*knob.values(), edges, norm_a, norm_b, *addition, devices, symmetric)
    if out is not None:
        result = _product_into(out, a, b, given, return_norms)
    else:
        result = (_spamm_with_norms if return_norms else _spamm)(a, b, *given)
    if info is None:
        return result
    return (*result, info) if return_norms else (result, info)


def _product_into(out: Tensor, a: Tensor, b: Tensor, given: Any, return_norms: bool) -> Any:
    shape, (m, _, n) = (a.shape[0], b.shape[1]), given[4]
    # Resized last, so that an error leaves it as it was.
    target = out if out.numel() > 0 or out.shape == shape else out.new_empty(shape)
    norms = None
    if return_norms:
        blocks = -(-shape[0] // m), -(-shape[1] // n)
        norms = target.new_empty(blocks, dtype=norm_dtype(out.dtype))
    _ops.spamm_into.default(a, b, *given, out=target, norms=norms)
    if target is not out:
        out.resize_(shape).copy_(target)
    return (out, norms) if return_norms else out


def _check_out(out: Tensor) -> None:
    """Raises unless ``out`` is a tensor that can be written to; the op checks the rest."""
    check_tensor(out, "out")
    if not torch.compiler.is_compiling() and out.is_neg():
        raise RuntimeError("out must not be a negative view (out.resolve_neg() is none); got one")


def mm(
    a: Tensor,
    b: Tensor,
    *,
    tau: float | Tensor | None = None,
    valid_ratio: float | None = None,
    max_error: float | None = None,
    block: int | Sequence[int] = 64,
    norm_a: Tensor | None = None,
    norm_b: Tensor | None = None,
    devices: Sequence[int | str | torch.device] | None = None,
    symmetric: bool = False,
    return_norms: bool = False,
    return_info: bool = False,
    out: Tensor | None = None,
    drop: float | None = None,
    plan: Any = None,
) -> Any:
    """Approximate ``torch.mm``.

    Args:
        a, b: (M, K) and (K, N).
        tau, valid_ratio, max_error, block: the knob; A is cut m x k, B k x n.
        norm_a, norm_b: norm maps to use for ``norm_map(a, (m, k))`` and ``norm_map(b, (k, n))``:
            their entries decide what is skipped. Without them one map serves both where ``a`` and
            ``b`` are one matrix, cut alike.
        devices: see below. The host waits once for the norms.
        symmetric: say that a @ b is symmetric: ``a`` is ``b`` and symmetric, or both are symmetric
            and commute. This is not checked. Only blocks on and above the diagonal are computed
            (all with ``devices`` and by CUDA's portable kernels) and mirrored. The block's m must
            be its n. Knobs, :class:`SkipInfo` and gradients speak of the whole product; of two
            matrices that commute the error may be sqrt(2) times the bound, and where ``a`` is ``b``
            products at the very threshold may differ from their mirror images.
        return_norms: add the norm map ``norm_map(c, (m, n))`` of c, bit for bit, without a
            gradient.
        return_info: add a :class:`SkipInfo`.
        out: a tensor that takes the result, of its dtype, device and shape (or without elements:
            then it is resized). It may share memory with any other tensor of the call.
            As in torch, this has no gradient, and autocast does not change the operands.
        drop: of block-sparse matrices: leave out blocks of the result whose norm is below this.
        plan: of block-sparse matrices: a plan of :func:`spamm_torch.sparse.plan`, for a knob.

    Block-sparse matrices, ``torch.sparse_bsr`` with one square block, give a block-sparse result,
    and one beside a dense matrix a dense one; norm maps are ``torch.sparse_csr``. See
    docs/block_sparse.md, which also says how ``max_error`` covers ``drop``.

    Returns:
        (M, N), of the operands' dtype: ``out`` if that is given. With ``return_norms`` or
        ``return_info`` a tuple: the product, then its norms, then the :class:`SkipInfo`.

    Raises, besides what is common to all:
        ValueError: a block that ``symmetric`` refuses, ``devices`` that are none, repeated or
            absent.
        RuntimeError: with ``out`` any tensor that requires a gradient, or with ``devices`` a stream
            that is being captured in a CUDA graph.
        torch.OutOfMemoryError: with ``devices``; for operands on the CPU it names the device and
            the bytes it would need.

    With ``devices``, operands on the CPU may be larger than the memory of the GPUs; a ``tau`` is on
    the CPU, too, and the result in pinned memory, complete when the call returns. docs/scaling.md
    has the memory that they need; :func:`mm_shards` takes operands that lie on several devices.

    Example:
        >>> i = torch.arange(512)
        >>> a = 0.9 ** (i[:, None] - i).abs()  # decays away from its diagonal
        >>> c, info = mm(a, a, max_error=1e-6, return_info=True)
        >>> print(f"{info.valid_ratio:.0%} of the products, error at most {info.error_bound:.0e}")
        25% of the products, error at most 1e-03
    """
    # The usual operands, without the cost of the others.
    plain = type(a) is type(b) is Tensor and a.layout is b.layout is torch.strided
    if not plain and is_sparse(a, b):
        return _of_blocks("mm", locals())
    if drop is not None or plan is not None:
        _refuse_sparse_arguments(drop)
    if not plain and holds_dtensor(a, b):
        knob, options = _knob_and_options(locals())
        from .distributed import dtensor  # not at the top: it takes half a second

        return dtensor.mm(a, b, knob, **options)
    if not plain or a.is_nested or b.is_nested or a.dim() != 2 or b.dim() != 2:
        _check_matrices("mm", a, b)
    if out is not None:
        _check_out(out)
    if (  # the usual call, without the cost of the others
        symmetric is return_norms is return_info is False
        and norm_a is norm_b is out is devices is None
        and type(block) is int
        and block == 64
        and is_threshold(tau, valid_ratio, max_error)
    ):
        return _spamm(a, b, None, tau)
    numbers = None if devices is None else as_devices(devices)
    knobs = (tau, valid_ratio, max_error)
    results = (return_norms, return_info, out)
    return _product(a, b, knobs, block, norm_a, norm_b, (None, 1, 1), numbers, symmetric, *results)


def _of_blocks(name: str, given: dict[str, Any]) -> Any:
    """mm or addmm where an operand is block-sparse; ``given``: its locals."""
    knob, options = _knob_and_options(given)
    return products.product(name, given["a"], given["b"], knob, **options)


def _knob_and_options(given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    _check_flags(given["return_norms"], given["return_info"], given["symmetric"])
    knob = {name: given[name] for name in ("tau", "valid_ratio", "max_error")}
    taken = {"a", "b", "plain", *knob}
    return knob, {name: value for name, value in given.items() if name not in taken}


def _refuse_sparse_arguments(drop: Any) -> None:
    """TypeError for arguments that block-sparse matrices alone have."""
    name = "plan" if drop is None else "drop"
    raise TypeError(f"{name} is for sparse_bsr operands; got dense ones")


def _check_flags(return_norms: Any, return_info: Any, symmetric: Any) -> None:
    check_bool(return_norms, "return_norms")
    check_bool(return_info, "return_info")
    check_bool(symmetric, "symmetric")


def mm_shards(
    a_shards: Sequence[Tensor],
    b_shards: Sequence[Tensor],
    *,
    tau: float | Tensor | None = None,
    valid_ratio: float | None = None,
    max_error: float | None = None,
    block: int | Sequence[int] = 64,
) -> list[Tensor]:
    """:func:`mm` of operands whose rows lie on several devices.

    ``c0, c1 = mm_shards([a0, a1], [b0, b1], tau=tau)`` on two devices. Method: as sparsity-aware
    products of sparse matrices (Hong and Buluc, arXiv 2408.14558, 2024): a device fetches only the
    blocks of B that have a valid block product with its rows of A (docs/kernels/shards.md).

    Args:
        a_shards: the rows of A (M, K) in order, a matrix (rows, K) for each part. Each but the last
            has a multiple of the block's m rows; a shard may be empty. Several may lie on one
            device; all on CUDA devices, or all on the CPU. :func:`row_cuts` cuts by work.
        b_shards: as many, each on the device of the A shard in the same place: the rows of B (K, N)
            in order, cut at multiples of the block's k, or in every place the whole of B.
        tau, valid_ratio, max_error, block: the knob, of the whole product.

    Returns:
        The rows of C: a matrix (rows, N) beside each shard of A. They have the bits of ``mm`` on
        one device, if the devices are of one model. Gradients are dense; where one is needed, each
        device keeps the whole of B.

    Runs on the current stream of each device, which also waits for what other devices read of its
    shards: the caller may free or overwrite them at once. The host waits once for the norms, but
    not if B is whole everywhere.

    Raises, besides what is common to all:
        ValueError: lists of different lengths or empty ones.
        RuntimeError: cuts that do not fit, or a stream that is being captured in a CUDA graph.
        torch.OutOfMemoryError: names the device and what its stages of B need, in bytes.
    """
    check_tensors(a_shards, "a_shards")
    check_tensors(b_shards, "b_shards")
    knobs, edges = as_knobs(tau, valid_ratio, max_error), check_block(block)
    return _ops.spamm_shards(list(a_shards), list(b_shards), **knobs, block=edges)


def addmm(
    input: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
    tau: float | Tensor | None = None,
    valid_ratio: float | None = None,
    max_error: float | None = None,
    block: int | Sequence[int] = 64,
    norm_a: Tensor | None = None,
    norm_b: Tensor | None = None,
    symmetric: bool = False,
    return_norms: bool = False,
    return_info: bool = False,
    out: Tensor | None = None,
    drop: float | None = None,
    plan: Any = None,
) -> Any:
    """Approximate ``torch.addmm``: beta * input + alpha * (a @ b).

    Args:
        input: broadcastable to (M, N), of the operands' dtype; ignored, NaN included, if beta is 0.
            With ``symmetric`` it is symmetric, too, or one number.
        a, b: (M, K) and (K, N).
        beta, alpha: factors of ``input`` and of the product, real numbers.
        tau, valid_ratio, max_error, block: the knob, of the product a @ b alone.
        norm_a, norm_b, symmetric, return_norms, return_info, drop, plan: as :func:`mm`.
        out: as :func:`mm`: X = 2 X - X @ X in place is
            ``addmm(x, x, x, beta=2, alpha=-1, out=x, tau=tau)``.

    Returns, raises: as :func:`mm`.

    Example:
        >>> c = addmm(a, a, a, beta=2, alpha=-1, tau=1e-3)  # 2 A - A A
        >>> print(f"{(c - (2 * a - a @ a)).norm():.0e}")
        5e-04
    """
    if holds_dtensor(input, a, b):
        raise TypeError("addmm takes no DTensor, unlike mm; got one")
    if is_sparse(input, a, b):
        check_number(beta, "beta")
        check_number(alpha, "alpha")
        return _of_blocks("addmm", locals())
    if drop is not None or plan is not None:
        _refuse_sparse_arguments(drop)
    _check_matrices("addmm", a, b)
    check_tensor(input, "input")
    check_number(beta, "beta")
    check_number(alpha, "alpha")
    if out is not None:
        _check_out(out)
    knobs, addition = (tau, valid_ratio, max_error), (input, beta, alpha)
    results = (return_norms, return_info, out)
    return _product(a, b, knobs, block, norm_a, norm_b, addition, None, symmetric, *results)


def bmm(
    a: Tensor,
    b: Tensor,
    *,
    tau: float | Tensor | None = None,
    valid_ratio: float | None = None,
    max_error: float | None = None,
    block: int | Sequence[int] = 64,
    return_info: bool = False,
) -> Any:
    """Approximate ``torch.bmm``, in one launch.

    Args:
        a, b: (batch, M, K) and (batch, K, N).
        tau, valid_ratio, max_error, block, return_info: as common to all.

    Returns:
        (batch, M, N), of the operands' dtype.

    Example:
        >>> bmm(torch.stack([a, a / 2]), torch.stack([a, a]), valid_ratio=0.3).shape
        torch.Size([2, 512, 512])
    """
    _check_matrices("bmm", a, b, 3)
    return _product(a, b, (tau, valid_ratio, max_error), block, return_info=return_info)


def linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    tau: float | Tensor | None = None,
    valid_ratio: float | None = None,
    max_error: float | None = None,
    block: int | Sequence[int] = 64,
    norm_weight: Tensor | None = None,
    return_info: bool = False,
) -> Any:
    """Approximate ``torch.nn.functional.linear``: A is the rows of input, B is weight.T.

    Args:
        input, weight, bias: (..., in_features), (out_features, in_features), and (out_features,) or
            None.
        tau, valid_ratio, max_error, return_info: as common to all.
        block: m is for rows, k for in_features, n for out_features.
        norm_weight: to use instead of computing ``norm_map(weight.t(), (k, n))``.

    Returns:
        (..., out_features), of the operands' dtype.

    Example:
        >>> linear(a, torch.eye(512)[:10], torch.zeros(10), valid_ratio=0.5).shape
        torch.Size([512, 10])
    """
    check_tensor(input, "input")
    check_tensor(weight, "weight")
    check_optional_tensor(bias, "bias")
    check_optional_tensor(norm_weight, "norm_weight")
    if input.dim() < 1 or weight.dim() != 2 or input.shape[-1] != weight.shape[1]:
        raise RuntimeError(
            "linear expects input (..., in_features) and weight (out_features, in_features); got "
            f"shapes {tuple(input.shape)} and {tuple(weight.shape)}"
        )
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise RuntimeError(
            f"bias must have shape ({weight.shape[0]},) for a weight of shape "
            f"{tuple(weight.shape)}; got {tuple(bias.shape)}"
        )
    rows = input.unsqueeze(0) if input.dim() == 1 else input.flatten(0, -2)
    columns, shape = weight.t(), (*input.shape[:-1], weight.shape[0])
    if holds_dtensor(input, weight):
        from .distributed import dtensor  # not at the top: it takes half a second

        refused = {"norm_weight": norm_weight, "return_info": return_info}
        knob = {"tau": tau, "valid_ratio": valid_ratio, "max_error": max_error}
        product = dtensor.mm(rows, columns, knob, block, **refused)
        return (product if bias is None else product + bias).reshape(shape)
    knobs, addition = (tau, valid_ratio, max_error), (bias, 1, 1)
    try:
        product = _product(
            rows, columns, knobs, block, None, norm_weight, addition, return_info=return_info
        )
    except (TypeError, RuntimeError) as error:
        named = _OF_LINEAR.sub(lambda name: _LINEAR_NAMES[name[0]], str(error), count=1)
        raise type(error)(named) from None
    if return_info:
        return product[0].reshape(shape), product[1]
    return product.reshape(shape)


# The names of linear's arguments, by those of the product at the start of a message.
_LINEAR_NAMES = {
    "a and b": "input and weight",
    "a": "input",
    "b": "weight",
    "input and a": "bias and input",
    "input": "bias",
    "norm_b": "norm_weight",
}
_OF_LINEAR = re.compile(rf"^(?:{'|'.join(sorted(_LINEAR_NAMES, key=len, reverse=True))})(?= must )")


# ---- Convolution --------------------------------------------------------------------------------


def _both(setting: int | Sequence[int]) -> tuple[int, int]:
    """One number, alone or in a tuple, as a pair."""
    pair = _pair(setting)
    first, *_, last = (*pair, *pair) if len(pair) == 1 else pair
    return first, last


def _explicit_padding(
    input: Tensor,
    weight: Tensor,
    stride: tuple[int, int],
    padding: str,
    dilation: tuple[int, int],
) -> tuple[Tensor, tuple[int, int]]:
    """Resolves string padding as torch does: "same" pads an odd rest on the right and bottom."""
    if padding == "valid":
        return input, (0, 0)
    if padding != "same":
        raise ValueError(f"padding must be 'valid', 'same', an int or a pair; got {padding!r}")
    if any(s != 1 for s in stride):
        raise RuntimeError(f"padding='same' needs stride 1; got stride {tuple(stride)}")
    total = [d * (k - 1) for d, k in zip(dilation, weight.shape[-2:], strict=True)]
    before = (total[0] // 2, total[1] // 2)
    rest_h, rest_w = (t % 2 for t in total)
    if rest_h or rest_w:
        input = _pad(input, (0, rest_w, 0, rest_h))
    return input, before


def conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    *,
    tau: float | Tensor | None = None,
    valid_ratio: float | None = None,
    max_error: float | None = None,
    block: int | Sequence[int] | None = None,
    pixel_block: Sequence[int] | None = None,
    norm_weight: Tensor | None = None,
    norm_input: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
    slope: float | Tensor | None = None,
    relu: bool = False,
    return_norms: bool = False,
    return_info: bool = False,
) -> Any:
    """Approximate ``torch.nn.functional.conv2d``, as weight matrix (A) times im2col matrix (B).

    The result is activation(convolution + bias + residual). M = out channels, K = (kh, kw, in
    channels) with each (kh, kw) padded to a multiple of the block's k, N = output pixels of all
    images, tiled by pixel blocks.

    Args:
        input: (N, C, H, W) or (C, H, W).
        weight, bias: (out_channels, C / groups, kh, kw), and (out_channels,) or None.
        stride, padding, dilation, groups: as torch's, string padding included.
        tau, valid_ratio, max_error: the knob.
        block: None picks m = 32 if out_channels / groups <= 32, else 64; k = 32 if in_channels /
            groups <= 32, else 64; n = 64, or the size of pixel_block.
        pixel_block: (images, rows, columns), powers of two whose product is the block's n. None
            with a tau is (n, 1, 1) for every batch, so that a tau means the same for all; a block
            that the batch does not fill is skipped as if it were full. None with valid_ratio or
            max_error takes as many images as fit and splits the rest evenly with columns >= rows:
            (64, 1, 1) from 64 images on, (1, 8, 8) for one. With more than one image in a block,
            what is skipped for an image depends on its batch; with (1, r, c) each image's result
            under a tau is bitwise independent of the others.
        norm_weight: to use instead of ``torch.ops.spamm_torch.conv2d_weight_norm``.
        norm_input: the input's norms as ``return_norms`` of the layer right before gave them: used
            where pixel_block is (64, 1, 1), k is 64 and no im2col matrix is needed; else computed.
        residual: added to the result before the activation: of the output's shape, dtype and
            device, in any memory format (the output's is read fastest). Its gradient is dense.
        activation: what is applied last: "relu", "relu6", "hardswish", "silu", "leaky_relu", or
            "none" as None. NaN stays NaN. Where the device's kernel computes bias, residual and
            activation, they are rounded once; elsewhere each is a pass of its own.
        slope: what "leaky_relu" multiplies numbers below zero by, 0.01 by default: a number, or as
            ``nn.PReLU`` has it a tensor of one or of (out_channels,), of the weight's dtype or
            float32. Tensors have a gradient.
        relu: True is activation="relu".
        return_norms: add the output's norms as norm_input of the next layer, without a gradient, of
            shape (ceil(N / 64), output height, output width, ceil(out_channels / 64)).
        return_info: for measurements: norm maps are computed apart, a pass over the input for each
            kernel position, and a product within 1e-5 of tau may count on its other side.

    Returns:
        The output of the convolution, (N, out_channels, height, width) or without N, of the
        operands' dtype, in the input's memory format. The backward pass is dense.

    Raises, besides what is common to all:
        ValueError: a pixel_block of other sizes, another string as padding, another activation or
            one with ``relu=True``, a slope of another activation than "leaky_relu".

    With a float ``tau`` <= 0, or such a 0-d tensor on the CPU, nothing is skipped, so the fastest
    engine serves: with groups torch's own dense convolution, else that or our kernels, by sizes,
    dtype and device alone (:func:`backend_for` names it). A ``pixel_block`` of one image
    keeps our kernels, for torch's do not promise that an image does not depend on its batch.

    On CUDA no im2col matrix is in memory, but for what docs/kernels/conv.md names; channels-last
    tensors with a multiple of 16 bytes of channels are not copied.

    Example:
        >>> images, weight = torch.rand(64, 32, 8, 8), torch.randn(64, 32, 3, 3)
        >>> c, info = conv2d(images, weight, padding=1, valid_ratio=0.6, return_info=True)
        >>> again = conv2d(images, weight, padding=1, tau=info.tau, pixel_block=info.pixel_block)
        >>> torch.equal(again, c)  # a tau belongs to its pixel block
        True
    """
    check_tensor(input, "input")
    check_tensor(weight, "weight")
    if bias is not None:
        check_tensor(bias, "bias")
    if norm_weight is not None:
        check_tensor(norm_weight, "norm_weight")
    check_integers(stride, "stride")
    check_integers(dilation, "dilation")
    check_integer(groups, "groups")
    if isinstance(padding, str):
        input, padding = _explicit_padding(input, weight, _both(stride), padding, _both(dilation))
    else:
        check_integers(padding, "padding")
    given = (input, weight, bias, stride, padding, dilation, groups)
    if (  # the usual call, without the cost of the others
        block is pixel_block is norm_input is residual is activation is slope is None
        and relu is return_norms is return_info is False
        and is_threshold(tau, valid_ratio, max_error)
    ):
        if norm_weight is None:
            return _conv2d(*given, None, tau)
        return _conv2d(*given, None, tau, None, None, None, None, norm_weight)
    knobs = as_knobs(tau, valid_ratio, max_error)
    check_bool(return_norms, "return_norms")
    check_bool(return_info, "return_info")
    check_optional_tensor(norm_input, "norm_input")
    check_optional_tensor(residual, "residual")
    number, slopes = (0.01, slope) if slope is None or isinstance(slope, Tensor) else (slope, None)
    check_number(number, "slope", "a number or a tensor")
    blocks = (
        None if block is None else check_block(block),
        None if pixel_block is None else check_pixel_block(pixel_block, block),
    )
    name = as_activation(activation, relu)
    options = (*knobs.values(), *blocks, norm_weight, norm_input, residual, name, number, slopes)
    result = (_conv2d_with_norms if return_norms else _conv2d)(*given, *options)
    if not return_info:
        return result
    x, w = (as_multiplied(operand) for operand in (input, weight))
    geometry = (_both(stride), _both(padding), _both(dilation), groups)
    maps = conv2d_norm_maps(x, w, geometry, has_tau(knobs), block, pixel_block, norm_weight)
    return result, skip_info(maps, knobs)


# ---- Introspection ------------------------------------------------------------------------------


def backend_for(
    device: torch.device | str,
    dtype: torch.dtype,
    block: int | Sequence[int] = 64,
    *,
    convolution: Mapping[str, Any] | None = None,
) -> str:
    """Name of the kernel that would multiply such operands, as in "cpu-plain" or "sm90-wgmma-f16".

    On Hopper ("sm90-..."), products with an empty K, or an M, N or K of 2^31 and more, take the
    portable kernel ("sm80-...") all the same.

    Args:
        device: a torch.device or its name, as in "cpu" or "cuda:0".
        dtype, block: of the operands.
        convolution: the name for a call of :func:`conv2d` instead: its arguments, with shapes for
            ``input`` and ``weight``, as in ``{"input": (8, 64, 56, 56), "weight": (64, 64, 3, 3),
            "padding": 1, "tau": 0.0}``. Where nothing is skipped it may be "cudnn" or "onednn",
            torch's convolution; where blocks are mostly empty "sm80-thin", "sm80-packed",
            "sm80-depthwise" or "cpu-depthwise". Geometry in numbers, the knob and
            ``pixel_block`` count, other arguments do not.

    Raises RuntimeError for a device that torch does not know, or that has no kernels in this build.
    """
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype; got {dtype!r}")
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise type(error)(
            f"device must be a torch.device or its name, as in 'cpu' or 'cuda:0'; got {device!r}"
        ) from None
    if convolution is None:
        return _ops.backend_for(place, dtype, check_block(block))
    given = {name: convolution[name] for name in _COUNTING if convolution.get(name) is not None}
    element = torch.empty(1, dtype=dtype, device=place)
    operands = (element.expand(tuple(convolution[name])) for name in ("input", "weight"))
    return _ops.conv2d_backend(*operands, **given, threshold=convolution.get("tau"))


_COUNTING = ("stride", "padding", "dilation", "groups", "pixel_block", "valid_ratio", "max_error")
