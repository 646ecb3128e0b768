"""convert_: which layers become what, what they absorb, that results stay what they were, and what
is refused: in one line, with the model as it was.
"""

import copy
import json
import operator
import re
from dataclasses import fields
from fractions import Fraction
from functools import cache, partial

import pytest
import torch
from small_models import (
    Block,
    Made,
    OfFunction,
    assert_same,
    calling,
    converted_alike,
    fused_alone,
    is_served,
    marks_of_forms,
    pictures,
    resnet,
    rows,
    state_of,
    trained,
)
from support import refuses
from torch import nn
from torch.nn import functional as F
from torchvision.ops import FrozenBatchNorm2d, StochasticDepth

from spamm_torch import SpAMMConfig, SpAMMConv2d, convert_, refresh_, revert_
from spamm_torch._timing import Timing

SKIPS = SpAMMConfig(tau=1e-3)


def converted(forward):
    """The rows of the convolutions of a model with this forward."""
    torch.manual_seed(0)
    return rows(converted_alike(calling(forward), pictures(channels=8)))


# ---- A network ----------------------------------------------------------------------------------


def test_a_network_absorbs_batch_norms_adds_and_activations():
    report = converted_alike(resnet(), (pictures(), pictures(5, size=23)))
    assert rows(report) == {
        "conv1": ("dense", ("bn", "relu")),
        "layer1.0.conv1": ("dense", ("bn", "relu")),
        "layer1.0.conv2": ("dense", ("bn", "add", "relu")),
        "layer2.0.conv1": ("dense", ("bn", "relu")),
        # The add belongs to the convolution that runs last of its two.
        "layer2.0.conv2": ("dense", ("bn", "add", "relu")),
        "layer2.0.downsample.0": ("dense", ("bn",)),
    }


def test_a_knob_makes_layers_skip_that_can_pay():
    model = resnet()
    report = converted_alike(model, pictures(), SpAMMConfig(max_error=1e-6))
    actions = {row.name: (row.action, row.setting) for row in report}
    assert actions["conv1"] == ("dense", None)
    assert actions["layer2.0.conv2"] == ("spamm", SpAMMConfig(max_error=1e-6))
    assert model.layer2[0].conv2.max_error == 1e-6
    assert report["conv1"].reason == "3 input channels do not fill a block of 32"


def test_overrides_by_name_and_by_pattern():
    model = resnet()
    strict, wide = SpAMMConfig(valid_ratio=0.5), SpAMMConfig(tau=0.0, block=32)
    overrides = {r"re:layer2\..*": None, "layer2.0.conv1": strict, "conv1": wide}
    report = convert_(model, SKIPS, overrides=overrides)
    found = {row.name: (row.action, row.setting) for row in report}
    assert found["conv1"] == ("spamm", wide)
    assert found["layer1.0.conv1"] == ("spamm", SKIPS)
    assert found["layer2.0.conv1"] == ("spamm", strict)
    assert found["layer2.0.conv2"] == ("dense", None)
    assert type(model.layer2[0].conv2) is nn.Conv2d


def test_without_fusing_layers_alone_are_converted():
    model = resnet()
    report = convert_(model, SKIPS, fuse=False)
    assert rows(report)["conv1"] == ("left", ())
    assert rows(report)["layer1.0.conv1"] == ("spamm", ())
    assert type(model) is type(resnet())
    assert type(model.layer1[0].conv1) is SpAMMConv2d


def test_a_dry_run_changes_nothing():
    model = resnet()
    before = {name: type(module) for name, module in model.named_modules()}
    report = convert_(model, SKIPS, dry_run=True)
    assert {name: type(module) for name, module in model.named_modules()} == before
    assert "_spamm_fused" not in model.__dict__
    assert rows(report)["layer1.0.conv1"] == ("spamm", ("bn", "relu"))


def test_a_root_that_is_a_convolution():
    conv = nn.Conv2d(64, 64, 3)
    dense = copy.deepcopy(conv)
    (row,) = convert_(conv, SpAMMConfig(tau=0.0), overrides={"": SpAMMConfig(max_error=1e-6)})
    assert (row.name, row.action) == ("", "spamm")
    assert type(conv) is SpAMMConv2d
    assert_same(conv, dense, pictures(channels=64))
    revert_(conv)
    assert type(conv) is nn.Conv2d


