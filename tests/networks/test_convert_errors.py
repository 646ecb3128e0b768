"""Bad input to convert_, revert_ and refresh_: one line, and the model as it was."""

import json

import pytest
import torch
from small_models import pictures, resnet, state_of, trained
from support import refuses
from torch import nn

from spamm_torch import SpAMMConfig, SpAMMConv2d, convert_, refresh_, revert_

SKIPS = SpAMMConfig(tau=0.5)


def refused(model, error, message, *args, **kwargs):
    before = state_of(model)
    refuses(error, lambda: convert_(model, *args, **kwargs), message)
    assert state_of(model) == before


@pytest.mark.parametrize(
    ("setting", "error", "message"),
    [
        ({}, ValueError, "exactly one of tau, valid_ratio and max_error must be given; got none"),
        ({"tau": 1, "max_error": 1}, ValueError, "got tau and max_error"),
        ({"valid_ratio": 0}, ValueError, "valid_ratio must be in (0, 1]; got 0"),
        ({"tau": float("nan")}, ValueError, "tau must be a number; got nan"),
        ({"tau": torch.tensor(1.0)}, TypeError, "tau must be a number in a SpAMMConfig"),
        ({"tau": 1, "block": 48}, ValueError, "block must be 32, 64 or 128"),
        ({"tau": 1, "pixel_block": (1, 2, 2)}, ValueError, "pixel_block must be"),
        ({"tau": 10**400}, ValueError, "tau must be a number that float64 holds; got a larger one"),
        ({"max_error": 10**400}, ValueError, "max_error must be a number that float64 holds"),
    ],
)
def test_settings(setting, error, message):
    refuses(error, lambda: SpAMMConfig(**setting), message)


@pytest.mark.parametrize(
    ("make", "value", "error", "message"),
    [
        (SpAMMConfig.from_json, "", ValueError, "a SpAMMConfig must be JSON; got ''"),
        (SpAMMConfig.from_json, "[]", ValueError, r"must be a JSON object; got '\[\]'"),
        (SpAMMConfig.from_json, '{"tau": 1, "speed": 2}', ValueError, "holds tau, .*; got speed"),
        (SpAMMConfig.from_json, '{"tau": 1, "max_error": 1}', ValueError, "exactly one of"),
        (SpAMMConfig.from_json, 3, TypeError, "is made of a str of JSON; got int"),
        (SpAMMConfig.from_dict, [1], TypeError, "a SpAMMConfig is made of a dict; got list"),
        (SpAMMConfig.from_dict, {1: 2}, ValueError, "a SpAMMConfig holds tau, .*; got 1"),
    ],
)
def test_settings_from_something_else(make, value, error, message):
    with pytest.raises(error, match=message) as caught:
        make(value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        (
            {"layer1.0.conv": SKIPS},
            ValueError,
            "overrides must name convolutions of the model; got 'layer1.0.conv' (close: ",
        ),
        ({"layer1": None}, ValueError, "(close: layer1.0.conv1, layer1.0.conv2)"),
        ({"fc": SKIPS}, ValueError, "got 'fc' (it has 6 convolutions)"),
        ({"re:stage.*": None}, ValueError, "got 're:stage.*', which matches none of 6"),
        ({"re:(": None}, ValueError, "regular expressions behind re:; got 're:('"),
        ({"conv1": 0.5}, TypeError, "overrides must hold a SpAMMConfig or None; got float"),
        ({1: None}, TypeError, "overrides must have names as keys; got 1"),
        (["conv1"], TypeError, "overrides must be a dict from names to settings; got list"),
    ],
)
def test_overrides(overrides, error, message):
    refused(resnet(), error, message, overrides=overrides)


