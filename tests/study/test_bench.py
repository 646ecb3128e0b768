"""scripts/bench.py: each benchmark on a small real run, and what it does where something fails."""

import json
import random

import pytest
import torch
from golden import assert_kept
from study_tools import (
    assert_rows,
    assert_three_files,
    digits,
    run_bench,
    run_script,
    same_parameters,
    tables_of,
    write_part,
)
from torch import nn

import bench
import spamm_torch
from cases import mm, multi_gpu, networks, shapes
from cases.networks import CANDIDATES
from common.operands import DATA, operands
from models.files import UserError
from models.vgg13 import CONVOLUTIONS
from tables import table_4, table_5

CPU = torch.device("cpu")
SLOW = ("compiled", "max-autotune", "freezing", "ours-freezing")  # to prepare; ours-compiled, too


def tiny_network():
    """A convolution with batch norm and ReLU, one with ReLU, and a head."""
    return nn.Sequential(
        *(nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU()),
        *(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)),
    )


TINY = networks.Network(tiny_network, size=8, batches=(1,))
GROUPS = {
    group.title: group
    for group in (
        table_5.Group("conv31", ("conv31",), "conv31", (0.7436, 0.4338)),
        table_5.Group("all", CONVOLUTIONS[8:], "conv51", (0.85,)),
        table_5.Group("conv31, images shifted", ("conv31",), "conv31", (0.4338,), shifted=True),
    )
}


@pytest.fixture(autouse=True, scope="module")
def small():
    """Shrinks what options do not: a network, a model cluster, and VGG13's groups."""
    quiet = torch._inductor.config.patch(autotune_num_choices_displayed=0)
    with pytest.MonkeyPatch.context() as patch, quiet:
        patch.setitem(networks.NETWORKS, "tiny", TINY)
        patch.setattr(table_4, "MODELS", dict.fromkeys(("cpu", "cuda"), (8, "STO-3G")))
        patch.setattr(table_5, "GROUPS", GROUPS)
        yield


@pytest.fixture(scope="module")
def training(tmp_path_factory):
    """The options of a tiny network and tiny images."""
    root = tmp_path_factory.mktemp("mnist")
    write_part(root, "t10k", *digits(100))
    return f"--data={root} --checkpoint={root / 'c.pt'} --epochs 1 --repeats 1"


# ---- Small runs ---------------------------------------------------------------------------------

# Sizes are ragged; blocks stick out of the batch.
SIZED = "--sizes 128 100 --repeats 1"
TRAINED = "{} --width 2 --batch 10"
NEAR = {"mm": 0.15, "conv": 0.02, "multi_gpu": 0.15}  # of valid ratios to what was asked
GIVEN = {
    "mm": "--sizes 128 100 --precisions float32 bfloat16 --blocks 32 32x64x128 --ratios 1 0.5 "
    "--data decay normal --repeats 2",
    "conv": "--groups vgg13 resnet50 --layers conv51 res7-reduce --batches 66 --ratios 1 0.5 "
    "--precisions float32 --data even centred --repeats 1",
    "shapes": "--largest 100 --batches 1 --shapes 2 --repeats 1 --seed 3 --precisions float32",
    "block_sparse": "--waters 40 --density 9 40 --repeats 1 --precisions float64 float16 --valid 4",
    "multi_gpu": "--repeats 1 --sizes 300 256 --data decay normal --ratios 0.3 1",
    "networks": "--networks tiny --batches 2 --repeats 2 --candidates "
    + " ".join(name for name in CANDIDATES if name not in SLOW),
    **{"table_1": SIZED, "table_2": SIZED, "table_3": SIZED, "table_4": "--repeats 1"},
    "table_5": TRAINED,
}


