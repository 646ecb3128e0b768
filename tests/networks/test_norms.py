"""Norms travel between converted layers: from convolutions and max pools to those that skip."""

import pytest
import torch
from small_models import Made, OfFunction, pictures, trained
from torch import nn
from torch.nn import functional as F

import spamm_torch
from spamm_torch import SpAMMConfig, convert_
from spamm_torch.networks.install import fused_of

OPS = torch.ops.spamm_torch
TAU = 30.0
SKIPS = SpAMMConfig(tau=TAU)


@pytest.fixture(autouse=True)
def norms_passed_on(monkeypatch):
    """Layers pass norms on, as they do on Hopper, on every device."""
    monkeypatch.setattr("spamm_torch.networks.fused.computes_output_norms", lambda *_: True)


class Network(nn.Module):
    """A residual block, then a pool between two convolutions."""

    def __init__(self, pool):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64)
        self.conv2 = nn.Conv2d(64, 64, 3, padding=1)
        self.conv3 = nn.Conv2d(64, 64, 1)
        self.pool = pool

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.conv2(y) + x)
        return self.conv3(self.pool(y))


def network(pool=None):
    torch.manual_seed(0)
    return trained(Network(nn.MaxPool2d(2) if pool is None else pool))


def code_of(model):
    """The names of the ops that the generated forward with norms calls."""
    forward = fused_of(model).forward_with_norms(True)
    return None if forward is None else forward.__code__.co_names


def dark_pictures(images=70):
    return pictures(images, 64, 8) * torch.linspace(0, 1, 8)


@torch.no_grad()
def test_norms_travel_as_if_layers_were_called_by_hand():
    model = network()
    convert_(model, SKIPS)
    (w1, b1), (w2, b2), (w3, b3) = (
        fused_of(model).operands[3 * layer : 3 * layer + 2] for layer in range(3)
    )
    x = dark_pictures()
    options = {"tau": TAU, "return_norms": True}
    y, norms = spamm_torch.conv2d(x, w1, b1, 1, 1, activation="relu", **options)
    y = spamm_torch.conv2d(
        y, w2, b2, 1, 1, tau=TAU, residual=x, activation="relu", norm_input=norms
    )
    y, norms = OPS.max_pool2d(y, [2, 2], norms=True)
    y = spamm_torch.conv2d(y, w3, b3, tau=TAU, norm_input=norms)
    assert torch.equal(model(x), y)
    dense = spamm_torch.conv2d(x, w1, b1, 1, 1, tau=0.0, activation="relu")
    assert not torch.equal(spamm_torch.conv2d(x, w1, b1, 1, 1, tau=TAU, activation="relu"), dense)


def test_what_the_reader_does_not_need_is_not_computed():
    model = network()
    convert_(model, SKIPS)
    names = code_of(model)
    assert "_spamm_torch_conv2d_with_norms" in names
    assert "_spamm_torch_max_pool2d" in names
    convert_(model, SpAMMConfig(tau=0.0), overrides={"conv2": SpAMMConfig(tau=0.0)})
    assert code_of(model) is None
    convert_(model, SpAMMConfig(tau=TAU, pixel_block=(1, 8, 8)))
    assert code_of(model) is None


@pytest.mark.parametrize(
    ("pool", "takes_norms"),
    [
        (nn.MaxPool2d(3, 2, 1), True),
        (lambda x: F.max_pool2d(x, 2), True),
        (lambda x: F.max_pool2d(x, 3, stride=2, padding=1, ceil_mode=True), True),
        (nn.AvgPool2d(2), False),
        (lambda x: F.max_pool2d(x, 2).relu_(), False),
        (lambda x: torch.sigmoid(x), False),
    ],
)
def test_pools(pool, takes_norms):
    model = network(pool if isinstance(pool, nn.Module) else nn.Identity())
    if not isinstance(pool, nn.Module):
        model.pool = OfFunction(pool).eval()
    convert_(model, SKIPS)
    assert ("_spamm_torch_max_pool2d" in code_of(model)) == takes_norms
    with torch.no_grad():
        found = model(dark_pictures())
        fused_of(model)._reads_norms = False
        assert torch.equal(found, model(dark_pictures()))


@torch.no_grad()
def test_norms_of_a_value_that_is_written_do_not_travel():
    """Two convolutions, and a write to the value between them."""

    def forward(m, x):
        y = F.relu(m.conv1(x))
        y.mul_(8.0)
        return m.conv2(y)

    torch.manual_seed(0)
    layers = {name: nn.Conv2d(64, 64, 3, padding=1) for name in ("conv1", "conv2")}
    model = trained(Made(forward, **layers))
    convert_(model, SKIPS)
    (w1, b1), (w2, b2) = (fused_of(model).operands[3 * i : 3 * i + 2] for i in range(2))
    y = spamm_torch.conv2d(dark_pictures(), w1, b1, 1, 1, tau=TAU, activation="relu")
    expected = spamm_torch.conv2d(8 * y, w2, b2, 1, 1, tau=TAU)
    assert torch.equal(model(dark_pictures()), expected)
    assert code_of(model) is None


@torch.no_grad()
def test_small_batches_take_norms_themselves():
    model = network()
    convert_(model, SKIPS)
    fused_of(model)._reads_norms = False
    few = model(dark_pictures(8))
    model = network()
    convert_(model, SKIPS)
    assert torch.equal(model(dark_pictures(8)), few)


def test_layers_that_skip_nothing_get_the_norms_of_their_weights(device):
    """Kernels leave out what meets padding alone, but for infinite weights."""
    model = trained(nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU()))
    model = model.to(device, torch.float16).to(memory_format=torch.channels_last)
    input = pictures(70, 64, 4, torch.float16).to(device, memory_format=torch.channels_last)
    with torch.no_grad():
        convert_(model, SpAMMConfig(tau=0.0), overrides={"0": SpAMMConfig(tau=0.0)})
        expected = torch.ops.spamm_torch.conv2d(
            *(input, model[0].weight, model[0].bias, 1, 1), threshold=0.0, activation="relu"
        )
        weight, _, norms = fused_of(model).operands
        assert torch.equal(norms, torch.ops.spamm_torch.conv2d_weight_norm(weight))
        assert torch.equal(model(input), expected)
        model[0].weight[3, 5, 0, 0] = torch.inf
        found = model(input)
    assert found[:, 3, 0].isnan().all()
    assert torch.equal(found[:, 4:], expected[:, 4:])
