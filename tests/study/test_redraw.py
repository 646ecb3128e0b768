"""Pages and pictures of results, drawn again from their JSON files."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import plot_results
import plot_summary
from bench import conv_report, mm_report
from common.console import exit_code
from common.plots import _spread

REPOSITORY = Path(__file__).resolve().parents[2]
RESULTS = REPOSITORY / "docs" / "results"
FILES = sorted(RESULTS.glob("*.json"))
NOT_DRAWN = {"scattered_digits", "scattered_digits_h200"}  # pictures of pixels, which no JSON has


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_page_is_what_its_json_file_gives(path, tmp_path):
    """Written by the script and not by hand, and with the numbers that were measured."""
    copy = tmp_path / path.name
    shutil.copy(path, copy)
    entry = plot_results.redraw(copy)
    page = copy.with_suffix(".md").read_text()
    assert page == path.with_suffix(".md").read_text()
    title, _, conclusion, _, _, _, device, date, command = page.splitlines()[:9]
    assert title.startswith("# ")
    assert conclusion == f"**{entry[1]}**"
    assert conclusion.endswith(".**")
    header = json.loads(path.read_text())["header"]
    assert device == f"| device | {header['device']} |"
    assert date == f"| date | {header['date']} |"
    assert command == f"| command | `{header['command']}` |"
    pictures = [file.name for file in tmp_path.glob("*.png")]
    is_drawn = ".png)" in page and path.stem not in NOT_DRAWN
    assert pictures == ([copy.with_suffix(".png").name] if is_drawn else [])
    for picture in pictures:
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")


def test_the_index_names_every_result():
    lines = (RESULTS / "README.md").read_text().splitlines()
    assert sum(line.startswith("| [") for line in lines) == len(FILES)
    for path in FILES:
        assert any(line.startswith(f"| [{path.stem}]({path.stem}.md) | ") for line in lines)


def test_redrawing_needs_neither_torch_nor_the_library(tmp_path):
    shutil.copy(RESULTS / "mm_cpu.json", tmp_path)
    code = (
        "import sys; sys.modules['torch'] = sys.modules['spamm_torch'] = None; "
        "import plot_results; plot_results.main(sys.argv[1:])"
    )
    subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "mm_cpu.json")],
        cwd=REPOSITORY / "scripts",
        check=True,
        capture_output=True,
    )
    assert (tmp_path / "mm_cpu.md").read_text() == (RESULTS / "mm_cpu.md").read_text()


def test_the_summary(tmp_path):
    for name in ("mm_h200", "study_h200", "vgg13_h200"):
        shutil.copy(RESULTS / f"{name}.json", tmp_path)
    plot_summary.main(["--results", str(tmp_path)])
    assert (tmp_path / "summary.png").read_bytes().startswith(b"\x89PNG")


def test_the_conclusion_of_products_names_the_size_of_the_readme():
    _, rows, _ = mm_report.from_data(json.loads((RESULTS / "mm_h200.json").read_text()))
    said = mm_report.conclusion(rows)
    assert said.startswith("Decay matrices, N = 8192, 5% of the block products kept: mm is 6.8x")
    for row in rows:
        if (row.data, row.n, row.valid_ratio < 0.06) == ("decay", 8192, True):
            assert f"{row.speedup:.1f}x ({row.precision})" in said


def test_the_conclusion_of_convolutions_counts_layers():
    def row(layer, ratio, speedup):
        measured = (1.0, 1.0 / speedup, None, 0.0, speedup, None, None, 0.0)
        return conv_report.Row(layer, 128, "float32", "even", (64,) * 3, ratio, ratio, *measured)

    rows = [row("conv11", 1.0, 0.5), row("conv11", 0.3, 0.9)]
    rows += [row("conv12", 1.0, 0.9), row("conv12", 0.3, 1.5)]
    rows += [row("conv21", 1.0, 1.1), row("conv21", 0.3, 2.0)]
    assert conv_report.conclusion(rows) == (
        "Layers faster than the dense convolution, in float32: 2 of 3 at 30% kept (median 1.50x), "
        "1 of 3 at 100% kept (median 0.90x)."
    )


def test_names_of_lines_are_moved_apart_and_no_further():
    assert _spread([50, 30, 10], 10) == [50, 30, 10]
    assert _spread([20, 20], 10) == [25, 15]
    assert _spread([50, 21, 20, 19], 10) == [50, 30, 20, 10]


# ---- Bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"header": {"command": "ls"}}', '{"header": {"command": "scripts/x.py"}}'],
)
def test_files_of_something_else(content, tmp_path, capsys):
    path = tmp_path / "a.json"
    path.write_text(content)
    assert exit_code(lambda: plot_results.main([str(path)])) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: expected results of bench_mm, ")
    assert line.endswith(f"as JSON; got {path}")
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize("main", [plot_results.main, plot_summary.main])
def test_files_that_are_missing(main, tmp_path, capsys):
    arguments = [str(tmp_path / "mm_h200.json")]
    if main is plot_summary.main:
        arguments = ["--results", str(tmp_path)]
    assert exit_code(lambda: main(arguments)) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line == f"error: cannot read {tmp_path / 'mm_h200.json'}: No such file or directory"
