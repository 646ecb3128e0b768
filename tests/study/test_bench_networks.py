"""The benchmark of whole networks: a small real run, and what it refuses."""

import json
import os
import shutil

import pytest
import torch
from bench_checks import assert_refused, assert_resumes, assert_three_files
from tiny_study import one_thread  # noqa: F401  the fixture is automatic
from torch import nn

import bench_networks
import plot_results
import spamm_torch
from bench.networks import candidates, layer_case, layers, layers_report, report, zoo
from bench.networks.candidates import CANDIDATES
from bench.networks.rows import LayerRow, NetworkRow
from models.unet import UNet

CPU = torch.device("cpu")
MEASURED = [name for name in CANDIDATES if name not in ("max-autotune", "freezing")]
LAYERS = ("7-512-2048-1x1", "14-1024-2048-1x1-down")


def tiny_network():
    """A convolution with batch norm and ReLU, one with ReLU, and a head."""
    return nn.Sequential(
        *(nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU()),
        *(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)),
    )


pytestmark = pytest.mark.inductor  # most runs compile


@pytest.fixture(scope="module", autouse=True)
def tiny():
    zoo.NETWORKS["tiny"] = zoo.Network(tiny_network, size=8, batches=(1,))
    yield
    del zoo.NETWORKS["tiny"]


@pytest.fixture(scope="module", autouse=True)
def autotuning_is_silent():
    with torch._inductor.config.patch(autotune_num_choices_displayed=0):
        yield


@pytest.fixture(autouse=True)
def caches_stay(monkeypatch):
    """--cache sets a variable of the environment."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", os.environ.get("TORCHINDUCTOR_CACHE_DIR", ""))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")


def run(folder, *arguments):
    """The results of a run on the CPU."""
    options = ("--device", "cpu", "--out", folder, "--name", "small", "--repeats", 2, *arguments)
    bench_networks.main([str(option) for option in options])
    return json.loads((folder / "small.json").read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two batches, only one of which has a held tau."""
    folder = tmp_path_factory.mktemp("bench")
    run(folder, "--networks", "tiny", "--batches", 2, 40, "--candidates", *MEASURED)
    return folder


# ---- Whole networks -----------------------------------------------------------------------------


def test_three_files(folder):
    assert_three_files(folder)


def test_every_candidate_is_there_once_and_right(results):
    found = [(row["batch"], row["candidate"]) for row in results["rows"]]
    assert found == [(2, name) for name in MEASURED] + [(40, name) for name in MEASURED[:-1]]
    for row in results["rows"]:
        assert row["absent"] is None, row
        assert list(row["ms"]) == ["eager"]
        assert row["ms"]["eager"] > 0
        assert row["prepare_s"] > 0
        assert row["error"] < 1e-5
        converted = row["candidate"] in ("ours", "ours-compiled", "held-tau")
        assert (row["actions"] is not None) == converted


def test_the_markdown_shows_the_same_rows(folder, results):
    text = (folder / "small.md").read_text()
    assert "(small.png)" in text
    for batch in (2, 40):
        rows = [row["ms"]["eager"] for row in results["rows"] if row["batch"] == batch]
        shown = " | ".join(f"{1e3 * ms:.4g} ({rows[0] / ms:.2f}x)" for ms in rows)
        assert f"| tiny | {batch} | {shown} |" in text


def test_the_page_is_drawn_again_from_json(folder, tmp_path):
    shutil.copy(folder / "small.json", tmp_path)
    entry = plot_results.redraw(tmp_path / "small.json")
    assert (tmp_path / "small.md").read_text() == (folder / "small.md").read_text()
    assert f"**{entry[1]}**" in (tmp_path / "small.md").read_text()
    assert (tmp_path / "small.png").read_bytes().startswith(b"\x89PNG")


def test_an_interrupted_run_goes_on(tmp_path, capsys, monkeypatch):
    arguments = ["--device", "cpu", "--networks", "tiny", "--batches", 1, 2, 3]
    arguments += ["--candidates", "dense", "ours", "--repeats", 1]
    assert_resumes(bench_networks, "measure_network", arguments, tmp_path, 3, capsys, monkeypatch)


