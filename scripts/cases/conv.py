"""conv2d against torch's (cuDNN or oneDNN, channels last) by layer, batch and valid ratio.

Layers: the ten convolutions of VGG13 on 32 x 32 pictures, the 3 x 3 and 1 x 1 convolutions of
ResNet-50 on 224 x 224, and two large ones. The weight's norms are pinned and tau is held, as in
serving. Times are medians, all candidates in turns; the share of block products kept is of those
that reach a pixel of the input. The JSON file has the peak of memory above input, weight and
output, over the size of these, and relative errors against float64 with the same products skipped.
"""

import functools
import itertools
from dataclasses import dataclass

import torch
import torch.nn.functional as F

import spamm_torch
from common import options as cli
from common.machine import PRECISIONS, TOLERANCE, use_precision
from common.measuring import require_near
from common.timing import interleaved
from models.files import UserError
from spamm_torch._info import conv2d_norm_maps

TITLE = "conv2d against torch.nn.functional.conv2d"
MODE = torch.inference_mode


# ---- Layers -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layer:
    name: str
    in_channels: int
    out_channels: int
    size: int  # height and width of the input
    kernel: int = 3
    stride: int = 1

    @property
    def padding(self):
        return self.kernel // 2

    @property
    def output_size(self):
        return (self.size + 2 * self.padding - self.kernel) // self.stride + 1


def _vgg13():
    channels = 3
    for stage, width in enumerate((64, 128, 256, 512, 512), start=1):
        for i in (1, 2):
            yield Layer(f"conv{stage}{i}", channels, width, 64 >> stage)
            channels = width


def _resnet50():
    for width, size in ((64, 56), (128, 28), (256, 14), (512, 7)):
        yield Layer(f"res{size}-3x3", width, width, size)
        yield Layer(f"res{size}-reduce", 4 * width, width, size, kernel=1)
        yield Layer(f"res{size}-expand", width, 4 * width, size, kernel=1)
        if size < 56:
            yield Layer(f"res{size}-stride", width, width, 2 * size, stride=2)


GROUPS = {
    "vgg13": tuple(_vgg13()),
    "resnet50": tuple(_resnet50()),
    "large": (Layer("large56", 256, 256, 56), Layer("large28", 512, 512, 28)),
}
NAMES = [layer.name for layers in GROUPS.values() for layer in layers]
RATIOS = (1.0, 0.97, 0.9, 0.75, 0.63, 0.43, 0.3)
_ON_GPU = {"groups": tuple(GROUPS), "batches": (100, 128), "precisions": ("float16",)}
DEFAULTS = {
    "cpu": {"groups": ("vgg13",), "batches": (128,), "precisions": ("float32",), "repeats": 5},
    "cuda": _ON_GPU | {"repeats": 15},
}
LARGE_BATCHES = (64,)  # of the group of large layers


def add_options(parser):
    cli.add_device_option(parser)
    cli.add_choices(parser, "--groups", "of layers", DEFAULTS, GROUPS)
    what = f"some of the groups' layers, which are {', '.join(NAMES)}"
    cli.add_choices(parser, "--layers", what, None, NAMES, "all", metavar="LAYER")
    what = f"images a batch; large layers {LARGE_BATCHES[0]}"
    cli.add_numbers(parser, "--batches", what, DEFAULTS, "IMAGES")
    cli.add_choices(parser, "--precisions", "number formats", DEFAULTS, PRECISIONS)
    what = "inputs: even in size at random, or falling off from the middle"
    cli.add_choices(parser, "--data", what, ["even"], ("even", "centred"))
    edges = {"type": int, "nargs": 3, "choices": (32, 64, 128), "metavar": ("M", "K", "N")}
    cli.add(parser, "--block", "edges of the blocks, each 32, 64 or 128", [64, 64, 64], **edges)
    cli.add_ratios_option(parser, RATIOS)
    cli.add_repeats_option(parser, DEFAULTS)
    cli.add_cold_option(parser)


def choose(options):
    if not list(cases_of(options)):
        raise UserError(
            f"expected layers of --groups {' '.join(options.groups)}; got "
            f"{' '.join(options.layers)}"
        )


def header(options):
    return {"block": " x ".join(map(str, options.block))}


def cells(options):
    return {
        f"{layer.name} {rest[0]} {rest[1]} {rest[2]}": functools.partial(
            bench_case, layer, *rest, options
        )
        for layer, *rest in cases_of(options)
    }


def cases_of(options):
    """(layer, batch, precision, data) in the order of the tables."""
    for group in options.groups:
        layers = [x for x in GROUPS[group] if options.layers is None or x.name in options.layers]
        by_default = options.batches is DEFAULTS[options.device.type]["batches"]
        batches = LARGE_BATCHES if by_default and group == "large" else options.batches
        yield from itertools.product(layers, batches, options.precisions, options.data)


# ---- A case -------------------------------------------------------------------------------------


