"""calibrate: settings within an accuracy drop, from times that these tests make up."""

import contextlib
import itertools
import json
import os
import random
import re
from collections import OrderedDict
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support import Made, linear_time, made_up, raises_line
from tiny import (
    Agreement,
    dark_pictures,
    from_file,
    tiny_network,
    unchanged,
)
from torch import nn

from spamm_torch import SpAMMConfig, SpAMMConv2d, calibrate, convert_, record_stats
from spamm_torch._timing import Timing
from spamm_torch.calibration import CalibrationReport
from spamm_torch.calibration.journal import Journal
from spamm_torch.calibration.statistics import RATIOS
from spamm_torch.networks.config import NOTHING_SKIPPED

LAYERS = ("conv_b", "conv_c")  # those that may skip


def batches(count=4, size=16):
    return [(dark_pictures(size, seed=seed), None) for seed in range(count)]


def run(model=None, max_drop=20.0, loader=None, evaluate=None, **options):
    model = tiny_network() if model is None else model
    loader = batches() if loader is None else loader
    evaluate = Agreement(model, loader) if evaluate is None else evaluate
    options = {"progress": False, **options}
    return calibrate(model, loader, evaluate, max_drop, **options)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A calibration's report, the text of its journal, and what it was given."""
    model, loader, journal = tiny_network(), batches(), tmp_path_factory.mktemp("journal") / "one"
    given = {"model": model, "loader": loader, "evaluate": Agreement(model, loader)}
    given["example_input"] = dark_pictures(4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("spamm_torch.calibration.times.measure", made_up(linear_time))
        report = run(**given, journal=journal)
    return SimpleNamespace(report=report, journal=journal.read_text(), given=given)


# ---- What is chosen -----------------------------------------------------------------------------


@torch.no_grad()
def test_settings_stay_within_the_drop_and_save_time(timed, tmp_path):
    model, loader = tiny_network(batch_norm=True), batches()
    evaluate = Agreement(model, loader)
    report = run(model, 20.0, loader, evaluate)
    outcome = report.outcome
    assert outcome.evaluations == evaluate.calls <= 12
    assert outcome.drop <= 20
    assert outcome.changed <= 40
    assert outcome.drop > 0  # it went as far as it could
    assert outcome.after_us < outcome.exact_us < outcome.before_us

    dense = evaluate(model, loader[1::2])[0]
    from_file(report, tmp_path, model)
    assert dense - evaluate(model, loader[1::2])[0] == outcome.drop  # on what was held back
    assert dense - evaluate(model, loader[::2])[0] == outcome.searched_drop
    for row in report:
        layer = model.get_submodule(row.name)
        if row.setting is not None:
            assert type(layer) is SpAMMConv2d
            assert (layer.tau, layer.pixel_block) == (row.setting.tau, row.setting.pixel_block)
    assert {row.name for row in report if row.setting is None} >= {"conv_a"}
    with record_stats(model) as stats:
        for pictures, _ in loader[::2]:
            model(pictures)
    assert stats.drifted == []
    for row in report:
        if row.setting is not None:
            assert stats[row.name].valid_ratio == pytest.approx(row.valid_ratio)
            assert stats[row.name].band is not None


def test_more_may_be_lost_for_more_time(timed):
    times = [run(max_drop=drop).outcome.after_us for drop in (0.0, 10.0, 50.0)]
    assert times[0] >= times[1] >= times[2]
    assert times[0] > times[2]


def test_a_score_without_answers_and_answers_that_change_although_it_stays(timed):
    model, loader = tiny_network(), batches()
    agreement = Agreement(model, loader)
    outcome = run(model, 15.0, loader, lambda *given: agreement(*given)[0]).outcome
    assert outcome.drop <= 15
    assert RATIOS[-1] + 0.05 < outcome.valid_ratio < 0.8  # something skips, and not all that can
    assert outcome.changed is outcome.resolution is None
    outcome = run(model, 10.0, loader, lambda *given: (97.0, agreement(*given)[1])).outcome
    assert outcome.drop == 0
    assert outcome.changed <= 20
    assert outcome.valid_ratio > RATIOS[-1] + 0.05  # a score that never drops would allow all


def test_reports(finished, timed, tmp_path):
    """The same times give the same one."""
    report = finished.report
    again = run(**finished.given)
    assert again.settings == report.settings
    assert str(again) == str(report)
    head, *rows, valid, drop, times = str(report).splitlines()
    assert head.split()[:4] == ["layer", "shape", "valid", "tau"]
    assert [row.split()[0] for row in rows] == ["conv_a", *LAYERS]
    assert "3 input channels do not fill a block of 32" in rows[0]
    assert "weighted by multiplications" in valid
    assert "of 20 allowed on unseen data (one answer is 3.1%)" in drop
    assert times.startswith("whole model, measured: 110 us as it was, 100 us with nothing skipped")
    untried = replace(report.outcome, searched_drop=None)
    shown = str(CalibrationReport(report, untried, report.settings))
    assert "; not tried where it was searched; " in shown
    line = "^outcome must be an Outcome, as calibrate gives it; got NoneType$"
    with pytest.raises(TypeError, match=line):
        CalibrationReport([], None, {})
    other = nn.Sequential(nn.Conv2d(32, 32, 1))
    line = "must be those of this model; got a layer 'conv_a'"
    with pytest.raises(ValueError, match=line), unchanged(other):
        from_file(report, tmp_path, other)


@pytest.mark.parametrize("seconds", [0.01, 20.0])
def test_progress_is_said(timed, capsys, monkeypatch, seconds):
    clock = itertools.count(0.0, seconds)
    monkeypatch.setattr("spamm_torch._output.time.monotonic", lambda: next(clock))
    run(progress=True)
    lines = capsys.readouterr().err.splitlines()
    assert all(line.startswith("calibrate: ") for line in lines)
    assert any(line.startswith("calibrate: evaluations, 3 of 12") for line in lines)
    # Three forms, two of them in two ways: the last stage that takes long.
    assert sum("times of the whole model, " in line for line in lines) == (5 if seconds > 1 else 1)
    assert any("about" in line for line in lines) == (seconds > 1)
    assert not any("about 0 s" in line for line in lines)
    run()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_inputs_are_moved_to_the_model(timed, device, dtype):
    model, loader = tiny_network().to(device, dtype), batches()
    own = [(pictures.to(device, dtype), None) for pictures, _ in loader]
    agreement = Agreement(model, own)

    def evaluate(model, half):
        first = next(i for i, (pictures, _) in enumerate(loader) if pictures is next(iter(half))[0])
        return agreement(model, own[first::2])

    report = run(model, 50.0, loader, evaluate)
    assert 0 < report.outcome.valid_ratio < 1
    assert next(model.parameters()).dtype == dtype


def test_a_layer_that_is_called_twice(timed, tmp_path):
    stem, conv = (nn.Conv2d(c, 32, 3, padding=1) for c in (3, 32))
    twice = lambda m, x: m.conv(m.conv(m.stem(x)).relu()).mean((2, 3))  # noqa: E731
    model = Made(twice, stem=stem, conv=conv).eval()
    report = run(model, 50.0)
    _, row = report
    assert (row.name, row.dense_us) == ("conv", 200.0)
    found = from_file(report, tmp_path, model)
    assert [row.setting for row in found][1:] == [row.setting] * 2


def test_layers_that_were_spamm_before_keep_their_setting(timed):
    model = tiny_network()
    model.conv_b = SpAMMConv2d.from_dense(model.conv_b, tau=1.0)
    report = run(model)
    assert [row.name for row in report] == ["conv_a", "conv_c"]
    assert report.settings["layers"]["conv_b"]["setting"] == {"tau": 1.0}


def test_an_example_input_is_what_is_timed(timed):
    seen = []
    model = tiny_network()
    timed(lambda trial: seen.append(trial) or linear_time(trial))
    handle = model.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    run(model, example_input=dark_pictures(5))
    handle.remove()
    place = next(i for i, what in enumerate(seen) if not isinstance(what, int))
    assert [what for what in seen[:place] if isinstance(what, int)][-1] == 5
    assert {trial.setting for trial in seen if not isinstance(trial, int)} >= {NOTHING_SKIPPED}


# ---- Where nothing is gained --------------------------------------------------------------------


def is_as_it_was(report, tmp_path):
    model = tiny_network()
    from_file(report, tmp_path, model)
    return type(model) is nn.Sequential and type(model.conv_b) is nn.Conv2d


SAME = "nothing is installed: the model as it was is as fast"
# Times, what the report notes, and whether the model stays; converting alone may save time.
NO_GAIN = {
    "layers": (
        lambda of: 90.0 if of.what.startswith(("dense", "nothing skipped")) else 100.0,
        *("nothing is skipped: no layer is faster with it", False),
    ),
    "the whole model": (
        lambda of: 100.0 if of.what.startswith("as chosen") else linear_time(of),
        *("the whole model is not faster", False),
    ),
    # Layers save time by skipping, and converting costs more.
    "as it was": (lambda of: 40.0 if of.what == "as it was" else linear_time(of), SAME, True),
    "nothing": (lambda of: linear_time(of) if of.layer else 100.0, SAME, True),
}


@pytest.mark.parametrize("name", NO_GAIN)
def test_nothing_is_skipped_where_it_is_not_faster(timed, tmp_path, name):
    time_of, note, stays = NO_GAIN[name]
    timed(time_of)
    report = run()
    outcome = report.outcome
    assert note in outcome.note
    assert note in str(report)
    assert is_as_it_was(report, tmp_path) == stays
    if not stays:
        assert all(row.setting is None for row in report)
    if name == "layers":
        assert {row.reason for row in report[1:]} == {"not faster at any ratio"}
        assert (outcome.drop, outcome.valid_ratio) == (0, 1)
    if name == "as it was":
        assert outcome.exact_us == 100
    if name == "nothing":
        assert outcome.after_us == outcome.before_us


def busy(spread):
    """Times of the whole model that vary so much, and are 20 times as long in some forms."""

    def time_of(trial):
        slow = {"as it was": 20.0, "nothing skipped, each by its fastest": 4.0}.get(trial.what, 1)
        return Timing(slow * linear_time(trial), 1.0 if trial.layer else spread)

    return time_of


@pytest.mark.parametrize("base", ["each by its fastest", "all by conv2d"])
def test_noise_chooses_nothing(timed, tmp_path, base):
    """Whichever times are long by chance, the same is chosen, and the report says why."""
    timed(lambda trial: Timing(busy(25.0)(trial).median * (3 if base in trial.what else 1), 25.0))
    report = run(journal=tmp_path / "journal.json")
    assert report.outcome.spread == 25
    assert str(report).endswith("; times vary by 25x here: other programs run")
    assert report.settings["calibration"]["note"] == report.outcome.note
    assert is_as_it_was(report, tmp_path)
    assert {row.reason for row in report[1:]} == {"not faster at any ratio"}


def test_times_that_vary_are_measured_again_the_next_time(timed, tmp_path):
    given = {"journal": tmp_path / "journal.json", "model": tiny_network()}
    timed(busy(25.0))
    assert run(**given).outcome.valid_ratio == 1
    timed(linear_time)
    quiet = run(**given)
    assert quiet.outcome.valid_ratio < 1
    assert "; times vary by 0%" in str(quiet)


def pooled_network():
    """The tiny network with a max pool behind the first convolution that may skip."""
    model = tiny_network()
    layers = dict(model.named_children())
    pooled = {"relu_b": nn.Sequential(layers["relu_b"], nn.MaxPool2d(2))}
    return nn.Sequential(OrderedDict(layers | pooled)).eval()


@torch.no_grad()
def test_pools_are_in_the_call_where_the_whole_model_is_faster_so(timed, tmp_path):
    timed(lambda trial: 30.0 if "nothing skipped, all" in trial.what else linear_time(trial))
    report = run(pooled_network())
    assert report.outcome.exact_us == report.outcome.after_us == 30
    line = r"nothing is skipped: the whole model is not faster with it \(\d+ us\)"
    assert re.fullmatch(line, report.outcome.note)
    model = pooled_network()
    rows = from_file(report, tmp_path, model)
    assert rows["conv_b"].absorbed == ("relu", "pool")
    assert rows["conv_b"].setting == rows["conv_c"].setting == NOTHING_SKIPPED
    pictures = dark_pictures()
    torch.testing.assert_close(model(pictures), pooled_network()(pictures))


def test_what_does_not_skip_pools_in_the_call_beside_what_does(timed, tmp_path):
    def of_the_last(trial):
        if trial.layer != "conv_c" and trial.layer:
            return 100.0
        return linear_time(trial) - 30 * (trial.what == "as chosen, all by conv2d")

    timed(of_the_last)
    report = run(pooled_network())
    rows = from_file(report, tmp_path, pooled_network())
    assert rows["conv_b"].absorbed == ("relu", "pool")
    assert rows["conv_c"].setting.tau > 0


def test_nothing_is_skipped_where_no_choice_is_good_enough(timed):
    def evaluate(model, half):
        layers = [layer for layer in model.modules() if isinstance(layer, SpAMMConv2d)]
        return 50.0 - any(layer.tau > 0 for layer in layers)

    note = run(max_drop=0.5, evaluate=evaluate).outcome.note
    assert note == "nothing is skipped: no choice that was tried held on both halves"


def test_the_half_that_was_not_searched_must_agree(timed):
    model, loader = tiny_network(), batches()
    second = {id(pictures) for pictures, _ in loader[1::2]}
    share = []  # of what is computed, on the second half

    def evaluate(model, half):
        pictures = [picture for picture, _ in half]
        layers = [layer for layer in model.modules() if isinstance(layer, SpAMMConv2d)]
        skipping = sum(layer.tau > 0 for layer in layers)
        for picture in pictures:
            model(picture)
        if id(pictures[0]) in second:
            share.append(skipping)
            return 50.0 - (10 if skipping > 1 else 0)
        return 50.0

    outcome = run(model, 5.0, loader, evaluate).outcome
    assert share[:2] == [0, 2]  # all moves held on the first half, and not on the second
    assert outcome.drop == 0
    assert outcome.valid_ratio > RATIOS[-1] + 0.05


# ---- Resuming -----------------------------------------------------------------------------------


def test_it_goes_on_where_it_was_stopped(timed, tmp_path, monkeypatch):
    model, loader = tiny_network(), batches()
    agreement = Agreement(model, loader)
    expected = run(model, 20.0, loader, agreement)
    stop_at = 5

    def evaluate(*given):
        if agreement.calls == stop_at:
            raise KeyboardInterrupt
        return agreement(*given)

    journal = tmp_path / "journal.json"
    agreement.calls = 0
    with pytest.raises(KeyboardInterrupt), unchanged(model):
        run(model, 20.0, loader, evaluate, journal=journal)

    def measured_again(*_):
        raise AssertionError

    monkeypatch.setattr("spamm_torch.calibration.statistics._Pool.gather", measured_again)
    timed(lambda trial: measured_again() if trial.layer else linear_time(trial))
    agreement.calls, stop_at = 0, None
    found = run(model, 20.0, loader, evaluate, journal=journal)
    assert agreement.calls < expected.outcome.evaluations
    assert found.settings["layers"] == expected.settings["layers"]
    assert found.outcome.drop == expected.outcome.drop
    assert found.outcome.evaluations == expected.outcome.evaluations  # with those that were kept


def other_forward():
    model = tiny_network()
    model.relu_b = nn.Identity()
    return model


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": tiny_network(seed=1)}, "of the same model"),
        ({"model": other_forward()}, "of the same model"),
        ({"loader": batches(size=17)}, "of the same data"),
        ({"example_input": dark_pictures(3)}, "of the same example_input"),
        (
            {"example_input": dark_pictures(4).contiguous(memory_format=torch.channels_last)},
            "of the same example_input",
        ),
        ({"evaluate": lambda *_: 3.0}, "of the same evaluate and loader"),
        ("[1]", "one of a calibration"),
        ({"settings": [1]}, "one of a calibration"),
        ({"results": "many"}, "one of a calibration"),
        ({"format": None}, "one of a calibration"),
    ],
)
def test_journals_of_something_else_are_refused(finished, timed, tmp_path, given, message):
    """Other arguments, or another file."""
    journal, is_file = tmp_path / "journal.json", message == "one of a calibration"
    kept = finished.journal
    if is_file:
        kept = given if isinstance(given, str) else json.dumps({**json.loads(kept), **given})
    journal.write_text(kept)
    with pytest.raises(ValueError, match=f"journal must be {message}; got"):
        run(**{**finished.given, **({} if is_file else given)}, journal=journal)
    assert journal.read_text() == kept


