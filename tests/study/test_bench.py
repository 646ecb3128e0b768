"""scripts/bench.py: what all benchmarks share, and products and convolutions on small real runs."""

import functools
import itertools
import json
import os
import random
from collections import Counter

import pytest
import torch
from processes import FORKS
from study_tools import assert_resumes, run_bench, run_script, tables_of

import bench
import spamm_torch
from cases import conv, mm, multi_gpu, ranks, shapes, shards
from cases.multi_gpu import LAYOUTS, PEERS
from common import measuring
from common.console import exit_code
from common.machine import TOLERANCE
from common.operands import DATA, operands
from models.files import UserError

RATIOS = (1.0, 0.5)
LAYERS = ("conv51", "res7-reduce")  # of different groups, 3 x 3 and 1 x 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a run over two data sets, two types and two sizes, one of them ragged."""
    folder = tmp_path_factory.mktemp("mm")
    with pytest.MonkeyPatch.context() as patch:  # a copy of the usual size would take the most time
        patch.setattr(mm, "copy_bandwidth", lambda device, repeats: 1e7)
        run_bench(
            *("mm", folder, "--sizes", 128, 100, "--precisions", "float32", "bfloat16"),
            *("--blocks", 32, "32x64x128", "--ratios", *RATIOS, "--data", "decay", "normal"),
            *("--repeats", 2),
        )
    return folder


