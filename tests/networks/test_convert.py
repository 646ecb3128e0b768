"""convert_ and revert_: which layers become what, that nothing else changes, what is refused."""

import copy
import importlib
import json
import math
import pickle
from dataclasses import fields
from fractions import Fraction
from functools import cache

import pytest
import torch
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
    refuses(ValueError, lambda: refresh_(model), "refresh_ expects a model that the backend")
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
    lines = str(report).splitlines()
    assert lines[0].split() == ["layer", "action", "shape", "setting"]
    for row, line in zip(report, lines[1:], strict=False):
        assert line.startswith(row.name)
    assert lines[len(report) + 1 :] == [
        "6 layers: 5 spamm, 1 left",
        "5 of 5 spamm: skips by its setting",
        "1 of 1 left: 3 input channels do not fill a block of 32",
    ]
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


# ---- Bad input ----------------------------------------------------------------------------------

NOT_HELD = "tau must be a number that float64 holds; got a larger one"
BAD_DICTS = [
    ({}, "exactly one of tau, valid_ratio and max_error must be given; got none"),
    ({"tau": 1, "max_error": 1}, "must be given; got tau and max_error"),
    ({"valid_ratio": 0}, "valid_ratio must be in (0, 1]; got 0"),
    ({"tau": 10**400}, NOT_HELD),
    *[({"tau": 1, "block": block}, "block must be 32, 64 or 128, or a")
      for block in (48, 10**400, [64] * 9)],
    *[({"tau": 1, "pixel_block": block}, "pixel_block must be (images, rows, columns), powers of")
      for block in ([1, 2, 2], [0, 0, 0], [1e300, 1, 1])],
    *[({"tau": tau}, f"tau must be a number in a SpAMMConfig; got {tau!r}") for tau in ("1", True)],
    *[({"tau": 1, name: 2}, f"argument '{name}'") for name in ("speed", "__class__")],
]  # fmt: skip


@pytest.mark.parametrize(("bad", "message"), BAD_DICTS)
def test_bad_settings(tmp_path, bad, message):
    """In a program, as JSON and in a file."""
    line = "a SpAMMConfig holds tau, " if "argument" in message else message
    refuses((TypeError, ValueError), lambda: SpAMMConfig.from_json(json.dumps(bad)), line)
    for call in (
        lambda: SpAMMConfig(**bad),
        lambda: convert_(resnet(), settings(tmp_path, setting(bad))),
    ):
        refuses((TypeError, ValueError), call, message)


def test_json_of_a_setting():
    setting = SpAMMConfig(tau=0.25, block=(64, 32, 64), pixel_block=(1, 8, 8))
    assert SpAMMConfig.from_json(setting.to_json()) == setting
    for text, error in (("", "must be JSON"), ("[]", "must be a JSON object; got '[]'")):
        refuses(ValueError, lambda text=text: SpAMMConfig.from_json(text), error)
    refuses(TypeError, lambda: SpAMMConfig.from_dict([1]), "made of a dict; got list")


@pytest.mark.parametrize(
    ("tau", "error", "message"),
    [
        (math.nan, ValueError, "tau must be a number; got nan"),
        (torch.tensor(1.0), TypeError, "tau must be a number in a SpAMMConfig"),
        (Fraction(10**400), ValueError, NOT_HELD),
    ],
)
def test_taus_that_are_no_numbers(tau, error, message):
    refuses(error, lambda: SpAMMConfig(tau), message)


def refused(model, error, message, **options):
    before = state_of(model)
    refuses(error, lambda: convert_(model, **options), message)
    assert state_of(model) == before


