"""The model of several devices: its formula, its fit to times made from known numbers, its page."""

import dataclasses
import json
import random

import pytest
import torch

import scaling_model
import spamm_torch  # noqa: F401  loads the ops
from bench.multi_gpu import model, scaling_page
from bench.multi_gpu.model import Machine, Measured
from common.console import exit_code
from common.errors import UserError

# 4 TB/s, 391 GB/s; 0.25 + 10.7 v ms at N = 16384, and more for what draws more power.
KNOWN = Machine(
    *(4e9, 391e6, 0.02, 0.08, 0.01, 0.03),
    gammas=(
        ("decay", 0.25 / 16384**3, 10.7 / 16384**3),
        ("normal", 0.5 / 16384**3, 14.2 / 16384**3),
    ),
)
SENT = {("decay", 0.05): 0.11, ("decay", 0.3): 0.38}
SIZES = (8192, 16384, 32768)


def cells_of(machine, parts=2, noise=0.0):
    """What a run would have measured on such a machine."""
    generator = random.Random(0)
    cells = []
    for n in SIZES:
        for data in ("decay", "normal"):
            for ratio in (0.05, 0.3, 1.0):
                for layout in ("R", "S"):
                    sent = SENT.get((data, ratio), 1.0) if layout == "S" else None
                    one_ms = machine.one_ms(n, ratio, data)
                    cell = Measured(layout, data, n, ratio, ratio, one_ms, 0.0, 1.02, sent)
                    time = cell.predicted(machine, parts) * (1 + generator.uniform(-noise, noise))
                    cells.append(dataclasses.replace(cell, all_ms=time))
    return cells


def as_json(cells, parts=2):
    """Cells as bench_multi_gpu.py writes them."""
    rows = [
        {
            "layout": cell.layout,
            "data": cell.data,
            "precision": "float16",
            "n": cell.n,
            "ratio": cell.ratio,
            "valid_ratio": cell.valid,
            "one_ms": cell.one_ms,
            "all_ms": cell.all_ms,
            "speedup": cell.one_ms / cell.all_ms,
            "sent": cell.sent,
            "work_imbalance": cell.imbalance if cell.layout == "S" else None,
            "search_ms": 0.07 * (cell.n / 32768) ** 3 if cell.layout == "R" else None,
            "absent": None,
        }
        for cell in cells
    ]
    absent = {"layout": "0", "data": "decay", "precision": "float16", "n": 32768, "ratio": 0.3}
    absent |= {"absent": "it failed", "one_ms": None, "search_ms": None, "work_imbalance": None}
    header = {"device": "A device", "date": "2026-01-02", "command": "scripts/bench_multi_gpu.py"}
    return {"header": header, "parts": parts, "rows": [*rows, absent]}


def numbers_of(machine):
    """All numbers of a Machine in a row."""
    *plain, gammas = dataclasses.astuple(machine)
    return [*plain, *(number for _, *pair in gammas for number in pair)]


# ---- The formula --------------------------------------------------------------------------------


def test_the_formula_in_numbers():
    """Worked out by hand: N = 32768, 30% valid, two devices."""
    n, valid = 32768, 0.3
    norms = 2 * 2 * n**2 / 4e9 / 2  # ms, half of A and half of B
    compute = 8 * (0.25 + 10.7 * 0.3) / 2
    assert KNOWN.one_ms(n, valid, "decay") == pytest.approx(2 * norms + 0.03 + 2 * compute)
    assert KNOWN.all_ms(n, valid, "decay", 2, 1.0, None) == pytest.approx(norms + 0.02 + compute)
    moved = 0.38 / 2 * 2 * n**2 / 391e6
    assert moved < compute
    expected = norms + 0.08 + 1.1 * compute + moved / 16 + 16 * 0.01
    assert KNOWN.all_ms(n, valid, "decay", 2, 1.1, 0.38 / 2) == pytest.approx(expected)


def test_travelling_counts_where_it_takes_longer():
    moved = 0.5 * 2 * 8192**2 / 1e6
    slow = dataclasses.replace(KNOWN, beta=1e6)
    norms = 2 * 2 * 8192**2 / 4e9 / 2
    assert slow.all_ms(8192, 0.05, "decay", 2, 1.0, 0.5) == pytest.approx(
        norms + 0.08 + moved + moved / 4 + 4 * 0.01
    )


