"""Small models for the tests of whole networks."""

import torch
from torch import nn
from torch.nn import functional as F
from torchvision.models.resnet import BasicBlock


class Block(BasicBlock):
    """torchvision's residual block, which makes its own shortcut."""

    def __init__(self, inner, outer, stride=1):
        super().__init__(inner, outer, stride)
        if stride != 1 or inner != outer:
            shortcut = nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer)
            self.downsample = nn.Sequential(*shortcut)


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

    def forward(self, x):
        x = self.pool(F.relu(self.bn1(self.conv1(x))))
        x = self.layer2(self.layer1(x))
        return self.fc(x.mean((2, 3)))


def trained(model, seed=3):
    """The model in eval mode, with batch norms that change what they get."""
    generator = torch.Generator().manual_seed(seed)
    for norm in model.modules():
        if isinstance(norm, nn.modules.batchnorm._BatchNorm):
            for tensor in filter(torch.is_tensor, (norm.running_mean, norm.bias)):
                tensor.data.uniform_(-0.2, 0.2, generator=generator)
            for tensor in filter(torch.is_tensor, (norm.running_var, norm.weight)):
                tensor.data.uniform_(0.7, 1.3, generator=generator)
    return model.eval()


def resnet(seed=0):
    torch.manual_seed(seed)
    return trained(ResNet(), seed)


def pictures(count=2, channels=3, size=16, dtype=torch.float32, seed=0):
    """Noise of one batch."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, channels, size, size, generator=generator).to(dtype)


def state_of(model):
    """Everything that could have changed, but for the values of tensors."""
    return {
        name: (type(module), {k: id(v) for k, v in module.__dict__.items()})
        for name, module in model.named_modules()
    }