def test_spamm_layers_keep_their_own_setting():
    model = resnet()
    model.layer1[0].conv1 = SpAMMConv2d.from_dense(model.layer1[0].conv1, tau=0.0)
    model.layer1[0].conv2 = SpAMMConv2d.from_dense(
        model.layer1[0].conv2, tau=torch.tensor(0.0), activation=None
    )
    model.layer2[0].conv1 = SpAMMConv2d.from_dense(
        model.layer2[0].conv1, max_error=0.0, activation="relu"
    )
    original = copy.deepcopy(model)
    report = convert_(model, overrides={"layer2.0.conv2": SpAMMConfig(tau=0.0)})
    assert rows(report)["layer1.0.conv1"] == ("spamm", ("bn", "relu"))
    assert rows(report)["layer1.0.conv2"] == ("left", ())
    assert rows(report)["layer2.0.conv1"] == ("spamm", ())
    assert_same(model, original, pictures())
    revert_(model)
    assert model.layer1[0].conv1.tau == 0.0
    assert type(model.layer2[0].conv2) is nn.Conv2d


# ---- What a convolution absorbs -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("activation", "name"),
    [
        *((nn.ReLU(), "relu"), (nn.ReLU(inplace=True), "relu"), (nn.ReLU6(), "relu6")),
        *((nn.Hardswish(), "hardswish"), (nn.SiLU(inplace=True), "silu")),
        *((nn.LeakyReLU(), "leaky_relu"), (nn.LeakyReLU(0.2), None), (nn.GELU(), None)),
        *((nn.Hardsigmoid(), None), (torch.sigmoid, None)),
        *((F.relu, "relu"), (lambda x: F.relu(x, inplace=True), "relu"), (F.relu_, "relu")),
        *((torch.relu, "relu"), (torch.relu_, "relu"), (lambda x: x.relu(), "relu")),
        *((lambda x: x.relu_(), "relu"), (F.relu6, "relu6"), (F.hardswish, "hardswish")),
        *((F.silu, "silu"), (F.leaky_relu, "leaky_relu")),
        (lambda x: F.leaky_relu(x, 0.01, True), "leaky_relu"),
        (lambda x: F.leaky_relu(x, negative_slope=0.2), None),
        (lambda x: F.leaky_relu(x, 0.2), None),
    ],
)
def test_activations(activation, name):
    layer = activation if isinstance(activation, nn.Module) else OfFunction(activation)
    model = trained(nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), layer))
    found = rows(converted_alike(model, pictures(channels=8)))
    assert found["0"] == ("dense", ("bn",) if name is None else ("bn", name))


@pytest.mark.parametrize(
    ("add", "is_absorbed"),
    [
        *((operator.add, True), (operator.iadd, True), (torch.add, True)),
        (lambda a, b: torch.add(a, b, alpha=1), True),
        *((lambda a, b: torch.add(a, b, alpha=2), False), (lambda a, b: a.add(b), True)),
        *((lambda a, b: a.add_(b), True), (lambda a, b: b + a, True)),
        *((lambda a, b: a + b.mean((2, 3), keepdim=True), False), (lambda a, b: a + b[:1], False)),
        *((lambda a, b: a + a, False), (lambda a, b: a + 1, False), (lambda a, b: a - b, False)),
    ],
)
def test_adds(add, is_absorbed):
    found = converted(lambda self, x: F.relu(add(self.bn(self.conv1(x)), x)))
    assert found["conv1"][1] == (("bn", "add", "relu") if is_absorbed else ("bn",))


