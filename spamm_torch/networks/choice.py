"""The engine of each fused convolution: its call, its operands, and the choice by times."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes

from .._arguments import norm_dtype
from .._info import default_pixel_block
from .._timing import MUST_WIN, Timing, times_of
from .config import NOTHING_SKIPPED, lossless
from .fusion import Site, sizes_of, value_of

_ops = torch.ops.spamm_torch

NORM_EDGE = 64  # of the blocks of the norms that travel: images, and channels
_PEERS_MUST_WIN = 1.05  # so many times as fast another engine than "spamm" has to be on CUDA
_JOINED_PIXELS = 64  # of a block of joined groups
_MOST_JOINED_BYTES = 1 << 28  # of the weight of joined groups


@dataclass(frozen=True)
class Choice:
    """An engine by name, why it was chosen, and the times of the candidates.

    Engines: "spamm" (the op ``conv2d``, with nothing skipped unless a SpAMM layer skips), "spamm,
    pool" (``conv2d_max_pool``), "groups joined" (``conv2d``, of all groups at once), "dense"
    (``dense_conv2d``), and "torch": the convolution is torch's, and the rest the compiler's.
    """

    engine: str
    reason: str
    times: tuple[tuple[str, Timing], ...] = ()


@functools.cache
def computes_output_norms(device: torch.device, dtype: torch.dtype) -> bool:
    """Tells whether convolutions there compute the norms of their output without a pass over it."""
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return False
    return str(_ops.backend_for(device, dtype, (NORM_EDGE,) * 3)).startswith("sm90")


# ---- Calls --------------------------------------------------------------------------------------


def operands(
    engine: str, site: Site, input_shape: Any, weight: Tensor, bias: Any, scales: Any, slope: Any
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Weight and bias with the maps of channels behind the convolution in them, rounded once, the
    weight's norms, and the slopes. Norms of a layer that skips are of its own weight, by which its
    setting was chosen: it skips the same products. For "dense" on a CPU the weight may be packed.
    """
    own, groups, dtype = weight, site.geometry[3], norm_dtype(weight.dtype)
    slope = slope.to(dtype) if isinstance(slope, Tensor) and engine != "torch" else None
    if scales:
        scale: Any = torch.ones((), dtype=dtype, device=weight.device)
        shift: Any = 0.0 if bias is None else bias.to(dtype)
        for mean, variance, gamma, beta, eps in scales:
            factor = 1.0 if variance is None else torch.rsqrt(variance.to(dtype) + eps)
            factor = factor if gamma is None else factor * _by_channel(gamma, dtype)
            shift = (shift if mean is None else shift - mean.to(dtype)) * factor
            shift = shift if beta is None else shift + _by_channel(beta, dtype)
            scale = scale * factor
        weight = (weight.to(dtype) * scale.reshape(-1, 1, 1, 1)).to(weight.dtype)
        if isinstance(shift, Tensor) or shift:
            shift = torch.as_tensor(shift, dtype=dtype, device=weight.device)
            bias = shift.expand(weight.shape[0]).to(weight.dtype)
    if engine == "groups joined":
        own = weight = _joined_weight(weight, groups)
        groups = 1
    if site.is_last:
        weight = weight.contiguous(memory_format=torch.channels_last)
    third = None
    if engine in ("spamm", "spamm, pool", "groups joined"):
        source = own if site.skips else weight
        third = _ops.conv2d_weight_norm(source, groups, **_blocks(engine, site, weight.dtype))
    elif engine == "dense" and _packs(site, weight):
        stride, padding, dilation, _ = site.geometry
        reorder = torch.ops.mkldnn._reorder_convolution_weight
        weight = reorder(weight, padding, stride, dilation, groups, input_shape)
    bias = None if bias is None else bias.contiguous()
    return weight, bias, third, slope


def _by_channel(value: Any, dtype: torch.dtype) -> Any:
    return value.flatten().to(dtype) if isinstance(value, Tensor) else value


