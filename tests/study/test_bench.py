"""scripts/bench.py: what all benchmarks share, and products and convolutions on small real runs."""

import itertools
import json
from collections import Counter

import pytest
import torch
from study_tools import assert_refused, assert_resumes, run_bench

import bench
from cases import conv, mm
from common import measuring
from common.console import exit_code
from common.machine import TOLERANCE
from common.operands import operands

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
            (*("--sizes", 256, "--data", "decay", "--layouts", "R", "--ratios", 0.5), "--layers"),
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


BAD = {
    "mm": [
        (("--device", "foo"), "'foo' (choose from"),
        (("--sizes", "0"), "an integer of 1 or more; got 0"),
        (("--sizes", "64", "x"), "an integer of 1 or more; got x"),
        (("--repeats", "-3"), "an integer of 1 or more; got -3"),
        (("--ratios", "1.5"), "a valid ratio in (0, 1]; got 1.5"),
        (("--ratios", "0.5", "0"), "a valid ratio in (0, 1]; got 0"),
        (("--ratios", "nan"), "a valid ratio in (0, 1]; got nan"),
        (("--ratios", "half"), "a valid ratio in (0, 1]; got half"),
        (("--blocks", "48"), "three of these as in 128x64x128; got '48'"),
        (("--blocks", "128x64"), "got '128x64'"),
        (("--precisions", "int8"), "'int8' (choose from"),
    ],
    "block_sparse": [
        (("--waters", "-1"), "an integer of 0 or more; got -1"),
        (("--max-error", "0"), "a number above 0 and below 1; got 0"),
    ],
    "conv": [
        (("--block", "64", "48", "64"), "48 (choose from"),
        (("--layers", "conv99"), "'conv99' (choose from"),
    ],
    "networks": [
        (("--networks", "vgg99"), "'vgg99' (choose from"),
        (("--candidates", "fast"), "'fast' (choose from"),
        (("--modes", "graph"), "'graph' (choose from"),
    ],
    "layers": [(("--layers", "conv99"), "'conv99' (choose from")],
    "multi_gpu": [
        (("--parts", "1"), "an integer of 2 or more; got 1"),
        (("--sweep", "x"), "an integer of 1 or more; got x"),
        (("--data", "noise"), "'noise' (choose from"),
        (("--layouts", "Q"), "'Q' (choose from"),
        (("--layers", "conv99"), "'conv99' (choose from"),
    ],
    "vgg13": [
        (("--max-drop", "-1"), "points from 0 to below 100; got -1"),
        (("--evaluations", "4"), "an integer of 5 or more; got 4"),
    ],
}


@pytest.mark.parametrize(
    ("case", "arguments", "words"), [(case, *bad) for case, of in BAD.items() for bad in of]
)
def test_options_out_of_range(capsys, tmp_path, case, arguments, words):
    assert_refused(bench.main, arguments, words, tmp_path / "out", capsys, [case])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("mm", "--device", "cuda"), "expected a CUDA device; torch finds none"),
        (("multi_gpu", "--device", "cuda"), "expected a CUDA device; torch finds none"),
        (("conv", "--groups", "large", "--layers", "conv21"), "--groups large; got conv21"),
        (("networks", "--modes", "CUDA graph"), "--modes eager on a CPU; got CUDA graph"),
    ],
)
def test_what_cannot_be_measured(capsys, monkeypatch, tmp_path, arguments, words):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    out = tmp_path / "out"
    assert exit_code(lambda: bench.main([*arguments, "--out", str(out)])) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert words in line
    assert not out.exists()


def test_a_device_for_each_part(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert exit_code(lambda: bench.main(["multi_gpu", "--out", str(tmp_path / "out")])) == 1
    assert "expected 2 CUDA devices, one a part; got 1" in capsys.readouterr().err


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
