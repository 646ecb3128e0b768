"""The oracle: SpAMM written to be read, slowly, in float64 (the error bound in long double).

:func:`multiply` is the flat form of the cuSpAMM paper.

Operands and norm maps are tensors of any dtype, device and stride. Everything returned is a NumPy
array in float64, except norm products, thresholds and decisions, which are made in the maps' own
type: one rounding for the product of norms, one for tau.
"""

import itertools
import math

import numpy as np
import torch
import torch.nn.functional as F

import spamm_torch


def to_float64(tensor):
    """The tensor's values, exactly (every operand dtype is a subset of float64)."""
    return tensor.detach().cpu().double().numpy()


def to_array(tensor):
    """A norm map in its own type."""
    return tensor.detach().cpu().numpy() if isinstance(tensor, torch.Tensor) else np.asarray(tensor)


def rounded(tau, dtype):
    """A threshold, rounded once to the norms' type."""
    value = to_float64(tau) if isinstance(tau, torch.Tensor) else tau
    with np.errstate(all="ignore"):
        return dtype.type(value)


def edges(block, count=3):
    return (block,) * count if isinstance(block, int) else tuple(block)


# ---- Norm maps ----------------------------------------------------------------------------------


def norm_map(a, block):
    """Frobenius norms of the blocks of ``a`` (..., M, K), scaled so that nothing leaves float64."""
    rows, columns = edges(block, 2)
    values = to_float64(a)
    *batch, height, width = values.shape
    norms = np.zeros((*batch, math.ceil(height / rows), math.ceil(width / columns)))
    for index in np.ndindex(*norms.shape):
        *b, i, j = index
        row, column = i * rows, j * columns
        norms[index] = _norm(values[(*b, slice(row, row + rows), slice(column, column + columns))])
    return norms


def _norm(values):
    """sqrt(sum of squares), never below the largest magnitude; NaN and Inf pass through."""
    peak = np.max(np.abs(values), initial=0.0)
    if peak == 0 or not np.isfinite(peak):
        return peak
    with np.errstate(over="ignore"):
        return max(peak, peak * np.sqrt(np.sum((values / peak) ** 2)))


# ---- Thresholds ---------------------------------------------------------------------------------


def products(norm_a, norm_b):
    """norm_a[i,k] * norm_b[k,j] as (..., MB, KB, NB), rounded once, in the maps' type."""
    norm_a, norm_b = to_array(norm_a), to_array(norm_b)
    assert norm_a.dtype == norm_b.dtype
    with np.errstate(all="ignore"):
        return norm_a[..., :, :, None] * norm_b[..., None, :, :]


def kept(norm_a, norm_b, tau):
    """The decision for each block product, (..., MB, KB, NB)."""
    product = products(norm_a, norm_b)
    with np.errstate(all="ignore"):
        return ~(product < rounded(tau, product.dtype))


def valid_counts(norm_a, norm_b, tau):
    return kept(norm_a, norm_b, tau).sum(axis=-2, dtype=np.int32)


def valid_ratio(norm_a, norm_b, tau):
    keep = kept(norm_a, norm_b, tau)
    return np.count_nonzero(keep) / keep.size if keep.size else 1.0


def error_bound(norm_a, norm_b, tau, skip_norm_b=None):
    """sqrt(sum over (i,j) of (sum over skipped k of norm_a * norm_b)^2), a long double."""
    keep = kept(norm_a, norm_b if skip_norm_b is None else skip_norm_b, tau)
    wide_a, wide_b = (to_array(norm).astype(np.longdouble) for norm in (norm_a, norm_b))
    with np.errstate(all="ignore"):
        product = wide_a[..., :, :, None] * wide_b[..., None, :, :]
    lost = np.where(keep, np.longdouble(0), product).sum(axis=-2)
    return np.sqrt(np.sum(lost**2))


def thresholds(norm_a, norm_b):
    """One threshold for each set of block products that can be kept, in ascending order.

    Each but the last is the smallest product it keeps; +inf keeps only what is never skipped.
    """
    product = products(norm_a, norm_b)
    return np.append(np.unique(product[np.isfinite(product)]), product.dtype.type(np.inf))


