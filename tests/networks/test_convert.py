"""convert_ and revert_: which layers become what, that nothing else changes, what is refused."""

import copy
import importlib
import json
import pickle
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from golden import assert_kept, assert_refused
from small_models import pictures, resnet, state_of
from support import refuses
from torch import nn
from torch.nn.utils import prune

from spamm_torch import SpAMMConfig, SpAMMConv2d, SpAMMLinear, convert_, refresh_, revert_

SKIPS = SpAMMConfig(tau=1e-3)
EXACT = SpAMMConfig(max_error=1e-6)


def settings_of(report):
    """{name: setting} of the layers that skip."""
    return {row.name: row.setting for row in report if row.action == "spamm"}


def assert_same(model, original, x=None, tolerance=1e-4):
    x = pictures() if x is None else x
    torch.testing.assert_close(model(x), original(x), rtol=tolerance, atol=tolerance)


# ---- Which layers skip --------------------------------------------------------------------------

WIDE = ("layer1.0.conv1", "layer1.0.conv2", "layer2.0.conv1", "layer2.0.conv2")
WIDE += ("layer2.0.downsample.0",)


@pytest.mark.parametrize("knob", [{"tau": 0.5}, {"valid_ratio": 0.5}, {"max_error": 1e-6}])
def test_a_knob_makes_layers_skip_that_can_pay(knob):
    model, original = resnet(), resnet()
    report = convert_(model, **knob)
    assert settings_of(report) == dict.fromkeys(WIDE, SpAMMConfig(**knob))
    assert report["conv1"].reason == "3 input channels do not fill a block of 32"
    assert type(model.conv1) is nn.Conv2d
    for name in WIDE:
        layer = model.get_submodule(name)
        assert type(layer) is SpAMMConv2d
        assert {name: getattr(layer, name) for name in knob} == knob
        by_hand = SpAMMConv2d.from_dense(original.get_submodule(name), **knob)
        original.set_submodule(name, by_hand)
    assert torch.equal(model(pictures()), original(pictures()))


def test_overrides_by_name_and_by_pattern():
    model = resnet()
    strict, wide = SpAMMConfig(valid_ratio=0.5), SpAMMConfig(tau=0.0, block=32)
    overrides = {r"re:layer2\..*": None, "layer2.0.conv1": strict, "conv1": wide}
    report = convert_(model, SKIPS, overrides=overrides)
    layers = {"conv1": wide, "layer1.0.conv1": SKIPS, "layer1.0.conv2": SKIPS}
    assert settings_of(report) == {**layers, "layer2.0.conv1": strict}
    assert type(model.layer2[0].conv2) is nn.Conv2d
    report = convert_(model, overrides={r"re:.*": strict})
    assert settings_of(report) == dict.fromkeys(WIDE, strict)
    assert settings_of(convert_(model, overrides={"conv1": SKIPS})) == {"conv1": SKIPS}
    assert convert_(model, overrides={"conv1": None})[1].reason == "no setting names it"
    assert not any(isinstance(module, SpAMMConv2d) for module in model.modules())


def test_a_root_that_is_a_convolution():
    conv = nn.Conv2d(64, 64, 3)
    (row,) = convert_(conv, overrides={"": EXACT})
    assert (row.name, row.action, type(conv)) == ("", "spamm", SpAMMConv2d)
    assert type(revert_(conv)) is nn.Conv2d


def test_a_layer_with_two_names_is_named_by_either(tmp_path):
    model = nn.Module()
    model.first = nn.Conv2d(64, 64, 3)
    model.again = model.first
    report = convert_(model, overrides={"again": SKIPS})
    assert [(row.name, row.action, row.setting) for row in report] == [("first", "spamm", SKIPS)]
    report.save(tmp_path / "net.json")
    assert settings_of(convert_(model, tmp_path / "net.json")) == {"first": SKIPS}


def test_spamm_layers_keep_their_own_setting():
    model = resnet()
    block, other = model.layer1[0], model.layer2[0]
    block.conv1 = SpAMMConv2d.from_dense(block.conv1, tau=torch.tensor(0.0))
    other.conv1 = SpAMMConv2d.from_dense(other.conv1, max_error=0.0, activation="relu")
    model.fc = SpAMMLinear.from_dense(model.fc, tau=0.0)
    before = state_of(model)
    report = convert_(model, EXACT, overrides={"layer2.0.conv1": EXACT})
    for name in ("layer1.0.conv1", "fc"):
        assert (report[name].action, report[name].reason) == ("left", "skips by its own setting")
    assert (other.conv1.max_error, other.conv1.activation) == (1e-6, "relu")
    revert_(model)
    assert state_of(model) == before
    assert other.conv1.max_error == 0.0


