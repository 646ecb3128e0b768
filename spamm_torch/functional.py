"""The functions of spamm_torch, on tensors.

With blocks (m, k, n), A (M x K) cut m x k and B (K x N) cut k x n, both padded with zeros,

    C[i,j] = sum over k of A[i,k] @ B[k,j]  where not (norm_a[i,k] * norm_b[k,j] < tau).

Method: SpAMM (Challacombe and Bock, 2010) in the flat form of the cuSpAMM paper ("Accelerating
Sparse Approximate Matrix Multiplication on GPUs").

Common to all functions:

* Operands are float16, bfloat16, float32 or float64, on the CPU or a CUDA device, of any size and
  strides. Norms are float32 (float64 for float64 operands).
* On CUDA, float32 products have float32's accuracy, unless PyTorch is allowed to use TF32 for its
  own (``torch.backends.cuda.matmul.fp32_precision``): then operands are rounded to eleven bits.
* Exactly one *knob* says what is skipped: ``tau`` (a float, or a 0-d tensor on the operands'
  device, which is never read on the host), ``valid_ratio`` in (0, 1] (the share of block products
  kept) or ``max_error`` >= 0 (bound of the error from skipping, relative to norm(A) * norm(B)).
* ``block`` is an int b for (b, b, b) or a triple (m, k, n), each 32, 64 or 128.
* A ratio is met as nearly as whole block products and ties allow: with few blocks the nearest may
  be none of them, and the result zero.
* Gradients are dense: those of the product without skipping. They are of reverse mode and can be
  differentiated again; forward mode and ``torch.func.grad`` are refused.
* Errors: ValueError for knobs and blocks out of range, TypeError for dtypes, RuntimeError for
  shapes and devices; one line, with what was expected and the value got.
"""

import torch
from torch.nn.functional import pad as _pad
from torch.nn.modules.utils import _pair

from .bisection import bisect_tau
from .settings import (
    as_knobs,
    as_tau,
    check_block,
    check_block_pair,
    check_optional_tensors,
    check_pixel_block,
    check_search,
    check_tensors,
)

_ops = torch.ops.spamm_torch


def _check_matrices(name, a, b, dim, expected):
    check_tensors(a=a, b=b)
    for operand in (a, b):
        if operand.dim() != dim:
            raise RuntimeError(
                f"{name} expects {expected}; got shapes {tuple(a.shape)} and {tuple(b.shape)}"
            )


def norm_map(a, block=64):
    """Frobenius norms of the blocks of a matrix.

    Args:
        a: (..., M, K), leading batch dimensions allowed.
        block: 32, 64 or 128, or a pair (rows, columns) of these.

    Returns:
        (..., ceil(M / rows), ceil(K / columns)) norms, right to 1e-5 relative over the whole range
        of the dtype: nothing vanishes, nothing overflows before the norm itself does.
    """
    check_tensors(a=a)
    return _ops.norm_map(a, check_block_pair(block))


def find_tau(norm_a, norm_b, valid_ratio, *, max_iterations=20, tolerance=0.01, method="selection"):
    """The threshold that keeps a given share of the block products.

    Args:
        norm_a: (..., MB, KB) norm map.
        norm_b: (..., KB, NB) norm map of the same dtype, device and batch dimensions.
        valid_ratio: share of block products to keep, in (0, 1].
        max_iterations: the paper's limit of its bisection, > 0.
        tolerance: the paper's tolerated error of the ratio, absolute, >= 0.
        method: "selection", exact (the ratio reached is the nearest that ties allow, the larger at
            equal distance), which satisfies every limit and tolerance; or "bisection", the paper's
            search from the mean product, slower and within ``tolerance`` at best.

    Returns:
        0-d tensor of the norms' dtype on their device, found without host synchronisation. One
        threshold serves all batches.
    """
    check_tensors(norm_a=norm_a, norm_b=norm_b)
    if method not in ("selection", "bisection"):
        raise ValueError(f"method must be 'selection' or 'bisection'; got {method!r}")
    if method == "bisection":
        check_search(valid_ratio, max_iterations, tolerance)
        return bisect_tau(norm_a, norm_b, valid_ratio, max_iterations, tolerance)
    return _ops.find_tau(
        norm_a, norm_b, valid_ratio, max_iterations=max_iterations, tolerance=tolerance
    )


def valid_counts(norm_a, norm_b, tau):
    """The paper's V: for each block of C, the number of k whose product is valid.

    Args:
        norm_a: (..., MB, KB) norm map. norm_b: (..., KB, NB) norm map of the same dtype, device and
            batch dimensions.
        tau: threshold, a float or a 0-d tensor on the maps' device.

    Returns:
        int32, (..., MB, NB).
    """
    check_tensors(norm_a=norm_a, norm_b=norm_b)
    return _ops.valid_counts(norm_a, norm_b, as_tau(tau))


