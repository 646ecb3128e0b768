"""bench.py vgg13 and inspect_model.py: a small real run, and what they refuse."""

import json

import pytest
import torch
from tiny_study import digits, one_thread, write_part  # noqa: F401  the fixture is automatic
from torch import nn

import bench
import inspect_model
import spamm_torch
from cases import vgg13
from common.console import exit_code
from common.results import load
from inspect_model import MOST_PANELS, chosen_layers, draw, valid_shares
from models.vgg13 import VGG13
from spamm_torch.networks.timing import Timing


@pytest.fixture
def in_proportion(monkeypatch):
    """Times in proportion to what is computed."""
    monkeypatch.setattr(
        "spamm_torch.calibration.times.measure",
        lambda runs, *_: {
            trial: Timing(110.0 if trial.what == "as it was" else 100 * trial.valid_ratio)
            for trials, _ in runs
            for trial in trials.values()
        },
    )


@pytest.fixture
def arguments(tmp_path):
    """Of both scripts; the network has batch norm."""
    write_part(tmp_path / "digits", "t10k", *digits(100))
    given = (
        *("--device", "cpu", "--data", tmp_path / "digits", "--checkpoint", tmp_path / "small.pt"),
        *("--model", "vgg13_bn", "--epochs", 1, "--width", 4, "--batch", 5),
        *("--out", tmp_path / "results", "--images", 5),
    )
    return [str(argument) for argument in given]


def run(arguments):
    return exit_code(lambda: bench.main(["vgg13", *arguments, "--repeats", "1"]))


def test_settings_are_found_served_and_drawn(
    arguments, tmp_path, in_proportion, capsys, monkeypatch
):
    monkeypatch.setattr(vgg13, "compiled", lambda model, *_: model)
    assert run([*arguments, "--max-drop", "60"]) == 0
    results = tmp_path / "results"
    settings = json.loads((results / "calibrated_cpu.json").read_text())
    assert settings["calibration"]["max_drop"] == 60
    skipping = [name for name, layer in settings["layers"].items() if layer["setting"]]
    assert set(skipping) <= {"conv42", "conv51", "conv52"}  # those with 32 channels
    assert skipping
    assert not list(results.glob("*.partial.json"))
    assert "of 60 allowed on unseen data" in capsys.readouterr().out

    [found] = load(results / "vgg13.json")["runs"]
    served = [(row["mode"], row["network"]) for row in found["tables"]["served"]]
    names = ("dense", "torch.compile", "nothing skipped", "SpAMM")
    assert served == [("eager", name) for name in names]
    assert all(row["ms"] > 0 for row in found["tables"]["served"])
    [quality] = found["tables"]["served, quality"]
    assert f"{quality['valid_ratio']:.1%} of the products valid" in found["said"]
    drop = settings["calibration"]["drop"]
    assert quality["dense_accuracy"] - quality["accuracy"] == pytest.approx(drop)
    layers = found["tables"]["calibrated layers"]
    assert {row["name"] for row in layers if row["tau"] is not None} == set(skipping)

    inspect_model.main([*arguments, "--picture", "3"])
    assert (results / "inspect_cpu.png").read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert all(f"\n{name}: " in shown for name in skipping)


def test_an_interrupted_calibration_says_how_to_go_on(
    arguments, tmp_path, in_proportion, capsys, monkeypatch
):
    score, calls = vgg13.score_and_answers, []

    def interrupted(*given):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return score(*given)

    monkeypatch.setattr(vgg13, "score_and_answers", interrupted)
    given = [*arguments, "--max-drop", "60", "--no-compile"]
    assert run(given) == 130
    journal = tmp_path / "results" / "calibrated_cpu.partial.json"
    said = f"interrupted: what is finished is in {journal}; the same command goes on from there\n"
    assert capsys.readouterr().err.endswith(said)
    assert journal.exists()
    assert run(given) == 0
    assert not list(journal.parent.glob("*.partial.json"))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--settings", "nope.json"], "error: expected a settings file; got none at nope.json"),
        (["--picture", "5"], "error: expected --picture below --images, 5; got 5"),
        (
            ["--images", "64", "--picture", "63", "--ratio", "1"],
            "error: expected --picture below 20",
        ),
    ],
)
def test_what_cannot_be_drawn(arguments, capsys, extra, message):
    assert exit_code(lambda: inspect_model.main([*arguments, *extra])) == 1
    assert capsys.readouterr().err.startswith(message)