def test_a_journal_serves_another_example_of_the_same_form(finished, timed, tmp_path):
    journal = tmp_path / "journal.json"
    journal.write_text(finished.journal)
    timed(lambda _: 0.0)  # nothing is measured again
    given = {**finished.given, "example_input": dark_pictures(4, seed=9)}
    assert str(run(**given, journal=journal)) == str(finished.report)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("statistics", 5), ("statistics", {"other": {}})),
        ("statistics", {"conv_b": {"multiplications": 1, "candidates": [{"setting": 2}]}}),
        *(("times", {}), ("times", {"conv_b": [1]}), ("score", [50]), ("half 0", None)),
        *(("half 1", {"drop": "much", "changed": None}), ("whole model", {"as it was": 1})),
    ],
)
def test_damaged_journals_are_refused(finished, timed, tmp_path, key, value):
    journal, content = tmp_path / "journal.json", json.loads(finished.journal)
    key = next(name for name in content["results"] if name.startswith(key))
    content["results"][key] = value
    journal.write_text(json.dumps(content))
    kept, line = journal.read_text(), r"an undamaged one .* cannot be read"
    with raises_line(ValueError, line) as error, unchanged(finished.given["model"]):
        run(**finished.given, journal=journal)
    assert f"whose result {key!r}" in str(error.value)
    assert journal.read_text() == kept