@pytest.mark.parametrize(
    ("forward", "conv1", "conv2"),
    [
        # The last of two convolutions takes the add, whichever operand comes later.
        (lambda m, x: m.conv1(x) + m.bn(m.conv2(x)), (), ("bn", "add")),
        (lambda m, x: F.relu(m.conv1(x) + F.max_pool2d(x, 3, 1, 1)), ("add", "relu"), ()),
        # The sum in place changes the other operand, which is read again.
        (
            lambda m, x: (z := F.relu(m.conv2(x)), operator.iadd(z, m.conv1(x)))[0] + 1,
            *((), ("relu",)),
        ),
        # The input is written in between.
        (lambda m, x: F.relu(m.bn(m.conv1(x := x * 1)) + (x.relu_(), x)[1]), ("bn",), ()),
        # A value that is read twice is kept.
        (lambda m, x: F.relu(y := m.bn(m.conv1(x))) + y, ("bn",), ()),
        # Dropout that is always on stays.
        (lambda m, x: F.relu(F.dropout(m.bn(m.conv1(x)), 0.0)), ("bn",), ()),
        (lambda m, x: F.relu(F.dropout(m.bn(m.conv1(x)), 0.0, True)), ("bn",), ()),
        (lambda m, x: F.relu(F.dropout(m.bn(m.conv1(x)), 0.5, False)), ("bn", "relu"), ()),
    ],
)
def test_forwards(forward, conv1, conv2):
    wanted = {"conv1": conv1, "conv2": conv2}
    assert converted(forward) == {
        name: ("dense" if absorbed else "left", absorbed) for name, absorbed in wanted.items()
    }


def test_what_passes_its_input_on_in_eval_mode_is_passed_over():
    layers = (nn.Conv2d(8, 8, 3), nn.Identity(), nn.BatchNorm2d(8), nn.Dropout(0.5), nn.ReLU())
    assert fused_alone(*layers) == ("bn", "relu")
    deep = Made(
        lambda m, x: m.depth(m.bn(m.conv(x))) + x,
        conv=nn.Conv2d(8, 8, 3, padding=1),
        bn=nn.BatchNorm2d(8),
        depth=StochasticDepth(0.5, "row"),
    )
    assert rows(convert_(trained(deep)))["conv"] == ("dense", ("bn", "add"))


def test_batch_norms_of_other_kinds():
    conv = nn.Conv2d(8, 8, 3)
    assert fused_alone(conv, FrozenBatchNorm2d(8), nn.ReLU()) == ("bn", "relu")
    assert fused_alone(conv, nn.SyncBatchNorm(8), nn.ReLU()) == ("bn", "relu")
    assert fused_alone(conv, nn.BatchNorm2d(8, affine=False), nn.ReLU()) == ("bn", "relu")
    assert fused_alone(conv, nn.BatchNorm2d(8, track_running_stats=False), nn.ReLU()) == ()


def test_a_convolution_in_two_places_is_folded_for_each():
    twice = Made(
        lambda m, x: m.bn2(m.conv(F.relu(m.bn1(m.conv(x))))),
        conv=nn.Conv2d(8, 8, 3, padding=1),
        **{name: nn.BatchNorm2d(8) for name in ("bn1", "bn2")},
    )
    found = rows(converted_alike(trained(twice), pictures(channels=8)))
    assert found == {"conv": ("dense", ("bn", "relu")), "conv#2": ("dense", ("bn",))}


def test_depthwise_and_grouped_layers_stay_dense_and_absorb():
    model = trained(
        nn.Sequential(
            *(nn.Conv2d(64, 64, 3, groups=64), nn.BatchNorm2d(64), nn.Hardswish()),
            *(nn.Conv2d(64, 64, 3, groups=4), nn.BatchNorm2d(64), nn.ReLU6()),
        )
    )
    report = converted_alike(model, pictures(channels=64), SKIPS)
    assert rows(report) == {"0": ("dense", ("bn", "hardswish")), "3": ("dense", ("bn", "relu6"))}
    assert [row.reason for row in report] == [
        "depthwise: a block would be nearly empty",
        "16 input channels a group do not fill a block of 32",
    ]


# ---- What is left -------------------------------------------------------------------------------


def opaque():
    """Control flow that depends on data; what is inside can be traced."""
    return Made(lambda m, x: m.block(x) if x.sum() != 0 else x, block=Block(8, 8))