# ---- All benchmarks -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "module", "measure", "arguments"),
    [
        ("mm", mm, "bench_operands", ("--sizes", 64, 100, 128, "--precisions", "float32")),
        pytest.param(
            *("conv", conv, "bench_case"),
            ("--groups", "vgg13", "--layers", "conv51", "--batches", 1, 2, 3),
            marks=pytest.mark.thorough,
        ),
        (
            *("multi_gpu", measuring, "attempt"),  # a cell, its peer, and what the host takes
            ("--sizes", 256, "--data", "decay", "--layouts", "R", "--ratios", 0.5),
        ),
    ],
)
def test_an_interrupted_run_goes_on(
    case, module, measure, arguments, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(mm, "copy_bandwidth", lambda device, repeats: 1e7)
    rest = (*arguments, "--repeats", 1) + (() if "--ratios" in arguments else ("--ratios", 1, 0.5))
    assert_resumes(case, module, measure, rest, tmp_path, 3, capsys, monkeypatch)


def test_no_path_of_this_machine_is_recorded(folder):
    [run] = json.loads((folder / "small.json").read_text())["runs"]
    command = run["header"]["command"]
    assert command.startswith(f"python scripts/bench.py mm --device cpu --out {folder.name} ")
    assert run["header"]["L2 cache"] == "warm"


def test_shapes_that_nobody_chose(tmp_path):
    """Whatever the seed, shapes are those of the draw, and every row is of both calls."""
    given = ("--largest", 100, "--batches", 1, "--shapes", 2, "--repeats", 1, "--seed", 3)
    kinds = ("products", "convolutions")
    tables = run_bench("shapes", tmp_path, *given, "--kinds", *kinds, "--precisions", "float32")
    rows = tables["shapes"]
    assert [row["op"] for row in rows] == ["mm", "mm", "conv2d", "conv2d"]
    draw = shapes.products(random.Random("3 products"), 100)
    assert [row["shape"] for row in rows[:2]] == [next(draw)["name"] for _ in range(2)]
    for share in tables["shapes, shares"]:
        of = [row[share["kept"]] for row in rows if row["op"] == share["op"]]
        assert share["below 0.8"] == sum(ratio < 0.8 for ratio in of) / 2
        assert share["speedup"] == pytest.approx(sum(of) / 2)


def test_block_sparse_products_and_density_matrices(tmp_path):
    tables = run_bench(
        *("block_sparse", tmp_path, "--waters", 40, "--density", 9, 40, "--repeats", 1),
        *("--precisions", "float64", "float16", "--valid", 4),
    )
    for row in tables["stored products"]:
        assert row["products"] == pytest.approx(4, abs=0.5)
        assert row["share_before"] == 1 - row["multiply_ms"] / row["mm_ms"]
        assert (row["over_entries"] is None) == (row["precision"] == "float16")
    for row in tables["block-sparse density"]:
        assert abs(row["energy_error"]) < 1e-7
        assert row["stored_x"] <= -(-row["n"] // 64)
    lines = {row["of"].partition(":")[0] for row in tables["block-sparse growth"]}
    assert lines == {"SP2", "S^(-1/2)", "S", "SP2, dense storage", "all"}


@pytest.mark.parametrize(
    ("gpus", "arguments", "words"),
    [
        (0, ("mm", "--device", "cuda"), "expected a CUDA device; torch finds none"),
        (0, ("multi_gpu", "--device", "cuda"), "expected a CUDA device; torch finds none"),
        (0, ("conv", "--groups", "large", "--layers", "conv21"), "--groups large; got conv21"),
        (0, ("networks", "--modes", "CUDA graph"), "--modes eager on a CPU; got CUDA graph"),
        (1, ("multi_gpu",), "expected 2 CUDA devices, one a part; got 1"),
    ],
)
def test_what_cannot_be_measured(capsys, monkeypatch, tmp_path, gpus, arguments, words):
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpus > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    code, _, [line] = run_script(bench.main, capsys, *arguments, "--out", tmp_path / "out")
    assert code == 1
    assert words in line
    assert not (tmp_path / "out").exists()


# ---- Products -----------------------------------------------------------------------------------


@pytest.mark.parametrize("data", ["scaled", "overlap"])
def test_data_of_many_magnitudes(data):
    """For some k, both blocks of a product hold nothing within 2^-15 of their largest entries."""
    a, b = operands(data, 256, torch.float32, "cpu")

    def faint(x):  # (blocks across K, blocks along K, k in the block), of rows along K
        blocks = x.abs().unfold(0, 64, 64).unfold(1, 64, 64).amax(2)  # over rows
        return blocks < 2**-15 * blocks.amax(-1, keepdim=True)

    both = faint(a.double())[:, None] & faint(b.double().T)
    assert both.any(-1).double().mean() > 0.2


def test_every_product_is_there_once(tables):
    cases = set(itertools.product(("decay", "normal"), ("float32", "bfloat16"),
                                  ("32", "[32, 64, 128]"), (128, 100)))  # fmt: skip
    key = lambda row: (row["data"], row["precision"], str(row["block"]), row["n"])  # noqa: E731
    assert Counter(map(key, tables["products"])) == Counter(dict.fromkeys(cases, len(RATIOS)))
    assert Counter(map(key, tables["norm maps"])) == Counter(cases)


def test_rows_of_products_agree_with_themselves(tables):
    for row in tables["products"]:
        assert min(row["dense_ms"], row["multiply_ms"], row["mm_ms"]) > 0
        assert row["speedup"] == pytest.approx(row["dense_ms"] / row["mm_ms"])
        assert row["speedup_multiply"] == pytest.approx(row["dense_ms"] / row["multiply_ms"])
        assert row["spread"] >= 0
        assert row["backend"].startswith("cpu-")
        assert 0 <= row["error"] <= TOLERANCE[row["precision"]]
        assert 0 < row["dense_error"] <= TOLERANCE[row["precision"]]
        operands_ms = 2 * row["n"] ** 2 * {"float32": 4, "bfloat16": 2}[row["precision"]] / 1e7
        floor = operands_ms + max(row["valid_ratio"] * row["dense_ms"], 1.5 * operands_ms)
        assert row["share_of_floor"] == pytest.approx(floor / row["mm_ms"])
        if row["ratio"] == 1:
            assert row["valid_ratio"] == 1
        elif row["block"] == 32:  # else there are few products
            assert row["valid_ratio"] == pytest.approx(row["ratio"], abs=0.15)
    for row in tables["norm maps"]:
        assert min(row["norms_ms"], row["search_ms"], row["error_search_ms"]) > 0


# ---- Convolutions -------------------------------------------------------------------------------


def test_convolutions(tmp_path):
    """Two layers and both data sets, with a block that sticks out of the batch."""
    tables = run_bench(
        *("conv", tmp_path, "--groups", "vgg13", "resnet50", "--layers", *LAYERS),
        *("--batches", 72, "--precisions", "float32", "--ratios", *RATIOS),
        *("--data", "even", "centred", "--repeats", 2),
    )
    rows = tables["convolutions"]
    cases = list(itertools.product(LAYERS, ("even", "centred"), RATIOS))
    assert [(row["layer"], row["data"], row["ratio"]) for row in rows] == cases
    for row in rows:
        assert row["valid_ratio"] == pytest.approx(row["ratio"], abs=0.02)
        assert min(row["dense_ms"], row["conv2d_ms"]) > 0
        assert row["speedup"] == pytest.approx(row["dense_ms"] / row["conv2d_ms"])
        assert 0 < row["error"] <= TOLERANCE["float32"]
        assert row["chained_ms"] is None  # chains are CUDA's
    text = (tmp_path / "small.md").read_text()
    for whole, half in zip(rows[::2], rows[1::2], strict=True):
        assert f"| {whole['speedup']:.2f} | {half['speedup']:.2f} |" in text


def test_wrong_results_are_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(TOLERANCE, "float32", -1.0)
    arguments = ["conv", "--device", "cpu", "--groups", "resnet50", "--layers", "res7-reduce"]
    arguments += ["--batches", "64", "--ratios", "1", "--repeats", "1", "--out", str(tmp_path)]
    assert exit_code(lambda: bench.main(arguments)) == 1
    assert "wrong result for res7-reduce, batch 64" in "".join(capsys.readouterr())
    assert not list(tmp_path.iterdir())


# ---- Several devices ----------------------------------------------------------------------------


@pytest.fixture(autouse=True, scope="module")
def ranks_are_forked():
    with pytest.MonkeyPatch.context() as patch:
        start = functools.partial(
            torch.multiprocessing.start_processes, start_method=FORKS.get_start_method()
        )
        patch.setattr(torch.multiprocessing, "spawn", start)
        yield


CPU = torch.device("cpu")
SHARES = (0.3, 1.0)
SIZES = (300, 256)  # the first is no multiple of a block


def run(folder, *arguments):
    """The tables of a run over products on the CPU."""
    return run_bench("multi_gpu", folder, "--repeats", 1, *arguments)


@pytest.fixture(scope="module")
def cells(tmp_path_factory):
    given = ("--sizes", *SIZES, "--data", "decay", "heavy", "--ratios", *SHARES)
    return run(tmp_path_factory.mktemp("cells"), *given)


def test_every_cell_is_there_once(cells):
    """R and S everywhere; the other layouts at the largest size with the first data set."""
    rows = cells["several devices"]
    ratios = lambda r: (None,) if r["absent"] else (r["ratio"],)  # noqa: E731
    found = Counter((r["layout"], r["data"], r["n"], *ratios(r)) for r in rows)
    expected = {
        (layout, data, n, ratio)
        for layout in LAYOUTS
        for data in ("decay", "heavy")
        for n in SIZES
        for ratio in ((None,) if layout in multi_gpu.NEED_CUDA else SHARES)
        if layout in ("R", "S") or (data, n) == ("decay", 300)
    }
    assert found == Counter(expected)
    peers = Counter((p["peer"], p["data"], p["n"]) for p in cells["several devices, peers"])
    everywhere = {("torch.mm", data, n) for data in ("decay", "heavy") for n in SIZES}
    assert peers == Counter(everywhere | {("DTensor", "decay", 300)})


def test_cells_agree_with_themselves(cells):
    for row in cells["several devices"]:
        if row["layout"] in multi_gpu.NEED_CUDA:
            assert row["absent"] == f"{row['layout']} needs CUDA devices; got cpu"
            assert row["all_ms"] is None
            continue
        assert row["absent"] is None
        assert min(row["one_ms"], row["all_ms"]) > 0
        assert row["speedup"] == pytest.approx(row["one_ms"] / row["all_ms"])
        assert row["spread"] >= 0
        assert row["valid_ratio"] == pytest.approx(row["ratio"], abs=0.1)
        if row["layout"] in ("S", "ranks"):
            assert row["work_imbalance"] >= 1
            assert row["sent"] == 1 if row["ratio"] == 1 else 0 < row["sent"] < 1
        assert (row["search_ms"] is not None) == (row["layout"] == "R" and row["ratio"] < 1)
    assert [o["layout"] for o in cells["several devices, overheads"]] == ["R", "S"]
    for overhead in cells["several devices, overheads"]:
        assert min(overhead["one_us"], overhead["all_us"]) > 0


def test_the_plan_counts_what_the_definition_counts():
    """The share of B that travels, by brute force over all block products."""
    product = shards.Product("exponential", "float32", 512, [CPU] * 2)
    tau, cuts = product.tau(0.3), product.cuts(0.3)
    assert (cuts[0], cuts[-1]) == (0, 512)
    half = cuts[1] // 64
    valid = ~(product.norm_a[:, :, None] * product.norm_b < tau)  # of one stage
    needed = valid[:half, half:].any(0).any(1).sum() + valid[half:, :half].any(0).any(1).sum()
    sent = shards.sent(product.norm_a, product.norm_b, tau, cuts)["sent"]
    assert sent == pytest.approx(needed.item() / 8)


def test_ranks_with_block_sparse_matrices(tmp_path, monkeypatch):
    """Half of the waters on each of two ranks; each type takes two processes more."""
    monkeypatch.setattr(multi_gpu, "STORED_PRECISIONS", ("float32",))
    given = ("--layouts", "--sizes", 64, "--data", "decay", "--waters", 128, "--density", 128)
    tables = run(tmp_path, *given)
    rows = tables["several devices"]
    assert [row["precision"] for row in rows] == list(multi_gpu.STORED_PRECISIONS)
    for row in rows:
        assert row["valid_ratio"] == pytest.approx(min(multi_gpu.RATIOS), abs=0.01)
        assert 0 < row["sent"] < 1
    [density] = tables["block-sparse density, ranks"]
    assert abs(density["energy_error"]) < 1e-7


# ---- What fails becomes a row -------------------------------------------------------------------


def test_a_cell_without_memory_is_a_row(tmp_path, monkeypatch):
    whole = spamm_torch.mm_shards

    def mm_shards(a, b, *, tau):
        if sum(map(len, a)) == 256:
            raise torch.OutOfMemoryError("CUDA out of memory on cuda:1.\nMore lines.")
        return whole(a, b, tau=tau)

    monkeypatch.setattr(spamm_torch, "mm_shards", mm_shards)
    found = run(tmp_path, "--layouts", "S", "--sizes", 256, 192, "--data", "decay", "--ratios", 1)
    large, small = found["several devices"]
    assert large["absent"] == "CUDA out of memory on cuda:1."
    assert large["all_ms"] is None
    assert large["may_pass"]
    assert small["absent"] is None
    text = (tmp_path / "small.md").read_text()
    assert "- Not measured: S decay float16 256: CUDA out of memory on cuda:1.." in text


def test_a_result_that_differs_ends_the_run(tmp_path, monkeypatch):
    whole = spamm_torch.mm_shards

    def mm_shards(a, b, *, tau):
        shards = whole(a, b, tau=tau)
        shards[1][-1, -1] += 1
        return shards

    monkeypatch.setattr(spamm_torch, "mm_shards", mm_shards)
    with pytest.raises(UserError, match="wrong result on several devices: expected the bits of"):
        run(tmp_path, "--layouts", "R", "--sizes", 256, "--data", "decay", "--ratios", 1)
    assert not list(tmp_path.iterdir())


def test_ranks_that_fail_and_that_end_say_which():
    wrong = {"data": "nothing of the kind", "precision": "float32", "n": 256}
    with pytest.raises(RuntimeError, match=r"^rank 0: ValueError: data must be one of "):
        ranks.run(ranks.multiply, [CPU], wrong, SHARES, 1)
    with pytest.raises(RuntimeError, match=r"^rank 0: process 0 terminated with exit code 3$"):
        ranks.run(end_the_first, [CPU] * 2)


def end_the_first(place):
    if place.rank == 0:
        os._exit(3)
    place.slowest([0.0])


# ---- Which cells --------------------------------------------------------------------------------


@pytest.mark.parametrize("data", DATA)
def test_every_data_set_reaches_every_ratio(data):
    a, b = operands(data, 1024, torch.float16, CPU)
    assert a.shape == b.shape == (1024, 1024)
    assert a.dtype == torch.float16
    assert a.isfinite().all()
    norm_a, norm_b = spamm_torch.norm_map(a), spamm_torch.norm_map(b)
    for ratio in multi_gpu.RATIOS:
        tau = spamm_torch.find_tau(norm_a, norm_b, ratio)
        valid = spamm_torch.valid_ratio(norm_a, norm_b, tau).item()
        assert valid == pytest.approx(ratio, abs=0.02)


def test_equal_cuts():
    assert shards.equal_cuts(300, 2) == [0, 128, 300]
    assert shards.equal_cuts(256, 4) == [0, 64, 128, 192, 256]
    assert shards.equal_cuts(64, 2) == [0, 0, 64]


# ---- On GPUs ------------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.multi_gpu
def test_two_gpus_measure_every_cell(tmp_path):
    arguments = ("multi_gpu", "--sizes", 2304, 3072, "--sweep", 512, "--repeats", 1)
    arguments += ("--out", tmp_path, "--name", "small")
    bench.main([str(argument) for argument in arguments])
    tables = tables_of(tmp_path / "small.json")
    assert not any(row.get("absent") for rows in tables.values() for row in rows)
    assert {row["layout"] for row in tables["several devices"]} == set(LAYOUTS)
    assert {row["peer"] for row in tables["several devices, peers"]} == set(PEERS.values())
