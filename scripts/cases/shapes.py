"""mm and conv2d over torch's calls, on shapes that nobody chose.

Products: M, N and K log-uniform and not rounded, operands row- or column-major, leading dimensions
as small as they can be, padded, odd, or behind an address off 16 bytes. Convolutions: the distinct
ones of torchvision's networks at several batches, channels last, in a random order. tau is 0, held
and skips nothing, keeps half of the block products, or a tenth; norms are included but for a
weight's. Each kind of shape in each number format has an equal part of the time. The JSON file has
every shape; another seed draws others.
"""

import functools
import itertools
import math
import random
import statistics
import time

import torch
import torch.nn.functional as F

import spamm_torch
from common import options as cli
from common.measuring import PRECISIONS, TOLERANCE, attempt, require_near, use_precision
from common.timing import interleaved

TITLE = "Shapes that nobody chose"
_HELD = 1e-30  # a tau that is held, and skips nothing
_KEPT = {"half": 0.5, "tenth": 0.1}
_OPS = {"products": "mm", "convolutions": "conv2d"}  # by kind of shape
_LIMITS = (0.6, 0.8, 0.95)
_SLOWEST = 10
_SHORT_MS = 0.015  # below it launches and waits decide, and what they add is told
_LEADING = ("least", "padded", "odd", "off")
NETWORKS = (
    "alexnet", "vgg16", "resnet18", "resnet50", "resnext50_32x4d", "densenet121",
    "googlenet", "inception_v3", "mobilenet_v2", "efficientnet_b0", "squeezenet1_0",
    "convnext_tiny",
)  # fmt: skip
_PICTURE = {"inception_v3": 299}  # pixels along an edge; 224 elsewhere
_LAYERS = ("float16", "bfloat16", "float32", "tf32")  # number formats of convolutions
DEFAULTS = {
    "cpu": {"precisions": ("float32", "float64"), "largest": 2048, "batches": (1, 8)},
    "cuda": {"precisions": tuple(PRECISIONS), "largest": 12288, "batches": (1, 8, 32)},
}


def add_options(parser):
    cli.add_device_option(parser)
    cli.add_choices(parser, "--kinds", "of shapes", list(_OPS), _OPS)
    cli.add_choices(parser, "--precisions", "number formats", DEFAULTS, PRECISIONS)
    cli.add_numbers(parser, "--largest", "the largest of M, N, K", DEFAULTS, "N", nargs=None)
    cli.add_numbers(parser, "--batches", "images of the convolutions", DEFAULTS, "IMAGES")
    cli.add_numbers(parser, "--seconds", "the time for all", 110, "SECONDS", nargs=None)
    cli.add_numbers(parser, "--shapes", "the most of a kind in a format", 1000, "N", nargs=None)
    cli.add(parser, "--seed", "of the draw", 0, type=cli.natural_number)
    cli.add(parser, "--repeats", "rounds of each timing", 5, type=cli.positive_integer)


def cells(options):
    cases = [
        (kind, precision)
        for kind, precision in itertools.product(options.kinds, options.precisions)
        if kind == "products" or precision in _LAYERS
    ]
    seconds = options.seconds / max(len(cases), 1)
    return {
        f"{kind} {precision}": functools.partial(survey, kind, precision, seconds, options)
        for kind, precision in cases
    }


def survey(kind, precision, seconds, options):
    """Rows of one kind in one number format, as many as the time allows, at least one."""
    dtype = use_precision(precision)
    draw = random.Random(f"{options.seed} {kind}")  # the same shapes in all formats
    shapes = products(draw, options.largest) if kind == "products" else layers(draw, options)
    end, rows = time.monotonic() + seconds, []
    for name, make in itertools.islice(shapes, options.shapes):
        place = {"op": _OPS[kind], "precision": precision, "shape": name}
        measure = functools.partial(_ratios, *make(dtype, options.device), place, options)
        rows += attempt("shapes", measure, **place)["shapes"]
        if time.monotonic() > end:
            break
    return _found(rows) | {"shapes": rows}


def _ratios(torch_call, own_call, taus, place, options):
    """One row: torch's time, and ours by tau."""
    expected = torch_call().double()
    for tau in (0.0, _HELD):
        error = (own_call(tau).double() - expected).norm() / expected.norm()
        require_near(error.item(), 2 * TOLERANCE[place["precision"]], f"for {place}")
    calls = {"torch": torch_call}
    for name, tau in {"off": 0.0, "none": _HELD, **taus()}.items():
        calls[name] = functools.partial(own_call, tau)
    del expected
    times = interleaved(calls, options.device, options.repeats)
    least = times.pop("torch").median
    return [{"torch_ms": least, **{name: least / own.median for name, own in times.items()}}]


# ---- Products -----------------------------------------------------------------------------------


def products(draw, largest):
    """Names of products without end, each with the call that makes it."""
    while True:
        m, k, n = (round(math.exp(draw.uniform(math.log(16), math.log(largest)))) for _ in "mkn")
        layouts = [(draw.choice("rc"), draw.choice(_LEADING)) for _ in "ab"]
        words = " ".join(f"{order}-{leading}" for order, leading in layouts)
        yield f"{m} x {k} x {n} {words}", functools.partial(product, (m, k, n), layouts)


