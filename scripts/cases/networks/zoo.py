"""The networks that bench.py networks measures, with weights drawn from a seed."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torchvision
from torch import nn

from models.unet import UNet
from models.vgg13 import VGG13

_BATCHES = (1, 8, 32, 64, 128)
_SETTLING_IMAGES = 4


@dataclass(frozen=True)
class Network:
    build: Callable[[], nn.Module]
    size: int = 224  # height and width of its pictures
    batches: tuple[int, ...] = _BATCHES


def _torchvision(name):
    return Network(partial(torchvision.models.get_model, name, weights=None))


NETWORKS = {
    **{name: _torchvision(name) for name in ("resnet18", "resnet50", "vgg11", "vgg13_bn")},
    "vgg13_32": Network(VGG13, size=32, batches=(1, 8, 32, 128, 512)),
    "unet": Network(UNet, size=512, batches=(1, 8)),
    **{
        name: _torchvision(name)
        for name in ("densenet121", "mobilenet_v3_large", "convnext_tiny", "efficientnet_b0")
    },
    **{name: _torchvision(name) for name in ("regnet_y_3_2gf", "resnext50_32x4d")},  # grouped
}


def pictures_for(network, batch, device):
    """Noise as a batch of pictures, float32, channels last; the same in each call."""
    generator = torch.Generator(device).manual_seed(0)
    shape = (batch, 3, network.size, network.size)
    noise = torch.randn(shape, generator=generator, device=device)
    return noise.to(memory_format=torch.channels_last)


def settled_model(network, device):
    """The network in eval mode, float32, channels last, the same in each call.

    Its batch norms know the mean and the variance of what they normalise, as in a trained network.
    At their defaults activations grow from layer to layer, in ResNets by powers of two.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = network.build()
    model = model.to(device, memory_format=torch.channels_last).eval()
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the average of all batches, here of one
        norm.train()
    with torch.no_grad():
        model(pictures_for(network, _SETTLING_IMAGES, device))
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
        norm.eval()
    return model
