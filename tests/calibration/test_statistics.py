"""Statistics of layers: thresholds and errors are those that the layers will have."""

import pytest
import torch
from tiny import dark_pictures, tiny_network
from torch import nn

from spamm_torch import SpAMMConv2d, record_stats
from spamm_torch._progress import SILENT
from spamm_torch.calibration.form import PIXEL_BLOCKS, Form
from spamm_torch.calibration.statistics import RATIOS, measure_layers
from spamm_torch.networks.example import Example


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
    class Partly(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Conv2d(32, 32, 1), nn.Conv2d(32, 32, 1)

        def forward(self, x):
            return self.used(x)

    torch.manual_seed(0)
    pictures = dark_pictures(4, channels=32, size=8)
    assert len(statistics_of(Partly(), [pictures])["used"].candidates) > 0
    found = statistics_of(Partly(), [torch.full_like(pictures, torch.nan)])
    assert list(found) == ["used"]
    assert found["used"].candidates == ()


def test_layers_that_give_zeros_have_no_error():
    conv = nn.Conv2d(32, 32, 1, bias=False)
    nn.init.ones_(conv.weight)
    model = nn.Sequential(conv, nn.ReLU()).eval()
    pictures = -dark_pictures(4, channels=32, size=8)  # and so are all outputs negative
    candidates = statistics_of(model, [pictures])["0"].candidates
    assert {candidate.error for candidate in candidates} == {0.0}
