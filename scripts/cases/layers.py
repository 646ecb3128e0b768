"""ResNet-50's convolutions one by one, with bias, residual and ReLU in the same kernel.

By group: what a byte and flop model says that they need.
"""

import functools
import itertools
from dataclasses import dataclass

import torch
import torch.nn.functional as F

import spamm_torch
from cases.conv import Layer
from cases.networks import PRECISION
from common import options as cli
from common.machine import TOLERANCE, use_precision
from common.timing import interleaved
from models.errors import UserError

CANDIDATES = {
    "ours": "conv2d at tau = 0, which skips nothing, with bias, residual and ReLU",
    "dense_conv2d": "the dense op with the same arguments",
    "separate": "torch's convolution, then add_ and relu_: a kernel each",
    "compiled": "the same under torch.compile: the convolution, then one kernel for the rest",
}
TITLE = "ResNet-50's convolutions fused, nothing skipped"
NOTES = (
    "Times are medians, all candidates in turns. "
    + "; ".join(f"{name}: {what}" for name, what in CANDIDATES.items())
    + ". Errors are of the output, relative, against float64's."
)
MODE = torch.no_grad
DEFAULTS = {"cpu": {"batches": (16,), "repeats": 7}, "cuda": {"batches": (64,), "repeats": 9}}
# What one H200 sustains: the bytes of a kernel that streams, the operations of cuDNN's fastest
# convolution in a half type.
BYTES_PER_S = 4.0e12
FLOPS = 690e12
_BYTES = 2  # an entry of a half type
_ROUNDINGS = 3  # a candidate of separate kernels rounds after each


@dataclass(frozen=True)
class FusedLayer:
    """A convolution and what its kernel does with the sums; ``count`` of them in the network."""

    group: str
    shape: Layer
    residual: bool
    relu: bool
    count: int

    @property
    def name(self):
        return self.shape.name

    def flops(self, batch):
        layer = self.shape
        products = layer.kernel**2 * layer.in_channels * layer.out_channels
        return 2 * products * batch * layer.output_size**2

    def bytes(self, batch):
        """Each operand once, in a half type; a strided 1x1 kernel reads only some of the pixels."""
        layer = self.shape
        read = layer.output_size if layer.kernel == 1 else layer.size
        pixels, outputs = batch * read**2, batch * layer.output_size**2 * layer.out_channels
        weights = layer.kernel**2 * layer.in_channels * layer.out_channels
        return _BYTES * (pixels * layer.in_channels + (1 + self.residual) * outputs + weights)

    def floor_us(self, batch):
        """Microseconds that one such layer takes at least: its bytes or its operations."""
        return 1e6 * max(self.flops(batch) / FLOPS, self.bytes(batch) / BYTES_PER_S)


# Group, channels in and out, height and width of the input, kernel, stride, what follows the sums,
# how many of them. Stride is in the 3x3 convolutions, as in torchvision. A 1x1 layer belongs to the
# size of the picture that it reads.
_RESNET50 = (
    ("conv1", 3, 64, 224, 7, 2, "relu", 1),
    ("56: reduce", 64, 64, 56, 1, 1, "relu", 1),
    ("56: reduce", 256, 64, 56, 1, 1, "relu", 2),
    ("56: 3x3", 64, 64, 56, 3, 1, "relu", 3),
    ("56: expand + add", 64, 256, 56, 1, 1, "add relu", 3),
    ("downsample", 64, 256, 56, 1, 1, "", 1),
    ("56: reduce", 256, 128, 56, 1, 1, "relu", 1),
    ("28, 14, 7: 3x3", 128, 128, 56, 3, 2, "relu", 1),
    ("28: reduce", 512, 128, 28, 1, 1, "relu", 3),
    ("28, 14, 7: 3x3", 128, 128, 28, 3, 1, "relu", 3),
    ("28: expand + add", 128, 512, 28, 1, 1, "add relu", 4),
    ("downsample", 256, 512, 56, 1, 2, "", 1),
    ("28: reduce", 512, 256, 28, 1, 1, "relu", 1),
    ("28, 14, 7: 3x3", 256, 256, 28, 3, 2, "relu", 1),
    ("14: reduce", 1024, 256, 14, 1, 1, "relu", 5),
    ("28, 14, 7: 3x3", 256, 256, 14, 3, 1, "relu", 5),
    ("14: expand + add", 256, 1024, 14, 1, 1, "add relu", 6),
    ("downsample", 512, 1024, 28, 1, 2, "", 1),
    ("14: reduce", 1024, 512, 14, 1, 1, "relu", 1),
    ("28, 14, 7: 3x3", 512, 512, 14, 3, 2, "relu", 1),
    ("7: 1x1", 2048, 512, 7, 1, 1, "relu", 2),
    ("28, 14, 7: 3x3", 512, 512, 7, 3, 1, "relu", 2),
    ("7: 1x1", 512, 2048, 7, 1, 1, "add relu", 3),
    ("downsample", 1024, 2048, 14, 1, 2, "", 1),
)