def test_a_part_that_cannot_be_traced_is_a_node_and_its_inside_is_fused(measured):
    measured([1.0, 2.0], [3.0, 1.0, 1.0])
    model = trained(nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU(), opaque(), Block(8, 8)))
    original = copy.deepcopy(model)
    found = rows(convert_(model, dry_run=True))
    assert found["0"] == ("dense", ("relu",))
    assert found["2.block.conv2"] == ("dense", ("bn", "add", "relu"))
    assert found["3.conv2"] == ("dense", ("bn",))  # behind it shapes are known of an example alone
    found = rows(convert_(model, example_input=pictures(channels=8)))
    assert found["3.conv2"][1] == ("bn", "add", "relu")
    assert_same(model, original, pictures(channels=8))


def test_a_root_that_cannot_be_traced_is_named_and_its_children_are_fused():
    report = converted_alike(trained(opaque()), pictures(channels=8))
    assert rows(report)["block.conv2"] == ("dense", ("bn", "add", "relu"))
    assert any("the model (Made) cannot be traced (TraceError" in note for note in report.notes)


@pytest.mark.parametrize(
    ("conv", "reason"),
    [
        (nn.Conv2d(64, 64, 3, padding=1, padding_mode="reflect"), "is made by torch"),
        (nn.Conv2d(64, 64, 3, padding="same"), "is made by torch"),
        (type("Mine", (nn.Conv2d,), {})(64, 64, 3), "a subclass, Mine"),
        (nn.ConvTranspose2d(64, 64, 3), "ConvTranspose2d: only nn.Conv2d is converted"),
        (nn.utils.parametrizations.weight_norm(nn.Conv2d(64, 64, 3)), "a subclass, Parametrized"),
    ],
)
def test_layers_that_cannot_be_fused_say_why(conv, reason):
    last = nn.Conv2d(64, 8, 1)
    model = trained(nn.Sequential(conv, nn.BatchNorm2d(64), nn.ReLU(), last, nn.ReLU()))
    report = converted_alike(model, pictures(channels=64))
    assert rows(report)["0"] == ("left", ())
    assert reason in report[0].reason
    assert rows(report)["3"] == ("dense", ("relu",))


def test_layers_with_hooks_are_called_and_not_absorbed():
    model = resnet()
    seen = []
    model.layer1[0].bn1.register_forward_hook(lambda *_: seen.append("bn"))
    model.layer2.register_forward_pre_hook(lambda *_: seen.append("layer"))
    original = copy.deepcopy(model)
    found = rows(convert_(model))
    assert found["layer1.0.conv1"] == ("left", ())
    assert found["layer2.0.conv2"] == ("dense", ("bn", "add", "relu"))
    assert is_served(model, pictures())
    seen.clear()
    assert_same(model, original, pictures())
    assert seen[:2] == ["bn", "layer"]


def test_what_a_trace_takes_for_something_else_is_left_without_an_example():
    """A trace sees no tensors, so that this forward takes the wrong branch."""

    model = calling(lambda m, x: F.relu(m.conv1(x)) if isinstance(x, torch.Tensor) else m.conv2(x))
    original = copy.deepcopy(model)
    report = convert_(trained(nn.Sequential(model, nn.Conv2d(8, 8, 1), nn.ReLU())))
    assert not any(row.absorbed for row in report)
    assert any("the model is not fused: its result differs" in note for note in report.notes)
    assert_same(model, original, pictures(channels=8))


def test_a_picture_without_a_batch():
    model = trained(nn.Sequential(nn.Conv2d(8, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 1), nn.SiLU()))
    for config in (None, SpAMMConfig(max_error=1e-6)):
        converted_alike(model, pictures(channels=8)[0], config)


# ---- The report ---------------------------------------------------------------------------------


