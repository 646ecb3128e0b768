"""What a layer's error comes to at the model's output."""

import math

import pytest
import torch
from tiny import dark_pictures, tiny_network
from torch import nn

from spamm_torch._progress import SILENT
from spamm_torch.calibration.form import SPAMM, Form
from spamm_torch.calibration.output_errors import _power_law, with_output_errors
from spamm_torch.calibration.statistics import measure_layers
from spamm_torch.networks.config import Engine
from spamm_torch.networks.example import Example


@torch.no_grad()
def output_errors_of(model, examples):
    form = Form(model, examples[0])
    layers = measure_layers(form, examples, SILENT)
    found = with_output_errors(form, examples, layers, SILENT)
    for name, layer in layers.items():
        for one, other in zip(layer.candidates, found[name].candidates, strict=True):
            assert (one.setting, one.error) == (other.setting, other.error)
    return form, found


@torch.no_grad()
def test_errors_are_those_of_the_output():
    model = tiny_network(batch_norm=True)
    pictures = dark_pictures(64, size=8)
    form, found = output_errors_of(model, [Example(pictures)])
    exact = model(pictures)
    # Those that were tried. In conv_b less is lost at the second of them, by chance.
    for name, ratio in (("conv_b", 0.5), ("conv_c", 0.5), ("conv_c", 0.26)):
        tried = min(found[name].candidates, key=lambda each: abs(each.valid_ratio - ratio))
        engines = {**dict.fromkeys(form.layers, SPAMM), name: Engine("spamm", tried.setting)}
        with form.installed(engines):
            error = (model(pictures) - exact).norm() / exact.norm()
        assert tried.output_error == pytest.approx(error.item(), rel=1e-3)
    for layer in found.values():  # between them more of one is more of the other
        by_error = sorted(layer.candidates, key=lambda each: each.error)
        assert by_error == sorted(layer.candidates, key=lambda each: each.output_error)


def test_where_the_output_says_nothing_the_layers_error_stands():
    class Silent(nn.Module):
        def __init__(self):
            super().__init__()
            self.network = tiny_network()

        def forward(self, x):
            return self.network(x).argmax(1), "a text"

    _, found = output_errors_of(Silent().eval(), [Example(dark_pictures(64, size=8))])
    for layer in found.values():
        for candidate in layer.candidates:
            assert candidate.output_error == candidate.error


def test_power_laws():
    law = _power_law([(0.1, 0.01), (0.2, 0.04)])
    assert law(0.4) == pytest.approx(0.16)
    assert law(0) == 0
    assert _power_law([(0.1, 0.01)])(0.2) == pytest.approx(0.02)
    assert _power_law([(0.1, 0.02), (0.2, 0.01)])(0.4) == pytest.approx(0.08)  # by chance
    for points in ([], [(0.1, 0.0)], [(0.1, math.nan)], [(0.0, 0.1)]):
        assert _power_law(points)(0.3) == 0.3
