"""ResNet-50's convolutions as they run fused: with bias, residual and ReLU.

By group: what a byte and flop model says that they need.
"""

from dataclasses import dataclass

from cases.conv import Layer

# What one H200 sustains: the bytes of a kernel that streams, the operations of cuDNN's fastest
# convolution in a half type.
BYTES_PER_S = 4.0e12
FLOPS = 690e12
_BYTES = 2  # an entry of a half type
MODEL_BATCH = 64


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