def test_the_settings_are_looked_for_before_a_training(arguments, capsys, monkeypatch):
    monkeypatch.setattr(inspect_model, "train_or_load", None)
    assert exit_code(lambda: inspect_model.main(arguments)) == 1
    assert "expected a settings file" in capsys.readouterr().err


def test_batches_that_are_too_few(arguments, in_proportion, capsys):
    assert run([*arguments, "--images", "20"]) == 1
    line = "error: loader must give at least two batches, one for each half; got 1\n"
    assert capsys.readouterr().err.endswith(line)


@pytest.mark.parametrize("pixel_block", [(1, 8, 8), (4, 4, 4), (64, 1, 1)])
def test_shares_lie_where_the_picture_is_bright(pixel_block):
    torch.manual_seed(0)
    conv = spamm_torch.SpAMMConv2d(32, 40, 3, padding=1, valid_ratio=0.3, pixel_block=pixel_block)
    pictures = torch.full((6, 32, 20, 20), 1e-3)
    bright = 4  # the picture, and in it the upper right corner
    pictures[bright, :, :8, 12:] = 1.0
    share = valid_shares(nn.Sequential(conv), pictures, bright)["0"]
    assert share.shape == (20, 20)
    assert share[1:7, 13:19].min() == 1
    assert share[10:, :10].max() < 1
    if pixel_block[0] == 1:  # whose blocks hold no other picture
        assert valid_shares(nn.Sequential(conv), pictures, 0)["0"].max() < 1
    if pixel_block[0] == 64:  # whose blocks hold all pictures
        with spamm_torch.record_stats(conv) as stats:
            conv(pictures)
        assert share.mean().item() == pytest.approx(stats[""].valid_ratio)


def test_no_more_panels_than_can_be_read():
    shares = {f"conv{number}": torch.rand(4, 4) for number in range(30)}
    names = chosen_layers(shares)
    assert len(names) == MOST_PANELS
    assert (names[0], names[-1]) == ("conv0", "conv29")
    assert list(dict.fromkeys(names)) == names
    assert chosen_layers(dict.fromkeys("abc")) == ["a", "b", "c"]
    drawn = draw(torch.rand(16, 16), shares, {"device": "a device"}, "a title")
    assert drawn.startswith(b"\x89PNG")


def test_the_score_of_an_evaluation():
    model, pictures = VGG13(width=2).eval(), torch.rand(4, 3, 32, 32)
    with torch.no_grad():
        answers = model(pictures).argmax(1)
    labels = answers.clone()
    labels[0] = (labels[0] + 1) % 10
    batches = [(pictures[:2], labels[:2]), (pictures[2:], labels[2:])]
    score, found = vgg13.score_and_answers(model, batches)
    assert score == 75
    assert torch.equal(found, answers)


@pytest.mark.parametrize(
    "cudnn", [False, pytest.param(True, marks=pytest.mark.cuda)], ids=["plain", "cudnn"]
)
def test_the_dense_network_computes_what_the_trained_one_does(cudnn):
    torch.manual_seed(0)
    device = "cuda" if cudnn else "cpu"
    model = VGG13(width=4, batch_norm=True).eval().to(device)
    pictures = torch.rand(3, 3, 32, 32, device=device)
    with torch.no_grad():
        found, expected = vgg13.dense_network(model, cudnn)(pictures), model(pictures)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
