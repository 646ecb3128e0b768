"""scripts/bench.py: what all benchmarks share, and each of them on small real runs."""

import functools
import json
import random

import pytest
import torch
from study_tools import (
    assert_consistent,
    assert_golden,
    assert_three_files,
    outline,
    run_bench,
    run_script,
    same_parameters,
    tables_of,
)
from torch import nn

import bench
import spamm_torch
from cases import mm, multi_gpu, networks, shapes
from cases.multi_gpu import LAYOUTS
from cases.networks import CANDIDATES
from common.measuring import TOLERANCE
from common.operands import DATA, operands
from models.files import UserError

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


TINY = networks.Network(tiny_network, size=8, batches=(1,))


@pytest.fixture(autouse=True, scope="module")
def fast():
    quiet = torch._inductor.config.patch(autotune_num_choices_displayed=0)
    with pytest.MonkeyPatch.context() as patch, quiet:
        patch.setitem(networks.NETWORKS, "tiny", TINY)
        yield


# ---- All benchmarks -----------------------------------------------------------------------------


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


def test_shapes_that_nobody_chose(tmp_path):
    """Whatever the seed, shapes are those of the draw, and every row is of both calls."""
    given = ("--largest", 100, "--batches", 1, "--shapes", 2, "--repeats", 1, "--seed", 3)
    kinds = ("products", "convolutions")
    tables = run_bench("shapes", tmp_path, *given, "--kinds", *kinds, "--precisions", "float32")
    rows = tables["shapes"]
    assert [row["op"] for row in rows] == ["mm", "mm", "conv2d", "conv2d"]
    draw = shapes.products(random.Random("3 products"), 100)
    assert [row["shape"] for row in rows[:2]] == [next(draw)[0] for _ in range(2)]
    for share in tables["shapes, shares"]:
        of_op = [row for row in rows if row["op"] == share["op"]]
        of = [row[share["kept"]] for row in of_op if row["torch_ms"] >= 0.015]
        assert (share["shapes"], share["short"]) == (len(of), 2 - len(of))
        if of:
            assert share["below 0.8"] == sum(ratio < 0.8 for ratio in of) / len(of)
            assert share["speedup"] == pytest.approx(sum(of) / len(of))


