"""The benchmark of several devices: small real runs, failures that become rows, what it refuses."""

import itertools
import os
from collections import Counter

import pytest
import torch
from study_tools import run_bench, tables_of

import bench
import spamm_torch
from cases import multi_gpu, ranks, shards
from cases.multi_gpu import LAYOUTS, PEERS
from common.operands import DATA, operands
from models.files import UserError

CPU = torch.device("cpu")
RATIOS = (0.3, 1.0)
SIZES = (300, 256)  # the first is no multiple of a block


def run(folder, *arguments):
    """The tables of a run over products on the CPU."""
    return run_bench("multi_gpu", folder, "--repeats", 1, "--layers", *arguments)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    run(folder, "--sizes", *SIZES, "--data", "decay", "heavy", "--ratios", *RATIOS)
    return folder


def test_every_cell_is_there_once(tables):
    """R and S everywhere; the other layouts at the largest size with the first data set."""
    rows = tables["several devices"]
    ratios = lambda r: (None,) if r["absent"] else (r["ratio"],)  # noqa: E731
    found = Counter((r["layout"], r["data"], r["n"], *ratios(r)) for r in rows)
    expected = {
        (layout, data, n, ratio)
        for layout in LAYOUTS
        for data in ("decay", "heavy")
        for n in SIZES
        for ratio in ((None,) if layout in multi_gpu.NEED_CUDA else RATIOS)
        if layout in ("R", "S") or (data, n) == ("decay", 300)
    }
    assert found == Counter(expected)
    peers = Counter((p["peer"], p["data"], p["n"]) for p in tables["several devices, peers"])
    everywhere = {("torch.mm", data, n) for data in ("decay", "heavy") for n in SIZES}
    assert peers == Counter(everywhere | {("DTensor", "decay", 300)})


def test_what_a_cpu_cannot_do_says_why(tables):
    for row in tables["several devices"]:
        if row["layout"] in ("0", "H"):
            assert row["absent"] == f"{row['layout']} needs CUDA devices; got cpu"
            assert row["all_ms"] is None
        else:
            assert row["absent"] is None


def test_rows_agree_with_themselves(tables):
    for row in tables["several devices"]:
        if row["absent"] is not None:
            continue
        assert min(row["one_ms"], row["all_ms"]) > 0
        assert row["speedup"] == pytest.approx(row["one_ms"] / row["all_ms"])
        assert row["spread"] >= 0
        assert row["valid_ratio"] == pytest.approx(row["ratio"], abs=0.1)
        if row["layout"] in ("S", "ranks"):
            assert row["work_imbalance"] >= 1
            assert row["sent"] == 1 if row["ratio"] == 1 else 0 < row["sent"] < 1
        assert (row["search_ms"] is not None) == (row["layout"] == "R" and row["ratio"] < 1)
    assert [o["layout"] for o in tables["several devices, overheads"]] == ["R", "S"]
    for overhead in tables["several devices, overheads"]:
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
        ranks.run(ranks.multiply, [CPU], wrong, RATIOS, 1)
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


# ---- Convolutions -------------------------------------------------------------------------------


def test_convolutions(tmp_path):
    layers, batches = ("conv51", "conv52"), (128, 200)
    given = ("--layouts", "--layers", *layers, "--batches", *batches, "--repeats", 1)
    rows = run_bench("multi_gpu", tmp_path, *given)["several devices, layers"]
    cells = [(row["layer"], row["batch"], row["ratio"]) for row in rows]
    assert cells == list(itertools.product(layers, batches, multi_gpu.LAYER_RATIOS))
    for row in rows:
        assert min(row["one_ms"], row["all_ms"]) > 0
        assert row["speedup"] == pytest.approx(row["one_ms"] / row["all_ms"])
        assert row["valid_ratio"] == pytest.approx(row["ratio"], abs=0.05)


def test_a_convolution_that_fails_is_a_row(tmp_path, monkeypatch, capsys):
    conv2d = spamm_torch.conv2d

    def on_one_device(input, *args, **kwargs):
        if isinstance(input, list):
            raise torch.OutOfMemoryError("CUDA out of memory on cuda:1.\nMore lines.")
        return conv2d(input, *args, **kwargs)

    monkeypatch.setattr(spamm_torch, "conv2d", on_one_device)
    given = ("--layouts", "--layers", "conv51", "--batches", 64, "--repeats", 1)
    rows = run_bench("multi_gpu", tmp_path, *given)["several devices, layers"]
    assert [row["absent"] for row in rows] == ["CUDA out of memory on cuda:1."] * 2
    assert not (tmp_path / "small.png").exists()
    assert "2 cells failed; the same command tries these again" in capsys.readouterr().out


# ---- On GPUs ------------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.multi_gpu
def test_two_gpus_measure_every_cell(tmp_path):
    arguments = ("multi_gpu", "--sizes", 2304, 3072, "--sweep", 512, "--repeats", 1)
    arguments += ("--batches", 128, 512, "--out", tmp_path, "--name", "small")
    bench.main([str(argument) for argument in arguments])
    tables = tables_of(tmp_path / "small.json")
    assert not any(row.get("absent") for rows in tables.values() for row in rows)
    assert {row["layout"] for row in tables["several devices"]} == set(LAYOUTS)
    assert {row["peer"] for row in tables["several devices, peers"]} == set(PEERS.values())