def _joined_weight(weight: Tensor, groups: int) -> Tensor:
    """The weight (Co, Ci, kh, kw) of one group, from that of all, (Co, Ci / groups, kh, kw).

    The op conv2d multiplies the whole matrix and skips the blocks of zeros between the groups.
    Inside a block that is not zero a group also meets channels of its neighbours, with weights of
    zero: finite values add nothing, but NaN and infinities of one group reach those of the same
    block as NaN.
    """
    rows, inner = weight.shape[0] // groups, weight.shape[1]
    joined = weight.new_zeros(groups, rows, groups, inner, *weight.shape[2:])
    joined.diagonal(dim1=0, dim2=2).copy_(weight.unflatten(0, (groups, rows)).movedim(0, -1))
    return joined.flatten(2, 3).flatten(0, 1)


def _packs(site: Site, weight: Tensor) -> bool:
    """Tells whether "dense" reads a copy of the weight in oneDNN's layout, whose result is channels
    last: oneDNN makes one in each call of another."""
    is_plain = weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.numel() > 0
    is_enabled = torch._C._has_mkldnn and torch._C._get_mkldnn_enabled()
    return is_plain and is_enabled and site.is_last and site.packs


def _setting(engine: str, site: Site, dtype: torch.dtype) -> dict[str, Any]:
    """The arguments of the op ``conv2d`` that say what it skips."""
    if engine == "groups joined":
        images = (sizes_of(value_of(site.input)) or (1,))[0]
        pixel_block = default_pixel_block(False, images, _JOINED_PIXELS)
        return replace(lossless(dtype), pixel_block=pixel_block).op_arguments()
    return dict(site.setting) if site.skips else NOTHING_SKIPPED.op_arguments()


def _blocks(engine: str, site: Site, dtype: torch.dtype) -> dict[str, Any]:
    setting = _setting(engine, site, dtype)
    return {name: setting.get(name) for name in ("block", "pixel_block")}