def test_the_report_is_a_table_of_all_layers_and_a_summary():
    report = convert_(resnet(), SKIPS)
    lines = str(report).splitlines()
    assert lines[0].split() == ["layer", "action", "shape", "setting", "absorbed"]
    for row, line in zip(report, lines[1:], strict=False):
        assert line.startswith(row.name)
    assert lines[len(report) + 1 :] == [
        "6 layers: 5 spamm, 1 dense, 0 left",
        "5 of 5 spamm: skips by its setting",
        "1 of 1 dense: 3 input channels do not fill a block of 32",
        "linear layers, torch's own: 1",
        *report.notes[1:],
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


def test_tables_are_narrow(measured):
    """Columns that do not fit are left out; reasons that many rows share are said once."""
    measured([2.0, 1.0, 1.5], [3.0, 1.0, 2.0, 2.0])
    report = convert_(resnet(), SKIPS, example_input=pictures())
    lines = str(report).splitlines()
    assert lines[0].split() == ["layer", "action", "shape", "absorbed", "dense", "/", "spamm", "us"]
    assert re.match(r"layer1\.0\.conv2 +dense .* bn add relu +2 ±0% / 1 ±0%$", lines[3])
    assert "6 of 6 dense: the whole model is faster so" in lines
    inner = nn.Sequential()
    inner.add_module("a_convolution_with_a_name_that_tells_what_it_is_for", resnet())
    report = convert_(inner, SpAMMConfig(max_error=1e-6, pixel_block=(1, 8, 8)))
    lines = str(report).splitlines()
    assert lines[0].split() == ["layer", "action", "shape"]
    assert all(line.startswith(row.name) for line, row in zip(lines[1:], report, strict=False))
    assert "no room here for setting, absorbed: rows have them" in lines
    assert max(map(len, lines)) < 100


def test_knobs_stand_for_a_config():
    for knob in ({"tau": 0.5}, {"valid_ratio": 0.5}, {"max_error": 0.5}):
        report = convert_(resnet(), **knob)
        assert report["layer1.0.conv1"].setting == SpAMMConfig(**knob)


def test_stages_are_said(capsys):
    convert_(resnet(), SKIPS, example_input=pictures(), progress=True)
    stages = [line.removeprefix("convert_: ") for line in capsys.readouterr().err.splitlines()]
    assert stages == [
        "tracing",
        "comparing parts of the model",
        "measuring layers in the model, in 3 forms",
        stages[-1],
    ]
    assert stages[-1].startswith("measuring the model in ")
    convert_(resnet(), SKIPS)
    assert capsys.readouterr().err == ""


def test_a_settings_file_makes_the_same_choices(tmp_path):
    model, again = resnet(), resnet()
    overrides = {"layer1.0.conv1": None, "layer2.0.conv1": SpAMMConfig(valid_ratio=0.5, block=32)}
    report = convert_(model, SKIPS, overrides=overrides)
    report.save(tmp_path / "net.json")
    found = convert_(again, tmp_path / "net.json")
    assert [(row.name, row.action, row.absorbed, row.setting) for row in found] == [
        (row.name, row.action, row.absorbed, row.setting) for row in report
    ]
    with torch.no_grad():
        assert torch.equal(model(pictures()), again(pictures()))


def test_a_setting_goes_to_json_and_back():
    setting = SpAMMConfig(tau=0.25, block=(64, 32, 64), pixel_block=(1, 8, 8))
    assert SpAMMConfig.from_json(setting.to_json()) == setting
    assert hash(setting) == hash(SpAMMConfig.from_json(setting.to_json()))


# ---- With an example ----------------------------------------------------------------------------


DENSE, SPAMM, SKIPPING = "dense", "spamm", f"spamm at {SKIPS}"


@pytest.mark.parametrize(
    ("of_layers", "of_models", "action", "setting"),
    [
        ([1.0, 2.0, 2.0], [3.0, 1.0, 2.0], "dense", None),
        ([2.0, 1.99, 1.98], [3.0, 1.0, 2.0], "dense", None),  # not by 3%
        ([1.0, 1.09, 1.09], [3.0, 2.0, 1.0], "spamm", SKIPS),  # all of them, not one by one
        ([1.0, 2.0, 2.0], [3.0, 2.0, 1.0], "dense", None),  # too slow one by one
        ([2.0, 1.0, 1.5], [3.0, 2.0, 1.0, 4.0], "spamm", SpAMMConfig(tau=0.0)),
        ([2.0, 1.5, 1.0], [3.0, 2.0, 1.0, 4.0], "spamm", SKIPS),
        ([2.0, 1.5, 1.0], [3.0, 1.0, 2.0, 4.0], "dense", None),
        ([2.0, 1.5, 1.0], [1.0, 3.0, 2.0, 4.0], "left", None),
        # Not by less than times vary.
        ([2.0, 1.5, Timing(1.0, 1.6)], [3.0, 2.0, 1.0, 4.0], "spamm", SpAMMConfig(tau=0.0)),
        ([Timing(2.0, 3.0), 1.5, 1.0], [3.0, 2.0, 2.5], "dense", None),
        ([2.0, 1.5, 1.0], [3.0, 2.0, Timing(1.0, 2.5), 4.0], "dense", None),
        ([2.0, 1.5, 1.0], [3.0, 2.0, Timing(1.0, 1.5), 4.0], "spamm", SKIPS),
    ],
)
def test_the_fastest_is_installed(measured, of_layers, of_models, action, setting):
    measured(of_layers, of_models)
    model = resnet()
    original = copy.deepcopy(model)
    report = convert_(model, SKIPS, example_input=pictures())
    found = report["layer1.0.conv1"]
    assert (found.action, found.setting) == (action, setting)
    assert [name for name, _ in found.times] == [DENSE, SPAMM, SKIPPING]
    varies = any(isinstance(time, Timing) for time in of_models)
    assert any("x here: other programs run" in note for note in report.notes) == varies
    assert is_served(model, pictures()) == (action != "left")
    assert_same(model, original, pictures())


@pytest.mark.parametrize("fuse", [False, True])
@torch.no_grad()
def test_each_call_of_a_convolution_is_timed_where_the_model_makes_it(monkeypatch, fuse):
    """In the order of calls, also of those that no generated forward makes."""
    forms = marks_of_forms(monkeypatch)
    model = calling(lambda m, x: m.conv2(m.conv2(F.relu(m.conv1(F.relu(m.conv1(x)))))))
    hooks = [layer._forward_pre_hooks for layer in model.modules()]
    report = convert_(model, example_input=pictures(channels=8), fuse=fuse)
    of_calls = ["conv1", "conv1#2", "conv2", "conv2#2"]
    of_layers = ["conv1", "conv1", "conv2", "conv2"]
    assert forms == [[*(of_calls if fuse else of_layers), ""]] * 2  # dense and spamm
    assert all(row.times for row in report)
    assert not any(hooks)


def test_a_setting_under_a_full_name_is_taken_whatever_is_measured(measured):
    measured([1.0, 2.0, 3.0], [1.0, 2.0, 3.0])
    model = resnet()
    report = convert_(model, example_input=pictures(), overrides={"layer1.0.conv1": SKIPS})
    assert rows(report)["layer1.0.conv1"] == ("spamm", ("bn", "relu"))
    assert rows(report)["layer1.0.conv2"] == ("dense", ("bn", "add", "relu"))


def test_a_layer_with_two_names_is_named_by_either():
    model = nn.Module()
    model.first = nn.Conv2d(64, 64, 3)
    model.again = model.first
    report = convert_(model, overrides={"again": SKIPS})
    assert [(row.name, row.action, row.setting) for row in report] == [("first", "spamm", SKIPS)]


def test_what_computes_something_else_is_left_and_named():
    def forward(m, x):
        return F.relu(m.conv(x)) * (2 if isinstance(x, torch.Tensor) else 3)

    model = trained(Made(forward, conv=nn.Conv2d(64, 64, 1)))
    report = convert_(model, SKIPS, example_input=pictures(channels=64), overrides={"conv": SKIPS})
    assert rows(report)["conv"] == ("spamm", ())
    assert "not fused: its result differs by" in report[0].reason
    assert any(note.startswith("the model is not fused: its result") for note in report.notes)


def test_rounding_that_grows_is_not_a_difference():
    """In half types a deep network may round to more than the limit by itself."""
    layers = [nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16)) for _ in range(6)]
    model = trained(nn.Sequential(*layers)).to(torch.float16)
    with torch.no_grad():
        for layer in layers:  # differences of numbers that are nearly equal
            layer[0].bias += 300
            layer[1].running_mean += 300
    report = convert_(model, example_input=pictures(channels=16).to(torch.float16))
    assert all("differs" not in row.reason for row in report)


