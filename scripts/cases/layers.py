"""ResNet-50's convolutions one by one, with bias, residual and ReLU in the same kernel.

By group: what a byte and flop model says that they need. Times are medians, candidates in turns:
ours, conv2d at tau = 0; dense_conv2d, the op with the same arguments; separate, a convolution, then
add_ and relu_; compiled, the same under torch.compile. Errors are relative, against float64's.
"""

import functools
import itertools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import torchvision

import spamm_torch
from cases.conv import Layer
from cases.networks import PRECISION
from common import options as cli
from common.machine import TOLERANCE, use_precision
from common.measuring import require_near
from common.timing import interleaved

CANDIDATES = ("ours", "dense_conv2d", "separate", "compiled")
TITLE = "ResNet-50's convolutions fused, nothing skipped"
MODE = torch.no_grad
DEFAULTS = {"cpu": {"batches": (16,), "repeats": 7}, "cuda": {"batches": (64,), "repeats": 9}}
# Rates that one H200 sustains: the bytes of a kernel that streams, the operations of cuDNN's
# fastest convolution in a half type.
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


def _layers():
    """By name, in the network's order. A 1x1 layer belongs to the size of the picture it reads."""
    with torch.device("meta"):
        model = torchvision.models.resnet50(weights=None).eval()
        picture = torch.empty(1, 3, 224, 224)
    found = {}

    def note(place, conv, inputs, _):
        (kernel, _), (stride, _), size = conv.kernel_size, conv.stride, inputs[0].shape[-1]
        is_plain, residual = "downsample" in place, place.endswith("conv3")
        name = f"{size}-{conv.in_channels}-{conv.out_channels}-{kernel}x{kernel}"
        name += "-down" if is_plain else ""
        shape = Layer(name, conv.in_channels, conv.out_channels, size, kernel, stride)
        if place == "conv1" or is_plain:
            group = "downsample" if is_plain else place
        elif kernel == 3:
            group = "56: 3x3" if shape.output_size == 56 else "28, 14, 7: 3x3"
        else:
            group = "7: 1x1" if size == 7 else f"{size}: {'expand + add' if residual else 'reduce'}"
        count = 1 + (found[name].count if name in found else 0)
        found[name] = FusedLayer(group, shape, residual, not is_plain, count)

    for place, module in model.named_modules():
        if isinstance(module, torch.nn.Conv2d):
            module.register_forward_hook(functools.partial(note, place))
    with torch.no_grad():
        model(picture)
    return found


LAYERS = _layers()


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
        """The error of the first image, against float64."""
        expected = F.conv2d(
            self.input[:1].double(), self.weight.double(), self.bias.double(), **self._window
        )
        if self.residual is not None:
            expected += self.residual[:1]
        if self.layer.relu:
            expected.relu_()
        return ((output[:1].double() - expected).norm() / expected.norm()).item()


def measure_layer(layer, batch, options):
    """A row for each candidate."""
    torch._dynamo.reset()  # compiled code of one layer is of no use to the next
    case = LayerCase(layer, batch, use_precision(options.precision), options.device)
    calls = case.calls()
    errors = {name: case.error(call()) for name, call in calls.items()}
    for name, error in errors.items():
        most = _ROUNDINGS * TOLERANCE[options.precision]
        require_near(error, most, f"of {name} for {layer.name}, batch {batch}")
    times = interleaved(calls, options.device, options.repeats, cold=options.cold)
    place = {"layer": layer.name, "batch": batch, "group": layer.group, "count": layer.count}
    place["floor_us"] = layer.floor_us(batch)
    rows = [
        place | {"candidate": name} | of.over(times["compiled"]) | {"error": errors[name]}
        for name, of in times.items()
    ]
    return {"fused layers": rows}
