"""A tiny network and pictures for it, in which skipping is worth something."""

from collections import OrderedDict

import torch
from torch import nn

CLASSES = 4


def tiny_network(seed=0, batch_norm=False):
    """Two convolutions that may skip behind one that may not, in eval mode."""
    torch.manual_seed(seed)
    layers = OrderedDict()
    for name, (inner, outer) in {"a": (3, 32), "b": (32, 32), "c": (32, 64)}.items():
        layers[f"conv_{name}"] = nn.Conv2d(inner, outer, 3, padding=1)
        if batch_norm:
            layers[f"bn_{name}"] = nn.BatchNorm2d(outer)
        layers[f"relu_{name}"] = nn.ReLU()
    layers |= {"pool": nn.AdaptiveAvgPool2d(2), "flatten": nn.Flatten()}
    layers["head"] = nn.Linear(4 * 64, CLASSES)
    model = nn.Sequential(layers)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_var, 0.5, 1.5)
    return model.eval()


def dark_pictures(count=8, seed=0, channels=3, size=16):
    """Pictures that are bright in one corner, each in its own way."""
    generator = torch.Generator().manual_seed(seed)
    fade = torch.linspace(1, 0, size) ** 4
    return torch.rand(count, channels, size, size, generator=generator) * fade * fade[:, None]
