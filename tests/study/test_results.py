"""Pages of results: made of their JSON files, and of nothing else."""

import json
import re
import shutil
from pathlib import Path

import pytest
from golden import assert_kept
from processes import python

import plot_results
from common import results
from common.options import exit_code
from common.results import KINDS
from models.files import UserError

REPOSITORY = Path(__file__).resolve().parents[2]
RESULTS = REPOSITORY / "docs" / "results"
FILES = sorted(RESULTS.glob("*.json"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_page_is_what_its_json_file_gives(path):
    """Commands are of today or name their commit; one row a measurement holds."""
    page = results.load(path)
    assert path.read_text() == results._as_json(page)
    assert path.with_suffix(".md").read_text() == results._markdown(page, path.stem)
    assert path.with_suffix(".png").exists() == (results._shown(page) is not None)
    for run in page["runs"]:
        command = run["header"]["command"]
        script = next(word for word in command.split() if word.endswith((".py", "pytest")))
        is_there = script == "pytest" or (REPOSITORY / script).exists()
        assert is_there or re.search(r"# at commit [0-9a-f]{8}$", command), command
    machines = {run["name"]: results._machine(run) for run in page["runs"]}
    for kind in KINDS:
        rows = [row for row in results.rows_of(page, kind) if not row.get("absent")]
        keys = [(machines[row["run"]], results._key(kind, row)) for row in rows]
        assert len(set(keys)) == len(keys)


def test_the_index_names_every_page_in_short_lines():
    pages = {path.stem: results.load(path) for path in FILES}
    text = (RESULTS / "README.md").read_text()
    assert text == results.index(pages)
    assert len(pages) <= 12
    lines = text.splitlines()
    assert len(lines) <= 25
    assert max(map(len, lines)) <= 120


def test_a_picture_is_drawn_without_torch_and_the_library(tmp_path):
    shutil.copy(RESULTS / "density_matrix.json", tmp_path)
    code = (
        "import sys; sys.modules['torch'] = sys.modules['spamm_torch'] = None; "
        "import plot_results; plot_results.main(sys.argv[1:])"
    )
    python("-c", code, tmp_path / "density_matrix.json", cwd=REPOSITORY / "scripts", check=True)
    for suffix in (".json", ".md"):
        made = (tmp_path / "density_matrix").with_suffix(suffix).read_text()
        assert made == (RESULTS / "density_matrix").with_suffix(suffix).read_text()
    assert (tmp_path / "density_matrix.png").read_bytes().startswith(b"\x89PNG")


def test_figures_are_written_where_the_marks_are():
    """README has those that are recorded."""
    text = (REPOSITORY / "README.md").read_text()
    assert plot_results.with_figures(text, plot_results.figures(plot_results.load(RESULTS))) == text
    begin, end = "before\n<!-- figures: begin -->\n", "\n<!-- figures: end -->\nafter\n"
    assert plot_results.with_figures(f"{begin}obsolete{end}", ["| a |"]) == f"{begin}| a |{end}"
    with pytest.raises(UserError, match="expected a page with the lines"):
        plot_results.with_figures("no marks", [])


PAGE = {"title": "T", "headline": "H", "notes": ""}


def run(name, date, *rows, **header):
    header = {"device": "a chip", "date": date, "command": "bench.py", "torch": "2"} | header
    return {"name": name, "said": "Said.", "header": header, "tables": {"products": list(rows)}}


def row(n, speedup, **rest):
    at = {"data": "decay", "precision": "float32", "block": 64, "n": n, "ratio": 0.3}
    return at | {"dense_ms": 2.0, "speedup": speedup, "valid_ratio": 0.3} | rest


def test_a_page_of_runs_that_supersede_each_other(tmp_path, capsys):
    """Rows of the same measurement on as many devices; those without figures supersede nothing."""
    page, more = tmp_path / "x.json", tmp_path / "more.json"
    first = run("old", "2026-01-01", *(row(n, 2.0) for n in (1024, 2048, 4096, 8192)))
    results.write(page, PAGE | {"notes": "A note.", "runs": [first]})
    failed = {name: value for name, value in row(2048, None).items() if name != "dense_ms"}
    for new in (
        run("other", "2026-01-02", row(1024, 9.0), device="another"),
        run("four", "2026-01-02", row(1024, 9.0), parts=4),
        run("new", "2026-01-03", row(1024, 2.05), row(4096, 1.9), row(8192, 2.1), row(512, 1.0)),
        run("failed", "2026-01-04", failed | {"absent": "no memory"}),
        run("new", "2026-01-05", row(1024, 1.7)),
    ):
        results.write(more, PAGE | {"runs": [new]})
        plot_results.main([str(page), "--add", str(more)])
    lines = page.with_suffix(".md").read_text().splitlines()
    moved = [line for line in capsys.readouterr().out.splitlines() if line != "x: H"]
    assert_kept("page", {"lines": lines, "moved": moved})


def test_a_kind_whose_first_column_is_a_text_has_no_figure_that_moves():
    rows = [{"case": "VGG13", "name": "conv12", "shape": "64 > 64, 3x3"}]
    old, new = ({"name": name, "header": {"device": "d"}} for name in ("old", "new"))
    page = {"runs": [old | {"tables": {"calibrated layers": rows}}]}
    assert results.add(page, new | {"tables": {"calibrated layers": rows}}) == []
    assert [run["tables"] for run in page["runs"]] == [{}, {"calibrated layers": rows}]


@pytest.mark.parametrize(
    "content",
    [
        json.dumps(PAGE | {"runs": [{"tables": {}}]}),
        '{"runs": [{"tables": {"x": {"columns": [], "rows": []}}}]}',
        '{"runs": [{"tables": {"products": {"columns": ["n"], "rows": [[1, 2]]}}}]}',
    ],
)
def test_files_of_something_else(content, tmp_path, capsys):
    path = tmp_path / "a.json"
    path.write_text(content)
    assert exit_code(lambda: plot_results.main([str(path)])) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line == f"error: expected a page of results as JSON; got something else in {path}"
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]


def test_what_is_found_is_said_in_a_line():
    rows = [row(n, speedup) for n, speedup in ((1024, 2.0), (2048, 4.0), (4096, 9.0))]
    rows += [row(1024, 0.5) | {"ratio": 1.0}, {**row(8192, None), "absent": "no memory"}]
    said = [results.said({"products": some}) for some in (rows, rows[4:])]
    assert_kept("said", said)
