"""Grouped convolutions as one product whose zero blocks are skipped."""

import copy
import json
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from spamm_torch import SpAMMConfig, convert_, record_stats
from spamm_torch.networks.operands import joined_setting, joined_weight


@pytest.fixture
def joins_groups(monkeypatch):
    """Measured times by which joined groups are fastest."""
    from spamm_torch.networks import engines as engines_module
    from spamm_torch.networks.engines import Choice, Chooser, fastest

    def choose(engines, times):
        joined = engines.get("groups joined")
        return fastest(engines, times) if joined is None else Choice(joined, "measured")

    monkeypatch.setattr(engines_module, "fastest", choose)
    monkeypatch.setattr(Chooser, "_fastest", lambda self, _: self._chosen())


def network():
    torch.manual_seed(0)
    layers = [
        *(nn.Conv2d(3, 192, 3), nn.ReLU()),
        *(nn.Conv2d(192, 192, 3, padding=1, groups=12, bias=False), nn.BatchNorm2d(192)),
        nn.ReLU(),
        *(nn.Conv2d(192, 192, 3, stride=2, groups=8), nn.SiLU()),
        nn.Conv2d(192, 192, 3, groups=192),
    ]
    return nn.Sequential(*layers).eval()


@pytest.mark.parametrize("groups", [2, 3, 12])
def test_one_group_computes_the_same(groups):
    weight, input = torch.randn(24, 24 // groups, 3, 2), torch.randn(2, 24, 7, 8)
    joined = joined_weight(weight, groups)
    assert joined.shape == (24, 24, 3, 2)
    expected = F.conv2d(input, weight, groups=groups)
    torch.testing.assert_close(F.conv2d(input, joined), expected)


@pytest.mark.parametrize(("images", "block"), [(1, (1, 8, 8)), (33, (32, 1, 2)), (500, (64, 1, 1))])
def test_blocks_follow_the_batch(images, block):
    assert joined_setting(nn.Conv2d(64, 64, 3, groups=2), images).pixel_block == block


def test_depthwise_layers_unseen_batches_and_huge_weights_stay():
    assert joined_setting(nn.Conv2d(64, 128, 3, groups=64), 8) is None
    assert joined_setting(nn.Conv2d(64, 64, 3, groups=2), 0) is None
    assert joined_setting(nn.Conv2d(4096, 4096, 3, groups=64, device="meta"), 8) is None


def test_a_converted_network_joins_groups(device, joins_groups, tmp_path):
    model, input = network().to(device), torch.randn(8, 3, 20, 20, device=device)
    tolerance = {"rtol": 1e-2, "atol": 1e-2} if device.type == "cuda" else {}  # TF32
    with torch.no_grad():
        expected = model(input)
        converted = copy.deepcopy(model)
        report = convert_(converted, example_input=input)
        assert ["groups" in row.absorbed for row in report] == [False, True, True, False]
        assert type(converted[2]) is nn.Conv2d
        torch.testing.assert_close(converted(input), expected, **tolerance)
        torch.testing.assert_close(converted(input[:3]), expected[:3], **tolerance)
        with record_stats(converted) as stats:
            converted(input)
        assert stats["2"].valid_ratio == pytest.approx(1 / 3)

        report.save(tmp_path / "settings.json")
        again = copy.deepcopy(model)
        convert_(again, tmp_path / "settings.json")
        for twin in (again, copy.deepcopy(converted), pickle.loads(pickle.dumps(converted))):
            assert torch.equal(twin(input), converted(input))

        for changed in (model, converted):
            changed[2].weight.mul_(2)
            changed[5].bias.add_(1)
        torch.testing.assert_close(converted(input), model(input), **tolerance)


def test_deviations_are_computed_group_by_group():
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3, groups=4), nn.ReLU()
    model, input = nn.Sequential(*layers).eval(), torch.zeros(2, 3, 32, 32)
    input[:, :, 4:9, 4:9] = torch.rand(2, 3, 5, 5)
    example = {"example_input": input, "reference": torch.zeros(1, 3, 32, 32)}
    expected, report = model(input), convert_(model, **example)
    assert not any("groups" in row.absorbed for row in report)
    with torch.no_grad():
        torch.testing.assert_close(model(input), expected)


def test_settings_of_one_group_hold_no_dense_setting(tmp_path):
    model = nn.Sequential(nn.Conv2d(32, 32, 3), nn.ReLU())
    report = convert_(model)
    text = str(report.to_dict()["layers"]["0"])
    assert "'setting': None" in text
    layers = report.to_dict()
    layers["layers"]["0"]["setting"] = SpAMMConfig(tau=1e-3).to_dict()
    path = tmp_path / "settings.json"
    path.write_text(json.dumps(layers))
    with pytest.raises(ValueError, match="spamm with a setting; got 'dense' with"):
        convert_(model, path)
