"""Generated forwards look up each container of modules once, whatever modules are called."""

import linecache

import pytest
import torch
from small_models import is_served
from torch import nn

from spamm_torch import convert_
from spamm_torch.networks.install import fused_of


class Block(nn.Module):
    """Layers in a container of any name, behind a convolution that is fused."""

    def __init__(self, container, *keys):
        super().__init__()
        self.stem, self.container = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU()), container
        layers = {key: nn.Conv2d(32, 32, 1) for key in keys}
        setattr(self, container, nn.ModuleDict({"inner": nn.ModuleDict(layers)}))
        self.last = nn.Sequential(nn.Conv2d(32, 32, 1))

    def forward(self, x):
        x = self.stem(x)
        for layer in getattr(self, self.container)["inner"].values():
            x = nn.functional.gelu(layer(x))
        return self.last(x)


def converted(model):
    """The report of a conversion that changes no result."""
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    model.eval()
    with torch.no_grad():
        expected = model(x)
        report = convert_(model)
        assert torch.allclose(model(x), expected, atol=1e-5)
        assert is_served(model, x) == ("no code" not in str(report))
    return report


@pytest.mark.parametrize(
    ("container", "keys"),
    [
        ("self", ("a",)),
        ("layers", ("a-b", "a_b", "0", 'q"')),
        ("_spamm_torch_conv2d", ("spamm_operands", "x")),
        ("torch", ("getattr", "operator")),
    ],
)
def test_modules_of_any_name_are_found(container, keys):
    converted(Block(container, *keys))


def test_what_no_code_can_name_is_left_and_named():
    report = converted(Block("layers", "class", "for"))
    assert "no code can be generated (SyntaxError: " in str(report)


def test_a_container_is_looked_up_once():
    model = Block("layers", "a", "b", "c", "d")
    converted(model)
    source = "".join(linecache.getlines(fused_of(model).forward.__code__.co_filename))
    assert source.count("self.layers") == source.count("at_layers.inner") == 1