def product(sizes, layouts, dtype, device):
    """torch's call, ours by tau, and the taus."""
    (m, k, n), (a_layout, b_layout) = sizes, layouts
    generator = torch.Generator(device).manual_seed(0)
    a = _matrix(m, k, a_layout, dtype, generator)
    b = _matrix(k, n, b_layout, dtype, generator)

    def taus():
        norms = torch.ops.spamm_torch.norm_maps(a, b, 64)
        return {name: spamm_torch.find_tau(*norms, kept).item() for name, kept in _KEPT.items()}

    return (
        functools.partial(torch.mm, a, b),
        lambda tau: spamm_torch.mm(a, b, tau=tau),
        taus,
    )


def _matrix(rows, columns, layout, dtype, generator):
    """Normal entries that fall off from the diagonal, in memory as the layout says."""
    order, leading = layout
    lines, length = (rows, columns) if order == "r" else (columns, rows)
    stride = {"padded": length // 64 * 64 + 128, "odd": length // 2 * 2 + 3}.get(leading, length)
    offset = 1 if leading == "off" else 0
    device = generator.device
    memory = torch.empty(lines * stride + offset, dtype=dtype, device=device)[offset:]
    matrix = memory.view(lines, stride)[:, :length]
    along = torch.linspace(0, 1, lines, device=device)[:, None]
    fall = torch.linspace(0, 1, length, device=device).sub(along).abs_().mul_(-6).exp_()
    matrix.copy_(torch.randn(fall.shape, device=device, generator=generator).mul_(fall))
    return matrix if order == "r" else matrix.t()


# ---- Convolutions -------------------------------------------------------------------------------


@functools.cache
def _convolutions():
    """The distinct convolutions of the networks, by what they are called with."""
    import torchvision

    found = {}

    def record(module, arguments):
        channels, rows, columns = arguments[0].shape[1:]
        rest = module.stride, module.padding, module.dilation, module.groups
        found[(channels, module.out_channels, rows, columns, module.kernel_size, *rest)] = None

    for name in NETWORKS:
        with torch.device("meta"):
            more = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
            network = torchvision.models.get_model(name, weights=None, **more).eval()
            for module in network.modules():
                if isinstance(module, torch.nn.Conv2d):
                    module.register_forward_pre_hook(record)
            network(torch.empty(1, 3, *[_PICTURE.get(name, 224)] * 2))
    return list(found)


def layers(draw, options):
    """All convolutions at all batches, once, in a random order; as products()."""
    shapes = list(itertools.product(_convolutions(), options.batches))
    for layer, batch in draw.sample(shapes, len(shapes)):
        inside, outside, rows, columns, kernel, stride, padding, dilation, groups = layer
        name = f"{batch} x {inside} -> {outside}, {rows} x {columns}, {kernel[0]} x {kernel[1]}"
        name += f", stride {stride[0]}" * (stride[0] > 1) + f", {groups} groups" * (groups > 1)
        settings = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
        input, weight = (batch, inside, rows, columns), (outside, inside // groups, *kernel)
        yield name, functools.partial(convolution, input, weight, settings)


def convolution(shape, weight_shape, settings, dtype, device):
    """As product()."""
    generator = torch.Generator(device).manual_seed(0)
    randn = functools.partial(torch.randn, generator=generator, device=device)
    fall = torch.linspace(1, 0, shape[3], device=device).pow_(3)
    last = {"dtype": dtype, "memory_format": torch.channels_last}
    input = randn(shape).relu_().mul_(fall).to(**last)
    weight = randn(weight_shape).div_(math.prod(weight_shape[1:]) ** 0.5).to(**last)
    pinned = torch.ops.spamm_torch.conv2d_weight_norm(weight, settings["groups"])

    def taus():
        searched = functools.partial(spamm_torch.conv2d, input, weight, return_info=True)
        infos = {k: searched(valid_ratio=v, **settings)[1] for k, v in _KEPT.items()}
        return {name: float(info.tau) for name, info in infos.items()}

    return (
        functools.partial(F.conv2d, input, weight, **settings),
        lambda tau: spamm_torch.conv2d(input, weight, tau=tau, **settings, norm_weight=pinned),
        taus,
    )


# ---- What was found -----------------------------------------------------------------------------


def _found(rows):
    """Shares of shapes that are slow, and the slowest, where torch's call is not short; by how much
    95% of the others exceed it at most. Nothing of no rows with figures.
    """
    shares, slowest = [], []
    rows = [row for row in rows if not row.get("absent")]
    long = [row for row in rows if row["torch_ms"] >= _SHORT_MS]
    short = [row for row in rows if row["torch_ms"] < _SHORT_MS]
    for kept in ("off", "none", *_KEPT) if rows else ():
        place = {"op": rows[0]["op"], "precision": rows[0]["precision"], "kept": kept}
        share = place | {"shapes": len(long), "short": len(short)}
        if long:
            ratios = [row[kept] for row in long]
            share["speedup"] = statistics.median(ratios)
            for limit in _LIMITS:
                share[f"below {limit}"] = sum(ratio < limit for ratio in ratios) / len(ratios)
        over = sorted(1e3 * row["torch_ms"] * (1 / row[kept] - 1) for row in short)
        if over:
            share["us over"] = over[int(0.95 * len(over))]
        shares.append(share)
        for row in sorted(long, key=lambda row: row[kept])[:_SLOWEST]:
            of_shape = {"shape": row["shape"], "torch_ms": row["torch_ms"], "speedup": row[kept]}
            slowest.append(place | of_shape)
    return {"shapes, shares": shares, "shapes, slowest": slowest} if rows else {}
