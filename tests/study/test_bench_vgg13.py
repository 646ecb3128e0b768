"""bench.py vgg13: a small real run, and what it refuses."""

import json

import pytest
import torch
from study_tools import digits, write_part

import bench
from cases import vgg13
from common.console import exit_code
from common.results import load
from models.vgg13 import VGG13
from spamm_torch._timing import Timing


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
    """The network has batch norm."""
    write_part(tmp_path / "digits", "t10k", *digits(100))
    given = (
        *("--device", "cpu", "--data", tmp_path / "digits", "--checkpoint", tmp_path / "small.pt"),
        *("--model", "vgg13_bn", "--epochs", 1, "--width", 4, "--batch", 5),
        *("--out", tmp_path / "results", "--images", 5),
    )
    return [str(argument) for argument in given]


def run(arguments):
    return exit_code(lambda: bench.main(["vgg13", *arguments, "--repeats", "1"]))


def test_settings_are_found_and_served(arguments, tmp_path, in_proportion, capsys, monkeypatch):
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
    assert found["said"].startswith("Speedup by network, least to most: ")
    assert "dense" not in found["said"]
    drop = settings["calibration"]["drop"]
    assert quality["dense_accuracy"] - quality["accuracy"] == pytest.approx(drop)
    layers = found["tables"]["calibrated layers"]
    assert {row["name"] for row in layers if row["tau"] is not None} == set(skipping)


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


def test_batches_that_are_too_few(arguments, in_proportion, capsys):
    assert run([*arguments, "--images", "20"]) == 1
    line = "error: loader must give at least two batches, one for each half; got 1\n"
    assert capsys.readouterr().err.endswith(line)


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
    device = "cuda" if cudnn else "cpu"
    model = VGG13(width=4, batch_norm=True).eval().to(device)
    pictures = torch.rand(3, 3, 32, 32, device=device)
    with torch.no_grad():
        found, expected = vgg13.dense_network(model, cudnn)(pictures), model(pictures)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
