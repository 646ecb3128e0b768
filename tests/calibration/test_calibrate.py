"""calibrate: settings within an accuracy drop, from times that these tests make up."""

import contextlib
import itertools
import random
import re

import pytest
import torch
from golden import assert_refused
from support import Made, linear_time
from tiny import Agreement, dark_pictures, from_file, tiny_network, unchanged
from torch import nn

from spamm_torch import SpAMMConfig, SpAMMConv2d, calibrate, convert_, record_stats
from spamm_torch._timing import Timing
from spamm_torch.calibration.options import RATIOS
from spamm_torch.networks.config import NOTHING_SKIPPED

LAYERS = ("conv_b", "conv_c")  # those that may skip


def batches(count=4, size=16):
    return [(dark_pictures(size, seed=seed), None) for seed in range(count)]


def run(model=None, max_drop=20.0, loader=None, evaluate=None, **options):
    model = tiny_network() if model is None else model
    loader = batches() if loader is None else loader
    evaluate = Agreement(model, loader) if evaluate is None else evaluate
    return calibrate(model, loader, evaluate, max_drop, **options)


def skipping(model):
    """Its layers that are made to skip."""
    return [layer for layer in model.modules() if isinstance(layer, SpAMMConv2d)]


# ---- What is chosen -----------------------------------------------------------------------------


@torch.no_grad()
def test_settings_stay_within_the_drop_and_save_time(timed, tmp_path):
    model, loader = tiny_network(), batches()
    evaluate = Agreement(model, loader)
    report = run(model, 20.0, loader, evaluate)
    outcome = report.outcome
    assert outcome.evaluations == evaluate.calls <= 12
    assert outcome.drop <= 20
    assert outcome.drop > 0  # it went as far as it could
    assert RATIOS[-1] + 0.05 < outcome.valid_ratio < 0.8  # something skips, and not all that can
    assert outcome.after_us < outcome.before_us

    dense = evaluate(model, loader[1::2])
    from_file(report, tmp_path, model)
    assert dense - evaluate(model, loader[1::2]) == outcome.drop  # on what was held back
    assert evaluate(model, loader[::2]) >= 80  # where it was searched
    with record_stats(model) as stats:
        for pictures, _ in loader[::2]:
            model(pictures)
    assert report[0].setting is None  # three channels
    for row in (row for row in report if row.setting is not None):
        layer = model.get_submodule(row.name)
        assert type(layer) is SpAMMConv2d
        assert (layer.tau, layer.pixel_block) == (row.setting.tau, row.setting.pixel_block)
        assert stats[row.name].valid_ratio == pytest.approx(row.valid_ratio)


@torch.no_grad()
@pytest.mark.parametrize("is_compiled", [True, False])
def test_a_batch_norm_behind_a_layer_changes_nothing_of_what_it_skips(timed, tmp_path, is_compiled):
    """A layer skips by its own weight, also where the batch norm is folded into that."""
    model, loader = tiny_network(batch_norm=True), batches()
    evaluate = Agreement(model, loader)
    report = run(model, 20.0, loader, evaluate)
    assert report.outcome.valid_ratio < 0.8
    dense = evaluate(model, loader[1::2])
    from_file(report, tmp_path, model)
    if is_compiled:
        options = {"inner": "eager", "measure": False}
        model.compile(backend="spamm_torch", options=options, dynamic=False)
    drop = dense - evaluate(model, loader[1::2])
    assert drop == pytest.approx(report.outcome.drop, abs=4)  # one answer may round otherwise


def test_reports(timed, tmp_path):
    """The same times give the same one."""
    model, loader = tiny_network(), batches()
    given = model, 20.0, loader, Agreement(model, loader)
    report, again = run(*given), run(*given)
    assert again.settings == report.settings
    assert str(again) == str(report)
    head, *rows, valid, drop, times = str(report).splitlines()
    assert head.split()[:4] == ["layer", "shape", "valid", "tau"]
    assert [row.split()[0] for row in rows] == ["conv_a", *LAYERS]
    assert "3 input channels do not fill a block of 32" in rows[0]
    assert "weighted by multiplications" in valid
    assert "of 20 allowed on unseen data; " in drop
    assert times.startswith("whole model: 110 us as it was, ")
    other = nn.Sequential(nn.Conv2d(32, 32, 1))
    line = "must be those of this model; got none for '0'"
    with pytest.raises(ValueError, match=line), unchanged(other):
        from_file(report, tmp_path, other)


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_said_where_somebody_looks(timed, capsys, monkeypatch, terminal):
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal)
    run()
    said = capsys.readouterr().err
    assert ("calibrate: evaluations, 3 of 12" in said) == bool(said) == terminal


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


def test_layers_that_were_spamm_before_keep_their_setting(timed, tmp_path):
    model = tiny_network()
    model.conv_b = SpAMMConv2d.from_dense(model.conv_b, tau=1.0)
    report = run(model)
    assert [row.name for row in report] == ["conv_a", "conv_c"]
    assert report.settings["layers"]["conv_b"]["setting"] is None
    from_file(report, tmp_path, model)
    assert (model.conv_b.tau, model.conv_b.pixel_block) == (1.0, None)


