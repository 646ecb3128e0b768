"""The networks that conversions are tested with, on small pictures."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torchvision
from torch import nn

from models.unet import UNet


@dataclass(frozen=True)
class ZooCase:
    """A network and what is expected of its conversion.

    Attributes:
        build: gives it, freshly drawn.
        size: height and width of its pictures.
        images: of a batch.
        batch_norms_left: those that stand before a convolution, and not behind one.
        needs: a package of an optional extra, or None.
    """

    build: Callable[[], nn.Module]
    size: int = 64
    images: int = 2
    batch_norms_left: int = 0
    needs: str | None = None

    def model(self):
        """In eval mode, channels last, the same in each call; batch norms know their inputs."""
        if self.needs is not None:
            pytest.importorskip(self.needs, reason=f"needs {self.needs}, an optional extra")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = self.build()
        return settled(model.to(memory_format=torch.channels_last).eval(), self.pictures(8))

    def pictures(self, images=None):
        """A batch, channels last, the same in each call."""
        generator = torch.Generator().manual_seed(1)
        noise = torch.randn(images or self.images, 3, self.size, self.size, generator=generator)
        return noise.to(memory_format=torch.channels_last)


def settled(model, pictures):
    """The model with batch norms as training leaves them: statistics, scales, shifts."""
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for norm in norms:
            norm.weight.copy_(1 + torch.randn(norm.weight.shape, generator=generator) / 8)
            norm.bias.copy_(torch.randn(norm.bias.shape, generator=generator) / 8)
            norm.momentum = None  # statistics of all batches, here of one
            norm.train()
        model(pictures)
    for norm in norms:
        norm.momentum = 0.1
        norm.eval()
    return model


def _torchvision(name, **options):
    return partial(torchvision.models.get_model, name, weights=None, **options)


def _vgg13_bn():
    """torchvision's, with a head that is small beside its convolutions."""
    layers = torchvision.models.vgg.make_layers(torchvision.models.vgg.cfgs["B"], batch_norm=True)
    model = torchvision.models.VGG(layers, num_classes=1, init_weights=False)
    model.classifier = nn.Sequential(nn.Dropout(), nn.Linear(512 * 49, 10))
    return model


def _fcn_resnet50():
    return torchvision.models.segmentation.fcn_resnet50(
        weights=None, weights_backbone=None, num_classes=3
    )


def _timm(name, **options):
    def build():
        import timm

        return timm.create_model(name, pretrained=False, **options)

    return ZooCase(build, needs="timm")


ZOO = {
    "resnet18": ZooCase(_torchvision("resnet18")),
    "resnet50": ZooCase(_torchvision("resnet50")),
    "vgg13_bn": ZooCase(_vgg13_bn),
    "densenet121": ZooCase(_torchvision("densenet121"), batch_norms_left=62),
    "mobilenet_v3_small": ZooCase(_torchvision("mobilenet_v3_small")),
    "mobilenet_v3_large": ZooCase(_torchvision("mobilenet_v3_large")),
    "convnext_tiny": ZooCase(_torchvision("convnext_tiny"), images=1),
    "regnet_y_400mf": ZooCase(_torchvision("regnet_y_400mf")),
    "googlenet": ZooCase(_torchvision("googlenet", aux_logits=False, init_weights=False)),
    "shufflenet_v2_x0_5": ZooCase(_torchvision("shufflenet_v2_x0_5")),
    "efficientnet_b0": ZooCase(_torchvision("efficientnet_b0")),
    "unet": ZooCase(partial(UNet, width=64, depth=2), size=32),
    "unet_transposed": ZooCase(partial(UNet, width=64, depth=2, upsampling="transposed"), size=32),
    "fcn_resnet50": ZooCase(_fcn_resnet50),
    "timm_resnet18": _timm("resnet18"),
    "timm_vgg11_bn": _timm("vgg11_bn", mlp_ratio=1 / 64),
    "timm_regnetx_002": _timm("regnetx_002"),
}


def output_of(model, pictures):
    """The tensor that a network gives; of a segmentation network's dictionary the main output."""
    output = model(pictures)
    return output["out"] if isinstance(output, dict) else output


def detector():
    """A detector of torchvision's for small pictures, in eval mode, and a list of these."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = torchvision.models.detection.fasterrcnn_mobilenet_v3_large_fpn(
            weights=None,
            weights_backbone=None,
            num_classes=3,
            min_size=64,
            max_size=64,
            rpn_post_nms_top_n_test=20,
        )
    generator = torch.Generator().manual_seed(1)
    pictures = [torch.rand(3, 64, side, generator=generator) for side in (48, 64)]
    return settled(model.eval(), pictures), pictures
