"""Small models for the tests of whole networks, and what these tests ask of a model."""

import copy
import linecache
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torchvision
from support import Made
from torch import nn
from torch.nn import functional as F
from torchvision.models.resnet import BasicBlock

from models.unet import UNet
from spamm_torch import convert_
from spamm_torch._timing import Timing
from spamm_torch.networks.install import fused_of


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

    def forward(self, x, scale=None):
        x = self.pool(F.relu(self.bn1(self.conv1(x))))
        x = self.layer2(self.layer1(x))
        x = self.fc(x.mean((2, 3)))
        return x if scale is None else x * scale


def unet(width=32, depth=1, classes=4):
    torch.manual_seed(0)
    return trained(UNet(1, classes, width=width, depth=depth))


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
    """Noise; size: of both edges, or height and width."""
    shape = (size, size) if isinstance(size, int) else size
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, channels, *shape, generator=generator).to(dtype)


@torch.no_grad()
def is_served(model, *args, **kwargs):
    """Tells whether a call takes a generated forward, in the model or anywhere in it."""
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


def source_of(model, name="forward"):
    """The text of a generated forward."""
    forward = getattr(fused_of(model), name)
    forward = forward if name == "forward" else forward(True)
    return "".join(linecache.getlines(forward.__code__.co_filename))


@torch.no_grad()
def compiled(model, *inputs):
    """The result of a model that is compiled into one graph, and what this graph calls."""
    targets = []

    def keep(graph, _):
        targets.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    torch._dynamo.reset()
    return torch.compile(model, fullgraph=True, backend=keep)(*inputs), targets


def marks_of_forms(monkeypatch, around_each=lambda names: nullcontext()):
    """A list that gets, of each form of a model that convert_ times, the names of its parts."""
    forms = []

    def times_of_parts(calls, _, before):
        for call, prepare in zip(calls, before, strict=True):
            forms.append(names := [])
            prepare()
            with around_each(names):
                call(names.append)
        return [dict.fromkeys(forms[-1], Timing(1.0))] * len(calls)

    monkeypatch.setattr("spamm_torch.networks.engines.times_of_parts", times_of_parts)
    return forms


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


def fused_alone(*layers):
    """The layers that the first convolution of these absorbs."""
    return rows(convert_(trained(nn.Sequential(*layers))))["0"][1]


# ---- The zoo -------------------------------------------------------------------------------------


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