def test_a_candidate_that_fails_is_a_row(tmp_path, monkeypatch):
    def convert_(*_, **__):
        raise RuntimeError("cannot convert this.\nMore lines.")

    monkeypatch.setattr(spamm_torch, "convert_", convert_)
    found = run(tmp_path, "--networks", "tiny", "--batches", 1, "--candidates", "dense", "ours")
    assert [row["absent"] for row in found["rows"]] == [None, "cannot convert this."]
    text = (tmp_path / "small.md").read_text()
    assert "| tiny, batch 1, ours | cannot convert this. |" in text
    assert "No converted network was measured beside its peer; 1 of 2 candidates absent." in text


def test_a_wrong_result_is_no_result(tmp_path, monkeypatch):
    def convert_(model, *, example_input):
        with torch.no_grad():
            model[3].weight *= 1.01
        return ()

    monkeypatch.setattr(spamm_torch, "convert_", convert_)
    found = run(tmp_path, "--networks", "tiny", "--batches", 1, "--candidates", "dense", "ours")
    dense, ours = found["rows"]
    assert dense["absent"] is None
    assert ours["ms"] is None
    assert ours["error"] > 1e-4
    assert ours["absent"].startswith("WRONG RESULT: expected an error of at most ")


def test_no_path_of_this_machine_is_recorded(tmp_path):
    found = run(
        tmp_path,
        *("--networks", "tiny", "--batches", 1, "--candidates", "dense"),
        f"--cache={tmp_path / 'cache'}",
    )
    command = found["header"]["command"]
    assert str(tmp_path) not in command
    assert command == (
        "python scripts/bench_networks.py --device cpu --name small --repeats 2 --networks tiny "
        "--batches 1 --candidates dense"
    )
    relative = ["--out", "docs/results", "--cache", "kept", "--repeats", "3"]
    assert bench_networks.recorded(relative) == relative


def test_the_cache_is_where_it_was_asked_for(tmp_path):
    cache = tmp_path / "cache"
    run(
        tmp_path,
        *("--networks", "tiny", "--batches", 1, "--candidates", "compiled", "--cache", cache),
    )
    assert any(cache.rglob("*.py"))


def test_freezing_folds_batch_norms():
    """Inductor reads a global setting: without it the code would be that of max-autotune."""
    model = zoo.settled_model(zoo.NETWORKS["tiny"], CPU)
    pictures = zoo.pictures_for(zoo.NETWORKS["tiny"], 2, CPU)
    with torch.no_grad():
        of = candidates.Candidates(model, pictures)
        _, (code,) = torch._inductor.utils.run_and_get_code(of.prepare, "freezing")
        assert "constant" in code  # weights that are part of the code
        assert not torch._inductor.config.freezing
        torch._dynamo.reset()
        _, (code,) = torch._inductor.utils.run_and_get_code(of.prepare, "max-autotune")
        assert "constant" not in code


@pytest.mark.parametrize(
    ("network", "size"),
    [
        ("resnet18", 64),
        ("vgg13_32", 32),
        pytest.param("unet", 32, marks=pytest.mark.thorough),
        pytest.param("densenet121", 64, marks=pytest.mark.thorough),
    ],
)
def test_activations_of_settled_networks_keep_their_size(network, size):
    """Half types must hold them, and errors of one layer must not vanish in the others'."""
    network = zoo.Network(zoo.NETWORKS[network].build, size=size)
    model = zoo.settled_model(network, CPU)
    largest = {}

    def note(name):
        return lambda module, inputs, output: largest.update({name: output.abs().max().item()})

    for name, module in model.named_modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            module.register_forward_hook(note(name))
    with torch.no_grad():
        model(zoo.pictures_for(network, 4, CPU))
    assert not model.training
    assert all(0.1 < value < 1000 for value in largest.values()), largest