def find_tau(norm_a, norm_b, ratio):
    """The threshold whose count is nearest to ratio * total, the larger count in a tie."""
    product = products(norm_a, norm_b)
    if product.size == 0:
        return product.dtype.type(0)

    def distance(tau):
        count = np.count_nonzero(~(product < tau))
        return abs(count - ratio * product.size), -count

    return min(thresholds(norm_a, norm_b), key=distance)


# ---- Products -----------------------------------------------------------------------------------


def multiply(a, b, norm_a, norm_b, tau, block, input=None, beta=1, alpha=1):
    """alpha * (A @ B over the kept block products) + beta * input, the flat form.

    beta = 0 ignores the input, NaN included.
    """
    m, k, n = edges(block)
    a, b = to_float64(a), to_float64(b)
    result = np.zeros((*a.shape[:-1], b.shape[-1]))
    with np.errstate(all="ignore"):
        for *batch, i, l, j in np.argwhere(kept(norm_a, norm_b, tau)):
            rows = (*batch, slice(i * m, (i + 1) * m))
            columns = slice(j * n, (j + 1) * n)
            inner = slice(l * k, (l + 1) * k)
            result[(*rows, columns)] += a[(*rows, inner)] @ b[(*batch, inner, columns)]
        result *= alpha
        return result + beta * to_float64(input) if input is not None and beta != 0 else result


# ---- Convolutions --------------------------------------------------------------------------------

# A convolution is weight matrix (out_channels x K) times im2col matrix (K x pixels), one pair of
# matrices a group. Everything here follows the definition word by word (docs/kernels/conv.md;
# spamm_torch.conv2d's arguments), one output pixel at a time, and knows nothing of how the library
# does it. Only the norms that decide are the library's own.


def blocks_of(length, edge):
    return math.ceil(length / edge)


def pair(value):
    return (value, value) if isinstance(value, int) else tuple(value)


def default_pixel_block(knob, images, n):
    """(images, rows, columns) where none is given.

    n images with a tau, whatever the batch. With a knob that searches in each call, as many images
    as there are, the rest split evenly with columns >= rows.
    """
    if knob == "tau":
        return n, 1, 1
    together = 1
    while 2 * together <= min(images, n):
        together *= 2
    rows, columns = 1, n // together
    while columns >= 4 * rows:
        rows, columns = 2 * rows, columns // 2
    return together, rows, columns