def valid_ratio(norm_a, norm_b, tau):
    """The share of block products that are valid: sum(V) / number of block products.

    Args:
        norm_a: (..., MB, KB) norm map. norm_b: (..., KB, NB) norm map of the same dtype, device and
            batch dimensions.
        tau: threshold, a float or a 0-d tensor on the maps' device.

    Returns:
        0-d tensor of the norms' dtype; 1 for empty maps.
    """
    check_tensors(norm_a=norm_a, norm_b=norm_b)
    return _ops.valid_ratio(norm_a, norm_b, as_tau(tau))


def error_bound(norm_a, norm_b, tau):
    """A proven bound of the Frobenius norm of what skipping loses.

    Args:
        norm_a: (..., MB, KB) norm map. norm_b: (..., KB, NB) norm map of the same dtype, device and
            batch dimensions.
        tau: threshold, a float or a 0-d tensor on the maps' device.

    Returns:
        0-d tensor of the norms' dtype: sqrt(sum over (i,j) of (sum over skipped k of norm_a[i,k] *
        norm_b[k,j])^2), rounded up. Follows from the triangle inequality in each block of C and the
        submultiplicativity of the Frobenius norm.
    """
    check_tensors(norm_a=norm_a, norm_b=norm_b)
    return _ops.error_bound(norm_a, norm_b, as_tau(tau))


def mm(
    a,
    b,
    *,
    tau=None,
    valid_ratio=None,
    max_error=None,
    block=64,
    norm_a=None,
    norm_b=None,
):
    """Approximate ``torch.mm``.

    Args:
        a: (M, K). b: (K, N), of the same dtype and device.
        tau, valid_ratio, max_error, block: see the module's head.
        norm_a, norm_b: norm maps to use instead of computing them, as from :func:`norm_map` with
            (m, k) and (k, n).

    Returns:
        (M, N), of the operands' dtype.
    """
    _check_matrices("mm", a, b, 2, "two matrices (2-d)")
    check_optional_tensors(norm_a=norm_a, norm_b=norm_b)
    return _ops.spamm(
        a,
        b,
        **as_knobs(tau, valid_ratio, max_error),
        block=check_block(block),
        norm_a=norm_a,
        norm_b=norm_b,
    )


def addmm(input, a, b, *, beta=1, alpha=1, tau=None, valid_ratio=None, max_error=None, block=64):
    """Approximate ``torch.addmm``: beta * input + alpha * (a @ b).

    Args:
        input: broadcastable to (M, N), of the operands' dtype; ignored, NaN included, if beta is 0.
        a: (M, K). b: (K, N).
        tau, valid_ratio, max_error, block: see the module's head.

    Returns:
        (M, N), of the operands' dtype.
    """
    _check_matrices("addmm", a, b, 2, "two matrices (2-d)")
    check_tensors(input=input)
    return _ops.spamm(
        a,
        b,
        **as_knobs(tau, valid_ratio, max_error),
        block=check_block(block),
        input=input,
        beta=beta,
        alpha=alpha,
    )


def bmm(a, b, *, tau=None, valid_ratio=None, max_error=None, block=64):
    """Approximate ``torch.bmm``: (batch, M, K) x (batch, K, N) in one launch.

    The knob speaks for all batches together: one threshold, one ratio, one error bound.

    Args:
        a: (batch, M, K). b: (batch, K, N), of the same dtype and device.
        tau, valid_ratio, max_error, block: see the module's head.

    Returns:
        (batch, M, N), of the operands' dtype.
    """
    _check_matrices("bmm", a, b, 3, "two batches of matrices (3-d)")
    return _ops.spamm(
        a,
        b,
        **as_knobs(tau, valid_ratio, max_error),
        block=check_block(block),
    )


def linear(
    input,
    weight,
    bias=None,
    *,
    tau=None,
    valid_ratio=None,
    max_error=None,
    block=64,
    norm_weight=None,
):
    """Approximate ``torch.nn.functional.linear``: A is the rows of input, B is weight.T.

    Args:
        input: (..., in_features). weight: (out_features, in_features). bias: (out_features,).
        tau, valid_ratio, max_error, block: see the module's head.
        norm_weight: norm map of weight.T to use instead of computing it, as from
            ``norm_map(weight.t(), (k, n))``.

    Returns:
        (..., out_features).
    """
    check_tensors(input=input, weight=weight)
    check_optional_tensors(bias=bias, norm_weight=norm_weight)
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
    product = _ops.spamm(
        rows,
        weight.t(),
        **as_knobs(tau, valid_ratio, max_error),
        block=check_block(block),
        norm_b=norm_weight,
        input=bias,
    )
    return product.reshape(*input.shape[:-1], weight.shape[0])


def _both(setting):
    """One number, alone or in a tuple, as a pair."""
    pair = _pair(setting)
    return pair * 2 if len(pair) == 1 else pair