def test_two_calibrations_with_one_journal(tmp_path, monkeypatch):
    """One keeps a result while the other is about to put its own file in place."""
    path, replace_file = tmp_path / "journal.json", os.replace
    one, other = Journal(path, {}), Journal(path, {})

    def after_the_other(*given):
        monkeypatch.setattr(os, "replace", replace_file)
        other.measured("other", lambda: 2, int)
        assert json.loads(path.read_text())["results"] == {"other": 2}
        replace_file(*given)

    monkeypatch.setattr(os, "replace", after_the_other)
    one.measured("one", lambda: 1, int)
    assert json.loads(path.read_text())["results"] == {"one": 1}
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("path", "kind", "line"),
    [
        ("none/journal.json", ValueError, "journal must be a file that can be written; got .*none"),
        ("", ValueError, "journal must be a file that can be read; got .*directory"),
        (None, TypeError, "journal must be a path; got 5"),
    ],
)
def test_a_journal_that_cannot_be_kept_fails_first(timed, tmp_path, path, kind, line):
    model, calls = tiny_network(), []
    given = {"journal": 5 if path is None else tmp_path / path}
    with raises_line(kind, line), unchanged(model):
        run(model, evaluate=lambda *_: calls.append(1), **given)
    assert calls == []


# ---- What may not change, and bad input ---------------------------------------------------------


