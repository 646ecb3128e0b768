"""Cases of convolutions with every epilogue, and of max pools."""

import copy
import functools
import math

import numpy as np
import torch
import torch.nn.functional as F

import spamm_torch

from . import space
from .space import DTYPES, PATTERNS, SEEDS, expect, expect_bits, reference, values

import support  # isort: skip  after space, which says where it lies

OPS = torch.ops.spamm_torch
LAST = {"memory_format": torch.channels_last}
LAYOUTS = {
    "contiguous": lambda t: t.contiguous(),
    "channels last": lambda t: t.contiguous(**LAST),
    "strided": lambda t: torch.stack((t, t), -1)[..., 0],
    "transposed": lambda t: t.mT.contiguous().mT,
    "offset": lambda t: F.pad(t, (1, 2, 1, 0))[..., 1:, 1 : 1 + t.shape[-1]],
    "some channels": lambda t: F.pad(t, (0, 0, 0, 0, 3, 5)).contiguous(**LAST)[:, 3:-5],
    "one image": lambda t: t[:1].expand(t.shape),
    "one pixel": lambda t: t[..., :1, :1].expand(t.shape),
}
COMMON = {"dtype": tuple(DTYPES), "layout": tuple(LAYOUTS), "seed": SEEDS}
GEOMETRY = {"inner": (1, 3, 4, 8, 17, 31, 32, 33, 64, 65, 72, 128)}
GEOMETRY |= {"groups": (1, 1, 1, 2, 4, "each")}
GEOMETRY |= {"outer": (1, 4, 8, 17, 32, 40, 64, 65, 72, 128, 136)}
GEOMETRY |= {"stride": (1, 1, 1, 2, (2, 1), (1, 3), 3)}
GEOMETRY |= {"kernel": ((1, 1), (3, 3), (3, 3), (2, 2), (1, 3), (5, 5), (3, 1), (7, 6))}
GEOMETRY |= {"padding": (0, 1, 1, (0, 1), 2, (2, 0), (2, 3)), "dilation": (1, 1, 1, 2, (1, 2), 3)}
GEOMETRY |= {"layout_weight": ("contiguous", "channels last", "strided"), **COMMON}
GEOMETRY |= {"activation": tuple(support.ACTIVATIONS)}
CONVOLUTION = {"images": (1, 2, 3, 5, 17, 63, 64, 65, 70, 129, 300, 0), **GEOMETRY}
CONVOLUTION |= {"height": (1, 2, 3, 5, 8, 9, 14, 17), "width": (1, 2, 3, 5, 7, 8, 16, 19)}
CONVOLUTION |= {"pattern_w": ("patchy", "normal", "normal", "zeros", "tiny", "nan", "inf")}
CONVOLUTION |= {"pattern_x": (*PATTERNS, "normal", "normal"), "bias": (False, True)}
CONVOLUTION |= {"residual": (None, *LAYOUTS), "share": (0.0, 0.5, 0.1, 0.9, 1.0)}
CONVOLUTION |= {"block": (None, None, 64, 32, 128, (64, 32, 64), (128, 64, 128))}
PIXEL_BLOCKS = ((1, 8, 8), (64, 1, 1), (4, 4, 4), (1, 4, 8), (2, 8, 8), (8, 1, 8), (16, 2, 2))
PIXEL_BLOCKS += ((128, 1, 1), (32, 1, 1), (32, 1, 2), (8, 16, 1), (4, 2, 8), (2, 4, 4), (1, 1, 64))
CONVOLUTION |= {"pixel_block": (None, None, *PIXEL_BLOCKS)}
FORMS = ("conv", "norms", "chain", "weight norms", "valid_ratio", "max_error", "dense")
FORMS += ("info",)
CONVOLUTION |= {"form": FORMS, "slopes": (None, None, 1, "each")}
MOST = 80_000  # numbers in the matrices of a case, so that it takes milliseconds