@pytest.mark.parametrize("n", [1, 2048, 2049, 3072, 8192, 12288, 16384, 32768, 40000, 92682, 10**6])
def test_stages_are_those_of_the_library(n):
    blocks = -(-n // 64)
    of_one = torch.ops.spamm_torch.stage_blocks(blocks, 64)
    assert model.stages_of(n) == -(-blocks // of_one)


# ---- Fit and check ------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [2, 4])
def test_the_fit_finds_the_numbers_that_made_the_times(parts):
    machine, checked = model.check(cells_of(KNOWN, parts), parts)
    assert numbers_of(machine) == pytest.approx(numbers_of(KNOWN), rel=1e-4)
    assert {cell.n for cell in checked} == {32768}
    assert len(checked) == 12
    for cell in checked:
        assert cell.predicted(machine, parts) == pytest.approx(cell.all_ms, rel=1e-6)


def test_another_machine():
    gammas = (("decay", 1e-13, 9e-12), ("normal", 2e-13, 8e-12))
    other = Machine(1e9, 25e6, 0.1, 0.5, 0.05, 0.2, gammas)  # bound by travelling at 5%
    machine, _ = model.check(cells_of(other), 2)
    assert numbers_of(machine) == pytest.approx(numbers_of(other), rel=1e-4)


def test_noise_of_a_few_percent_is_not_multiplied():
    machine, checked = model.check(cells_of(KNOWN, noise=0.03), 2)
    assert machine.gammas[0][2] == pytest.approx(KNOWN.gammas[0][2], rel=0.05)
    for cell in checked:
        assert cell.predicted(machine, 2) == pytest.approx(cell.all_ms, rel=0.08)


def test_rows_of_the_benchmark_become_cells():
    """Rows of R have the imbalance of S; other layouts, types and failures are left out."""
    cells = cells_of(KNOWN)
    data = as_json(cells)
    data["rows"].append(data["rows"][0] | {"precision": "float32"})
    assert model.measured(data["rows"]) == cells


@pytest.mark.parametrize("kept", [(32768,), (16384, 32768), (1024, 2048, 32768)])
def test_too_few_sizes(kept):
    sizes = dict(zip(SIZES[-len(kept) :], kept, strict=True))
    cells = [dataclasses.replace(c, n=sizes[c.n]) for c in cells_of(KNOWN) if c.n in sizes]
    with pytest.raises(UserError, match=r"^expected rows in layouts R and S at three sizes"):
        scaling_page.outcome_of(as_json(cells))


def test_the_verdict():
    cells = cells_of(KNOWN)
    assert scaling_page.outcome_of(as_json(cells)).verdict() == (
        "The model holds: fitted to smaller sizes, it predicts all 12 times at N = 32768 within "
        "10%; the largest miss is 0.0%."
    )
    cells[-1] = dataclasses.replace(cells[-1], all_ms=cells[-1].all_ms / 1.25)
    outcome = scaling_page.outcome_of(as_json(cells))
    assert outcome.misses()[-1] == pytest.approx(0.25, abs=1e-4)
    assert outcome.verdict() == (
        "The model does not hold: fitted to smaller sizes, it misses 1 of 12 times at N = 32768 "
        "by more than 10%, the worst by 25.0%."
    )
    page = scaling_page.figures(as_json(cells), "results/x.md")
    assert "**The model does not hold" in page
    assert "The model missed above, so these are no better than that." in page


# ---- Beyond -------------------------------------------------------------------------------------


def test_meshes():
    assert [model.mesh_of(p) for p in (2, 4, 8, 64, 1024)] == [
        (1, 2), (2, 2), (2, 4), (8, 8), (32, 32)
    ]  # fmt: skip
    assert model.moved_share((1, 2)) == model.moved_share((2, 1)) == 0.5
    assert model.moved_share((4, 4)) == 2 * (3 / 4) / 4


def test_the_forecast_in_numbers():
    """16 devices on two hosts, where a device receives 50 GB/s and stages cost 40 us."""
    n = 131072
    line = model.forecast(KNOWN, 16, n=n, valid=0.05, data="decay", sent=0.12, search=(32768, 0.07))
    compute = 512 * (0.25 + 10.7 * 0.05) / 16
    travel = 0.12 * 0.375 * 2 * n**2 / 50e6
    assert (line.parts, line.mesh, line.n) == (16, (4, 4), n)
    assert line.compute_ms == pytest.approx(compute)
    assert line.travel_ms == pytest.approx(travel)
    together = 4 * n**2 / 4e9 / 16 + 0.08 + max(compute, travel) + travel / 16 + 16 * 0.04
    assert line.efficiency == pytest.approx(KNOWN.one_ms(n, 0.05, "decay") / 16 / together)
    assert line.efficiency_dense < line.efficiency
    assert line.replicated_ms == pytest.approx(0.07 * 64)
    assert line.histogram_ms == pytest.approx(0.07 * 64 / 16 + 3 * 0.04)
    matrix = 2 * n**2
    assert line.memory == pytest.approx(3 * matrix / 16 + matrix / 4 + 3 * matrix / 4 / 16)


def test_one_host_is_as_fast_as_was_measured():
    line = model.forecast(KNOWN, 8, n=92682, valid=0.3, data="decay", sent=0.38)
    assert line.travel_ms == pytest.approx(0.38 * 0.5 * 2 * 92682**2 / 391e6)
    assert line.replicated_ms is None
    assert line.histogram_ms is None


# ---- The page -----------------------------------------------------------------------------------


def test_the_page_says_what_was_recorded():
    """docs/scaling.md is what the script writes from docs/results, where there is something."""
    block = scaling_model.block(
        scaling_model.RESULTS, scaling_model.CONVOLUTIONS, scaling_model.PAGE
    )
    text = scaling_model.PAGE.read_text()
    assert scaling_page.with_figures(text, block) == text


def test_figures_are_written_between_the_marks(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(scaling_model, "CONVOLUTIONS", tmp_path / "none.json")
    results, page = tmp_path / "results" / "run.json", tmp_path / "page.md"
    results.parent.mkdir()
    results.write_text(json.dumps(as_json(cells_of(KNOWN))))
    page.write_text(f"before\n\n{scaling_page.BEGIN}\nobsolete\n{scaling_page.END}\nafter\n")
    for _ in range(2):  # the second time nothing changes
        scaling_model.main([str(results), "--page", str(page)])
        text = page.read_text()
        assert text.startswith(
            f"before\n\n{scaling_page.BEGIN}\n\nMeasured on 2 devices (A device)"
        )
        assert text.endswith(f"|\n\n{scaling_page.END}\nafter\n")
    assert "obsolete" not in text
    assert "[every number](results/run.md)" in text
    assert "| decay | 11% | 38% | 100% |" in text
    assert "| W | 4.00 TB/s |" in text
    assert "| gamma(v), times 16384^3, decay | 0.250 + 10.70 v ms |" in text
    assert "| beta | 391 GB/s |" in text
    assert "| 1024 | 32 x 32 | 1048576 | 5.0% |" in text
    printed = capsys.readouterr().out
    for line in printed.splitlines():
        if line.startswith("| "):
            assert line in text
    assert "The model holds" in printed


def test_convolutions_are_named_where_they_are_recorded(tmp_path):
    rows = [
        {"layer": "conv12", "batch": batch, "ratio": 0.5, "speedup": speedup, "equal": True}
        for batch, speedup in {128: 0.5, 512: 1.5}.items()
    ]
    results, convolutions = tmp_path / "mm.json", tmp_path / "conv.json"
    results.write_text(json.dumps(as_json(cells_of(KNOWN))))
    convolutions.write_text(json.dumps({"header": {}, "parts": 2, "rows": rows}))
    text = scaling_model.block(results, convolutions, tmp_path / "page.md")
    assert text.endswith(
        "\n### Convolutions\n\n2 devices against one, 50% of the block products kept: they pay for "
        "1 of 1 layers, from a batch of about 260 (conv12) to 260 (conv12) on. By layer and batch: "
        "[every number](conv.md).\n"
    )
    without = scaling_model.block(results, scaling_model.CONVOLUTIONS, tmp_path / "page.md")
    assert text.startswith(without.partition("### Convolutions")[0].rstrip())


def test_nothing_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr(scaling_model, "RESULTS", tmp_path / "none.json")
    page = tmp_path / "page.md"
    page.write_text(f"{scaling_page.BEGIN}\n{scaling_page.END}\n")
    scaling_model.main([str(tmp_path / "none.json"), "--page", str(page)])
    assert "Nothing is recorded yet." in page.read_text()


# ---- Bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "no marks", scaling_page.END + scaling_page.BEGIN])
def test_a_page_without_marks(text, tmp_path, capsys):
    results, page = tmp_path / "run.json", tmp_path / "page.md"
    results.write_text(json.dumps(as_json(cells_of(KNOWN))))
    page.write_text(text)
    assert exit_code(lambda: scaling_model.main([str(results), "--page", str(page)])) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: expected a page with the lines ")
    assert page.read_text() == text


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"rows": []}', None])
def test_files_of_something_else(content, tmp_path, capsys):
    path = tmp_path / "a.json"
    if content is not None:
        path.write_text(content)
    assert exit_code(lambda: scaling_model.main([str(path), "--page", str(tmp_path / "p")])) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert str(path) in line