CONFIG = "config must be a SpAMMConfig, the path of a settings file, or None; got "
KNOBS = "must come without tau, valid_ratio and max_error, which stand for one; got config and "
OVERRIDES = "overrides must be a dict from names to a SpAMMConfig or None; got "
BAD = {
    TypeError: [
        ({"config": 0.5}, f"{CONFIG}0.5 (a threshold is tau=0.5 or SpAMMConfig(tau=0.5))"),
        ({"config": [0.5]}, f"{CONFIG}list"),
        ({"tau": torch.tensor(0.1)}, "tau must be a number in a SpAMMConfig"),
        ({"overrides": {"conv1": 0.5}}, f"{OVERRIDES}'conv1': 0.5"),
        ({"overrides": {1: None}}, f"{OVERRIDES}1: None"),
        ({"overrides": ["conv1"]}, f"{OVERRIDES}['conv1']: None"),
    ],
    ValueError: [
        ({"config": SKIPS, "tau": 0.1}, f"{KNOBS}tau"),
        ({"config": "net.json", "valid_ratio": 0.5}, f"{KNOBS}valid_ratio"),
        ({"valid_ratio": 0.5, "max_error": 0.1}, "exactly one of tau, valid_"),
        ({"config": "none"}, "config must be a settings file that can be"),
        ({"overrides": {"layer1.0.conv": SKIPS}},
         "overrides must name convolutions of the model; got 'layer1.0.conv' (close: "),
        ({"overrides": {"layer1": None}}, "(close: layer1.0.conv1, layer1.0.conv2)"),
        ({"overrides": {"fc": SKIPS}},
         "got 'fc' (it has conv1, layer1.0.conv1, layer1.0.conv2, layer2.0.conv1, layer2.0.conv2, "
         "... (6 in all))"),
        ({"overrides": {"re:stage.*": None}}, "got 're:stage.*' (it has conv1, "),
        ({"overrides": {"re:(": None}}, "regular expressions behind re:; got 're:('"),
        ({}, "expects config, tau, valid_ratio, max_error or overrides; got none of them"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("error", "options", "message"), [(error, *bad) for error, of in BAD.items() for bad in of]
)
def test_bad_arguments(error, options, message):
    """tests/robustness/test_hostile_files.py has settings files that are no JSON."""
    refused(resnet(), error, message, **options)


def test_models_that_are_none():
    message = "convert_ expects a model with nn.Conv2d layers; got Sequential, which has none in 3"
    refused(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), ValueError, message, tau=0.1)
    for function in (convert_, revert_, refresh_):
        message = f"{function.__name__} expects an nn.Module; got str"
        refuses(TypeError, lambda function=function: function("model"), message)


@cache
def saved_settings():
    return json.dumps(convert_(resnet(), SKIPS).to_dict())


def settings(tmp_path, change):
    """The path of a settings file that was changed."""
    path, content = tmp_path / "net.json", json.loads(saved_settings())
    change(content)
    path.write_text(json.dumps(content))
    return path


def layer(name="layer1.0.conv1", **changes):
    """A change of what is known of a layer."""
    return lambda content: content["layers"][name].update(changes)


def setting(value):
    return layer(setting=value)


def renamed(content):
    content["layers"]["conv2"] = content["layers"].pop("layer2.0.conv2")


def added(content):
    content["layers"]["conv2"] = content["layers"]["layer2.0.conv2"]


OTHER_SETTINGS = [
    (renamed, "the settings must be those of this model; got none for 'layer2.0.conv2', which is "),
    (added, "'conv2', which is none of its layers (close: "),
    (layer("conv1", shape="3 > 32, 3x3, padding 0x0"),
     "x3, padding 0x0 for 'conv1', which is 3 > 32, 3x3, padding 1x1"),
    (setting(["tau", 1]), "as a report saves them; got ['tau', 1] for 'layer1.0.conv1'"),
    (setting({"tau": "high"}),
     "the settings must be as a report saves them; got {'tau': 'high'} for 'layer1"),
    (lambda content: content.update(format=3), "must be of format 4; got format 3 (make them"),
    (lambda content: content.update(format=5), "must be of format 4; got format 5 (make them"),
    (lambda content: content.clear(), "config must be a settings file as a report saves it"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), OTHER_SETTINGS)
def test_settings_of_another_model(tmp_path, change, message):
    refused(resnet(), ValueError, message, config=settings(tmp_path, change))
    message = "overrides must not come with a settings file, which names each layer's setting; got"
    options = {"config": settings(tmp_path, lambda _: None), "overrides": {"conv1": None}}
    refused(resnet(), ValueError, message, **options)


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
    refused(model, RuntimeError, "no memory", config=SpAMMConfig(tau=1.0))
    assert model.layer1[0].conv1.tau == SKIPS.tau