def test_block_sparse_products_and_density_matrices(tmp_path):
    tables = run_bench(
        *("block_sparse", tmp_path, "--waters", 40, "--density", 9, 40, "--repeats", 1),
        *("--precisions", "float64", "float16", "--valid", 4),
    )
    for row in tables["stored products"]:
        assert row["products"] == pytest.approx(4, abs=0.5)
        assert row["share_before"] == 1 - row["multiply_ms"] / row["mm_ms"]
    for row in tables["block-sparse density"]:
        assert abs(row["energy_error"]) < 1e-7
        assert row["stored_x"] <= -(-row["n"] // 64)


def test_fewer_gpus_than_parts(monkeypatch, tmp_path):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(UserError, match=r"^expected 2 CUDA devices, one a part; got 1"):
        run_bench("multi_gpu", tmp_path, device="cuda")
    assert not list(tmp_path.iterdir())


# ---- Products and convolutions ------------------------------------------------------------------


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


def test_products(tmp_path):
    """Two data sets, two types and two sizes, one of them ragged."""
    tables = run_bench(
        *("mm", tmp_path, "--sizes", 128, 100, "--precisions", "float32", "bfloat16"),
        *("--blocks", 32, "32x64x128", "--ratios", 1.0, 0.5, "--data", "decay", "normal"),
        *("--repeats", 2),
    )
    assert_golden("bench mm", outline(tables))
    assert_consistent(tables["products"], speedup="dense_ms/mm_ms")
    assert_consistent(tables["norm maps"])
    for row in tables["products"]:
        assert row["spread"] >= 0
        assert 0 <= row["error"] <= TOLERANCE[row["precision"]]
        if row["ratio"] == 1 or row["block"] == 32:  # else there are few products
            assert row["valid_ratio"] == pytest.approx(row["ratio"], abs=0.15)
    header = json.loads((tmp_path / "small.json").read_text())["runs"][0]["header"]
    begin = f"python scripts/bench.py mm --device cpu --out {tmp_path.name} "
    assert header["command"].startswith(begin)  # no path of this machine


def test_convolutions(tmp_path):
    """Layers of different groups, 3 x 3 and 1 x 1, with a block that sticks out of the batch."""
    tables = run_bench(
        *("conv", tmp_path, "--groups", "vgg13", "resnet50", "--layers", "conv51", "res7-reduce"),
        *("--batches", 66, "--precisions", "float32", "--ratios", 1.0, 0.5),
        *("--data", "even", "centred", "--repeats", 1),
    )
    assert_golden("bench conv", outline(tables))
    rows = tables["convolutions"]
    assert_consistent(rows, speedup="dense_ms/ms")
    for row in rows:
        assert row["valid_ratio"] == pytest.approx(row["ratio"], abs=0.02)
        assert 0 < row["error"] <= TOLERANCE["float32"]
    text = (tmp_path / "small.md").read_text()
    for whole, half in zip(rows[::2], rows[1::2], strict=True):
        assert f"| {whole['speedup']:.3g}x | {half['speedup']:.3g}x |" in text


# ---- Several devices ----------------------------------------------------------------------------


run = functools.partial(run_bench, "multi_gpu")


def test_cells(tmp_path):
    given = "--repeats 1 --sizes 300 256 --data decay normal --ratios 0.3 1.0"
    tables = run(tmp_path, *given.split())
    assert_golden("bench multi_gpu", outline(tables))
    assert_consistent(tables["several devices"], speedup="one_ms/all_ms")
    for row in tables["several devices"]:
        if not row["absent"]:
            assert row["valid_ratio"] == pytest.approx(row["ratio"], abs=0.1)


def run_changed(change, monkeypatch, folder, arguments):
    """A run for which a function changes results of mm_shards, of which it has the operands."""
    real = spamm_torch.mm_shards
    changed = lambda a, b, *, tau: change(a, real(a, b, tau=tau))  # noqa: E731
    monkeypatch.setattr(spamm_torch, "mm_shards", changed)
    given = f"--repeats 1 --data decay --ratios 1 {arguments}"
    return run(folder, *given.split())


def test_a_cell_without_memory_is_a_row(tmp_path, monkeypatch):
    def none_for_256(a, found):
        if sum(map(len, a)) == 256:
            raise torch.OutOfMemoryError("CUDA out of memory on cuda:1.\nMore lines.")
        return found

    found = run_changed(none_for_256, monkeypatch, tmp_path, "--layouts S --sizes 256 192")
    large, small = found["several devices"]
    assert (large["absent"], large["all_ms"]) == ("CUDA out of memory on cuda:1.", None)
    assert small["absent"] is None
    text = (tmp_path / "small.md").read_text()
    assert "- Not measured: S decay float16 256: CUDA out of memory on cuda:1.." in text


def test_a_result_that_differs_ends_the_run(tmp_path, monkeypatch):
    more = lambda a, found: [x + 1 for x in found]  # noqa: E731
    with pytest.raises(UserError, match="wrong result on several devices: expected the bits of"):
        run_changed(more, monkeypatch, tmp_path, "--layouts R --sizes 256")
    assert not list(tmp_path.iterdir())


@pytest.mark.cuda
@pytest.mark.multi_gpu
def test_two_gpus_measure_every_cell(tmp_path):
    given = ("--sizes", 2304, 3072, "--precisions", "float16", "float64", "--repeats", 1)
    tables = run_bench("multi_gpu", tmp_path, *given, device="cuda")
    assert not any(row.get("absent") for rows in tables.values() for row in rows)
    assert {row["layout"] for row in tables["several devices"]} == set(LAYOUTS)


# ---- Whole networks -----------------------------------------------------------------------------


def run_tiny(folder, batch, candidates, **rest):
    """The rows of a run over the tiny network."""
    given = ("--networks", "tiny", "--batches", batch, "--candidates", *candidates)
    return run_bench("networks", folder, *given, "--repeats", 2, **rest)["networks"]


@pytest.mark.inductor
def test_every_candidate_is_there_once_and_right(tmp_path):
    """A large batch has no held tau."""
    few = ["dense", "ours", MEASURED[-1]]
    rows = run_tiny(tmp_path / "2", 2, MEASURED) + run_tiny(tmp_path / "40", 40, few)
    found = [(row["batch"], row["candidate"]) for row in rows]
    assert found == [(2, name) for name in MEASURED] + [(40, name) for name in few[:-1]]
    dense = {row["batch"]: row["ms"] for row in rows if row["candidate"] == "dense"}
    for row in rows:
        assert row["mode"] == "eager"
        assert row["ms"] > 0
        assert row["speedup"] == pytest.approx(dense[row["batch"]] / row["ms"])
        assert row["error"] < 1e-5


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
    monkeypatch.setattr(networks, "_compiled", compiled)
    monkeypatch.setattr(spamm_torch, "explain", lambda _: ())
    dense, ours = run_tiny(tmp_path, 1, ("dense", "ours"))
    assert (dense["absent"], ours["ms"]) == (None, None)
    assert ours["absent"].startswith(why)
    text = (tmp_path / "small.md").read_text()
    assert f"- Not measured: tiny 1 ours: {why}" in text
    assert "Nothing was measured beside its peer; 1 rows without figures." in text


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


@pytest.mark.parametrize(
    ("network", "size"),
    [
        ("resnet18", 64),
        ("vgg13_32", 32),
        pytest.param("densenet121", 64, marks=pytest.mark.thorough),
    ],
)
def test_activations_of_settled_networks_keep_their_size(network, size):
    """Half types must hold them, and errors of one layer must not vanish in the others'. They are
    the same in each call.
    """
    network = networks.Network(networks.NETWORKS[network].build, size=size)
    model, again = (networks.settled_model(network, CPU) for _ in range(2))
    assert same_parameters(model, again)
    largest = {}

    def note(name):
        return lambda module, inputs, output: largest.update({name: output.abs().max().item()})

    for name, module in model.named_modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            module.register_forward_hook(note(name))
    pictures, again = (networks.pictures_for(network, 4, CPU) for _ in range(2))
    assert torch.equal(pictures, again)
    assert pictures.is_contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        model(pictures)
    assert not model.training
    assert all(0.1 < value < 1000 for value in largest.values()), largest


@pytest.mark.cuda
@pytest.mark.inductor
def test_a_gpu_measures_every_candidate_in_both_modes(tmp_path):
    rows = run_tiny(tmp_path, 2, CANDIDATES, device="cuda")
    expected = [(mode, name) for mode in networks.MODES for name in CANDIDATES]
    assert [(row["mode"], row["candidate"]) for row in rows] == expected
    assert not any(row.get("absent") for row in rows)