def exactly():
    """float32 as on the CPU."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


def geometry_of(case):
    """The shapes of input and weight, and torch's keyword arguments."""
    kernel, inner = case["kernel"], case["inner"]
    groups = inner if case["groups"] == "each" else case["groups"]
    inner, outer = (max(1, channels // groups) * groups for channels in (inner, case["outer"]))
    depth = groups * -(-(inner // groups) // 32) * 32 * math.prod(kernel)
    edges = case.get("pixel_block") or (64, 1, 1)
    sizes = [case["images"], case["height"], case["width"]]
    while (
        depth * math.prod(-(-n // edge) * edge for n, edge in zip(sizes, edges, strict=True)) > MOST
    ):
        largest = max(range(3), key=sizes.__getitem__)
        if sizes[largest] == 1:
            break
        sizes[largest] -= sizes[largest] // 2
    geometry = {name: case[name] for name in ("stride", "padding", "dilation")}
    pads, steps = reference.pair(case["padding"]), reference.pair(case["dilation"])
    reach = [d * (k - 1) + 1 - 2 * p for d, k, p in zip(steps, kernel, pads, strict=True)]
    shape = (sizes[0], inner, max(sizes[1], reach[0]), max(sizes[2], reach[1]))
    return shape, (outer, inner // groups, *kernel), geometry | {"groups": groups}


def expect_near(found, exact, bare, size, inner, activation="none", passes=0, lost=0.0, slope=None):
    """Within the rounding of the sums, and of what follows, ``passes`` before the last. bare: what
    a backend may store before that, where it may be infinite. lost: of the operands.
    """
    dtype, size = found.dtype, size.numpy()
    # A backend may apply all but clamps in a pass of its own; slopes are rounded before it.
    own = 2.0**-19 if activation in ("hardswish", "silu", "leaky_relu") else 0.0
    passes += (own > 0) + isinstance(slope, torch.Tensor)
    if dtype == torch.float64 and (activation != "hardswish" or not found.is_cuda):
        own = min(own, 2.0**-48)  # elsewhere torch's hardswish has 1 / 6 in float32
    slopes = torch.as_tensor(0.0 if slope is None else slope).abs().flatten()
    largest = max({"hardswish": 1.5, "silu": 1.1}.get(activation, 1.0), *slopes.tolist())
    follow = {"slope": largest, "own": own * largest, "passes": passes}
    sums = space.sums_of_conv(found.device, dtype)
    with np.errstate(all="ignore"):
        bound = space.rounding(exact.numpy(), size, inner, sums, dtype, **follow)
        bound = bound + largest * np.asarray(lost)
        if passes and found.is_cuda and dtype == torch.float16:
            overflows = np.abs(bare.numpy()) >= torch.finfo(dtype).max * (1 - 2.0**-10)
            size = np.where(overflows, np.finfo(np.float64).max / 8, size)
    space.expect_near(found, exact.numpy(), bound, size * 4)


def norms_of(images, together=1):
    """Norms of 64 channels of each pixel, or of so many images: (blocks, rows, columns, blocks)."""
    sides = (0,) * 5 + (-images.shape[1] % 64, 0, -len(images) % together)
    wide = F.pad(images.cpu().double(), sides).numpy().astype(np.longdouble)  # holds every square
    parts = wide.reshape(-1, together, wide.shape[1] // 64, 64, *wide.shape[2:])
    with np.errstate(all="ignore"):
        return np.moveaxis(np.sqrt((parts**2).sum((1, 3))), 1, -1)


def norms_of_strips(oracle):
    """For each entry of the output the norm of 64 rows of the weights times that of all columns: in
    a strip lie the numbers that share an exponent.
    """
    finite = (torch.nan_to_num(x.double(), 0.0, 0.0, 0.0) for x in (oracle.weights, oracle.columns))
    weights, columns = (x.pow(2).sum(2 - i) for i, x in enumerate(finite))
    rows = F.pad(weights, (0, -weights.shape[1] % 64)).unflatten(1, (-1, 64)).sum(2)
    rows = rows.sqrt().repeat_interleave(64, 1)[:, : weights.shape[1]]
    matrix = rows[:, :, None] * columns.sum(1).sqrt()[:, None, None]
    return oracle.output(matrix.expand(*weights.shape, columns.shape[1]).flatten(0, 1))


def convolution(case, device):
    """conv2d against its matrices, and each way in which it can be called."""
    exactly()
    shape, weight_shape, geometry = geometry_of(case)
    dtype, seed, form = DTYPES[case["dtype"]], case["seed"], case["form"]
    pattern_x, pattern_w = case["pattern_x"], case["pattern_w"]
    block, pixel_block = case["block"], case["pixel_block"]
    if block and pixel_block:
        block = (*reference.edges(block)[:2], math.prod(pixel_block))
    blocks = {"block": block, "pixel_block": pixel_block}
    is_torchs = form == "dense" or geometry["groups"] > 1
    if case["share"] == 0 and form not in ("valid_ratio", "max_error"):
        pair = (torch.empty(of, dtype=dtype, device=device) for of in (shape, weight_shape))
        backend = OPS.conv2d_backend(*pair, threshold=0.0, **geometry, **blocks)
        is_torchs = is_torchs or backend in ("cudnn", "onednn")
    if is_torchs or dtype == torch.bfloat16:
        # torch's own convolution and instructions for bfloat16 take subnormals for zero; the former
        # multiplies no padding, but channels that it has added.
        other = dict.fromkeys(("tiny", "huge", "nan", "inf"), "normal")
        pattern_x, pattern_w = other.get(pattern_x, pattern_x), other.get(pattern_w, pattern_w)
    host_x = values(shape, pattern_x, dtype, seed)
    host_x, x = space.laid_out(LAYOUTS, case["layout"], host_x, device)
    host_w = values(weight_shape, pattern_w, dtype, seed + 1)
    host_w, w = space.laid_out(LAYOUTS, case["layout_weight"], host_w, device)
    oracle = reference.Im2col(host_x, host_w, **geometry, **blocks)
    tau, valid = oracle.decide(case["share"])
    if case["share"] == 0 or form in ("dense", "valid_ratio", "max_error"):
        tau = 0.0
    elif tau <= 0:
        return convolution(case | {"share": 0.0}, device)
    valid |= tau == 0

    def product(weights, columns):
        other = copy.copy(oracle)
        other.weights, other.columns = weights, columns
        return other.product(valid)

    sums, size = oracle.product(valid), product(oracle.weights.abs(), oracle.columns.abs())
    if {pattern_x, pattern_w} == {"inf", "huge"}:  # sums of what is finite may overflow apart
        finite = (torch.nan_to_num(x.abs(), posinf=0.0) for x in (oracle.weights, oracle.columns))
        finite = product(*finite)
        size = torch.where(finite * 32 >= torch.finfo(torch.float32).max, finite, size)
    bias, residual, bare = None, None, sums
    if case["bias"]:
        bias = values((len(w),), "patchy", dtype, seed + 2)
        sums, size = sums + bias.double()[:, None, None], size + bias.double().abs()[:, None, None]
        bias, bare = bias.to(device), sums
    if case["residual"]:
        numbers = values(tuple(sums.shape), "patchy", dtype, seed + 3)
        numbers, residual = space.laid_out(LAYOUTS, case["residual"], numbers, device)
        sums, size = sums + numbers.double(), size + numbers.double().abs()
    epilogue, follow = {"residual": residual, "activation": case["activation"]}, {}
    wanted = support.ACTIVATIONS[case["activation"]](sums)
    if case.get("slopes") and case["activation"] == "leaky_relu":
        of = dtype if seed % 2 else torch.float32
        numbers = values((1 if case["slopes"] == 1 else len(w),), "normal", of, seed + 6)
        wanted = F.prelu(sums, numbers.double())
        epilogue["slope"] = follow["slope"] = numbers.to(device)
    call = functools.partial(spamm_torch.conv2d, x, w, bias, **geometry, **epilogue, **blocks)
    norms, again = None, None if tau == 0 else call(tau=tau)
    if form == "dense":
        found = OPS.dense_conv2d(x, w, bias, **geometry, **epilogue)
    elif form in ("valid_ratio", "max_error"):
        found = call(**{form: 1.0 if form == "valid_ratio" else 0.0})
    elif form == "weight norms":
        given = OPS.conv2d_weight_norm(w, geometry["groups"], **blocks)
        found = call(tau=tau, norm_weight=given)
    elif form == "conv":
        found = call(tau=tau)
    elif form == "info":
        found, info = call(tau=tau, return_info=True)
        share = valid.double().mean().item() if valid.numel() else 1.0
        expect(abs(info.valid_ratio.item() - share) < 1e-6, f"{info}, the oracle {share}")
        kept = product(oracle.weights, oracle.columns)
        lost = (oracle.product(torch.ones_like(valid)) - kept).norm().item()
        least = 1e-12 * size.norm().item()
        expect(not lost > info.error_bound.item() * (1 + 1e-5) + least, f"{info}, lost {lost}")
    else:
        found, norms = call(tau=tau, return_norms=True)
    got = f"{found.dtype} on {found.device}"
    expect(found.dtype == dtype and found.device.type == device.type, got)
    if again is not None and device.type == "cpu":
        expect_bits(again, found, f"the same convolution without {form}")
    if norms is not None:
        space.expect_norms(norms, norms_of(found, 64), "norms of the output", 2e-5)
    lost = 0.0
    if device.type == "cuda" and dtype == torch.float32:
        lost = space.LOST_OF_SPLIT * norms_of_strips(oracle)
        if "tiny" in (pattern_x, pattern_w):
            lost = lost + space.flushed(product, oracle.weights, oracle.columns, 2.0**-133)
    if is_torchs and device.type == "cuda" and dtype.itemsize == 2 and size.numel():
        # cuDNN may transform neighbouring outputs together, in float32 (Winograd).
        lost = lost + 2.0**-21 * torch.nan_to_num(size, 0.0, 0.0, 0.0).max()
    for result in (found,) if again is None else (found, again):
        passes = (residual is not None) + (case["bias"] and is_torchs)  # in a pass of its own
        inner = oracle.weights.shape[2]
        expect_near(result, wanted, bare, size, inner, case["activation"], passes, lost, **follow)
    if form == "chain" and found.numel() and device.type == "cpu":  # else norms may round apart
        more = values((8, found.shape[1], 1, 1), "normal", dtype, seed + 4).to(device)
        layer = functools.partial(spamm_torch.conv2d, found, more, tau=tau, block=64)
        expect_bits(layer(norm_input=norms), layer(), "a layer that gets norms")


POOL = COMMON | {"images": (1, 2, 3, 17, 64, 65, 129, 300, 0)}
POOL |= {"channels": (1, 3, 8, 17, 64, 72, 136)}
POOL |= {"height": (1, 2, 3, 5, 8, 13), "width": (1, 2, 3, 5, 8, 16), "pattern": PATTERNS}
POOL |= {"kernel": (1, 2, 3, (3, 2), 5), "stride": (1, 2, 3, (1, 2)), "padding": (0, 1, 2)}
POOL |= {"dilation": (1, 1, 2), "ceil_mode": (False, True), "form": ("pool", "conv")}


def pool(case, device):
    """Max pools bit for bit torch's, and a convolution with its pool in one op."""
    exactly()
    dtype, seed, form = DTYPES[case["dtype"]], case["seed"], case["form"]
    shape = tuple(case[name] for name in ("images", "channels", "height", "width"))
    shape = shape if math.prod(shape) <= MOST else (*shape[:2], 3, 2)
    numbers = values(shape, case["pattern"], dtype, seed)
    _, x = space.laid_out(LAYOUTS, case["layout"], numbers, device)
    setting = [case[name] for name in ("kernel", "stride", "padding", "dilation", "ceil_mode")]
    try:  # on the CPU: torch's own kernel of float64 on CUDA may write beyond its shared memory
        wanted = F.max_pool2d(x.cpu(), *setting)
    except RuntimeError:
        return  # a window larger than the picture, or padding larger than half of it
    if form == "conv" and min(shape[2:]) >= 2:
        w = values((9, shape[1], 1, 1), "patchy", dtype, seed + 1).to(device)
        apart = F.max_pool2d(spamm_torch.conv2d(x, w, tau=0.0, relu=True), 2).cpu().double()
        found = OPS.conv2d_max_pool(x, w, activation="relu")
        size = F.max_pool2d(F.conv2d(numbers.double().abs(), w.cpu().double().abs()), 2)
        expect_near(found, apart, apart, 2 * size, shape[1], passes=1)  # of both
    else:
        expect_bits(OPS.max_pool2d(x, *setting), wanted, "max_pool2d")