@pytest.mark.inductor
@pytest.mark.parametrize("case", GIVEN)
def test_a_small_run(case, training, tmp_path):
    """The golden file has the numbers of rows, but for those that depend on a time."""
    tables = run_bench(case, tmp_path, *GIVEN[case].format(training).split())
    assert_rows(tables)
    counts = {kind: len(rows) for kind, rows in tables.items() if kind != "shapes, slowest"}
    assert_kept(f"rows of {case}", counts)
    [of_run] = json.loads((tmp_path / "small.json").read_text())["runs"]
    begin = f"python scripts/bench.py {case} --device cpu --out {tmp_path.name} "
    assert of_run["header"]["command"].startswith(begin)  # no path of this machine
    rows = next(iter(tables.values()))
    if case in NEAR:
        for row in rows:
            is_meant = case != "mm" or row["ratio"] == 1 or row["block"] == 32  # else few products
            off = 0 if row.get("absent") else abs(row["valid_ratio"] - row["ratio"])
            assert off < NEAR[case] or not is_meant
    absent = {row["layout"] for row in rows if row.get("absent")}
    assert absent == ({"0", "H"} if case == "multi_gpu" else set())  # GPUs are not here
    if case == "shapes":
        draw = shapes.products(random.Random("3 products"), 100)
        assert [row["shape"] for row in tables[case][:2]] == [next(draw)[0] for _ in range(2)]
    assert all(abs(row["products"] - 4) < 0.5 for row in tables.get("stored products", ()))
    for row in tables.get("block-sparse density", ()):
        assert abs(row["energy_error"]) < 1e-7
        assert row["stored_x"] <= -(-row["n"] // 64)
    assert case != "networks" or max(row["error"] for row in rows) < 1e-5
    if case == "table_3":
        peers = {(peer["n"], peer["share"]): peer for peer in tables["sparse products"]}
        for row in rows:
            peer = peers[row["n"], row["share"]]
            assert row["peer_ms"] == peer["ms"]
            assert 0 <= row["error"] <= peer["error"]
            assert peer["nonzeros"] == pytest.approx(row["share"], abs=0.02)
    if case == "table_5":
        dense = {row["title"]: row["dense_accuracy"] for row in tables["study, dense"]}
        for row in rows:
            change = row["accuracy"] - dense[row["title"]]
            assert row["accuracy_change"] == pytest.approx(change)
            assert (row["ms"] is None) == GROUPS[row["title"]].shifted


def test_shares_are_of_shapes_whose_call_is_not_short():
    rows = [
        {"op": "mm", "precision": "float32", "shape": str(ms), "torch_ms": ms}
        | dict.fromkeys(("off", "none", "half", "tenth"), ratio)
        for ms, ratio in ((0.5, 0.5), (1.5, 0.7), (2.5, 2.0), (0.005, 0.5), (0.01, 2.0))
    ]
    share, *_ = shapes._found([*rows, {"absent": "no memory"}])["shapes, shares"]
    expected = {"shapes": 3, "short": 2, "speedup": 0.7, "us over": 5.0}
    expected |= {"below 0.6": 1 / 3, "below 0.8": 2 / 3, "below 0.95": 2 / 3}
    assert expected.items() <= share.items()


@pytest.mark.cuda
def test_tables_of_a_gpu(training, tmp_path):
    tables = run_bench("table_3", tmp_path / "3", *SIZED.split(), device="cuda")
    given = TRAINED.format(training).split()
    tables |= run_bench("table_5", tmp_path / "5", *given, device="cuda")
    assert_rows(tables)
    assert not any(row.get("absent") for rows in tables.values() for row in rows)


@pytest.mark.cuda
@pytest.mark.multi_gpu
def test_two_gpus_measure_every_cell(tmp_path):
    given = ("--sizes", 2304, 3072, "--precisions", "float16", "float64", "--repeats", 1)
    tables = run_bench("multi_gpu", tmp_path, *given, device="cuda")
    assert not any(row.get("absent") for rows in tables.values() for row in rows)
    assert {row["layout"] for row in tables["several devices"]} == set(multi_gpu.LAYOUTS)


@pytest.mark.cuda
@pytest.mark.inductor
def test_a_gpu_measures_every_candidate_in_both_modes(tmp_path):
    given = ("--networks", "tiny", "--batches", 2, "--candidates", *CANDIDATES, "--repeats", 2)
    rows = run_bench("networks", tmp_path, *given, device="cuda")["networks"]
    expected = [(mode, name) for mode in networks.MODES for name in CANDIDATES]
    assert [(row["mode"], row["candidate"]) for row in rows] == expected
    assert not any(row.get("absent") for row in rows)


# ---- What fails ---------------------------------------------------------------------------------


def test_an_interrupted_run_writes_what_it_has(tmp_path, capsys, monkeypatch):
    """Stopped in its second cell it leaves the rows of the first."""
    given = ("mm", "--device", "cpu", "--sizes", 64, 100, "--precisions", "float32")
    given += ("--repeats", 1, "--out", tmp_path, "--name", "small")
    whole = mm.bench_operands

    def measure(case, *rest):
        if case[3] == 100:
            raise KeyboardInterrupt
        return whole(case, *rest)

    monkeypatch.setattr(mm, "bench_operands", measure)
    code, _, lines = run_script(bench.main, capsys, *given)
    assert (code, lines) == (130, ["interrupted: files that are written are whole"])
    assert_three_files(tmp_path)
    rows = tables_of(tmp_path / "small.json")["products"]
    assert [(row["n"], row["ratio"]) for row in rows] == [(64, ratio) for ratio in mm.RATIOS]


def test_several_devices_that_are_not_there_fail_or_are_wrong(tmp_path, monkeypatch):
    """A cell without memory is a row; a result that differs, and fewer devices, end the run."""
    real = spamm_torch.mm_shards

    def shards(a, b, *, tau):
        if sum(map(len, a)) == 256:
            raise torch.OutOfMemoryError("CUDA out of memory on cuda:1.\nMore lines.")
        return real(a, b, tau=tau)

    monkeypatch.setattr(spamm_torch, "mm_shards", shards)
    given = ("--repeats", 1, "--data", "decay", "--ratios", 1, "--layouts", "S", "--sizes", 256)
    large, small = run_bench("multi_gpu", tmp_path / "a", *given, 192)["several devices"]
    assert (large["absent"], large["all_ms"]) == ("CUDA out of memory on cuda:1.", None)
    assert small["absent"] is None
    text = (tmp_path / "a" / "small.md").read_text()
    assert "- Not measured: S decay float16 256: CUDA out of memory on cuda:1.." in text
    monkeypatch.setattr(spamm_torch, "mm_shards", lambda *of, tau: [x + 1 for x in of[0]])
    with pytest.raises(UserError, match="wrong result on several devices: expected the bits of"):
        run_bench("multi_gpu", tmp_path / "b", *given)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(UserError, match=r"^expected 2 CUDA devices, one a part; got 1"):
        run_bench("multi_gpu", tmp_path / "b", device="cuda")
    assert not list((tmp_path / "b").iterdir())


def fails(*_, **__):
    raise RuntimeError("cannot compile this.\nMore lines.")


def wrong(model, **_):
    with torch.no_grad():
        model[3].weight *= 1.01
    return model


@pytest.mark.parametrize(
    ("compiled", "why"),
    [(fails, "cannot compile this."), (wrong, "WRONG RESULT: expected an error of at most ")],
)
def test_a_candidate_that_fails_or_is_wrong_is_a_row(tmp_path, monkeypatch, compiled, why):
    monkeypatch.setattr("torch.compile", compiled)
    given = ("--networks", "tiny", "--batches", 1, "--candidates", "dense", "ours", "--repeats", 1)
    dense, ours = run_bench("networks", tmp_path, *given)["networks"]
    assert (dense["absent"], ours["ms"]) == (None, None)
    assert ours["absent"].startswith(why)
    text = (tmp_path / "small.md").read_text()
    assert f"- Not measured: tiny 1 ours: {why}" in text
    assert "Nothing was measured beside its peer; 1 rows without figures." in text


# ---- What is measured ---------------------------------------------------------------------------


@pytest.mark.parametrize("data", DATA)
def test_data_sets(data):
    """Every ratio can be reached; some have, for some k, blocks of both operands that hold nothing
    within 2^-15 of their largest entries.
    """
    a, b = operands(data, 1024, torch.float16, CPU)
    assert a.shape == b.shape == (1024, 1024)
    assert a.dtype == torch.float16
    assert a.isfinite().all()
    norm_a, norm_b = spamm_torch.norm_map(a), spamm_torch.norm_map(b)
    for ratio in multi_gpu.RATIOS:
        tau = spamm_torch.find_tau(norm_a, norm_b, ratio)
        valid = spamm_torch.valid_ratio(norm_a, norm_b, tau).item()
        assert valid == pytest.approx(ratio, abs=0.02)
    a, b = operands(data, 256, torch.float32, CPU)

    def faint(x):  # (blocks across K, blocks along K, k in the block), of rows along K
        blocks = x.abs().unfold(0, 64, 64).unfold(1, 64, 64).amax(2)  # over rows
        return blocks < 2**-15 * blocks.amax(-1, keepdim=True)

    both = (faint(a.double())[:, None] & faint(b.double().T)).any(-1).double().mean()
    assert (both > 0.2) == (data in ("scaled", "overlap"))


@pytest.mark.thorough
@pytest.mark.inductor
def test_freezing_folds_batch_norms():
    """Inductor reads a global setting: without it the code would be that of max-autotune."""
    given = networks.settled_model(TINY, CPU), networks.pictures_for(TINY, 2, CPU)
    with torch.no_grad():
        for candidate in ("freezing", "max-autotune"):
            torch._dynamo.reset()
            run = torch._inductor.utils.run_and_get_code
            _, (code,) = run(networks.prepared, candidate, *given)
            # Weights that are part of the code.
            assert ("constant" in code) == (candidate == "freezing")
            assert not torch._inductor.config.freezing


def test_activations_of_settled_networks_keep_their_size():
    """Half types must hold them, and errors of one layer must not vanish in the others'. They are
    the same in each call.
    """
    network = networks.Network(networks.NETWORKS["resnet18"].build, size=64)
    model, again = (networks.settled_model(network, CPU) for _ in range(2))
    assert same_parameters(model, again)
    largest = []
    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            module.register_forward_hook(lambda *of: largest.append(of[2].abs().max().item()))
    pictures, again = (networks.pictures_for(network, 4, CPU) for _ in range(2))
    assert torch.equal(pictures, again)
    assert pictures.is_contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        model(pictures)
    assert not model.training
    assert len(largest) == 21
    assert all(0.1 < value < 1000 for value in largest), largest
