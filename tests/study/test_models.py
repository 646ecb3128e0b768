"""VGG13 and its training; U-Net: channels and sizes at every level, and what it refuses."""

import os
import signal
from pathlib import Path

import pytest
import torch
from study_tools import digits, run_script, same_parameters, silent, write_part
from torch import nn

import train_vgg13
from models import training
from models.checkpoint import load_checkpoint
from models.data import ROOT_VARIABLE, Digits, to_pictures
from models.training import TrainConfig, train
from models.unet import UPSAMPLINGS, UNet
from models.vgg13 import CONVOLUTIONS, VGG13, fold_batch_norm

REPOSITORY = Path(__file__).resolve().parents[2]
TINY = TrainConfig(width=2, epochs=2, batch=10)
CPU = torch.device("cpu")


@pytest.fixture
def data():
    return Digits(*digits(50), "50 bars")


# ---- The network --------------------------------------------------------------------------------


def test_convolutions_are_vgg13s():
    model = VGG13()
    assert list(CONVOLUTIONS) == [f"conv{s}{i}" for s in range(1, 6) for i in (1, 2)]
    shapes = {name: tuple(getattr(model, name).weight.shape) for name in CONVOLUTIONS}
    channels = [64, 64, 128, 128, 256, 256, 512, 512, 512, 512]
    before = [3, *channels[:-1]]
    assert list(shapes.values()) == [
        (co, ci, 3, 3) for co, ci in zip(channels, before, strict=True)
    ]
    weighted = [m for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    assert len(weighted) == 13


@pytest.mark.parametrize("batch_norm", [False, True])
def test_shapes_at_every_stage(batch_norm):
    model = VGG13(batch_norm=batch_norm, width=4).eval()
    x = torch.randn(2, 3, 32, 32)
    sides = {}
    y = x
    for name, layer in model.named_children():
        sides[name] = y.shape[-1]
        y = layer(y)
    assert [sides[name] for name in CONVOLUTIONS] == [32, 32, 16, 16, 8, 8, 4, 4, 2, 2]
    assert y.shape == (2, 10)
    assert torch.equal(y, model(x))
    assert sum(isinstance(m, nn.BatchNorm2d) for m in model.modules()) == 10 * batch_norm


def test_folding_batch_norm_keeps_the_function():
    torch.manual_seed(0)
    model = VGG13(batch_norm=True, width=4).double()
    for norm in (m for m in model.modules() if isinstance(m, nn.BatchNorm2d)):
        for tensor in (norm.weight, norm.running_var):
            nn.init.uniform_(tensor, 0.5, 2)
        for tensor in (norm.bias, norm.running_mean):
            nn.init.normal_(tensor)
    plain = fold_batch_norm(model)
    assert model.training
    assert not plain.training
    assert not any(isinstance(m, nn.BatchNorm2d) for m in plain.modules())
    x = torch.randn(3, 3, 32, 32, dtype=torch.float64)
    torch.testing.assert_close(plain(x), model.eval()(x))


# ---- Training -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", training.MODELS)
def test_training_learns(name, tmp_path, data):
    """Bars are easy: a narrow network knows all training images after a few epochs."""
    config = TrainConfig(model=name, width=8, epochs=12, batch=10)
    model = train(config, data, tmp_path / "c.pt", CPU, silent)
    images = data.split(config.seed)[0]
    assert not model.training
    found = model(to_pictures(images.images)).argmax(1)
    assert (found == images.labels).double().mean() > 0.8


@pytest.mark.parametrize("name", training.MODELS)
@pytest.mark.parametrize("stop", [3, 4, 6])
def test_an_interrupted_training_ends_as_an_uninterrupted_one(
    name, stop, tmp_path, data, monkeypatch
):
    """Stopped within and between epochs of 4 steps, a checkpoint at each step."""
    monkeypatch.setattr(training, "_CHECKPOINT_EVERY_S", -1)
    config = TrainConfig(model=name, width=2, epochs=2, batch=10)
    whole = train(config, data, tmp_path / "whole.pt", CPU, silent)

    def interrupt(step, steps, message):
        assert steps == 8
        if step == stop:
            raise KeyboardInterrupt

    messages = []
    with pytest.raises(KeyboardInterrupt):
        train(config, data, tmp_path / "cut.pt", CPU, interrupt)
    resumed = train(config, data, tmp_path / "cut.pt", CPU, lambda *report: messages.append(report))
    assert messages[0][0] == stop - 1
    assert "resumed" in messages[0][2]
    assert same_parameters(resumed, whole)


@pytest.mark.parametrize("name", training.MODELS)
def test_ctrl_c_saves_the_step_at_hand(name, tmp_path, data):
    """Between checkpoints, which an epoch of 4 steps and a minute make."""
    config = TrainConfig(model=name, width=2, epochs=2, batch=10)
    path = tmp_path / "cut.pt"
    whole = train(config, data, tmp_path / "whole.pt", CPU, silent)
    before = signal.getsignal(signal.SIGINT)

    def interrupt(step, steps, message):
        if step == 3:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt) as caught:
        train(config, data, path, CPU, interrupt)
    assert str(caught.value) == (
        f"step 3 of 8 is saved in {path}; the same command goes on from there"
    )
    assert signal.getsignal(signal.SIGINT) is before
    assert load_checkpoint(path)["step"] == 3
    assert same_parameters(train(config, data, path, CPU, silent), whole)