# ---- Bad input ----------------------------------------------------------------------------------

BAD_SETTINGS = [
    (partial(SpAMMConfig, **setting), *refusal)
    for setting, *refusal in (
        ({}, ValueError, "exactly one of tau, valid_ratio and max_error must be given; got none"),
        ({"tau": 1, "max_error": 1}, ValueError, "got tau and max_error"),
        ({"valid_ratio": 0}, ValueError, "valid_ratio must be in (0, 1]; got 0"),
        ({"tau": float("nan")}, ValueError, "tau must be a number; got nan"),
        ({"tau": torch.tensor(1.0)}, TypeError, "tau must be a number in a SpAMMConfig"),
        ({"tau": 1, "block": 48}, ValueError, "block must be 32, 64 or 128"),
        ({"tau": 1, "pixel_block": (1, 2, 2)}, ValueError, "pixel_block must be"),
        ({"tau": 10**400}, ValueError, "tau must be a number that float64 holds; got a larger one"),
        ({"max_error": Fraction(10**400)}, ValueError, "max_error must be a number that float64"),
    )
] + [
    (partial(make, value), error, *fragments)
    for make, value, error, *fragments in (
        (SpAMMConfig.from_json, "", ValueError, "a SpAMMConfig must be JSON; got ''"),
        (SpAMMConfig.from_json, "[]", ValueError, "must be a JSON object; got '[]'"),
        (SpAMMConfig.from_json, '{"tau": 1, "speed": 2}', ValueError, "holds tau, ", "; got speed"),
        (SpAMMConfig.from_json, '{"tau": 1, "max_error": 1}', ValueError, "exactly one of"),
        (SpAMMConfig.from_json, 3, TypeError, "is made of a str of JSON; got int"),
        (SpAMMConfig.from_dict, [1], TypeError, "a SpAMMConfig is made of a dict; got list"),
        (SpAMMConfig.from_dict, {1: 2}, ValueError, "a SpAMMConfig holds tau, ", "; got 1"),
    )
]


