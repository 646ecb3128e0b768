"""The benchmark of convolutions on several devices: a small real run, and what it refuses."""

import itertools
import json

import pytest
import torch
from bench_checks import assert_refused, assert_resumes, assert_three_files
from tiny_study import one_thread  # noqa: F401  the fixture is automatic

import bench_multi_gpu_conv
import spamm_torch
from bench.multi_gpu import conv_report, convolutions
from bench.multi_gpu.conv_report import Row

LAYERS, BATCHES, RATIOS = ("conv51", "conv52"), (128, 200), (0.5, 1.0)


def run(folder, *arguments):
    """The results of a run on the CPU."""
    options = ("--device", "cpu", "--out", folder, "--name", "small", "--repeats", 1, *arguments)
    bench_multi_gpu_conv.main([str(option) for option in options])
    return json.loads((folder / "small.json").read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    run(folder, "--layers", *LAYERS, "--batches", *BATCHES, "--ratios", *RATIOS)
    return folder


def test_three_files(folder):
    assert_three_files(folder)


def test_every_cell_is_there_once_and_equal(results):
    cells = [(row["layer"], row["batch"], row["ratio"]) for row in results["rows"]]
    assert cells == list(itertools.product(LAYERS, BATCHES, RATIOS))
    for row in results["rows"]:
        assert row["absent"] is None
        assert row["equal"] is True
        assert min(row["one_ms"], row["all_ms"]) > 0
        assert row["speedup"] == pytest.approx(row["one_ms"] / row["all_ms"])
        assert row["valid_ratio"] == pytest.approx(row["ratio"], abs=0.05)


def test_the_markdown_shows_the_same_rows(folder, results):
    text = (folder / "small.md").read_text()
    for row in results["rows"]:
        shown = f"{row['speedup']:.2f}x<br>{1e3 * row['one_ms']:.4g}, {1e3 * row['all_ms']:.4g} |"
        [line] = [
            x for x in text.splitlines() if x.startswith(f"| {row['layer']} | {row['ratio']:.0%} ")
        ]
        assert shown in line
    assert "(small.png)" in text


def test_an_interrupted_run_goes_on(tmp_path, capsys, monkeypatch):
    arguments = ["--device", "cpu", "--layers", "conv51", "--batches", 64, 128, 192]
    arguments += ["--ratios", 1, "--repeats", 1]
    assert_resumes(
        bench_multi_gpu_conv, "measure_cell", arguments, tmp_path, 3, capsys, monkeypatch
    )


def test_a_cell_that_fails_is_a_row(tmp_path, monkeypatch):
    def conv2d_shards(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory on cuda:1.\nMore lines.")

    monkeypatch.setattr(spamm_torch, "conv2d_shards", conv2d_shards)
    found = run(tmp_path, "--layers", "conv51", "--batches", 64, "--ratios", 0.5)
    assert [row["absent"] for row in found["rows"]] == ["CUDA out of memory on cuda:1."]
    text = (tmp_path / "small.md").read_text()
    assert "| conv51, batch 64 | CUDA out of memory on cuda:1. |" in text
    assert not (tmp_path / "small.png").exists()


def test_image_cuts():
    assert convolutions.image_cuts(200, 2) == [0, 128, 200]
    assert convolutions.image_cuts(8192, 4) == [0, 2048, 4096, 6144, 8192]
    assert convolutions.image_cuts(64, 2) == [0, 0, 64]


def test_the_conclusion():
    def row(layer, batch, ratio, speedup):
        return Row(layer, batch, ratio, speedup=speedup, equal=True)

    rows = [row("conv11", 128, 0.5, 0.5), row("conv11", 512, 0.5, 1.5)]
    rows += [row("conv12", 128, 0.5, 1.1), row("conv12", 512, 0.5, 1.5)]
    rows += [row("conv52", 128, 0.5, 0.5), row("conv52", 512, 0.5, 0.9)]
    rows += [row("conv52", 128, 1.0, 5.0)]
    assert conv_report.conclusion(rows, 2) == (
        "2 devices against one, 50% of the block products kept: they pay for 2 of 3 layers, from a "
        "batch of about 130 (conv12) to 260 (conv11) on."
    )
    assert conv_report.conclusion(rows[4:6], 2).endswith(
        "they pay for no layer and batch measured."
    )


@pytest.mark.cuda
@pytest.mark.multi_gpu
def test_two_gpus_measure_every_cell(tmp_path):
    arguments = ("--batches", 128, 512, "--repeats", 1, "--out", tmp_path, "--name", "small")
    bench_multi_gpu_conv.main([str(argument) for argument in arguments])
    for row in json.loads((tmp_path / "small.json").read_text())["rows"]:
        assert row["absent"] is None, row
        assert row["equal"], row


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--layers", "conv99"), "'conv99' (choose from"),
        (("--batches", "0"), "an integer of 1 or more; got 0"),
        (("--precision", "int8"), "'int8' (choose from"),
        (("--parts", "1"), "an integer of 2 or more; got 1"),
        (("--ratios", "0"), "a valid ratio in (0, 1]; got 0"),
    ],
)
def test_options_out_of_range(capsys, tmp_path, arguments, words):
    assert_refused(bench_multi_gpu_conv.main, arguments, words, tmp_path / "out", capsys)