def test_the_first_batch_is_what_is_timed(timed):
    sizes, trials, model = [], [], tiny_network()
    timed(lambda trial: trials.append((sizes[-1], trial)) or linear_time(trial))
    handle = model.register_forward_pre_hook(lambda _, args: sizes.append(len(args[0])))
    run(model, loader=batches(1, 5) + batches(3))
    handle.remove()
    assert {size for size, _ in trials} == {5}
    whats = {trial.what for _, trial in trials}
    assert whats >= {"dense", "None", "(64, 1, 1)", "(1, 8, 8)", "as it was", "as chosen"}


# ---- Where nothing is gained --------------------------------------------------------------------


def is_as_it_was(report, tmp_path):
    model = tiny_network()
    from_file(report, tmp_path, model)
    return type(model) is nn.Sequential and type(model.conv_b) is nn.Conv2d


def slower(trial, of_b=120.0):
    """One layer of the two may gain a little."""
    if trial.what in ("dense", "as it was"):
        return 100.0
    return of_b if trial.layer == "conv_b" and trial.valid_ratio < 1 else 120.0


SLOW, IN_ALL = "not faster at any ratio", "the whole model is not faster with it"
NO_GAIN = {  # by the line on the whole model: times, and the reasons of both layers
    "layers are not faster": (slower, (SLOW, SLOW)),
    "layers are not faster, or not enough": (
        lambda of: slower(of, 96.0),
        ("all layers together save too little", SLOW),
    ),
    "the whole model takes 100 us with it and 100 as it was": (
        lambda of: 100.0 if not of.layer else linear_time(of),
        (IN_ALL, IN_ALL),
    ),
    "and a gain counts from 25.00x on": (
        lambda of: Timing(linear_time(of), 1.0) if of.layer else Timing(100.0, 25.0),
        (IN_ALL, IN_ALL),
    ),
}


@pytest.mark.parametrize("line", NO_GAIN)
def test_nothing_is_skipped_where_it_is_not_faster(timed, tmp_path, line):
    time, reasons = NO_GAIN[line]
    timed(time)
    report = run()
    outcome = report.outcome
    assert "nothing is skipped, the model stays as it is: " in outcome.note
    assert line in outcome.note
    assert ("times vary by 25x here: other programs run" in outcome.note) == (outcome.spread == 25)
    assert str(report).endswith(outcome.note)
    assert is_as_it_was(report, tmp_path)
    assert all(row.setting is None for row in report)
    assert (outcome.drop, outcome.valid_ratio) == (0, 1)
    assert outcome.after_us == outcome.before_us == 100
    assert tuple(row.reason for row in report[1:]) == reasons
    assert all(row.chosen_us == row.dense_us for row in report)


def test_conv2d_with_nothing_skipped_is_an_option(timed, tmp_path):
    """A layer where it is faster than dense, and skipping is not faster still."""
    timed(lambda of: {"dense": 300.0, "as it was": 300.0}.get(of.what, 100.0))
    report = run()
    assert [row.setting for row in report[1:]] == [NOTHING_SKIPPED] * 2
    assert report.outcome.drop == 0
    model = tiny_network()
    from_file(report, tmp_path, model)
    assert model.conv_b.tau == 0


def test_where_a_twentieth_is_too_much_it_ends_at_once(timed, tmp_path):
    """Before anything is timed."""
    timed(lambda trial: pytest.fail(f"{trial} is timed"))
    report = run(max_drop=0.5, evaluate=lambda model, _: 50.0 - bool(skipping(model)))
    line = r"to skip \d+% of the products, where it costs least, drops the score by 1$"
    assert re.search(line, report.outcome.note)
    assert report.outcome.evaluations == 3
    assert report.outcome.before_us is None
    assert "whole model" not in str(report)
    assert is_as_it_was(report, tmp_path)


def test_the_half_that_was_not_searched_must_agree(timed):
    model, loader = tiny_network(), batches()
    counts = []  # of layers that skip, on the second half

    def evaluate(model, half):
        if next(iter(half))[0] is not loader[1][0]:
            return 50.0
        counts.append(len(skipping(model)))
        return 40.0 if counts[-1] > 1 else 50.0

    outcome = run(model, 5.0, loader, evaluate).outcome
    assert counts[:2] == [0, 2]  # all steps held on the first half, and not on the second
    assert outcome.drop == 0
    assert outcome.valid_ratio > RATIOS[-1] + 0.05
    # A threshold for each call may be allowed, and those that are held are not.
    held = lambda model, _: 50.0 - any((of.tau or 0) > 0 for of in skipping(model))  # noqa: E731
    note = run(max_drop=0.5, evaluate=held).outcome.note
    assert note.endswith(": no choice that was tried held on both halves")


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


@pytest.mark.parametrize("several", [False, True])
def test_batches_of_arguments_by_name_and_of_several_tensors(timed, several):
    loader = [([x, x], None) if several else {"x": x} for x, _ in batches()]
    forward = lambda m, x: m.network(sum(x) if several else x)  # noqa: E731
    report = run(Made(forward, network=tiny_network()).eval(), 5.0, loader, lambda *_: 50.0)
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


def test_what_is_refused(timed):
    """A model stays as it is."""
    calls = itertools.count()

    def converted():
        model = tiny_network()
        convert_(model, SpAMMConfig(tau=8.0))
        return model

    def refuse(model=None, evaluate=lambda *_: 50.0, **given):
        model = tiny_network() if model is None else model
        is_module = isinstance(model, nn.Module)
        with unchanged(model) if is_module else contextlib.nullcontext():
            run(model, evaluate=evaluate, **given)

    assert_refused("refused: calibrate", globals() | locals())