def test_arguments():
    message = "config must be a SpAMMConfig, the path of a settings file, or None; got "
    number = "0.5 (a threshold is tau=0.5 or SpAMMConfig(tau=0.5))"
    refused(resnet(), TypeError, message + number, 0.5)
    refused(resnet(), TypeError, message + "list", [0.5])
    message = "must come without tau, valid_ratio and max_error, which stand for one; got config"
    refused(resnet(), ValueError, f"{message} and tau", SKIPS, tau=0.1)
    refused(resnet(), ValueError, f"{message} and valid_ratio", "net.json", valid_ratio=0.5)
    refused(resnet(), ValueError, "exactly one of tau, valid_", valid_ratio=0.5, max_error=0.1)
    refused(resnet(), TypeError, "tau must be a number in a SpAMMConfig", tau=torch.tensor(0.1))
    refused(resnet(), TypeError, "progress must be True or False; got 1", progress=1)
    refused(resnet(), TypeError, "fuse must be True or False; got 1", fuse=1)
    refused(resnet(), TypeError, "dry_run must be True or False; got None", dry_run=None)
    for function in (convert_, revert_, refresh_):
        with pytest.raises(TypeError, match=rf"{function.__name__} expects an nn.Module; got str"):
            function("model")
    with pytest.raises(
        ValueError, match="refresh_ expects a model that convert_ converted; got Re"
    ):
        refresh_(resnet())


def test_models_without_values():
    lazy = nn.Sequential(nn.LazyConv2d(64, 3), nn.ReLU())
    message = "whose layers know their sizes; got one whose 0.weight is not initialised (run"
    refused(lazy, ValueError, message)
    message = "expects a model with values; got one whose conv1.weight is on the device meta"
    refused(resnet().to("meta"), ValueError, message)


def test_nothing_to_convert():
    message = "convert_ expects a model with nn.Conv2d layers; got Sequential, which has none in 3"
    refused(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), ValueError, message)
    model = trained(nn.Sequential(nn.Conv2d(8, 8, 3), nn.GELU(), nn.Linear(8, 8)))
    convert_(model, overrides={"0": SKIPS})
    assert type(model[0]) is SpAMMConv2d
    report = convert_(model, SKIPS)
    assert type(model[0]) is nn.Conv2d
    assert [row.action for row in report] == ["left"]
    assert "8 input channels do not fill a block" in report[0].reason
    assert report.notes[-1] == "the model stays as it was: nothing to absorb, nothing faster"


def test_a_reason_is_said_once():
    class Std(nn.Conv2d):
        def forward(self, x):
            return self._conv_forward(x, self.weight - self.weight.mean(), self.bias)

    (row,) = convert_(Std(64, 64, 3))
    assert (row.action, row.reason) == ("left", "a subclass, Std")


FITS, PROVES = "be what the model takes; ", "hold finite numbers; "


@pytest.mark.parametrize(
    ("example", "message"),
    [
        (pictures(channels=4), f"{FITS}got a tensor of shape (2, 4, 16, 16) and float32 (RuntimeE"),
        (pictures(dtype=torch.float64), f"{FITS}got a tensor of shape (2, 3, 16, 16) and float64"),
        ((pictures(), None, None), f"{FITS}got a tuple (TypeError: "),
        ({"y": pictures()}, f"{FITS}got a dict (TypeError: "),
        ("picture", f"{FITS}got a str (TypeError: "),
        (pictures(0), "not be empty; got a tensor of shape (0, 3, 16, 16) and float32"),
        ({"x": pictures() * float("nan")}, f"{PROVES}got a tensor of shape (2, 3"),
        (pictures() / 0, f"{PROVES}got a tensor of shape (2, 3, 16, 16)"),
    ],
)
def test_examples_that_do_not_fit_or_prove_nothing(example, message):
    refused(resnet(), ValueError, f"example_input must {message}", example_input=example)


def settings(tmp_path, change=None):
    path = tmp_path / "net.json"
    convert_(resnet(), SKIPS).save(path)
    content = json.loads(path.read_text())
    if change is not None:
        change(content)
        path.write_text(json.dumps(content))
    return path


def layer(name="layer1.0.conv1", **changes):
    """A change of what is known of a layer."""
    return lambda content: content["layers"][name].update(changes)


def setting(value):
    return layer(setting=value)


def renamed(content):
    content["layers"]["conv2"] = content["layers"].pop("conv1")


