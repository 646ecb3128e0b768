"""U-Net: channels and sizes at every level, and what it refuses."""

import pytest
import torch
from torch import nn

from models.unet import UPSAMPLINGS, UNet


def test_convolutions_are_the_papers():
    """In channels and order; the up-convolutions are 3x3 here."""
    model = UNet()
    found = [(m.in_channels, m.out_channels) for m in model.encoder.modules() if is_3x3(m)]
    assert found == [
        *((3, 64), (64, 64), (64, 128), (128, 128)),
        *((128, 256), (256, 256), (256, 512), (512, 512)),
    ]
    found = [(m.in_channels, m.out_channels) for m in model.bottom.modules() if is_3x3(m)]
    assert found == [(512, 1024), (1024, 1024)]
    found = [(m.in_channels, m.out_channels) for m in model.up.modules() if is_3x3(m)]
    assert found == [(1024, 512), (512, 256), (256, 128), (128, 64)]
    found = [(m.in_channels, m.out_channels) for m in model.decoder.modules() if is_3x3(m)]
    assert found == [
        *((1024, 512), (512, 512), (512, 256), (256, 256)),
        *((256, 128), (128, 128), (128, 64), (64, 64)),
    ]
    assert model.head.weight.shape == (11, 64, 1, 1)


def is_3x3(module):
    return isinstance(module, nn.Conv2d) and module.kernel_size == (3, 3)


@pytest.mark.parametrize("upsampling", UPSAMPLINGS)
def test_shapes_at_every_level(upsampling):
    model = UNet(in_channels=2, classes=5, width=4, depth=3, upsampling=upsampling).eval()
    shapes = {}

    def note(name):
        return lambda module, inputs, output: shapes.update({name: tuple(output.shape[1:])})

    for name, module in model.named_modules():
        module.register_forward_hook(note(name))
    output = model(torch.randn(2, 2, 16, 24))
    assert output.shape == (2, 5, 16, 24)
    sides = [(4, 16, 24), (8, 8, 12), (16, 4, 6)]
    for level, side in enumerate(sides):
        assert shapes[f"encoder.{level}"] == side
        assert shapes[f"up.{2 - level}"] == side
        assert shapes[f"decoder.{2 - level}"] == side
    assert shapes["bottom"] == (32, 2, 3)


@pytest.mark.parametrize("upsampling", UPSAMPLINGS)
def test_every_level_reaches_the_output(upsampling):
    """A level whose output is lost on the way would have no gradient."""
    torch.manual_seed(0)
    model = UNet(width=4, depth=2, upsampling=upsampling)
    model(torch.randn(2, 3, 8, 8)).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.abs().max() > 0, name


def test_it_learns_a_picture():
    """Which pixels of noise are bright, a question that the first level can answer."""
    torch.manual_seed(0)
    pictures = torch.rand(4, 1, 16, 16)
    labels = (pictures[:, 0] > 0.5).long()
    model = UNet(in_channels=1, classes=2, width=8, depth=2)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(30):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(pictures), labels).backward()
        optimizer.step()
    assert (model.eval()(pictures).argmax(1) == labels).double().mean() > 0.95


def test_another_upsampling():
    with pytest.raises(
        ValueError, match=r"^upsampling must be one of nearest, transposed; got 'b'"
    ):
        UNet(upsampling="b")


def test_sides_that_cannot_be_halved():
    with pytest.raises(RuntimeError, match="Expected size 5 but got size 4"):
        UNet(width=2)(torch.randn(1, 3, 40, 40))