class Mine(nn.Conv2d):
    """A layer of somebody's own."""


def of_integers(conv):
    conv.weight = nn.Parameter(conv.weight.detach().to(torch.int8), requires_grad=False)
    return conv


def with_forward(conv):
    conv.forward = lambda x: x
    return conv


@pytest.mark.parametrize(
    ("conv", "reason"),
    [
        (Mine(64, 64, 3), "a subclass, Mine"),
        (nn.LazyConv2d(64, 3), "a subclass, LazyConv2d"),
        (nn.ConvTranspose2d(64, 64, 3), "ConvTranspose2d: only nn.Conv2d is converted"),
        (nn.utils.parametrizations.weight_norm(nn.Conv2d(64, 64, 3)), "a subclass, Parametrized"),
        (prune.identity(nn.Conv2d(64, 64, 3), "weight"), "its weight is not a Parameter"),
        (of_integers(nn.Conv2d(64, 64, 3)), "its weight is int8"),
        (with_forward(nn.Conv2d(64, 64, 3)), "it has a forward of its own"),
        (nn.Conv2d(64, 64, 3, groups=4), "16 input channels a group do not fill a block of 32"),
        (nn.Conv2d(64, 64, 3, groups=64), "1 input channels a group do not fill a block of 32"),
        (nn.Conv2d(64, 16, 3), "16 output channels do not fill a block of 32"),
    ],
)
def test_layers_that_are_left_say_why(conv, reason):
    kind, model = type(conv), nn.Sequential(conv, nn.Conv2d(64, 64, 1))
    report = convert_(model, SKIPS)
    assert report[0].action == "left"
    assert report[0].reason.startswith(reason)
    assert type(conv) is kind
    assert settings_of(report) == {"1": SKIPS}


# ---- Nothing else changes -----------------------------------------------------------------------


def test_objects_names_hooks_and_keys_stay_and_revert_restores_every_bit():
    model, original = resnet(), resnet()
    seen = []
    model.layer1[0].conv1.register_forward_hook(lambda *_: seen.append("conv"))
    before, keys = state_of(model), list(model.state_dict())
    objects = [*model.modules(), *model.parameters(), *model.buffers()]
    for _ in range(2):
        convert_(model, SKIPS)
        convert_(model, EXACT)
    assert list(model.state_dict()) == keys
    assert all(map(lambda a, b: a is b, objects, [*model.modules(), *model.parameters()]))
    assert_same(model, original)
    assert seen == ["conv"]
    original.load_state_dict(model.state_dict(), strict=True)
    model.load_state_dict(original.state_dict(), strict=True)
    assert revert_(model) is model
    revert_(model)
    assert state_of(model) == before
    assert torch.equal(model(pictures()), original(pictures()))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_are_converted_and_their_own(copied):
    model, original = resnet(), resnet()
    convert_(model, SKIPS)
    twin = copied(model)
    assert torch.equal(twin(pictures()), model(pictures()))
    twin.layer1[0].conv1.weight.mul_(2)
    assert not torch.equal(twin(pictures()), model(pictures()))
    revert_(twin)
    twin.layer1[0].conv1.weight.div_(2)
    assert torch.equal(twin(pictures()), original(pictures()))


def test_a_model_without_values_and_under_another_default_device():
    model, twin, original, x = resnet().to("meta"), resnet(), resnet(), pictures()
    with torch.device("meta"):
        convert_(model, EXACT)
        convert_(twin, EXACT)
        assert_same(twin, original, x)
    model.to_empty(device="cpu").load_state_dict(original.state_dict(), assign=True)
    assert_same(model, original)


def test_another_class_on_top_is_refused():
    model = resnet()
    convert_(model, EXACT)
    conv = model.layer1[0].conv1
    nn.utils.parametrizations.weight_norm(conv)
    before = state_of(model)
    for call in (lambda: revert_(model), lambda: convert_(model, SKIPS)):
        refuses(RuntimeError, call, "got layer1.0.conv1, which is Parametrized", "undo that first")
        assert state_of(model) == before
    nn.utils.parametrize.remove_parametrizations(conv, "weight")
    revert_(model)
    assert type(conv) is nn.Conv2d


