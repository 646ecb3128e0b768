"""Fine-tuning with skipping on, on tiny data."""

from dataclasses import replace

import pytest
import torch
from study_tools import digits, run_script, same_parameters, silent, write_part

import train_vgg13
from common.journal import model_digest
from models.checkpoint import load_checkpoint
from models.data import Digits
from models.finetuning import SKIPPING, FineTuneConfig, fine_tune, with_skipping
from models.training import TrainConfig, distillation_loss, train
from spamm_torch import SpAMMConv2d

TINY = TrainConfig(width=2, epochs=1, batch=10)
CPU = torch.device("cpu")


def skip_all(ratio):
    return {name: {"valid_ratio": ratio} for name in SKIPPING}


@pytest.fixture
def data():
    return Digits(*digits(50), "50 bars")


@pytest.fixture
def start(tmp_path, data):
    """A trained network, and the configuration of a fine-tuning of it."""
    model = train(TINY, data, tmp_path / "c.pt", CPU, silent)
    return model, FineTuneConfig(skip_all(0.5), model_digest(model), TINY)


# ---- Fine-tuning --------------------------------------------------------------------------------


def test_the_network_skips_while_it_learns_and_the_one_given_stays(tmp_path, data, start):
    model, config = start
    before = model_digest(model)
    tuned = fine_tune(config, model, data, tmp_path / "t.pt", CPU, silent)
    assert model_digest(model) == before
    assert model_digest(tuned) != before
    assert not tuned.training
    for name in SKIPPING:
        assert type(getattr(tuned, name)) is SpAMMConv2d
        assert getattr(tuned, name).valid_ratio == 0.5
    assert type(tuned.conv11) is torch.nn.Conv2d
    TINY.build().load_state_dict(load_checkpoint(tmp_path / "t.pt")["model"])


def test_the_loss_depends_on_what_is_skipped(tmp_path, data, start):
    model, config = start
    half = fine_tune(config, model, data, tmp_path / "half.pt", CPU, silent)
    all_of_it = replace(config, settings=skip_all(1.0))
    whole = fine_tune(all_of_it, model, data, tmp_path / "whole.pt", CPU, silent)
    nothing = replace(config, settings={name: {"tau": 0.0} for name in SKIPPING})
    dense = fine_tune(nothing, model, data, tmp_path / "dense.pt", CPU, silent)
    assert same_parameters(whole, dense)
    assert not same_parameters(half, whole)


def test_the_dense_networks_answers_are_learnt_beside_the_labels(tmp_path, data, start):
    model, config = start

    def run(name, **rest):
        begin = with_skipping(model, config.settings)
        return train(config, data, tmp_path / name, CPU, silent, begin, **rest)

    assert not same_parameters(run("taught.pt", teacher=model), run("alone.pt"))


def test_the_distillation_loss_is_the_divergence_of_softened_answers():
    generator = torch.Generator().manual_seed(0)
    answers, taught = (torch.randn(5, 10, generator=generator) * 3 for _ in range(2))
    own, other = ((x / 2).softmax(1) for x in (answers, taught))
    expected = 4 * (other * (other / own).log()).sum() / 5
    torch.testing.assert_close(distillation_loss(answers, taught, temperature=2), expected)
    assert distillation_loss(taught, taught, temperature=4).abs() < 1e-6


def test_fewer_steps_than_an_epoch(tmp_path, data, start):
    model, config = start
    path = tmp_path / "t.pt"
    fine_tune(replace(config, steps=3), model, data, path, CPU, silent)
    assert load_checkpoint(path)["step"] == 3
    reports = []
    fine_tune(replace(config, steps=3), model, data, path, CPU, lambda *r: reports.append(r))
    assert [step for step, _, _ in reports] == [3]


def test_the_share_kept_is_that_of_the_form_that_runs(start):
    model, _ = start
    pictures = torch.rand(10, 3, 32, 32)
    dense = with_skipping(model, skip_all(1.0), fuse=True)
    assert train_vgg13.share_kept(dense, pictures) == 1
    skipping = with_skipping(model, {name: {"tau": 1e9} for name in SKIPPING}, fuse=True)
    assert train_vgg13.share_kept(skipping, pictures) == 0


# ---- The command --------------------------------------------------------------------------------


@pytest.fixture
def options(tmp_path):
    write_part(tmp_path, "t10k", *digits(50))
    given = ["--width", "2", "--epochs", "1", "--batch", "10", "--device", "cpu"]
    given += ["--data", tmp_path, "--checkpoint", tmp_path / "c.pt"]
    return [str(option) for option in given]


def run(capsys, *arguments):
    return run_script(train_vgg13.main, capsys, *arguments)


def test_the_command_trains_and_fine_tunes(capsys, options, tmp_path):
    code, output, _ = run(capsys, *options, "--spamm", "0.5")
    assert code == 0
    assert "before and" in output
    assert load_checkpoint(tmp_path / "c.spamm.pt")["step"] == 4
    code, output, _ = run(capsys, *options, "--spamm", "0.5")
    assert code == 0
    assert output.count("already trained") == 2


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--spamm", "0.5", "0.4"], ["expected one --spamm setting, or 9", "got 2"]),
        (["--spamm", "0.5", "--spamm-steps", "5"], ["at most 4, one epoch; got 5"]),
        (["--spamm", "0.4"], ["same network with the same options", "c.spamm.pt"]),
    ],
)
def test_bad_options_are_one_line(capsys, options, tmp_path, given, words):
    assert run(capsys, *options, "--spamm", "0.5")[0] == 0
    content = (tmp_path / "c.spamm.pt").read_bytes()
    code, _, [line] = run(capsys, *options, *given)
    assert code == 1
    for word in words:
        assert word in line
    assert (tmp_path / "c.spamm.pt").read_bytes() == content


@pytest.mark.parametrize("text", ["0", "1.5", "tau", "tau=-1", "tau=nan", "x=1", "=1", "half"])
def test_settings_that_are_none(capsys, text):
    with pytest.raises(SystemExit):
        train_vgg13.main(["--spamm", text])
    assert f"got {text}" in capsys.readouterr().err


def test_settings_by_layer():
    given = [train_vgg13.setting(text) for text in ["tau=1.5", *["0.3"] * 8]]
    chosen = train_vgg13.chosen_settings(given)
    assert chosen["conv12"] == {"tau": 1.5}
    assert [chosen[name] for name in SKIPPING[1:]] == [{"valid_ratio": 0.3}] * 8


def test_a_fine_tuned_checkpoint_is_no_training(capsys, options, tmp_path):
    assert run(capsys, *options, "--spamm", "0.5")[0] == 0
    other = [tmp_path / "c.spamm.pt" if text.endswith("c.pt") else text for text in options]
    code, _, [line] = run(capsys, *other)
    assert code == 1
    assert "expected a checkpoint with the options" in line
