"""The study's data; VGG13, its training and bench.py vgg13."""

import gzip
import hashlib
import itertools
import json
from dataclasses import asdict, replace

import pytest
import torch
from study_tools import (
    assert_rows,
    digits,
    idx_bytes,
    run_script,
    same_parameters,
    silent,
    write_part,
)
from support import raises_line
from torch import nn

import bench
from cases import vgg13
from common.options import exit_code
from common.results import load
from models import data as mnist
from models import training
from models.data import ROOT_VARIABLE, Digits, to_pictures
from models.files import UserError
from models.training import TrainConfig, accuracy
from models.vgg13 import CONVOLUTIONS, VGG13

TINY = TrainConfig(width=2, epochs=2, batch=10)
CPU = torch.device("cpu")


@pytest.fixture
def data():
    return Digits(*digits(50), "50 bars")


# ---- The network --------------------------------------------------------------------------------


def test_shapes_at_every_stage():
    model = VGG13(batch_norm=True, width=4).eval()
    y, found = torch.randn(2, 3, 32, 32), []
    for name, layer in model.named_children():
        if name in CONVOLUTIONS:
            found.append((y.shape[-1], *layer.weight.shape))
        y = layer(y)
    widths = itertools.pairwise([3, 4, 4, 8, 8, 16, 16, 32, 32, 32, 32])
    assert found == [(32 >> i // 2, o, inner, 3, 3) for i, (inner, o) in enumerate(widths)]
    assert y.shape == (2, 10)


@pytest.mark.parametrize(
    "cudnn", [False, pytest.param(True, marks=pytest.mark.cuda)], ids=["plain", "cudnn"]
)
def test_the_dense_network_has_no_batch_norm_and_computes_the_same(cudnn, exact_reference):
    """As bench.py vgg13 serves it; with float64 where cuDNN does not fuse."""
    model = VGG13(batch_norm=True, width=4).to("cuda" if cudnn else "cpu")
    model = model if cudnn else model.double()
    for norm in (m for m in model.modules() if isinstance(m, nn.BatchNorm2d)):
        for tensor in (norm.weight, norm.running_var):
            nn.init.uniform_(tensor, 0.5, 2)
        for tensor in (norm.bias, norm.running_mean):
            nn.init.normal_(tensor)
    plain = vgg13.dense_network(model, cudnn)
    assert model.training
    assert not plain.training
    assert not any(isinstance(m, nn.BatchNorm2d) for m in plain.modules())
    x = torch.randn(3, 3, 32, 32).to(model.conv11.weight)
    with torch.no_grad():
        expected = model.eval()(x)
        error = (plain(x) - expected).norm() / expected.norm()
    assert error < (1e-4 if cudnn else 1e-12)


# ---- Training -----------------------------------------------------------------------------------


def test_training_learns(tmp_path, data):
    """Bars are easy: a narrow network knows all training images after a few epochs."""
    config = TrainConfig(model="vgg13_bn", width=8, epochs=12, batch=10)
    model = training.train(config, data, tmp_path / "c.pt", CPU, silent)
    images = data.split(config.seed)[0]
    found = model(to_pictures(images.images)).argmax(1)
    assert (found == images.labels).double().mean() > 0.8


@pytest.mark.parametrize("kind", training.MODELS)
def test_a_finished_training_is_kept_and_the_next_is_the_same(tmp_path, data, kind):
    """A training that is stopped leaves nothing, and begins anew."""

    def stop(message):
        raise KeyboardInterrupt

    given, messages = (replace(TINY, model=kind), data, tmp_path / "c.pt", CPU), []
    with pytest.raises(KeyboardInterrupt):
        training.train(*given, stop)
    assert not list(tmp_path.iterdir())
    found = training.train(*given, messages.append)
    assert [line.partition(":")[0] for line in messages] == ["epoch 1 of 2", "epoch 2 of 2"]
    kept = training.train(*given, messages.append)
    again = training.train(*given[:2], tmp_path / "other.pt", CPU, silent)
    assert messages[2:] == [f"already trained: {given[2]}"]
    for model in (kept, again):
        assert same_parameters(found, model)
        assert not model.training


# ---- Bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "change", "words"),
    [
        (("--model", "vgg13_bn"), {}, "a checkpoint of model=vgg13_bn, epochs=2, full=False, "),
        ((), {"depth": 13}, "of other options"),
        ((), {"seed": [1]}, "of other options"),
        ((), "images", "other images"),
        ((), "labels", "other images"),
    ],
)
def test_a_checkpoint_of_another_training(capsys, arguments, change, words, tmp_path):
    """tests/robustness/test_hostile_files.py has damaged ones."""
    path, changed = tmp_path / "c.pt", change if isinstance(change, dict) else {}
    of = {"config": asdict(TINY) | changed, "data": Digits(*digits(50), "").fingerprint()}
    training.save_checkpoint(path, {**of, "model": TINY.build().state_dict()})
    images, labels = digits(50, seed=int(change == "images"))
    write_part(tmp_path, "t10k", images, labels.flip(0) if change == "labels" else labels)
    content, given = path.read_bytes(), ("--data", tmp_path, "--checkpoint", path, *arguments)
    given += ("--width", 2, "--epochs", 2, "--batch", 10)
    given += ("--device", "cpu", "--out", tmp_path / "out")
    code, _, [line] = run_script(bench.main, capsys, "vgg13", *given)
    assert code == 1
    assert words in line
    assert str(path) in line
    assert path.read_bytes() == content


# ---- Data: reading, checking, splitting and placing MNIST ----------------------------------------


@pytest.fixture(autouse=True)
def no_root(monkeypatch):
    monkeypatch.delenv(ROOT_VARIABLE, raising=False)


@pytest.fixture(scope="module")
def embedded():
    return mnist.load_digits()


def test_embedded_is_mnists_test_set(embedded):
    readme = (mnist.EMBEDDED.parent / "README.md").read_text()
    files = sorted(mnist.EMBEDDED.glob("*.gz"))
    assert len(files) == 2
    for path in files:
        assert f"`{path.name}` | `{hashlib.sha256(path.read_bytes()).hexdigest()}`" in readme
    assert embedded.images.shape == (10_000, 28, 28)
    assert embedded.images.dtype == embedded.labels.dtype == torch.uint8
    counts = torch.bincount(embedded.labels.long()).tolist()
    assert counts == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert "10,000 images" in embedded.description


def test_split_is_a_partition_fixed_by_the_seed(embedded):
    numbered = Digits(torch.arange(10_000), embedded.labels, "numbered")
    (training, validation), (again, _), (other, _) = map(numbered.split, (3, 3, 4))
    assert (len(training), len(validation)) == (8_000, 2_000)
    both = torch.cat([training.images, validation.images])
    assert torch.equal(both.sort().values, numbered.images)
    assert torch.equal(validation.labels, embedded.labels[validation.images])
    assert torch.equal(training.images, again.images)
    assert not torch.equal(training.images, other.images)


@pytest.mark.parametrize("shift", [(0, 0), (3, -1), (-6, 6)])
def test_pictures_are_shifted_equal_channels(shift):
    images, _ = digits(7)
    pictures = to_pictures(images, torch.tensor([shift] * 7))
    assert pictures.is_contiguous(memory_format=torch.channels_last)
    wide = nn.functional.pad(images, (8,) * 4).roll(shift, (1, 2))[:, 6:38, 6:38]
    assert torch.equal((255 * pictures).round().byte(), wide[:, None].expand(-1, 3, -1, -1))
    assert shift != (0, 0) or torch.equal(pictures, to_pictures(images))


def test_drawn_shifts_stay_in_range_and_move_about_their_share():
    shifts = mnist.draw_shifts(4000, torch.Generator().manual_seed(0))
    assert shifts.unique().tolist() == list(range(-mnist.MAX_SHIFT, mnist.MAX_SHIFT + 1))
    half = mnist.draw_shifts(4000, torch.Generator().manual_seed(0), share=0.5)
    assert 0.45 < half.any(1).double().mean() < 0.55


@pytest.mark.parametrize("packed", [True, False])
def test_reads_a_torchvision_root(tmp_path, packed, monkeypatch):
    images, labels = digits(20)
    write_part(tmp_path, "t10k", images, labels, packed)
    monkeypatch.setenv(ROOT_VARIABLE, str(tmp_path))
    for found in (mnist.load_digits(tmp_path), mnist.load_digits()):
        assert torch.equal(found.images, images)
        assert torch.equal(found.labels, labels)
        assert str(tmp_path) in found.description


def test_full_is_both_parts(tmp_path):
    with raises_line(UserError, r"train-images.*\.gz. in .*MNIST.raw; found none.*torchvision"):
        mnist.load_digits(tmp_path, full=True)
    for part in ("train", "t10k"):
        write_part(tmp_path, part, *digits(10), packed=False)
    found = mnist.load_digits(tmp_path, full=True)
    assert len(found) == 20
    assert "full" in found.description


# ---- Bad input ----------------------------------------------------------------------------------


IMAGES, LABELS = "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"


def _damaged():
    """Gives, by name, a file, its damaged content unpacked or packed, and expected words."""
    images, labels = digits(10)
    content = idx_bytes(images)
    packed = gzip.compress(content)
    return {
        "truncated gzip": (IMAGES + ".gz", packed[:-100], "intact gzip"),
        "damaged gzip": (IMAGES + ".gz", packed[:30] + b"xxxxxxxx" + packed[38:], "intact gzip"),
        "wrong magic": (IMAGES, b"\x01" + content[1:], "magic 000008xx.*got 01000803"),
        "cut header": (IMAGES, content[:10], "header of 16 bytes; got 10"),
        "trailing bytes": (IMAGES, content + b"\0", "expected 7840 bytes.*got more"),
        "labels as images": (IMAGES, idx_bytes(labels), r"shape \(n, 28, 28\).*\(10,\)"),
        "small images": (IMAGES, idx_bytes(images[:, 1:]), r"\(10, 27, 28\)"),
        "fewer labels": (LABELS, idx_bytes(labels[1:]), r"each of the 10 images.*\(9,\)"),
        "label 10": (LABELS, idx_bytes(labels + 1), "0 to 9; got 10"),
        "no labels": (LABELS + ".gz", None, r"t10k-labels-idx1-ubyte.*found none"),
    }


@pytest.mark.parametrize("damage", _damaged())
def test_a_damaged_file(tmp_path, damage):
    raw = write_part(tmp_path, "t10k", *digits(10))
    name, content, words = _damaged()[damage]
    (raw / name).unlink(missing_ok=True)
    if content is not None:
        (raw / name).write_bytes(content)
    with raises_line(UserError, words) as caught:
        mnist.load_digits(tmp_path)
    assert str(raw) in str(caught.value)


# ---- bench.py vgg13 ------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path):
    """Runs it on a network with batch norm, and tiny images."""
    write_part(tmp_path / "digits", "t10k", *digits(100))
    given = "--device=cpu --model=vgg13_bn --epochs=1 --width=4 --batch=5 --repeats=1"
    places = {"data": "digits", "checkpoint": "small.pt", "out": "results"}
    options = [
        *given.split(),
        *(f"--{option}={tmp_path / name}" for option, name in places.items()),
    ]
    return lambda *more: exit_code(lambda: bench.main(["vgg13", *options, *more]))


def test_settings_are_found_and_served(run, tmp_path, timed, capsys, monkeypatch):
    monkeypatch.setattr(vgg13, "compiled", lambda model, **_: model)
    assert run("--images", "5", "--max-drop", "60") == 0
    results = tmp_path / "results"
    settings = json.loads((results / "calibrated_cpu.json").read_text())
    assert settings["calibration"]["max_drop"] == 60
    skipping = [name for name, layer in settings["layers"].items() if layer["setting"]]
    assert set(skipping) <= {"conv42", "conv51", "conv52"}  # those with 32 channels
    assert skipping
    said = capsys.readouterr().out
    assert "training vgg13_bn: epoch 1 of 1: loss " in said
    assert "of 60 allowed on unseen data" in said

    [found] = load(results / "vgg13.json")["runs"]
    served = [(row["mode"], row["network"]) for row in found["tables"]["served"]]
    names = ("dense", "torch.compile", "nothing skipped", "SpAMM")
    assert served == [("eager", name) for name in names]
    assert_rows(found["tables"])
    [quality] = found["tables"]["served, quality"]
    assert found["said"].startswith("Speedup by network, least to most: ")
    assert "dense" not in found["said"]
    drop = settings["calibration"]["drop"]
    assert quality["dense_accuracy"] - quality["accuracy"] == pytest.approx(drop)
    layers = found["tables"]["calibrated layers"]
    assert {row["name"] for row in layers if row["tau"] is not None} == set(skipping)
    assert run("--images", "20") == 1
    said = capsys.readouterr()
    assert "already trained" in said.out
    line = "error: loader must give at least two batches, one for each half; got 1\n"
    assert said.err.endswith(line)


def test_the_score_of_an_evaluation():
    model, pictures = VGG13(width=2).eval(), torch.rand(4, 3, 32, 32)
    with torch.no_grad():
        labels = model(pictures).argmax(1)
    labels[0] = (labels[0] + 1) % 10
    assert accuracy(model, zip(pictures.split(2), labels.split(2), strict=True)) == 75