def call_of(
    engine: str, site: Site, dtype: torch.dtype, given: tuple[Any, ...], residual: Any
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The function, its arguments, and those by name, for an input and the result of operands()."""
    x, weight, bias, norms, slope = given
    stride, padding, dilation, groups = site.geometry
    groups = 1 if engine == "groups joined" else groups
    args = (x, weight, bias, stride, padding, dilation, groups)
    if engine == "torch":
        return F.conv2d, args, {}
    slopes = {"negative_slope": site.slope} if slope is None else {"slope": slope}
    options: dict[str, Any] = {"activation": site.activation, **slopes}
    if engine == "spamm, pool":
        return _ops.conv2d_max_pool.default, args, {**options, "norm_weight": norms}
    options |= {} if residual is None else {"residual": residual}
    if engine == "dense":
        return _ops.dense_conv2d.default, args, options
    setting = {**_setting(engine, site, dtype), "norm_weight": norms}
    return _ops.conv2d.default, args, {**setting, **options}


# ---- Candidates and their times -----------------------------------------------------------------


def _candidates(site: Site, weight: Tensor, compiles: bool) -> list[str]:
    """The engines that may compute it, and first the one that others have to beat, which is taken
    where nothing is measured: on CUDA ours, whose launches overlap in a network; else one call, if
    it reads a packed weight or no compiler gets what is left. ``compiles``: one does."""
    names = ["torch", "dense"] if compiles else ["dense"]
    if _packs(site, weight):
        names.reverse()
    groups = site.geometry[3]
    if groups == 1:
        names.insert(0 if weight.is_cuda else len(names), "spamm")
        if site.pool is not None and weight.is_cuda:
            names.append("spamm, pool")
    elif weight.shape[1] > 1 and weight.is_cuda and weight.nbytes * groups <= _MOST_JOINED_BYTES:
        names.append("groups joined")
    return names


# By all that times depend on but the number of images, and by that, in this process.
_measured: dict[Any, dict[int, Choice]] = {}


def choose(site: Site, measures: bool, compiles: bool) -> Choice:
    """The engine of a site, measured on made-up numbers of the shapes that it was traced with."""
    weight = value_of(site.weight)
    if site.skips:
        return Choice("spamm", "skips by its own setting")
    images = value_of(site.input)
    if weight.device.type not in ("cpu", "cuda"):
        return Choice("torch", f"on the device {weight.device.type}")
    if weight.is_cuda and not torch.cuda.is_available():
        return Choice("torch", "no CUDA device is here")
    sizes = sizes_of(images)
    if not measures or sizes is None:
        return Choice(_candidates(site, weight, compiles)[0], "table: nothing is measured")
    residual = value_of(site.residual) if site.residual is not None else None
    key = (
        *(_form(value) for value in (images, weight, residual, value_of(site.slope))),
        *(str(site.geometry), site.activation, site.pool is not None, site.bias is None),
        *(bool(site.scales), site.is_last, site.packs, compiles, torch.get_num_threads()),
    )
    known, count = _measured.setdefault(key, {}), sizes[0]
    if known and not isinstance(images.shape[0], int):
        # The last, smaller batch of many compiles a graph of any number of images, for all.
        count = max(count, *known)
    if count not in known:
        with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
            known[count] = _measure(site, weight, images, residual, compiles)
    return known[count]


def _form(value: Any) -> Any:
    """Everything of a tensor that times depend on, but its first size."""
    if value is None:
        return None
    sizes = sizes_of(value) or (0,)
    return value.device, value.dtype, sizes[1:], suggest_memory_format(value)


def _made_up(value: Tensor) -> Tensor:
    """Numbers of a tensor's sizes and memory format."""
    made = torch.randn(sizes_of(value) or (), dtype=value.dtype, device=value.device)
    return made.contiguous(memory_format=suggest_memory_format(value))


def _measure(
    site: Site, weight: Tensor, images: Tensor, residual: Tensor | None, compiles: bool
) -> Choice:
    x, w = _made_up(images), _made_up(weight)
    other = None if residual is None else _made_up(residual)
    bias = None
    if site.bias is not None or site.scales:
        bias = torch.zeros(w.shape[0], dtype=w.dtype, device=w.device)
    calls: dict[str, Callable[[], Any]] = {}
    for name in _candidates(site, w, compiles):
        call = _whole_call(name, site, x, w, bias, other)
        try:
            call()
        except RuntimeError:  # no memory, or an op that does not take such sizes
            continue
        calls[name] = call
    if len(calls) < 2:
        return Choice(next(iter(calls), "torch"), "nothing else can compute it")
    on_cuda = w.device.type == "cuda"
    times = dict(zip(calls, times_of(list(calls.values()), w.device), strict=True))
    best = next(iter(times))
    for name, time in times.items():
        is_peer = on_cuda and not name.startswith("spamm")
        if time.beats(times[best], _PEERS_MUST_WIN if is_peer else MUST_WIN):
            best = name
    least = min(times, key=lambda name: times[name].median)
    reason = "measured: fastest" if least == best else "measured: nothing is clearly faster"
    return Choice(best, reason, tuple(times.items()))


def _whole_call(
    name: str, site: Site, x: Tensor, w: Tensor, bias: Tensor | None, residual: Tensor | None
) -> Callable[[], Any]:
    """The call with what the compiler would do behind it: one pass in place for everything that is
    not a max pool. On CUDA a compiler adds the bias in that pass, too."""
    slope = value_of(site.slope)
    made = None if slope is None else torch.full(slope.shape, 0.25, device=w.device)
    weight, b, *more = operands(name, site, tuple(x.shape), w, bias, (), made)
    is_torch = name == "torch"
    adds_bias_later = is_torch and w.is_cuda and b is not None
    has_epilogue = is_torch and (
        adds_bias_later or residual is not None or site.activation != "none"
    )
    given = (x, weight, None if adds_bias_later else b, *more)
    function, args, options = call_of(name, site, w.dtype, given, residual)

    def call() -> Any:
        output = function(*args, **options)
        if has_epilogue:
            output = output.relu_() if residual is None else output.add_(residual)
        if site.pool is not None and name != "spamm, pool":
            output = F.max_pool2d(output, 2)
        return output

    return call