def test_networks_are_the_same_in_each_call():
    first, second = (zoo.settled_model(zoo.NETWORKS["tiny"], CPU) for _ in range(2))
    for name, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[name]), name
    pictures = zoo.pictures_for(zoo.NETWORKS["tiny"], 2, CPU)
    assert torch.equal(pictures, zoo.pictures_for(zoo.NETWORKS["tiny"], 2, CPU))
    assert pictures.is_contiguous(memory_format=torch.channels_last)


def test_defaults_hold_what_goals_speak_of():
    networks = zoo.NETWORKS
    assert isinstance(networks["unet"].build(), UNet)
    for goal in report.GOALS["cuda"]:
        for name in goal.networks or networks:
            if name != "tiny":
                assert set(goal.batches or networks[name].batches) & set(networks[name].batches)
    cpu_networks, cpu_batches, *_ = bench_networks.DEFAULTS["cpu"]
    for goal in report.GOALS["cpu"]:
        assert set(goal.networks or cpu_networks) <= set(cpu_networks)
        assert set(goal.batches) & set(cpu_batches)


# ---- What the page says -------------------------------------------------------------------------


def cells(times, batch=64, mode="CUDA graph", network="resnet50"):
    rows = [NetworkRow(network, batch, name, ms={mode: ms}) for name, ms in times.items()]
    return {(network, batch): {row.candidate: row for row in rows}}


def test_the_conclusion_takes_the_faster_of_ours():
    found = cells({"dense": 4.2, "compiled": 2.8, "ours": 2.0, "ours-compiled": 2.1})
    found |= cells({"compiled": 1.0, "ours": 9.0}, batch=128)
    found |= cells({"compiled": 1.0, "ours-compiled": 0.8}, batch=8, network="unet")
    assert report.conclusion(found, ["CUDA graph"]) == (
        "Networks converted with nothing skipped, by themselves or compiled, whichever is faster, "
        "over torch.compile, in one CUDA graph: resnet50 1.40x (batch 64), unet 1.25x (batch 8)."
    )


def test_the_conclusion_on_a_cpu_is_over_the_dense_network():
    found = cells({"dense": 3.0, "compiled": 2.0, "ours": 2.5}, 16, "eager", "vgg11")
    said = report.conclusion(found, ["eager"])
    assert said.endswith("over the dense network, eager: vgg11 1.20x (batch 16).")


def test_goals_name_the_cell_that_is_furthest():
    found = cells({"compiled": 2.8, "ours": 2.0})
    found |= cells({"compiled": 1.0, "ours": 0.8}, network="resnet18")
    *_, line = report._goals(found, "cuda")
    assert line == (
        "| over torch.compile | CUDA graph | 1.4x | 1 of 2 | 1.25x (resnet18, batch 64) |"
    )


# ---- ResNet-50's layers -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def layer_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("layers")
    run(folder, "--batches", 1, "--layers", *LAYERS)
    return folder


def test_layers(layer_folder):
    assert_three_files(layer_folder)
    found = json.loads((layer_folder / "small.json").read_text())
    assert [row["layer"] for row in found["rows"]] == list(LAYERS)
    for row in found["rows"]:
        assert list(row["ms"]) == list(layer_case.LAYER_CANDIDATES)
        assert min(row["ms"].values()) > 0
        assert max(row["error"].values()) < 1e-5
    text = (layer_folder / "small.md").read_text()
    assert "| 7-512-2048-1x1 | 7: 1x1 | 3 | " in text
    assert "floor |" not in text  # the model is of another device
    assert plot_results.redraw(layer_folder / "small.json")[1] in text


