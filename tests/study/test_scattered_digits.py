"""The demo of scattered digits: canvases, quality, and a run from training to the page."""

import json
import signal
from dataclasses import replace
from itertools import product

import pytest
import torch
from study_tools import digits as bars
from study_tools import write_part

from common import results
from examples.scattered_digits import demo, network
from examples.scattered_digits.canvases import CLASSES, draw_scene
from examples.scattered_digits.network import Config, quality, train
from models.data import Digits
from models.errors import UserError
from models.unet import UNet
from spamm_torch import _timing as timing

TINY = Config(width=32, depth=1, size=64, steps=2, batch=2)


@pytest.fixture
def digits():
    return Digits(*bars(40), "bars")


def test_a_scene_is_that_of_its_seed(digits):
    one, same, other = (draw_scene(digits, 2, 96, 3, seed) for seed in (0, 0, 1))
    assert torch.equal(one.pictures, same.pictures)
    assert torch.equal(one.labels, same.labels)
    assert not torch.equal(one.pictures, other.pictures)


def test_labels_are_where_digits_are(digits):
    scene = draw_scene(digits, 3, 128, 4, 0)
    assert scene.pictures.shape == (3, 1, 128, 128)
    assert scene.pictures.min() == 0
    assert scene.pictures.max() <= 1
    assert torch.equal(scene.labels > 0, scene.instances > 0)
    assert (scene.pictures[:, 0][scene.labels > 0] > 0.3).all()
    assert scene.instances.amax((1, 2)).tolist() == [4, 4, 4]
    for number in range(1, 5):  # one digit has one label
        assert len(scene.labels[0][scene.instances[0] == number].unique()) == 1
    assert scene.labels.max() < CLASSES


def test_how_many_digits_lie_on_a_canvas_and_what_lies_below(digits):
    counts = draw_scene(digits, 20, 128, (1, 3), 0).instances.amax((1, 2))
    assert set(counts.tolist()) == {1, 2, 3}
    assert not draw_scene(digits, 1, 64, 0, 0).pictures.any()
    textured = draw_scene(digits, 1, 64, 0, 0, textured=True)
    assert (textured.pictures > 0).float().mean() > 0.9
    assert not textured.labels.any()


def test_quality_counts_digits_and_classes(digits):
    scene = draw_scene(digits, 2, 128, 4, 0)
    assert vars(quality(scene.labels, scene)) == {"mean_iou": 1.0, "found": 1.0}
    missed = torch.where(scene.instances == 1, 0, scene.labels)
    worse = quality(missed, scene)
    assert worse.found == pytest.approx(3 / 4)
    assert worse.mean_iou < 1
    assert quality(torch.zeros_like(scene.labels), scene).found == 0


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # by Python 3.12, of any loader
def test_other_processes_draw_the_same_batches(digits, first):
    config = replace(TINY, steps=4)
    alone, together = (list(network._batches(config, digits, first, n)) for n in (0, 2))
    assert len(alone) == len(together) == 4 - first
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])
    assert not torch.equal(alone[0][0], alone[1][0])


def test_no_process_is_started_where_no_step_is_left(digits):
    batches = network._batches(TINY, digits, TINY.steps, 2)
    assert batches.num_workers == 0
    assert list(batches) == []


def test_training_goes_on_where_ctrl_c_stopped_it(digits, tmp_path):
    device, steps, path = torch.device("cpu"), [], tmp_path / "part.pt"
    expected = train(TINY, digits, tmp_path / "whole.pt", device, lambda *at: steps.append(at[0]))
    assert steps == [1, 2]
    assert isinstance(expected, UNet)
    assert not expected.training

    def stop(*_):
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt, match=rf"^step 1 of 2 is saved in {path}; the same"):
        train(TINY, digits, path, device, stop)
    again = train(TINY, digits, path, device, lambda *at: steps.append(at[0]))
    assert steps == [1, 2, 2]
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, expected.state_dict()[name])
    with pytest.raises(UserError, match="name another file with --checkpoint"):
        train(Config(**{**vars(TINY), "seed": 1}), digits, path, device, stop)


def test_the_demo_writes_a_page_its_data_and_a_picture(tmp_path, monkeypatch, capsys):
    write_part(tmp_path, "t10k", *bars(60))
    monkeypatch.setitem(demo._CONFIGS, "cpu", TINY)
    monkeypatch.setattr(demo, "_DIGITS", (4, 8))
    monkeypatch.setattr(demo, "_CHECKED", 2)
    monkeypatch.setattr(timing, "_CPU_SECONDS", 0)
    arguments = ["--device", "cpu", "--root", str(tmp_path), "--out", str(tmp_path / "out")]
    demo.main([*arguments, "--size", "64", "--repeats", "1", "--no-compile"])
    [run] = results.load(tmp_path / "out/scattered_digits.json")["runs"]
    forms = ["dense", "converted", "reference form", "calibrated"]
    canvases = ("4 digits", "8 digits", "16 digits, textured")
    rows = run["tables"]["canvases"]
    assert [(row["canvas"], row["form"]) for row in rows] == list(product(canvases, forms))
    assert [row["form"] for row in run["tables"]["quality"]] == [forms[0], *forms[2:]]
    assert run["header"]["drop"] <= 0.5
    settings = json.loads((tmp_path / "out/scattered_digits_calibrated_cpu.json").read_text())
    assert settings["reference"] == [1, 1, 64, 64]
    exact = [row for row in rows if row["form"] != "calibrated"]  # which may skip, by its times
    assert all(row["largest_difference"] < 1e-4 for row in exact)
    page = (tmp_path / "out/scattered_digits.md").read_text()
    assert run["said"] in capsys.readouterr().out.replace("\n", " ")
    assert "16 digits, textured" in page
    assert (tmp_path / "out/scattered_digits.png").read_bytes().startswith(b"\x89PNG")


def test_bad_options(capsys):
    with pytest.raises(SystemExit):
        demo.main(["--size", "100"])
    assert "expected a multiple of 64; got 100" in capsys.readouterr().err