OTHER_SETTINGS = [
    (renamed, "the settings must be those of this model; got a layer 'conv2' (close: conv1"),
    (lambda content: content["layers"].pop("layer2.0.conv1"),
     "got none for 'layer2.0.conv1' (1 layers are missing)"),
    (layer("conv1", shape="3 > 32, 3x3, padding 0x0"),
     "x3, padding 0x0' for 'conv1', which is '3 > 32, 3x3, padding 1x1'"),
    (layer("conv1", engine="cudnn"),
     "the settings must have engines spamm, dense, left, spamm with a setting;"),
    (setting({"tau": 0.5, "max_error": 1}),
     "exactly one of tau, valid_ratio and max_error must be given; got tau and max"),
    (layer("conv1", setting=SKIPS.to_dict()), "spamm with a setting; got 'dense' with"),
    *[(layer(pool=pool), "must have true as pool where") for pool in ("yes", True)],
    (setting(["tau", 1]), "spamm with a setting; got 'spamm' with ['tau', 1] for 'layer1.0.conv1'"),
    (setting({"tau": 10**400}), "tau must be a number that float64 holds; got a larger one"),
    *[(setting(SKIPS.to_dict() | change), message) for change, message in (
        *[({"tau": tau}, f"tau must be a number in a SpAMMConfig; got {tau!r}")
          for tau in ("1", True)],
        ({"tau": None}, "exactly one of tau, valid_ratio and max_error must be given; got none"),
        *[({"block": block}, "block must be 32, 64 or 128, or a") for block in (10**400, [64] * 9)],
        *[({"pixel_block": block}, "pixel_block must be (images, rows, columns), powers of two")
          for block in ([0, 0, 0], [1e300, 1, 1])],
        ({"__class__": "x"}, "a SpAMMConfig holds tau, valid_ratio, max_error, block, pixel_bl"),
        ({"valid_ratio": 0.5}, "must be given; got tau and valid_ratio"),
    )],
    (setting({"tau": "high"}),
     "the settings must be as a report saves them; got {'tau': 'high'} for 'layer1"),
    *[(layer(band=band), f"bands of two valid ratios, 0 <= low <= high <= 1; got {band} for 'l")
      for band in ([0.5, 0.2], [0.1], [-0.1, 0.5], [0.5, 1.5], [float("nan"), 0.5])],
    *[(layer(band=band), f"bands of two valid ratios, 0 <= low <= high <= 1; got {band!r} for 'l")
      for band in ("wide", [0.1, "x"])],
    (lambda content: content.update(versions={"spamm_torch": "9.1.0"}), "got those of '9.1.0'"),
    (lambda content: content.update(versions={}), "a settings file as a report saves it"),
    (lambda content: content.update(format=2), "must be of format 3; got format 2 (make them"),
    (lambda content: content.update(format=4), "must be of format 3; got format 4 (make them"),
    (lambda content: content.clear(), "config must be a settings file as a report saves it"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), OTHER_SETTINGS)
def test_settings_of_another_model(tmp_path, change, message):
    refused(resnet(), ValueError, message, settings(tmp_path, change))


def test_settings_come_without_overrides(tmp_path):
    message = "overrides must not come with a settings file, which names each layer's engine; got"
    path = settings(tmp_path, lambda _: None)
    refused(resnet(), ValueError, message, path, overrides={"conv1": None})


def test_settings_that_cannot_be_read(tmp_path):
    """tests/robustness/test_hostile_files.py has files that are no JSON."""
    refused(resnet(), ValueError, "config must be a settings file that can be", tmp_path / "none")


def test_a_failure_late_in_the_conversion_leaves_the_model_as_it_was(monkeypatch):
    def fail(*_):
        raise RuntimeError("no memory")

    model = resnet()
    convert_(model, SKIPS)
    monkeypatch.setattr("spamm_torch.networks.install.attach", fail)
    refused(model, RuntimeError, "no memory", SpAMMConfig(tau=1.0))
    assert model.layer1[0].conv1.tau == 0.5