class Im2col:
    """The matrices of a convolution, their norms and the products that are valid.

    ``weights`` (groups, out_channels / groups, K) and ``columns`` (groups, K, pixels) are in the
    operands' dtype. ``inside`` says for each column whether it is a pixel of the output, and
    ``pixels`` which: images, rows and columns. Columns outside the grid are zero. ``existing``
    counts for each pixel block the columns inside the grid.
    """

    def __init__(
        self,
        input,
        weight,
        stride=1,
        padding=0,
        dilation=1,
        groups=1,
        block=None,
        pixel_block=None,
        knob="tau",
    ):
        (sh, sw), (ph, pw), (dh, dw) = pair(stride), pair(padding), pair(dilation)
        images, _, height, width = input.shape
        out_channels, group_channels, kh, kw = weight.shape
        if block is None:
            m, k = (
                32 if channels <= 32 else 64
                for channels in (out_channels // groups, group_channels)
            )
            block = m, k, 64 if pixel_block is None else math.prod(pixel_block)
        self.block = (block,) * 3 if isinstance(block, int) else block
        _, k, n = self.block
        self.pixel_block = edges = pixel_block or default_pixel_block(knob, images, n)
        padded = F.pad(input, (pw, pw, ph, ph))
        self.grid = (
            images,
            (height + 2 * ph - dh * (kh - 1) - 1) // sh + 1,
            (width + 2 * pw - dw * (kw - 1) - 1) // sw + 1,
        )
        self.out_channels = out_channels

        # K: (kernel row, kernel column, channel), each kernel position padded to a multiple of k.
        depth = blocks_of(group_channels, k) * k
        rows = out_channels // groups
        self.weights = weight.new_zeros(groups, rows, kh * kw * depth)
        for g, (y, x) in itertools.product(range(groups), positions(kh, kw)):
            start = (y * kw + x) * depth
            self.weights[g, :, start : start + group_channels] = weight[
                g * rows : (g + 1) * rows, :, y, x
            ]

        # Columns: pixel block by pixel block, and in each block image by image, row by row.
        counts = [blocks_of(size, edge) for size, edge in zip(self.grid, edges, strict=True)]
        corners, offsets = (torch.cartesian_prod(*map(torch.arange, of)) for of in (counts, edges))
        pixels = corners[:, None] * torch.tensor(edges) + offsets  # blocks, columns, coordinates
        exists = (pixels < torch.tensor(self.grid)).all(2)
        self.existing, self.inside = exists.sum(1), exists.flatten()
        self.pixels = image, row, col = pixels[exists].T

        self.columns = input.new_zeros(groups, kh * kw * depth, exists.numel())
        for g, (y, x) in itertools.product(range(groups), positions(kh, kw)):
            start = (y * kw + x) * depth
            own = padded[:, g * group_channels : (g + 1) * group_channels]
            read = own[image, :, row * sh + y * dh, col * sw + x * dw]  # pixels, channels
            self.columns[g, start : start + group_channels, self.inside] = read.T

    def skip_norm(self, norm_b):
        """Norms of pixel blocks times sqrt(n / c), c being their columns inside the grid."""
        n = torch.tensor(float(self.block[2]), dtype=norm_b.dtype, device=norm_b.device)
        return norm_b * torch.sqrt(n / self.existing.to(norm_b))

    def norms(self, device="cpu"):
        """The library's norms of the matrices: weights, columns, and the skip norms."""
        m, k, n = self.block
        norm_a = spamm_torch.norm_map(self.weights.to(device), (m, k))
        norm_b = spamm_torch.norm_map(self.columns.to(device), (k, n))
        return norm_a, norm_b, self.skip_norm(norm_b)

    def decide(self, share, device="cpu"):
        """A threshold that skips about this share of the block products, and what it keeps."""
        norm_a, _, skip_norm = self.norms(device)
        products = norm_products(norm_a, skip_norm)
        tau = gap_near(products, share)
        return tau, ~(products < tau)

    def product(self, valid, bias=None):
        """The convolution in float64 with the block products where ``valid`` holds.

        ``valid`` is (groups, MB, KB, NB).
        """
        m, k, n = self.block
        weights, columns = self.weights.double(), self.columns.double()
        groups, rows, _ = weights.shape
        valid = valid.to(weights.device)
        result = weights.new_zeros(groups, rows, columns.shape[2])
        for s in range(valid.shape[2]):
            depth = slice(s * k, (s + 1) * k)
            kept = valid[:, :, s].repeat_interleave(m, 1)[:, :rows].repeat_interleave(n, 2)
            result += torch.where(kept, weights[:, :, depth] @ columns[:, depth], 0)
        output = self.output(result.reshape(self.out_channels, -1))
        return output if bias is None else output + bias.double().view(1, -1, 1, 1)

    def output(self, matrix):
        """The images of a matrix (out_channels, columns)."""
        images, height, width = self.grid
        output = matrix.new_zeros(images, len(matrix), height, width)
        image, row, col = self.pixels
        output[image, :, row, col] = matrix[:, self.inside].T
        return output


def positions(kh, kw):
    return list(itertools.product(range(kh), range(kw)))


def norm_products(norm_a, norm_b):
    """(groups, MB, KB, NB): what is compared with tau, one rounding in the norms' type."""
    return norm_a.unsqueeze(-1) * norm_b.unsqueeze(-3)


def gap_near(products, share):
    """A threshold that no rounding of a norm moves across: amid a gap between two products.

    Of all gaps wider than the norms' promised accuracy, the one nearest to skipping ``share``.
    """
    ordered = products.double().flatten().sort().values
    low, high = ordered[:-1], ordered[1:]
    wide = torch.nonzero(high > low * (1 + 1e-4) + 1e-30).flatten()
    if len(wide) == 0:
        return 0.0
    nearest = wide[(wide - share * len(ordered)).abs().argmin()]
    return float((low[nearest] + high[nearest]) / 2)