@pytest.mark.parametrize("case", BAD_SETTINGS)
def test_bad_settings(case):
    make, error, *fragments = case
    refuses(error, make, *fragments)


def refused(model, error, message, **options):
    before = state_of(model)
    refuses(error, lambda: convert_(model, **options), message)
    assert state_of(model) == before


CONFIG = "config must be a SpAMMConfig, the path of a settings file, or None; got "
KNOBS = "must come without tau, valid_ratio and max_error, which stand for one; got config and "
EXAMPLE, FITS, PROVES = "example_input must ", "be what the model takes; ", "hold finite numbers; "
BAD = {
    TypeError: [
        ({"config": 0.5}, f"{CONFIG}0.5 (a threshold is tau=0.5 or SpAMMConfig(tau=0.5))"),
        ({"config": [0.5]}, f"{CONFIG}list"),
        ({"tau": torch.tensor(0.1)}, "tau must be a number in a SpAMMConfig"),
        ({"progress": 1}, "progress must be True or False; got 1"),
        ({"fuse": 1}, "fuse must be True or False; got 1"),
        ({"dry_run": None}, "dry_run must be True or False; got None"),
        ({"overrides": {"conv1": 0.5}}, "overrides must hold a SpAMMConfig or None; got float"),
        ({"overrides": {1: None}}, "overrides must have names as keys; got 1"),
        ({"overrides": ["conv1"]}, "overrides must be a dict from names to settings; got list"),
    ],
    ValueError: [
        ({"config": SKIPS, "tau": 0.1}, f"{KNOBS}tau"),
        ({"config": "net.json", "valid_ratio": 0.5}, f"{KNOBS}valid_ratio"),
        ({"valid_ratio": 0.5, "max_error": 0.1}, "exactly one of tau, valid_"),
        ({"config": "none"}, "config must be a settings file that can be"),
        ({"overrides": {"layer1.0.conv": SKIPS}},
         "overrides must name convolutions of the model; got 'layer1.0.conv' (close: "),
        ({"overrides": {"layer1": None}}, "(close: layer1.0.conv1, layer1.0.conv2)"),
        ({"overrides": {"fc": SKIPS}}, "got 'fc' (it has 6 convolutions)"),
        ({"overrides": {"re:stage.*": None}}, "got 're:stage.*', which matches none of 6"),
        ({"overrides": {"re:(": None}}, "regular expressions behind re:; got 're:('"),
        *(({"example_input": example}, EXAMPLE + message) for example, message in (
            (pictures(channels=4), f"{FITS}got a tensor of shape (2, 4, 16, 16) and float32 (Runt"),
            (pictures(dtype=torch.float64), f"{FITS}got a tensor of shape (2, 3, 16, 16) and flo"),
            ((pictures(), None, None), f"{FITS}got a tuple (TypeError: "),
            ({"y": pictures()}, f"{FITS}got a dict (TypeError: "),
            ("picture", f"{FITS}got a str (TypeError: "),
            (pictures(0), "not be empty; got a tensor of shape (0, 3, 16, 16) and float32"),
            ({"x": pictures() * float("nan")}, f"{PROVES}got a tensor of shape (2, 3"),
            (pictures() / 0, f"{PROVES}got a tensor of shape (2, 3, 16, 16)"),
        )),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("error", "options", "message"), [(error, *bad) for error, of in BAD.items() for bad in of]
)
def test_bad_arguments(error, options, message):
    """tests/robustness/test_hostile_files.py has settings files that are no JSON."""
    refused(resnet(), error, message, **options)


def test_models_that_are_none():
    lazy = nn.Sequential(nn.LazyConv2d(64, 3), nn.ReLU())
    message = "whose layers know their sizes; got one whose 0.weight is not initialised (run"
    refused(lazy, ValueError, message)
    message = "expects a model with values; got one whose conv1.weight is on the device meta"
    refused(resnet().to("meta"), ValueError, message)
    message = "convert_ expects a model with nn.Conv2d layers; got Sequential, which has none in 3"
    refused(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), ValueError, message)
    for function in (convert_, revert_, refresh_):
        message = f"{function.__name__} expects an nn.Module; got str"
        refuses(TypeError, lambda function=function: function("model"), message)
    message = "refresh_ expects a model that convert_ converted; got Re"
    refuses(ValueError, lambda: refresh_(resnet()), message)


