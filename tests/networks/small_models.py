"""Small models for the tests of whole networks, and what these tests ask of a model."""

import copy

import torch
from support import Made
from torch import nn
from torch.nn import functional as F

from spamm_torch import convert_
from spamm_torch.networks.install import fused_of


class Block(nn.Module):
    """A residual block as torchvision writes it, with activations in place."""

    def __init__(self, inner, outer, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outer)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outer)
        self.downsample = None
        if stride != 1 or inner != outer:
            self.downsample = nn.Sequential(
                nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer)
            )

    def forward(self, x):
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    """A stem, two residual blocks, and a head."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 32, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(32)
        self.pool = nn.MaxPool2d(2)
        self.layer1 = nn.Sequential(Block(32, 32))
        self.layer2 = nn.Sequential(Block(32, 64, 2))
        self.fc = nn.Linear(64, 5)

    def forward(self, x, scale=None):
        x = self.pool(F.relu(self.bn1(self.conv1(x))))
        x = self.layer2(self.layer1(x))
        x = self.fc(x.mean((2, 3)))
        return x if scale is None else x * scale


def trained(model, seed=0):
    """The model in eval mode, with statistics and scales that a fold must not miss."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
                if name in ("weight", "running_var"):
                    tensor.data.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
                elif name in ("bias", "running_mean"):
                    tensor.data.copy_(torch.randn(tensor.shape, generator=generator))
    return model.eval()


def resnet(seed=0):
    torch.manual_seed(seed)
    return trained(ResNet(), seed)


def pictures(count=2, channels=3, size=16, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, channels, size, size, generator=generator).to(dtype)


@torch.no_grad()
def is_served(model, *args, **kwargs):
    """Whether a call takes a generated forward, in the model or anywhere in it."""
    count = 0
    generated = [fused for module in model.modules() if (fused := fused_of(module)) is not None]

    def counted(run):
        def run_and_count(inputs):
            nonlocal count
            count += 1
            return run(inputs)

        return run_and_count

    try:
        for fused in generated:
            fused.run = counted(fused.run)
        model(*args, **kwargs)
    finally:
        for fused in generated:
            del fused.run
    return count > 0


@torch.no_grad()
def assert_same(model, original, *args, tolerance=1e-4):
    args = args or (pictures(),)
    torch.testing.assert_close(model(*args), original(*args), rtol=tolerance, atol=tolerance)


def converted_alike(model, inputs, *config, tolerance=1e-4, **options):
    """The report of ``convert_``: generated forwards give for all inputs what the model gave."""
    original = copy.deepcopy(model)
    report = convert_(model, *config, **options)
    for x in inputs if isinstance(inputs, tuple) else (inputs,):
        assert is_served(model, x)
        assert_same(model, original, x, tolerance=tolerance)
    return report


def state_of(model):
    """Everything that could have changed, but for the values of tensors."""
    return {
        name: (type(module), {k: id(v) for k, v in module.__dict__.items()})
        for name, module in model.named_modules()
    }


class OfFunction(nn.Module):
    """A module of a function."""

    def __init__(self, function):
        super().__init__()
        self._function = function

    def forward(self, x):
        return self._function(x)


def calling(forward):
    """A model of two convolutions of 8 channels, a batch norm and a linear layer."""
    convolutions = {name: nn.Conv2d(8, 8, 3, padding=1) for name in ("conv1", "conv2")}
    return trained(Made(forward, **convolutions, bn=nn.BatchNorm2d(8), fc=nn.Linear(8, 3)))


def rows(report):
    """{name: (action, absorbed)} of the convolutions."""
    return {row.name: (row.action, row.absorbed) for row in report if "x" in row.shape}


def fused_alone(*layers, name="0"):
    """What the first convolution of these layers absorbs."""
    model = trained(nn.Sequential(*layers))
    return rows(convert_(model))[name][1]
