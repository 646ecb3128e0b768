"""conv2d against torch's (cuDNN or oneDNN, channels last) by layer, batch and valid ratio.

Layers: the ten convolutions of VGG13 on 32 x 32 pictures, the 3 x 3 and 1 x 1 convolutions of
ResNet-50 on 224 x 224, and two large ones. The weight's norms are pinned and tau is held, as in
serving. Times are medians, all candidates in turns; the share of block products kept is of those
that reach a pixel of the input. The JSON file has relative errors against float64, skipped alike.
"""

import functools
import itertools
from dataclasses import dataclass

import torch
import torch.nn.functional as F

import spamm_torch
from common import options as cli
from common.measuring import PRECISIONS, TOLERANCE, require_near, use_precision
from common.timing import interleaved
from spamm_torch._info import conv2d_norm_maps

TITLE = "conv2d against torch.nn.functional.conv2d"


@dataclass(frozen=True)
class Layer:
    name: str
    in_channels: int
    out_channels: int
    size: int  # height and width of the input
    kernel: int = 3
    stride: int = 1


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
_BLOCKS = {"block": (64, 64, 64), "pixel_block": (64, 1, 1)}


def add_options(parser):
    cli.add_device_option(parser)
    cli.add_choices(parser, "--groups", "of layers", DEFAULTS, GROUPS)
    what = f"some layers in place of groups, of {', '.join(NAMES)}"
    cli.add_choices(parser, "--layers", what, None, NAMES, "those of the groups", metavar="LAYER")
    cli.add_numbers(parser, "--batches", "images a batch", DEFAULTS, "IMAGES")
    cli.add_choices(parser, "--precisions", "number formats", DEFAULTS, PRECISIONS)
    what = "inputs: even in size at random, or falling off from the middle"
    cli.add_choices(parser, "--data", what, ["even"], ("even", "centred"))
    cli.add_ratios_option(parser, RATIOS)
    cli.add_repeats_option(parser, DEFAULTS)


def cells(options):
    return {
        f"{layer.name} {rest[0]} {rest[1]} {rest[2]}": functools.partial(
            bench_case, layer, *rest, options
        )
        for layer, *rest in cases_of(options)
    }


def cases_of(options):
    """(layer, batch, precision, data) in the order of the tables."""
    layers = [
        layer
        for group, of_group in GROUPS.items()
        for layer in of_group
        if (layer.name in options.layers if options.layers else group in options.groups)
    ]
    return itertools.product(layers, options.batches, options.precisions, options.data)


class Case:
    """A layer's operands, the norms of their blocks and what is skipped under a threshold."""

    def __init__(self, layer, batch, dtype, data, device):
        generator = torch.Generator(device).manual_seed(0)

        def randn(*shape):
            return torch.randn(shape, generator=generator, device=device)

        input = randn(batch, layer.in_channels, layer.size, layer.size).relu_()
        if data == "even":  # sizes differ at random
            shape = (-(-batch // 64), -(-layer.in_channels // 64), layer.size, layer.size)
            scale = torch.rand(shape, generator=generator, device=device) + 0.5
            blocks = scale.repeat_interleave(64, 0).repeat_interleave(64, 1)
            input *= blocks[:batch, : layer.in_channels]
        else:  # they fall off from the middle
            along = torch.linspace(-1, 1, layer.size, device=device).square()
            input *= torch.exp(-3 * (along[:, None] + along).sqrt())
        weight = randn(layer.out_channels, layer.in_channels, layer.kernel, layer.kernel)
        weight /= (layer.in_channels * layer.kernel**2) ** 0.5
        self.input = input.to(dtype).to(memory_format=torch.channels_last)
        self.weight = weight.to(dtype).to(memory_format=torch.channels_last)
        self.shape = {"stride": layer.stride, "padding": layer.kernel // 2}
        geometry = (layer.stride,) * 2, (layer.kernel // 2,) * 2, (1, 1), 1
        maps = conv2d_norm_maps(self.input, self.weight, geometry, True, *_BLOCKS.values(), None)
        self.norm_weight, self._norm_columns = maps.norm_a, maps.skip_norm_b[0]

    def threshold(self, ratio):
        """A tau that keeps this share of the products in the picture, and the share it keeps."""
        inside = self._norm_columns > 0
        products = (self.norm_weight[0][:, :, None] * self._norm_columns)[:, inside]
        ordered = products.flatten().sort().values
        skipped = round((1 - ratio) * len(ordered))
        # Away from the product itself, for norms are right to a few last bits.
        tau = ordered[skipped] * (1 - 1e-5) if skipped else 0.0
        return tau, (ordered >= tau).double().mean().item()

    def error(self, output, tau):
        """The error of the first block of images against float64 with the same skips."""
        images = self.input[: _BLOCKS["block"][2]].double()
        wanted = spamm_torch.conv2d(images, self.weight.double(), tau=tau, **self.shape, **_BLOCKS)
        error = (output[: len(images)].double() - wanted).norm()
        return (error / wanted.norm().clamp(min=1e-30)).item()


def bench_case(layer, batch, precision, data, options):
    """A row for each ratio; the dense convolution takes turns with all of them."""
    device = options.device
    case = Case(layer, batch, use_precision(precision), data, device)
    input, weight = case.input, case.weight
    calls, found = {"dense": functools.partial(F.conv2d, input, weight, **case.shape)}, {}
    norms = spamm_torch.norm_map(input.permute(2, 3, 0, 1), 64).permute(2, 0, 1, 3).contiguous()
    for ratio in options.ratios:
        tau, valid = case.threshold(ratio)
        given = case.shape | _BLOCKS | {"tau": tau, "norm_weight": case.norm_weight}
        call = calls[ratio] = functools.partial(spamm_torch.conv2d, input, weight, **given)
        error = case.error(call(), tau)
        of = f"for {layer.name}, batch {batch}, at ratio {ratio}"
        require_near(error, TOLERANCE[precision], of)
        found[ratio] = {"ratio": ratio, "valid_ratio": valid, "error": error}
        if device.type == "cuda":
            chained = functools.partial(call, norm_input=norms, return_norms=True)
            calls[f"chained {ratio}"] = chained
    times = interleaved(calls, device, options.repeats)
    dense = times["dense"]
    place = {"layer": layer.name, "batch": batch, "precision": precision, "data": data}
    place |= {"block": list(_BLOCKS["block"]), "dense_ms": dense.median}
    for ratio, row in found.items():
        row |= place | times[ratio].over(dense)
        if chained := times.get(f"chained {ratio}"):
            row["speedup_chained"] = chained.over(dense)["speedup"]
    return {"convolutions": list(found.values())}
