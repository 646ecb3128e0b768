"""The benchmark of products: a small real run, and what it refuses."""

from collections import Counter

import pytest
import torch
from bench_checks import assert_refused, assert_resumes, assert_three_files
from tiny_study import one_thread  # noqa: F401  the fixture is automatic

import bench_mm
from bench.operands import operands
from common.console import exit_code
from common.precisions import TOLERANCE

RATIOS = (1.0, 0.5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run over two data sets, two precisions and two sizes, one of them ragged."""
    folder = tmp_path_factory.mktemp("bench")
    arguments = (
        *("--device", "cpu", "--sizes", 128, 100, "--precisions", "float32", "bfloat16"),
        *("--blocks", 32, "32x64x128", "--ratios", *RATIOS, "--data", "decay", "normal"),
        *("--repeats", 2, "--out", folder, "--name", "small"),
    )
    with pytest.MonkeyPatch.context() as patch:  # a copy of the usual size would take the most time
        patch.setattr(bench_mm, "copy_bandwidth", lambda device, repeats: 1e7)
        bench_mm.main([str(argument) for argument in arguments])
    return folder


@pytest.mark.parametrize("data", ["scaled", "overlap"])
def test_data_of_many_magnitudes(data):
    """For some k, both blocks of a product hold nothing within 2^-15 of their largest entries."""
    a, b = operands(data, 256, torch.float32, "cpu")

    def faint(x):  # (blocks across K, blocks along K, k in the block), of rows along K
        blocks = x.abs().unfold(0, 64, 64).unfold(1, 64, 64).amax(2)  # over rows
        return blocks < 2**-15 * blocks.amax(-1, keepdim=True)

    both = faint(a.double())[:, None] & faint(b.double().T)
    assert both.any(-1).double().mean() > 0.2


def test_three_files(folder):
    assert_three_files(folder)


def test_every_case_is_there_once(results):
    cases = {(data, p, block, n) for data in ("decay", "normal") for p in ("float32", "bfloat16")
             for block in ("32", "[32, 64, 128]") for n in (128, 100)}  # fmt: skip
    key = lambda row: (row["data"], row["precision"], str(row["block"]), row["n"])  # noqa: E731
    assert Counter(map(key, results["rows"])) == Counter(dict.fromkeys(cases, len(RATIOS)))
    assert Counter(map(key, results["stages"])) == Counter(cases)


def test_rows_agree_with_themselves(results):
    for row in results["rows"]:
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
    for stage in results["stages"]:
        assert min(stage["norms_ms"], stage["search_ms"], stage["error_search_ms"]) > 0


def test_valid_ratios_are_those_asked_for(results):
    """Of 64 products, as near as ties allow: those of decay matrices come in few sizes."""
    for row, asked in zip(results["rows"], RATIOS * 16, strict=True):
        if asked == 1:
            assert row["valid_ratio"] == 1
        elif row["block"] == 32:  # else there are few products
            assert row["valid_ratio"] == pytest.approx(asked, abs=0.15)


def test_the_header_tells_how_to_repeat_it(results):
    assert "scripts/bench_mm.py --device cpu --sizes 128 100" in results["header"]["command"]
    assert results["header"]["L2 cache"] == "warm"


def test_the_markdown_shows_the_same_rows(folder, results):
    text = (folder / "small.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith(("| decay", "| normal"))]
    assert len(rows) == len(results["rows"]) + len(results["stages"])
    for line, row in zip(rows, results["rows"], strict=False):
        assert f"| {row['n']} | {row['valid_ratio']:.1%} | {row['dense_ms']:.4g} |" in line
    assert "(small.png)" in text


def test_an_interrupted_run_goes_on(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench_mm, "copy_bandwidth", lambda device, repeats: 1e7)
    arguments = ["--device", "cpu", "--sizes", 64, 100, 128, "--precisions", "float32"]
    arguments += ["--ratios", 1, 0.5, "--repeats", 1]
    assert_resumes(bench_mm, "bench_operands", arguments, tmp_path, 3, capsys, monkeypatch)


# ---- Bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--device", "foo"), "'foo' (choose from"),
        (("--device", "meta"), "'meta' (choose from"),
        (("--sizes", "0"), "an integer of 1 or more; got 0"),
        (("--sizes", "64", "x"), "an integer of 1 or more; got x"),
        (("--repeats", "0"), "an integer of 1 or more; got 0"),
        (("--repeats", "-3"), "an integer of 1 or more; got -3"),
        (("--ratios", "1.5"), "a valid ratio in (0, 1]; got 1.5"),
        (("--ratios", "0.5", "0"), "a valid ratio in (0, 1]; got 0"),
        (("--ratios", "nan"), "a valid ratio in (0, 1]; got nan"),
        (("--ratios", "half"), "a valid ratio in (0, 1]; got half"),
        (("--blocks", "48"), "three of these as in 128x64x128; got '48'"),
        (("--blocks", "128x64"), "got '128x64'"),
        (("--precisions", "int8"), "'int8' (choose from"),
    ],
)
def test_options_out_of_range(capsys, tmp_path, arguments, words):
    assert_refused(bench_mm.main, arguments, words, tmp_path / "out", capsys)


def test_cuda_where_there_is_none(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    arguments = ["--device", "cuda", "--out", str(tmp_path / "out")]
    assert exit_code(lambda: bench_mm.main(arguments)) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert "--device cuda" in line
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_written(capsys, tmp_path):
    (tmp_path / "file").touch()
    out = tmp_path / "file" / "out"
    assert exit_code(lambda: bench_mm.main(["--device", "cpu", "--out", str(out)])) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert str(out) in line