def test_nothing_to_convert():
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
    (lambda content: content.update(reference=[1, 1, 8, 8]),
     "must come without a reference; got one of shape [1, 1, 8, 8] (make them anew: calibrate("),
    (lambda content: content.clear(), "config must be a settings file as a report saves it"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), OTHER_SETTINGS)
def test_settings_of_another_model(tmp_path, change, message):
    refused(resnet(), ValueError, message, config=settings(tmp_path, change))


def test_a_reference_left():
    message = "convert_ takes no reference any more: calibrate(model, loader, evaluate, max_drop)"
    refused(resnet(), TypeError, message, reference=torch.zeros(1, 3, 8, 8))


def test_settings_come_without_overrides(tmp_path):
    message = "overrides must not come with a settings file, which names each layer's engine; got"
    options = {"config": settings(tmp_path, lambda _: None), "overrides": {"conv1": None}}
    refused(resnet(), ValueError, message, **options)


def test_a_failure_late_in_the_conversion_leaves_the_model_as_it_was(monkeypatch):
    def fail(*_):
        raise RuntimeError("no memory")

    model = resnet()
    convert_(model, SKIPS)
    monkeypatch.setattr("spamm_torch.networks.install.attach", fail)
    refused(model, RuntimeError, "no memory", config=SpAMMConfig(tau=1.0))
    assert model.layer1[0].conv1.tau == SKIPS.tau
