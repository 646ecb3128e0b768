"""The benchmark of convolutions: a small real run, and what it refuses."""

import itertools

import pytest
from bench_checks import assert_refused, assert_resumes, assert_three_files
from tiny_study import one_thread  # noqa: F401  the fixture is automatic

import bench_conv
from bench.conv_layers import GROUPS, NAMES, group_of
from common.console import exit_code

LAYERS = ("conv51", "res7-reduce")  # of different groups, 3 x 3 and 1 x 1
RATIOS = (1.0, 0.5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run over two layers and both data sets, with a block that sticks out of the batch."""
    folder = tmp_path_factory.mktemp("bench")
    arguments = (
        *("--device", "cpu", "--groups", "vgg13", "resnet50", "--layers", *LAYERS),
        *("--batches", 72, "--precisions", "float32", "--ratios", *RATIOS),
        *("--data", "even", "centred", "--repeats", 2, "--out", folder, "--name", "small"),
    )
    bench_conv.main([str(argument) for argument in arguments])
    return folder


def test_three_files(folder):
    assert_three_files(folder)


def test_every_case_is_there_once(results):
    cases = [(layer, data) for layer in LAYERS for data in ("even", "centred")]
    found = [(row["layer"], row["data"]) for row in results["rows"]]
    assert found == [case for case in cases for _ in RATIOS]


def test_rows_agree_with_themselves(results):
    for row, asked in zip(results["rows"], RATIOS * 4, strict=True):
        assert row["asked_ratio"] == asked
        assert row["valid_ratio"] == pytest.approx(asked, abs=0.02)
        assert min(row["dense_ms"], row["conv2d_ms"]) > 0
        assert row["speedup"] == pytest.approx(row["dense_ms"] / row["conv2d_ms"])
        assert 0 < row["error"] <= bench_conv.TOLERANCE["float32"]
        assert row["chained_ms"] is None  # chains are CUDA's


def test_the_markdown_shows_the_same_cases(folder, results):
    text = (folder / "small.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith(("| conv", "| res"))]
    assert len(rows) == len(LAYERS) * 2
    for line, whole, half in zip(rows, results["rows"][::2], results["rows"][1::2], strict=True):
        assert f"| {whole['speedup']:.2f}x | {half['speedup']:.2f}x |" in line
    assert "(small.png)" in text
    assert "scripts/bench_conv.py --device cpu --groups vgg13" in text


def test_layers():
    """Each of them once, and chained: an input's channels and size are an output's before it."""
    assert len(set(NAMES)) == len(NAMES)
    assert all(group_of(layer.name) == group for group, of in GROUPS.items() for layer in of)
    vgg13 = GROUPS["vgg13"]
    for before, layer in itertools.pairwise(vgg13):
        assert layer.in_channels == before.out_channels
        assert layer.size in (before.output_size, before.output_size // 2)


def test_an_interrupted_run_goes_on(tmp_path, capsys, monkeypatch):
    arguments = ["--device", "cpu", "--groups", "vgg13", "--layers", "conv51", "--batches", 1, 2, 3]
    arguments += ["--ratios", 1, 0.5, "--repeats", 1]
    assert_resumes(bench_conv, "bench_case", arguments, tmp_path, 3, capsys, monkeypatch)


# ---- Bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--device", "foo"), "'foo' (choose from"),
        (("--batches", "0"), "an integer of 1 or more; got 0"),
        (("--repeats", "x"), "an integer of 1 or more; got x"),
        (("--ratios", "1.5"), "a valid ratio in (0, 1]; got 1.5"),
        (("--block", "64", "48", "64"), "48 (choose from"),
        (("--precisions", "int8"), "'int8' (choose from"),
        (("--layers", "conv99"), "'conv99' (choose from"),
    ],
)
def test_options_out_of_range(capsys, tmp_path, arguments, words):
    assert_refused(bench_conv.main, arguments, words, tmp_path / "out", capsys)


def test_layers_of_another_group(capsys, tmp_path):
    arguments = ["--device", "cpu", "--groups", "large", "--layers", "conv21"]
    assert exit_code(lambda: bench_conv.main([*arguments, "--out", str(tmp_path / "out")])) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line == "error: expected layers of --groups large; got conv21"
    assert not (tmp_path / "out").exists()


def test_wrong_results_are_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(bench_conv.TOLERANCE, "float32", -1.0)
    arguments = ["--device", "cpu", "--groups", "resnet50", "--layers", "res7-reduce"]
    arguments += ["--batches", "64", "--ratios", "1", "--repeats", "1", "--out", str(tmp_path)]
    assert exit_code(lambda: bench_conv.main(arguments)) == 1
    assert "wrong result for res7-reduce, batch 64" in "".join(capsys.readouterr())
    assert not list(tmp_path.iterdir())
