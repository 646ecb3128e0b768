"""The benchmark of whole networks: a small real run, and how it chooses thresholds."""

import pytest
import torch
from bench_checks import assert_three_files
from tiny_study import digits, one_thread, write_part  # noqa: F401  the fixture is automatic

import bench
from cases import vgg13
from common.console import exit_code
from spamm_torch.networks.fused import fused_of

LAYERS = [f"conv{stage}{i}" for stage in range(1, 6) for i in (1, 2)][1:]


@pytest.fixture(scope="module", params=["vgg13", "vgg13_bn"])
def folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    write_part(folder / "digits", "t10k", *digits(100))
    arguments = (
        *("--device", "cpu", "--data", folder / "digits", "--checkpoint", folder / "small.pt"),
        *("--model", request.param, "--epochs", 1, "--width", 4, "--batch", 20),
        *("--images", 70, "--repeats", 1, "--max-loss", 5),
        *("--out", folder / "results", "--name", "small"),
    )
    bench.main(["vgg13", *map(str, arguments)])
    assert_three_files(folder / "results")
    return folder / "results"


def is_served(network, pictures):
    """Whether the generated forward computes the network's result for these pictures."""
    return fused_of(network).serves((pictures,))


def test_results(tables):
    served = [(row["mode"], row["network"]) for row in tables["served"]]
    assert served == [("eager", name) for name in ("dense", "nothing skipped", "SpAMM")]
    assert all(row["ms"] > 0 for row in tables["served"])
    [quality] = tables["served, quality"]
    assert 0 <= quality["accuracy"] <= 100
    lost = abs(quality["accuracy"] - quality["dense_accuracy"])
    assert lost <= quality["changed"] + 1e-9
    assert [row["layer"] for row in tables["served layers"]] == LAYERS
    times = {(r["layer"], r["ratio"]): r["ms"] for r in tables["served layers by ratio"]}
    assert min(times.values()) > 0
    for row in tables["served layers"]:
        assert row["dense_ms"] > 0
        assert (row["ratio"] is None) == (row["tau"] is None)
        assert row["spamm_ms"] == times[row["layer"], row["ratio"] or 1.0]
        if row["ratio"]:
            assert row["spamm_ms"] < row["dense_ms"]


def test_the_page(folder):
    text = (folder / "small.md").read_text()
    assert "float32, batch 70, channels last" in text
    lines = [line for line in text.splitlines() if line.startswith("| conv")]
    assert lines[0].startswith(f"| {LAYERS[0]} | ")


def test_an_interrupted_run_goes_on(folder, tmp_path, capsys, monkeypatch):
    """Stopped in its fourth layer, and then where it counts changed answers."""
    data = folder.parent / "digits"
    arguments = [
        "vgg13",
        "--device",
        "cpu",
        "--data",
        data,
        "--checkpoint",
        folder.parent / "small.pt",
    ]
    arguments += ["--images", 70, "--repeats", 1, "--out", tmp_path, "--name", "small"]
    timed, counted = [], []
    time_layer, changed_by = vgg13.time_layer, vgg13.Answers.changed_by

    def run(layers, answers):
        """With an interrupt in the layer and the count given."""

        def time_one(model, name, *rest):
            if len(timed) == layers:
                raise KeyboardInterrupt
            timed.append(name)
            _, ours = time_layer(model, name, *rest)
            return 2 * max(ours.values()), ours  # SpAMM pays: there are answers to count

        def count_one(self, net):
            if len(counted) == answers:
                raise KeyboardInterrupt
            counted.append(net)
            return changed_by(self, net)

        monkeypatch.setattr(vgg13, "time_layer", time_one)
        monkeypatch.setattr(vgg13.Answers, "changed_by", count_one)
        code = exit_code(lambda: bench.main([str(argument) for argument in arguments]))
        return code, capsys.readouterr()

    code, printed = run(3, None)
    assert code == 130
    assert f"finished groups are in {tmp_path / 'small.partial.json'}" in printed.err
    code, printed = run(None, 5)
    assert code == 130
    assert "resumed from" in printed.out
    assert timed == LAYERS
    code, _ = run(None, None)
    assert code == 0
    assert timed == LAYERS
    assert_three_files(tmp_path)


def test_converted_networks_run_fused(folder, tmp_path, monkeypatch):
    """Weights that were cast in inference mode would rule that out."""
    networks = []

    def fuse(model, *rest):
        networks.append(vgg13.network(model, {"conv21": 0.0, "conv31": 1.0}, cudnn=False))
        raise KeyboardInterrupt

    monkeypatch.setattr(vgg13, "bench", fuse)
    arguments = [
        "vgg13",
        "--device",
        "cpu",
        "--data",
        folder.parent / "digits",
        "--dtype",
        "bfloat16",
    ]
    arguments += ["--checkpoint", folder.parent / "small.pt", "--out", tmp_path]
    with pytest.raises(KeyboardInterrupt):
        bench.main([str(argument) for argument in arguments])
    with torch.no_grad():
        assert is_served(networks[0], torch.randn(2, 3, 32, 32, dtype=torch.bfloat16))


def test_answers_are_counted_where_most_of_them_change():
    def dense(pictures):
        return torch.eye(4)[pictures]

    def shifted(pictures):
        return torch.eye(4)[(pictures + (pictures == 1)) % 4]

    sets = [[0, 1, 2, 3], [1, 1, 0, 0]]
    batches = [[(torch.tensor(half), None) for half in (of[:2], of[2:])] for of in sets]
    answers = vgg13.Answers(dense, batches)
    assert answers.changed_by(dense) == 0
    assert answers.changed_by(shifted) == 50


def times(dense, **ratios):
    """By ratio, none faster than dense but those given."""
    ours = dict.fromkeys(vgg13.RATIOS, 2 * dense)
    return {None: dense} | ours | {float(ratio[1:]) / 100: ms for ratio, ms in ratios.items()}


def test_what_loses_least_for_its_time_is_chosen():
    layers = {
        "slow": times(1.0),
        "free": times(1.0, r50=0.8, r25=0.5),
        "dear": times(1.0, r50=0.7, r25=0.1),
    }
    losses = {("free", 0.5): 0.0, ("free", 0.25): 0.1, ("dear", 0.5): 0.2, ("dear", 0.25): 3.0}

    def loss_of(ratios):
        return sum(losses[name, ratio] for name, ratio in ratios.items() if ratio)

    def choose(max_loss):
        return vgg13.chosen_ratios(layers, loss_of, max_loss, lambda what: None)

    assert choose(0.31) == {"slow": None, "free": 0.25, "dear": 0.5}
    assert choose(0.0) == {"slow": None, "free": 0.5, "dear": None}
    assert choose(9.0) == {"slow": None, "free": 0.25, "dear": 0.25}


def test_the_network_computes_what_the_plain_one_does():
    from models.vgg13 import VGG13

    torch.manual_seed(0)
    model = VGG13(width=4).eval()
    pictures = torch.randn(70, 3, 32, 32)
    fused = vgg13.network(model, {"conv21": 0.0, "conv22": 0.0}, cudnn=False)
    with torch.no_grad():
        torch.testing.assert_close(fused(pictures), model(pictures))
        assert is_served(fused, pictures)
