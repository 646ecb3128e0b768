"""Thresholds front to back: layers compute the share that they are given, while others skip."""

import pytest
import torch
from tiny import dark_pictures, tiny_network

from spamm_torch import record_stats
from spamm_torch._progress import SILENT
from spamm_torch.calibration.form import PIXEL_BLOCKS, Form
from spamm_torch.calibration.statistics import measure_layers
from spamm_torch.calibration.thresholds import thresholds_for
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