class Case:
    """A layer's operands, the norms of their blocks and what is skipped under a threshold."""

    def __init__(self, layer, batch, dtype, data, block, device):
        self.layer, self.block = layer, block
        generator = torch.Generator(device).manual_seed(0)

        def randn(*shape):
            return torch.randn(shape, generator=generator, device=device)

        input = randn(batch, layer.in_channels, layer.size, layer.size).relu_()
        input *= self.scale(data, batch, generator, device)
        weight = randn(layer.out_channels, layer.in_channels, layer.kernel, layer.kernel)
        weight /= (layer.in_channels * layer.kernel**2) ** 0.5
        self.input = input.to(dtype).to(memory_format=torch.channels_last)
        self.weight = weight.to(dtype).to(memory_format=torch.channels_last)
        self.shape = {"stride": layer.stride, "padding": layer.padding}
        self.setting = {"block": block, "pixel_block": (block[2], 1, 1)}
        geometry = (layer.stride,) * 2, (layer.padding,) * 2, (1, 1), 1
        blocks = block, self.setting["pixel_block"], None
        maps = conv2d_norm_maps(self.input, self.weight, geometry, True, *blocks)
        self.norm_weight, self.norm_columns = maps.norm_a, maps.skip_norm_b[0]

    def scale(self, data, batch, generator, device):
        """Sizes by place: "even" differs at random, "centred" falls off from the middle."""
        layer = self.layer
        if data == "even":
            shape = (-(-batch // 64), -(-layer.in_channels // 64), layer.size, layer.size)
            scale = torch.rand(shape, generator=generator, device=device) + 0.5
            blocks = scale.repeat_interleave(64, 0).repeat_interleave(64, 1)
            return blocks[:batch, : layer.in_channels]
        along = torch.linspace(-1, 1, layer.size, device=device)
        return torch.exp(-3 * (along[:, None].square() + along.square()).sqrt())

    def threshold(self, ratio):
        """A tau that keeps this share of the products in the picture, and the share it keeps."""
        inside = self.norm_columns > 0
        products = (self.norm_weight[0][:, :, None] * self.norm_columns)[:, inside]
        ordered = products.flatten().sort().values
        skipped = round((1 - ratio) * len(ordered))
        # Away from the product itself, for norms are right to a few last bits.
        tau = ordered[skipped] * (1 - 1e-5) if skipped else 0.0
        return tau, (ordered >= tau).double().mean().item()

    def error(self, output, tau):
        """The error of one row of the picture in the first block of images, against float64."""
        layer, (m, k, n) = self.layer, self.block
        row = layer.output_size // 2
        images = min(n, len(self.input))
        padding = (layer.padding,) * 4
        padded = F.pad(self.input[:images], padding).double()
        columns = self.norm_columns.view(len(self.norm_columns), -1, *output.shape[2:])[:, 0, row]
        valid = ~(self.norm_weight[0][:, :, None] * columns < tau)
        expected = torch.zeros_like(output[:images, :, row], dtype=torch.float64)
        steps = itertools.product(
            range(layer.kernel), range(layer.kernel), range(0, layer.in_channels, k)
        )
        reach = (layer.output_size - 1) * layer.stride + 1
        for step, (y, x, c) in enumerate(steps):
            pixels = padded[:, c : c + k, row * layer.stride + y, x : x + reach : layer.stride]
            product = torch.einsum("oc,ncw->now", self.weight[:, c : c + k, y, x].double(), pixels)
            kept = valid[:, step].repeat_interleave(m, 0)[: layer.out_channels]
            expected += product * kept
        error = (output[:images, :, row].double() - expected).norm()
        return (error / expected.norm().clamp(min=1e-30)).item()


def extra_memory(call, *tensors):
    """Peak memory of a call above its tensors and its result, over the size of these. As asked for:
    what the allocator hands out may be up to 1 MiB more, by chance.
    """
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    requested = lambda kind: torch.cuda.memory_stats()[f"requested_bytes.all.{kind}"]  # noqa: E731
    before = requested("current")
    result = call()
    peak = requested("peak") - before
    size = lambda tensor: tensor.numel() * tensor.element_size()  # noqa: E731
    return (peak - size(result)) / sum(map(size, (*tensors, result)))


def bench_case(layer, batch, precision, data, options):
    """A row for each ratio; the dense convolution takes turns with all of them."""
    device = options.device
    dtype = use_precision(precision)
    case = Case(layer, batch, dtype, data, tuple(options.block), device)
    input, weight = case.input, case.weight
    candidates = {"dense": lambda: F.conv2d(input, weight, **case.shape)}
    found = {}
    chained = device.type == "cuda" and case.block[1:] == (64, 64)
    norm_input = None
    if chained:
        _, norm_input = torch.ops.spamm_torch.max_pool2d(input, 1, norms=True)
    for ratio in options.ratios:
        tau, valid = case.threshold(ratio)

        given = case.shape | case.setting | {"tau": tau, "norm_weight": case.norm_weight}
        call = functools.partial(spamm_torch.conv2d, input, weight, **given)
        error = case.error(call(), tau)
        of = f"for {layer.name}, batch {batch}, at ratio {ratio}"
        require_near(error, TOLERANCE[precision], of)
        memory = extra_memory(call, input, weight) if device.type == "cuda" else None
        found[ratio] = valid, error, memory
        candidates[f"conv2d {ratio}"] = call
        if chained:
            more = {"norm_input": norm_input, "return_norms": True}
            candidates[f"chained {ratio}"] = functools.partial(call, **more)
    times = interleaved(candidates, device, options.repeats, cold=options.cold)
    dense = times["dense"].median

    def row(ratio):
        valid, error, memory = found[ratio]
        own = times[f"conv2d {ratio}"]
        chained_ms = times[f"chained {ratio}"].median if chained else None
        return {
            "layer": layer.name,
            "batch": batch,
            "precision": precision,
            "data": data,
            "block": list(case.block),
            "ratio": ratio,
            "cold": options.cold,
            "valid_ratio": valid,
            "dense_ms": dense,
            "conv2d_ms": own.median,
            "chained_ms": chained_ms,
            "spread": own.spread / own.median,
            "speedup": dense / own.median,
            "speedup_chained": dense / chained_ms if chained else None,
            "extra_memory": memory,
            "error": error,
        }

    return {"convolutions": [row(ratio) for ratio in options.ratios]}
