"""Measures one fused layer: ours, the dense op, and what torch makes of it."""

import torch
import torch.nn.functional as F

import spamm_torch
from common.precisions import PRECISIONS, TOLERANCE
from common.timing import interleaved
from models.errors import UserError

LAYER_CANDIDATES = {
    "ours": "conv2d at tau = 0, which skips nothing, with bias, residual and ReLU",
    "dense_conv2d": "the dense op with the same arguments",
    "separate": "torch's convolution, then add_ and relu_: a kernel each",
    "compiled": "the same under torch.compile: the convolution, then one kernel for the rest",
}
_ROUNDINGS = 3  # a candidate of separate kernels rounds after each


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
        return dict(zip(LAYER_CANDIDATES, calls, strict=True))

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


def measure_layer(layer, batch, options, precision):
    """A row for each candidate.

    Raises:
        UserError: a candidate gives a wrong result.
    """
    torch._dynamo.reset()  # compiled code of one layer is of no use to the next
    case = LayerCase(layer, batch, PRECISIONS[precision][0], options.device)
    calls = case.calls()
    errors = {name: case.error(call()) for name, call in calls.items()}
    most = _ROUNDINGS * TOLERANCE[precision]
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