def test_refresh_pins_norms_again():
    model = resnet()
    convert_(model, SpAMMConfig(tau=1.0))
    layer, x = model.layer1[0].conv1, pictures(channels=32)
    layer.weight.mul_(1e-6)
    layer.freeze_()
    layer.weight.data.mul_(1e6)
    stale = layer(x)
    assert refresh_(model) is model
    assert not torch.equal(layer(x), stale)
    assert torch.equal(layer(x), copy.deepcopy(layer).unfreeze_()(x))


# ---- The report ---------------------------------------------------------------------------------


def test_the_report_is_a_table_of_all_layers_and_a_summary():
    report = convert_(resnet(), SKIPS)
    assert_kept("report of a conversion", str(report).splitlines())
    row = report[5]
    assert (row.shape, row.geometry) == ("32 > 64, 1x1, /2", "32 > 64, 1x1, /2, padding 0x0")


def test_rows_have_numbers_and_names_and_go_to_data_frames():
    report = convert_(resnet(), SKIPS)
    assert report["layer2.0.conv1"] is report[3]
    assert report[1:3] == (report[1], report[2])
    with pytest.raises(KeyError, match=r"'layer2\.conv1' \(close: layer2\.0\.conv1"):
        report["layer2.conv1"]
    # pandas.DataFrame(report) does so: the attributes of the first row are the columns.
    assert [field.name for field in fields(report[0])][:3] == ["name", "shape", "action"]
    assert copy.deepcopy(report)["conv1"] == report["conv1"]


def test_a_settings_file_makes_the_same_choices(tmp_path):
    model, again = resnet(), resnet()
    overrides = {"layer1.0.conv1": None, "layer2.0.conv1": SpAMMConfig(valid_ratio=0.5, block=32)}
    report = convert_(model, SKIPS, overrides=overrides)
    report.save(tmp_path / "net.json")
    found = convert_(again, tmp_path / "net.json")
    assert [(row.name, row.action, row.setting) for row in found] == [
        (row.name, row.action, row.setting) for row in report
    ]
    assert torch.equal(model(pictures()), again(pictures()))


def test_a_setting_goes_to_json_and_back():
    setting = SpAMMConfig(tau=0.25, block=(64, 32, 64), pixel_block=(1, 8, 8))
    assert SpAMMConfig.from_json(setting.to_json()) == setting


# ---- Bad input ----------------------------------------------------------------------------------


def layer(name="layer1.0.conv1", **changes):
    """A change of what is known of a layer."""
    return lambda content: content["layers"][name].update(changes)


def setting(**given):
    return layer(setting=given)


def renamed(content):
    content["layers"]["conv2"] = content["layers"].pop("layer2.0.conv2")


def added(content):
    content["layers"]["conv2"] = content["layers"]["layer2.0.conv2"]


def test_what_is_refused(tmp_path, monkeypatch):
    """Settings in a program and in a file, and files of another model. The model stays as it was.

    tests/robustness/test_hostile_files.py has settings files that are no JSON.
    """
    monkeypatch.chdir(tmp_path)
    model, dense = resnet(), nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    saved, before = convert_(resnet(), SKIPS).to_dict(), (state_of(model), state_of(dense))

    def read(change, **given):
        """Converts by a settings file that was changed."""
        change(content := copy.deepcopy(saved))
        Path("net.json").write_text(json.dumps(content))
        convert_(model, "net.json", **given)

    assert_refused("refused: convert_", globals() | locals())
    assert (state_of(model), state_of(dense)) == before


def test_a_failure_late_in_the_conversion_leaves_the_model_as_it_was(monkeypatch):
    rooms, calls = importlib.import_module("spamm_torch.networks.convert"), []

    def fail_late(*given):
        calls.append(given)
        if len(calls) > 2:
            raise RuntimeError("no memory")
        convert_layer(*given)

    model, convert_layer = resnet(), rooms.convert_layer
    convert_(model, SKIPS)
    monkeypatch.setattr(rooms, "convert_layer", fail_late)
    before = state_of(model)
    refuses(RuntimeError, lambda: convert_(model, tau=1.0), "no memory")
    assert state_of(model) == before
    assert model.layer1[0].conv1.tau == SKIPS.tau