def test_the_model_stays_as_it_is(timed):
    model = tiny_network(batch_norm=True).train()
    model.bn_b.eval()
    model.conv_c.register_forward_hook(lambda *_: None)

    def evaluate(model, half):
        torch.rand(3), random.random()
        return 90 + sum(float(model(pictures).mean()) for pictures, _ in half)

    with unchanged(model):
        run(model, 5.0, evaluate=evaluate)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(
    "move",
    [
        nn.Module.double,
        lambda model: model.to(memory_format=torch.channels_last),
        lambda model: setattr(model.bn_b.running_mean, "data", torch.zeros(32)),
    ],
)
def test_an_evaluate_that_moves_or_casts_the_model_is_refused(timed, move, fails):
    model = tiny_network(batch_norm=True)
    model.conv_a.weight.grad = torch.ones(32, 3, 3, 3)

    def evaluate(model, half):
        move(model)
        if fails:
            raise RuntimeError("evaluate must leave it, and cannot")
        return 50.0

    kind = RuntimeError if fails else ValueError
    with pytest.raises(kind, match=r"^evaluate must leave .*$"), unchanged(model):
        run(model, evaluate=evaluate)
    assert model.conv_a.weight.grad.dtype == torch.float32


def test_batches_of_arguments_by_name_and_of_several_tensors(timed):
    named, several = (
        Made(lambda m, x, of=of: m.network(of(x)), network=tiny_network()).eval()
        for of in (lambda x: x, sum)
    )
    named = named, [{"x": x} for x, _ in batches()]
    several = several, [([x, x], None) for x, _ in batches()]
    for model, loader in (named, several):
        report = run(model, 5.0, loader, lambda *_: 50.0)
        assert [row.name for row in report][1:] == [f"network.{name}" for name in LAYERS]