def _layers():
    for group, before, after, size, kernel, stride, epilogue, count in _RESNET50:
        name = f"{size}-{before}-{after}-{kernel}x{kernel}" + ("" if epilogue else "-down")
        shape = Layer(name, before, after, size, kernel, stride)
        yield FusedLayer(group, shape, "add" in epilogue, "relu" in epilogue, count)


LAYERS = {layer.name: layer for layer in _layers()}


# ---- Options ------------------------------------------------------------------------------------


def add_options(parser):
    cli.add_device_option(parser)
    cli.add_choices(parser, "--layers", "some of the layers", list(LAYERS), LAYERS, metavar="LAYER")
    cli.add_numbers(parser, "--batches", "images a batch", DEFAULTS, "IMAGES")
    cli.add_repeats_option(parser, DEFAULTS)
    cli.add_cold_option(parser)


def choose(options):
    options.precision = PRECISION[options.device.type]


def header(options):
    return {"inference": f"{options.precision}, channels last"}


def cells(options):
    cells = itertools.product(options.batches, options.layers)
    return {
        f"{name}, batch {batch}": functools.partial(measure_layer, LAYERS[name], batch, options)
        for batch, name in cells
    }


# ---- A layer ------------------------------------------------------------------------------------


class LayerCase:
    """A layer's operands: activations behind a ReLU, weights and a bias that keep their size."""

    def __init__(self, layer, batch, dtype, device):
        self.layer = layer
        generator = torch.Generator(device).manual_seed(0)

        def randn(*shape):
            return torch.randn(shape, generator=generator, device=device)

        def activations(channels, size):
            values = randn(batch, channels, size, size).relu_().to(dtype)
            return values.to(memory_format=torch.channels_last)

        shape = layer.shape
        self.input = activations(shape.in_channels, shape.size)
        self.residual = None
        if layer.residual:
            self.residual = activations(shape.out_channels, shape.output_size)
        weight = randn(shape.out_channels, shape.in_channels, shape.kernel, shape.kernel)
        weight /= (shape.in_channels * shape.kernel**2) ** 0.5
        self.weight = weight.to(dtype).to(memory_format=torch.channels_last)
        self.bias = randn(shape.out_channels).to(dtype)
        self._window = {"stride": shape.stride, "padding": shape.padding}

    def calls(self):
        """{candidate: call}."""
        compiled = torch.compile(self._separate, dynamic=False)
        activation = "relu" if self.layer.relu else None
        operands = self.input, self.weight, self.bias
        window = self._window["stride"], self._window["padding"]

        def ours():
            return spamm_torch.conv2d(
                *operands, *window, tau=0.0, residual=self.residual, activation=activation
            )

        def dense():
            return torch.ops.spamm_torch.dense_conv2d(
                *operands,
                *([length] * 2 for length in window),
                residual=self.residual,
                activation=activation or "none",
            )

        calls = ours, dense, self._separate, compiled
        return dict(zip(CANDIDATES, calls, strict=True))

    def _separate(self):
        output = F.conv2d(self.input, self.weight, self.bias, **self._window)
        if self.residual is not None:
            output = output.add_(self.residual)
        return output.relu_() if self.layer.relu else output

    def error(self, output):
        """Of the first image, against float64."""
        expected = F.conv2d(
            self.input[:1].double(), self.weight.double(), self.bias.double(), **self._window
        )
        if self.residual is not None:
            expected += self.residual[:1]
        if self.layer.relu:
            expected.relu_()
        return ((output[:1].double() - expected).norm() / expected.norm()).item()


def measure_layer(layer, batch, options):
    """A row for each candidate.

    Raises:
        UserError: a candidate gives a wrong result.
    """
    torch._dynamo.reset()  # compiled code of one layer is of no use to the next
    case = LayerCase(layer, batch, use_precision(options.precision), options.device)
    calls = case.calls()
    errors = {name: case.error(call()) for name, call in calls.items()}
    most = _ROUNDINGS * TOLERANCE[options.precision]
    for name, error in errors.items():
        if not error <= most:
            raise UserError(
                f"wrong result of {name} for {layer.name}, batch {batch}: expected an error of at "
                f"most {most:.2g}; got {error:.2g}"
            )
    times = interleaved(calls, options.device, options.repeats, cold=options.cold)
    place = {"layer": layer.name, "batch": batch, "group": layer.group, "count": layer.count}
    rows = [
        place
        | {
            "candidate": name,
            "ms": of.median,
            "speedup": times["compiled"].median / of.median,
            "spread": of.spread / of.median,
            "error": errors[name],
            "floor_us": layer.floor_us(batch),
        }
        for name, of in times.items()
    ]
    return {"fused layers": rows}
