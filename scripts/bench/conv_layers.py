"""The convolutions that bench_conv.py measures."""

from dataclasses import dataclass


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


def group_of(name):
    return next(group for group, layers in GROUPS.items() if any(x.name == name for x in layers))
