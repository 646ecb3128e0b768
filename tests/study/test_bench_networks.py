"""The benchmark of whole networks: a small real run, and what it refuses."""

import pytest
import torch
from study_tools import assert_resumes, run_bench, tables_of
from torch import nn

import bench
import spamm_torch
from cases import networks
from cases.networks import CANDIDATES

CPU = torch.device("cpu")
SLOW = ("compiled", "max-autotune", "freezing")  # to prepare; ours-compiled compiles, too
MEASURED = [name for name in CANDIDATES if name not in SLOW]


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
    networks.NETWORKS["tiny"] = networks.Network(tiny_network, size=8, batches=(1,))
    yield
    del networks.NETWORKS["tiny"]


@pytest.fixture(scope="module", autouse=True)
def autotuning_is_silent():
    with torch._inductor.config.patch(autotune_num_choices_displayed=0):
        yield


def run(folder, *arguments):
    """The rows of a run on the CPU."""
    return run_bench("networks", folder, "--repeats", 2, *arguments)["networks"]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    given = ("--networks", "tiny", "--batches", 2, "--candidates", *MEASURED)
    return run(tmp_path_factory.mktemp("bench"), *given)


# ---- Whole networks -----------------------------------------------------------------------------


def test_every_candidate_is_there_once_and_right(rows, tmp_path):
    """A large batch has no held tau."""
    few = ["dense", "ours", MEASURED[-1]]
    large = run(tmp_path, "--networks", "tiny", "--batches", 40, "--candidates", *few)
    rows = [*rows, *large]
    found = [(row["batch"], row["candidate"]) for row in rows]
    assert found == [(2, name) for name in MEASURED] + [(40, name) for name in few[:-1]]
    dense = {row["batch"]: row["ms"] for row in rows if row["candidate"] == "dense"}
    for row in rows:
        assert row["mode"] == "eager"
        assert row["ms"] > 0
        assert row["speedup"] == pytest.approx(dense[row["batch"]] / row["ms"])
        assert row["prepare_s"] > 0
        assert row["error"] < 1e-5
        converted = row["candidate"] in ("ours", "ours-compiled", "held-tau")
        assert (row["actions"] is not None) == converted


def test_an_interrupted_run_goes_on(tmp_path, capsys, monkeypatch):
    arguments = ["--networks", "tiny", "--batches", 1, 2, 3]
    arguments += ["--candidates", "dense", "ours", "--repeats", 1]
    given = "networks", networks, "measure_network", arguments, tmp_path, 3
    assert_resumes(*given, capsys, monkeypatch)


def test_a_candidate_that_fails_is_a_row(tmp_path, monkeypatch):
    def compiled(*_, **__):
        raise RuntimeError("cannot compile this.\nMore lines.")

    monkeypatch.setattr(networks, "_compiled", compiled)
    found = run(tmp_path, "--networks", "tiny", "--batches", 1, "--candidates", "dense", "ours")
    assert [row["absent"] for row in found] == [None, "cannot compile this."]
    text = (tmp_path / "small.md").read_text()
    assert "- Not measured: tiny 1 ours: cannot compile this." in text
    assert "Nothing was measured beside its peer; 1 rows without figures." in text


def test_a_wrong_result_is_no_result(tmp_path, monkeypatch):
    def compiled(model, **_):
        with torch.no_grad():
            model[3].weight *= 1.01
        return model

    monkeypatch.setattr(networks, "_compiled", compiled)
    monkeypatch.setattr(spamm_torch, "explain", lambda _: ())
    found = run(tmp_path, "--networks", "tiny", "--batches", 1, "--candidates", "dense", "ours")
    dense, ours = found
    assert dense["absent"] is None
    assert ours["ms"] is None
    assert ours["error"] > 1e-4
    assert ours["absent"].startswith("WRONG RESULT: expected an error of at most ")


@pytest.mark.thorough
def test_freezing_folds_batch_norms():
    """Inductor reads a global setting: without it the code would be that of max-autotune."""
    model = networks.settled_model(networks.NETWORKS["tiny"], CPU)
    pictures = networks.pictures_for(networks.NETWORKS["tiny"], 2, CPU)
    with torch.no_grad():
        of = networks.Candidates(model, pictures)
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
    network = networks.Network(networks.NETWORKS[network].build, size=size)
    model = networks.settled_model(network, CPU)
    largest = {}

    def note(name):
        return lambda module, inputs, output: largest.update({name: output.abs().max().item()})

    for name, module in model.named_modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            module.register_forward_hook(note(name))
    with torch.no_grad():
        model(networks.pictures_for(network, 4, CPU))
    assert not model.training
    assert all(0.1 < value < 1000 for value in largest.values()), largest


def test_networks_are_the_same_in_each_call():
    first, second = (networks.settled_model(networks.NETWORKS["tiny"], CPU) for _ in range(2))
    for name, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[name]), name
    pictures = networks.pictures_for(networks.NETWORKS["tiny"], 2, CPU)
    assert torch.equal(pictures, networks.pictures_for(networks.NETWORKS["tiny"], 2, CPU))
    assert pictures.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.cuda
def test_a_gpu_measures_every_candidate_in_both_modes(tmp_path):
    options = ("networks", "--device", "cuda", "--networks", "tiny", "--batches", 2, "--repeats", 2)
    options += ("--out", tmp_path, "--name", "small")
    bench.main([str(option) for option in options])
    rows = tables_of(tmp_path / "small.json")["networks"]
    expected = [(mode, name) for mode in networks.MODES for name in CANDIDATES]
    assert [(row["mode"], row["candidate"]) for row in rows] == expected
    assert not any(row.get("absent") for row in rows)
