"""What layers are found to lose: by themselves, at the model's output, and while others skip."""

import math

import pytest
import torch
from support import Made
from tiny import dark_pictures, tiny_network
from torch import nn

from spamm_torch import SpAMMConv2d, record_stats
from spamm_torch._progress import SILENT
from spamm_torch.calibration.form import PIXEL_BLOCKS, SPAMM, Form
from spamm_torch.calibration.statistics import (
    RATIOS,
    _power_law,
    measure_layers,
    thresholds_for,
    with_output_errors,
)
from spamm_torch.networks.config import Engine
from spamm_torch.networks.example import Example

LAYERS = ("conv_b", "conv_c")


def least_of(candidates, pixel_block):
    """The candidate in these blocks that computes the least."""
    return [found for found in candidates if found.setting.pixel_block == pixel_block][-1]


@torch.no_grad()
def ratios_with(model, form, examples, settings):
    engines = {name: Engine("spamm", setting) for name, setting in settings.items()}
    with form.installed(engines), record_stats(model) as stats:
        for example in examples:
            example.call(model)
    return {name: stats[name].valid_ratio for name in settings}


@pytest.mark.parametrize("pixel_block", PIXEL_BLOCKS)
@pytest.mark.parametrize(("size", "batches"), [(64, 3), (8, 16)])
@torch.no_grad()
def test_layers_compute_their_share_while_others_skip(pixel_block, size, batches):
    model = tiny_network(batch_norm=True)
    examples = [Example(dark_pictures(size, seed=seed, size=8)) for seed in range(batches)]
    form = Form(model, examples[0])
    found = measure_layers(form, examples, SILENT)
    wanted = {name: least_of(found[name].candidates, pixel_block) for name in LAYERS}
    settings = thresholds_for(form, examples, wanted)

    assert {setting.pixel_block for setting in settings.values()} == {pixel_block}
    # Nothing skips before the first of them.
    undisturbed = {name: candidate.setting for name, candidate in wanted.items()}
    assert settings["conv_b"].tau == pytest.approx(undisturbed["conv_b"].tau, rel=1e-5)
    computed = ratios_with(model, form, examples, settings)
    for name, candidate in wanted.items():
        assert computed[name] == pytest.approx(candidate.valid_ratio, abs=0.01)
    before = ratios_with(model, form, examples, undisturbed)
    assert abs(before["conv_c"] - wanted["conv_c"].valid_ratio) > 0.02


@torch.no_grad()
def test_layers_that_see_nan_skip_nothing():
    model = tiny_network()
    good = [Example(dark_pictures(64, size=8))]
    form = Form(model, good[0])
    found = measure_layers(form, good, SILENT)
    wanted = {"conv_b": least_of(found["conv_b"].candidates, PIXEL_BLOCKS[0])}
    bad = [Example(torch.full((64, 3, 8, 8), torch.nan))]
    assert thresholds_for(form, bad, wanted)["conv_b"].tau == 0


@pytest.fixture(scope="module")
def network():
    return tiny_network(batch_norm=True)


@torch.no_grad()
def statistics_of(model, pictures):
    examples = [Example(batch) for batch in pictures]
    return measure_layers(Form(model, examples[0]), examples, SILENT)


@torch.no_grad()
def test_candidates(network):
    pictures = [dark_pictures(64, seed=seed, size=8) for seed in range(2)]
    found = statistics_of(network, pictures)
    assert list(found) == ["conv_a", "conv_b", "conv_c"]
    assert found["conv_a"].candidates == ()  # three channels
    for layer, outer in (("conv_b", 32), ("conv_c", 64)):
        assert found[layer].multiplications == 64 * outer * 32 * 9

    before = network[: list(dict(network.named_children())).index("conv_b")]
    fused = nn.utils.fusion.fuse_conv_bn_eval(network.conv_b, network.bn_b)
    inputs = [before(batch) for batch in pictures]
    exact = torch.cat([fused(x).relu() for x in inputs])
    by_block = {block: [] for block in PIXEL_BLOCKS}
    for candidate in found["conv_b"].candidates:
        layer = SpAMMConv2d.from_dense(fused, **candidate.setting.setting(), activation="relu")
        with record_stats(layer) as stats:
            error = torch.cat([layer(x) for x in inputs]) - exact
        assert stats[""].valid_ratio == pytest.approx(candidate.valid_ratio, abs=1e-3)
        assert candidate.error == pytest.approx(
            (error.norm() / exact.norm()).item(), rel=1e-3, abs=1e-6
        )
        by_block[candidate.setting.pixel_block].append(candidate.valid_ratio)
    for ratios in by_block.values():
        assert 0 < len(ratios) <= len(RATIOS)
        assert ratios == sorted(ratios, reverse=True)
        assert len(set(ratios)) == len(ratios)  # none twice


def test_what_is_not_called_or_no_number_has_no_candidates():
    torch.manual_seed(0)
    layers = {name: nn.Conv2d(32, 32, 1) for name in ("used", "unused")}
    model, pictures = Made(lambda m, x: m.used(x), **layers), dark_pictures(4, channels=32, size=8)
    assert len(statistics_of(model, [pictures])["used"].candidates) > 0
    found = statistics_of(model, [torch.full_like(pictures, torch.nan)])
    assert list(found) == ["used"]
    assert found["used"].candidates == ()


def test_layers_that_give_zeros_have_no_error():
    conv = nn.Conv2d(32, 32, 1, bias=False)
    nn.init.ones_(conv.weight)
    model = nn.Sequential(conv, nn.ReLU()).eval()
    pictures = -dark_pictures(4, channels=32, size=8)  # and so are all outputs negative
    candidates = statistics_of(model, [pictures])["0"].candidates
    assert {candidate.error for candidate in candidates} == {0.0}


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
    silent = Made(lambda m, x: (m.network(x).argmax(1), "a text"), network=tiny_network())
    _, found = output_errors_of(silent.eval(), [Example(dark_pictures(64, size=8))])
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