def test_a_loader_that_shuffles_by_torchs_generator(timed):
    data = torch.utils.data.TensorDataset(dark_pictures(64), torch.arange(64))
    loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)
    model = tiny_network()
    seen = {True: set(), False: set()}

    def evaluate(model, half):
        order = torch.cat([numbers for _, numbers in half]).tolist()
        seen[type(model.conv_b) is SpAMMConv2d].add(tuple(order))
        return 50.0

    with unchanged(model):
        run(model, 5.0, loader, evaluate)
    assert len(seen[False]) == 2  # the two halves, in the same order each time
    assert seen[True] == seen[False]
    assert len(set().union(*seen[True])) == 64  # which share nothing


def drifting(model, half, calls=iter(range(100))):  # noqa: B008  counts all calls
    return float(next(calls))


def changing_answers(model, half, calls=iter(range(100))):  # noqa: B008
    return 90.0, torch.arange(4) + next(calls)


def converted():
    model = tiny_network()
    convert_(model, SpAMMConfig(tau=8.0))
    return model


BAD = {
    TypeError: [
        ({"model": 3}, "calibrate expects an nn.Module; got int"),
        ({"max_drop": "1"}, "max_drop must be a number; got '1'"),
        ({"loader": 3}, "loader must be iterable, .* got int"),
        ({"evaluate": lambda *_: (50.0, ["cat", "dog"])},
         "a tensor or a list of numbers; got a list"),
        ({"evaluate": lambda *_: (50.0, [[1, 2], [3]])},
         "a tensor or a list of numbers; got a list"),
        ({"evaluate": 3}, "evaluate must be a function; got int"),
        ({"evaluate": lambda model: 1.0},
         r"evaluate must take \(model, loader\); got one of \(model\)"),
        ({"evaluate": lambda *_: "good"}, "a number and the answers; got str"),
        ({"reference": 3}, "calibrate takes no reference any more: calibrate.model, loader"),
    ],
    ValueError: [
        ({"model": converted}, "not converted; got one whose Sequential is"),
        ({"model": lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten())},
         "convolutions that can skip; got Sequential, which has none (1 others)"),
        ({"model": nn.ReLU}, "can skip; got ReLU, which has none"),
        ({"max_drop": -0.5}, "at least 0, since .* got -0.5"),
        ({"max_drop": float("nan")}, "at least 0, .* got nan"),
        ({"evaluations": 4}, "evaluations must be at least 5; got 4"),
        ({"loader": []}, "at least two batches, one for each half; got none"),
        ({"loader": batches(1)}, "one for each half; got 1"),
        ({"loader": iter(batches())}, "anew .* got list_iterator"),
        ({"loader": [(dark_pictures(0), None)] * 2},
         r"at least one image .* got an input of shape \(0, 3, 16, 16\)"),
        ({"loader": [torch.tensor(1.0)] * 2}, r"at least one image .* got an input of shape \(\)"),
        ({"loader": [("a",), ("b",)]}, "with tensors: .* got a tuple"),
        ({"evaluate": lambda *_: float("nan")}, "a finite number; got nan"),
        ({"evaluate": drifting}, "the same for the same .* 0 and then 1"),
        ({"evaluate": changing_answers}, "the same for the same model"),
        ({"loader": [{"x": dark_pictures()}] * 4},
         "the loader's first batch must be what the model takes; got a dict .TypeError"),
        ({"example_input": torch.ones(2, 5, 8, 8)},
         "example_input must be what the model takes; got a tensor of shape"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "given", "line"), [(kind, *bad) for kind, of in BAD.items() for bad in of]
)
def test_bad_input_is_one_line(timed, kind, given, line):
    given = dict(given)
    model = given.pop("model", tiny_network)
    model = model() if callable(model) else model
    stays = unchanged(model) if isinstance(model, nn.Module) else contextlib.nullcontext()
    given.setdefault("evaluate", lambda *_: 50.0)
    with raises_line(kind, line.replace("(1 o", r"\(1 o").replace("s)", r"s\)")), stays:
        run(model, **given)