def _explicit_padding(input, weight, stride, padding, dilation):
    """Resolves string padding as torch does: "same" pads an odd rest on the right and bottom."""
    if padding == "valid":
        return input, (0, 0)
    if padding != "same":
        raise ValueError(f"padding must be 'valid', 'same', an int or a pair; got {padding!r}")
    if any(s != 1 for s in stride):
        raise RuntimeError(f"padding='same' needs stride 1; got stride {tuple(stride)}")
    total = [d * (k - 1) for d, k in zip(dilation, weight.shape[-2:], strict=True)]
    before = tuple(t // 2 for t in total)
    rest_h, rest_w = (t % 2 for t in total)
    if rest_h or rest_w:
        input = _pad(input, (0, rest_w, 0, rest_h))
    return input, before


def conv2d(
    input,
    weight,
    bias=None,
    stride=1,
    padding=0,
    dilation=1,
    groups=1,
    *,
    tau=None,
    valid_ratio=None,
    max_error=None,
    block=None,
    pixel_block=None,
    norm_weight=None,
    norm_input=None,
    relu=False,
    return_norms=False,
):
    """Approximate ``torch.nn.functional.conv2d``, as weight matrix (A) times im2col matrix (B).

    M = out channels, K = (kh, kw, in channels) with each (kh, kw) padded to a multiple of the
    block's k, N = output pixels of all images, tiled by pixel blocks.

    Args:
        input: (N, C, H, W) or (C, H, W). weight: (out_channels, C / groups, kh, kw).
        bias, stride, padding, dilation, groups: as torch's, string padding included.
        tau, valid_ratio, max_error: see the module's head; groups share one knob.
        block: (m, k, n) or an int. None picks m = 32 if out_channels / groups <= 32, else 64;
            k = 32 if in_channels / groups <= 32, else 64; n = 64, or the size of pixel_block.
        pixel_block: (images, rows, columns), powers of two whose product is the block's n. None
            with a tau is (n, 1, 1) for every batch, so that a tau means the same for all; a block
            that the batch does not fill is skipped as if it were full. None with valid_ratio or
            max_error takes as many images as fit and splits the rest evenly with columns >= rows:
            (64, 1, 1) from 64 images on, (1, 8, 8) for one. With more than one image in a block,
            what is skipped for an image depends on its batch; with (1, r, c) each image's result
            under a tau is bitwise independent of the others.
        norm_weight: norms of the weight matrix to use instead of computing them, as from
            ``torch.ops.spamm_torch.conv2d_weight_norm``.
        norm_input: the input's norms where the layer before has left them (``return_norms``, and
            nothing came between): used where pixel_block is (64, 1, 1), k is 64 and the device has
            a convolution that needs no im2col matrix; elsewhere norms are taken anew.
        relu: rectify the result; in the convolution's own kernel where that needs no im2col matrix.
        return_norms: return a pair, the output and its norms as norm_input of the next layer, of
            shape (ceil(N / 64), output height, output width, ceil(out_channels / 64)). Without a
            gradient.

    Returns:
        The output of the convolution, in the input's memory format. The backward pass is dense.

    On CUDA no im2col matrix is in memory. Exceptions: groups whose channels are no multiple of 16
    bytes, and float32 without TF32 in blocks of 64 and more and 32 channels or more on Hopper, but
    for what its own kernels take. These take float16, bfloat16 and, where
    ``torch.backends.cuda.matmul`` allows TF32, float32, without groups: blocks of 64 or 128 (32
    where one block holds all channels), out_channels a multiple of 16 bytes, a pixel_block whose
    edges times the stride stay within 256 pixels; and float32 at full accuracy in the same blocks
    where pixel_block holds images alone (the default with a tau) and there are 32 channels or more,
    by products of float16 halves. Input and weight are read as they lie where they are
    channels-last and have a multiple of 16 bytes of channels; otherwise each call copies them into
    that form first, and the output back where the input is not channels-last.
    """
    check_tensors(input=input, weight=weight)
    check_optional_tensors(bias=bias, norm_weight=norm_weight, norm_input=norm_input)
    if isinstance(padding, str):
        input, padding = _explicit_padding(input, weight, _both(stride), padding, _both(dilation))
    op = _ops.conv2d_with_norms if return_norms else _ops.conv2d
    return op(
        input,
        weight,
        bias,
        stride,
        padding,
        dilation,
        groups,
        **as_knobs(tau, valid_ratio, max_error),
        block=None if block is None else check_block(block),
        pixel_block=None if pixel_block is None else check_pixel_block(pixel_block, block),
        norm_weight=norm_weight,
        norm_input=norm_input,
        relu=relu,
    )


def backend_for(device, dtype, block=64):
    """Name of the kernel that would multiply such operands, as in "cpu-brgemm" or "sm90-wgmma-f16".

    On Hopper ("sm90-..."), products with an empty K, or an M, N or K of 2^31 and more, take the
    portable kernel ("sm80-...") all the same.

    Args:
        device: a torch.device or its name. dtype: the operands'. block: an int or a triple.
    """
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype; got {dtype!r}")
    return _ops.backend_for(torch.device(device), dtype, check_block(block))