def test_wrong_layers_are_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(layer_case.LayerCase, "error", lambda *_: float("nan"))
    arguments = ["--device", "cpu", "--out", str(tmp_path), "--batches", "1", "--layers", LAYERS[0]]
    assert bench_networks.exit_code(lambda: bench_networks.main(arguments)) == 1
    assert "wrong result of ours for 7-512-2048-1x1, batch 1" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_layers_are_torchvisions():
    """Every convolution of ResNet-50, with what follows it, as often as the network has it."""
    model, expected = zoo.NETWORKS["resnet50"].build().eval(), []

    def note(module, inputs, output):
        shape = module.in_channels, module.out_channels, inputs[0].shape[-1]
        expected.append((*shape, module.kernel_size[0], module.stride[0], module.padding[0]))

    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(note)
    with torch.no_grad():
        model(torch.zeros(1, 3, 224, 224))
    found = []
    for layer in layers.LAYERS.values():
        of = layer.shape
        shape = of.in_channels, of.out_channels, of.size, of.kernel, of.stride, of.padding
        found += [shape] * layer.count
    assert sorted(found) == sorted(expected)
    residuals = sum(layer.count for layer in layers.LAYERS.values() if layer.residual)
    plain = sum(layer.count for layer in layers.LAYERS.values() if not layer.relu)
    assert (residuals, plain) == (16, 4)


def test_floors_are_below_what_must_be_reached():
    """Reckoned by hand: 56 x 56, 256 channels out of 64, with a residual, is bound by its bytes;
    3 x 3 over 64 channels by its operations."""
    expand = layers.LAYERS["56-64-256-1x1"]
    pixels = 64 * 56 * 56
    assert expand.bytes(64) == 2 * (pixels * (64 + 256 + 256) + 64 * 256)
    assert expand.floor_us(64) == pytest.approx(expand.bytes(64) / 4e6)
    window = layers.LAYERS["56-64-64-3x3"]
    assert window.flops(64) == 2 * 9 * 64 * 64 * pixels
    assert window.floor_us(64) == pytest.approx(window.flops(64) / 690e6)
    floors = dict.fromkeys(layers.MUST_REACH, 0.0)
    for layer in layers.LAYERS.values():
        floors[layer.group] += layer.count * layer.floor_us(layers.MODEL_BATCH)
    for group, floor in floors.items():
        assert 0.6 * layers.MUST_REACH[group] < floor < layers.MUST_REACH[group]


def test_the_conclusion_of_layers():
    def row(name, ours):
        ms = {"ours": ours / 1e3, "compiled": 0.1}
        return LayerRow(name, 64, ms, dict.fromkeys(ms, 0.0), dict.fromkeys(ms, 0.0))

    rows = [row("224-3-64-7x7", 40.0), row("56-64-64-3x3", 30.0)]
    assert layers_report.conclusion(rows, [64], True) == (
        "ResNet-50's convolutions fused, batch 64: 130 us ours, 400 us compiled; goal 129 us "
        "(reached by 1 of 2 groups), floor 94.85 us."
    )
    assert layers_report.conclusion(rows, [64], False).endswith("130 us ours, 400 us compiled.")


# ---- Bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--networks", "vgg99"), "'vgg99' (choose from"),
        (("--batches", "0"), "an integer of 1 or more; got 0"),
        (("--candidates", "fast"), "'fast' (choose from"),
        (("--modes", "graph"), "'graph' (choose from"),
        (("--layers", "conv99"), "'conv99' (choose from"),
        (("--repeats", "x"), "an integer of 1 or more; got x"),
        (("--cold",), "expected --layers with it; got none"),
        (("--networks", "tiny", "--layers"), "expected no --layers with it; got both"),
        (("--modes", "CUDA graph", "--device", "cpu"), "expected eager on a CPU; got CUDA graph"),
    ],
)
def test_options_out_of_range(capsys, tmp_path, arguments, words):
    assert_refused(bench_networks.main, arguments, words, tmp_path / "out", capsys)


@pytest.mark.cuda
def test_a_gpu_measures_every_candidate_in_both_modes(tmp_path):
    options = ("--device", "cuda", "--networks", "tiny", "--batches", 2, "--repeats", 2)
    options += ("--out", tmp_path, "--name", "small")
    bench_networks.main([str(option) for option in options])
    rows = json.loads((tmp_path / "small.json").read_text())["rows"]
    assert [row["candidate"] for row in rows] == list(CANDIDATES)
    for row in rows:
        assert row["absent"] is None, row
        assert sorted(row["ms"]) == ["CUDA graph", "eager"]