@pytest.fixture
def ctrl_c_interrupts():
    """Also where the tests run in the background, and a shell has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c_interrupts")
def test_a_second_ctrl_c_does_not_wait(tmp_path, data):
    def interrupt(step, steps, message):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(TINY, data, tmp_path / "c.pt", CPU, interrupt)
    assert not (tmp_path / "c.pt").exists()


def test_a_finished_training_returns_at_once(tmp_path, data):
    path = tmp_path / "c.pt"
    first = train(TINY, data, path, CPU, silent)
    content = path.read_bytes()
    reports = []
    again = train(TINY, data, path, CPU, lambda *report: reports.append(report))
    assert [step for step, _, _ in reports] == [8]
    assert "already trained" in reports[0][2]
    assert not again.training
    assert same_parameters(first, again)
    assert path.read_bytes() == content


# ---- Bad input ----------------------------------------------------------------------------------


@pytest.fixture
def trained(tmp_path, data, monkeypatch):
    """A checkpoint of a tiny training, and its data as the default."""
    monkeypatch.setenv(ROOT_VARIABLE, str(tmp_path))
    write_part(tmp_path, "t10k", data.images, data.labels)
    path = tmp_path / "c.pt"
    train(TINY, data, path, CPU, silent)
    return path


def assert_refused(capsys, path, *arguments, words):
    content = path.read_bytes()
    code, _, lines = run_script(train_vgg13.main, capsys, "--checkpoint", path, *arguments)
    assert code == 1
    assert len(lines) == 1
    for word in (*words, str(path)):
        assert word in lines[0]
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--model", "vgg13_bn"), ("model=vgg13_bn", "model=vgg13 ")),
        (("--width", "4"), ("width=4", "width=2")),
        (("--epochs", "3"), ("epochs=3", "epochs=2")),
        (("--seed", "1"), ("seed=1", "seed=0")),
        (("--full",), ("full=True", "full=False")),
    ],
)
def test_a_checkpoint_of_another_training(capsys, trained, arguments, words):
    assert_refused(capsys, trained, *arguments, words=words)


def test_a_checkpoint_of_other_images(capsys, trained, tmp_path):
    write_part(tmp_path, "t10k", *digits(50, seed=1))
    assert_refused(capsys, trained, words=("other images",))


class Harmful:
    """Makes a folder when it is loaded as code."""

    def __reduce__(self):
        return os.mkdir, ("harm",)


@pytest.mark.parametrize("damage", ["empty", "cut", "flipped", "text", "other", "harmful"])
def test_a_damaged_checkpoint(capsys, trained, damage, monkeypatch):
    monkeypatch.chdir(trained.parent)
    content = bytearray(trained.read_bytes())
    if damage in ("other", "harmful"):
        torch.save({"model": {} if damage == "other" else Harmful()}, trained)
    else:
        middle = len(content) // 2
        flipped = content[:middle] + bytes([content[middle] ^ 0xFF]) + content[middle + 1 :]
        trained.write_bytes(
            {"empty": b"", "cut": content[:-100], "flipped": flipped, "text": b"hello\n"}[damage]
        )
    assert_refused(capsys, trained, words=("expected a checkpoint",))
    assert not (trained.parent / "harm").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"depth": 13}, "differs in depth:"),
        ({"width": 2.0}, "differs in width:"),
        ({"seed": None, "model": 1}, "differs in model, seed:"),
    ],
)
def test_a_checkpoint_with_options_of_another_kind(capsys, trained, change, words):
    content = torch.load(trained)
    content["config"].update(change)
    torch.save(content, trained)
    assert_refused(capsys, trained, words=(words,))


def test_missing_data_leaves_nothing_behind(capsys, tmp_path):
    code, _, lines = run_script(
        train_vgg13.main, capsys, "--data", tmp_path / "none", "--checkpoint", tmp_path / "c.pt"
    )
    assert code == 1
    assert len(lines) == 1
    assert str(tmp_path / "none") in lines[0]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--epochs", "0", "an integer of 1 or more"),
        ("--epochs", "x", "an integer of 1 or more"),
        ("--batch", "-1", "an integer of 1 or more"),
        ("--width", "1000000000", "an integer from 1 to 1024"),
        ("--seed", "-1", "an integer from 0"),
        ("--seed", "99999999999999999999999", "an integer from 0"),
        ("--model", "vgg16", "choose from"),
    ],
)
def test_options_out_of_range(capsys, option, value, words):
    with pytest.raises(SystemExit) as caught:
        train_vgg13.main([option, value])
    assert caught.value.code == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert option in line
    assert value in line
    assert words in line


# ---- U-Net ---------------------------------------------------------------------------------------


def test_convolutions_are_the_papers():
    """In channels and order; the up-convolutions are 3x3 here."""
    expected = {
        "encoder": [(3, 64), (64, 128), (128, 256), (256, 512)],
        "bottom": [(512, 1024)],
        "up": [(1024, 512), (512, 256), (256, 128), (128, 64)],
        "decoder": [(1024, 512), (512, 256), (256, 128), (128, 64)],
    }
    model = UNet()
    for part, channels in expected.items():
        convs = [m for m in getattr(model, part).modules() if isinstance(m, nn.Conv2d)]
        assert all(conv.kernel_size == (3, 3) for conv in convs)
        found = [(conv.in_channels, conv.out_channels) for conv in convs]
        pairs = channels if part == "up" else [(c, o) for i, o in channels for c in (i, o)]
        assert found == pairs
    assert model.head.weight.shape == (11, 64, 1, 1)


@pytest.mark.parametrize("upsampling", UPSAMPLINGS)
def test_shapes_at_every_level(upsampling):
    model = UNet(in_channels=2, classes=5, width=4, depth=3, upsampling=upsampling).eval()
    shapes = {}

    def note(name):
        return lambda module, inputs, output: shapes.update({name: tuple(output.shape[1:])})

    for name, module in model.named_modules():
        module.register_forward_hook(note(name))
    output = model(torch.randn(2, 2, 16, 24))
    assert output.shape == (2, 5, 16, 24)
    sides = [(4, 16, 24), (8, 8, 12), (16, 4, 6)]
    for level, side in enumerate(sides):
        assert shapes[f"encoder.{level}"] == side
        assert shapes[f"up.{2 - level}"] == side
        assert shapes[f"decoder.{2 - level}"] == side
    assert shapes["bottom"] == (32, 2, 3)


@pytest.mark.parametrize("upsampling", UPSAMPLINGS)
def test_every_level_reaches_the_output(upsampling):
    """A level whose output is lost on the way would have no gradient."""
    torch.manual_seed(0)
    model = UNet(width=4, depth=2, upsampling=upsampling)
    model(torch.randn(2, 3, 8, 8)).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.abs().max() > 0, name


def test_it_learns_a_picture():
    """Which pixels of noise are bright, a question that the first level can answer."""
    torch.manual_seed(0)
    pictures = torch.rand(4, 1, 16, 16)
    labels = (pictures[:, 0] > 0.5).long()
    model = UNet(in_channels=1, classes=2, width=8, depth=2)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(30):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(pictures), labels).backward()
        optimizer.step()
    assert (model.eval()(pictures).argmax(1) == labels).double().mean() > 0.95


def test_what_a_unet_refuses():
    line = r"^upsampling must be one of nearest, transposed; got 'b'"
    with pytest.raises(ValueError, match=line):
        UNet(upsampling="b")
    with pytest.raises(RuntimeError, match="Expected size 5 but got size 4"):
        UNet(width=2)(torch.randn(1, 3, 40, 40))
