"""The benchmark of convolutions: a small real run, and what it refuses."""

import json

import pytest
from tiny_study import one_thread  # noqa: F401  the fixture is automatic

from scripts import bench_conv
from scripts._console import exit_code

RATIOS = (1.0, 0.5)
LAYERS = ("conv51", "res7-reduce")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run over two layers and two kinds of data, the batch filling a block in part."""
    folder = tmp_path_factory.mktemp("bench")
    arguments = (
        *("--device", "cpu", "--groups", "vgg13", "resnet50", "--layers", *LAYERS),
        *("--batches", 70, "--data", "even", "centred", "--ratios", *RATIOS),
        *("--repeats", 2, "--out", folder, "--name", "small"),
    )
    bench_conv.main([str(argument) for argument in arguments])
    return folder


@pytest.fixture(scope="module")
def rows(folder):
    return json.loads((folder / "small.json").read_text())["rows"]


def test_three_files(folder):
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["small.json", "small.md", "small.png"]
    assert (folder / "small.png").read_bytes().startswith(b"\x89PNG")


def test_every_case_is_there_once(rows):
    cases = [(layer, data) for layer in LAYERS for data in ("even", "centred")]
    assert [(row["layer"], row["data"]) for row in rows] == [c for c in cases for _ in RATIOS]


def test_rows_agree_with_themselves(rows):
    for i, row in enumerate(rows):
        assert row["valid_ratio"] == pytest.approx(RATIOS[i % len(RATIOS)], abs=0.02)
        assert row["speedup"] == pytest.approx(row["dense_ms"] / row["conv2d_ms"])
        assert 0 <= row["error"] <= bench_conv.TOLERANCE["float32"]
        assert row["left_ms"] is None  # norms are left for the next layer on CUDA
        assert row["extra_memory"] is None


def test_markdown_has_a_line_for_each_row(folder, rows):
    text = (folder / "small.md").read_text()
    assert all(text.count(f"| {layer} | 70 |") == len(rows) // 2 for layer in LAYERS)


def test_wrong_results_are_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(bench_conv.TOLERANCE, "float32", -1.0)
    arguments = ["--device", "cpu", "--groups", "resnet50", "--layers", "res7-reduce"]
    arguments += ["--batches", "64", "--ratios", "1", "--repeats", "1", "--out", str(tmp_path)]
    assert exit_code(lambda: bench_conv.main(arguments)) == 1
    assert "wrong result for res7-reduce, batch 64" in "".join(capsys.readouterr())
    assert not list(tmp_path.iterdir())
