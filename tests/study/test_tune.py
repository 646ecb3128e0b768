"""scripts/tune.py: the arithmetic of its choice, and both tiles on a GPU."""

import math
import os
import subprocess
import sys

import pytest
import torch

import sanitize
import tune
from common import results


def case(tiles_each, small, large, chosen=None):
    times = {"small": small, "large": large, "chosen": chosen or small}
    return {"tiles_each": tiles_each, "ms": times}


def test_the_threshold_lies_where_the_better_tile_changes():
    cases = [case(0.2, 1, 3), case(0.5, 1, 2), case(0.9, 2, 1), case(4.0, 3, 1)]
    assert tune.best_threshold(cases) == (0.9, 1)


def test_where_no_threshold_is_right_everywhere_the_loss_is_least():
    cases = [case(0.2, 1, 2), case(0.5, 1.1, 1), case(0.9, 1, 1.2), case(4.0, 3, 1)]
    threshold, loss = tune.best_threshold(cases)
    assert threshold == 4.0
    assert loss == pytest.approx(1.1 ** (1 / 4))


def test_a_large_tile_that_never_pays_is_never_taken():
    assert tune.best_threshold([case(0.2, 1, 2), case(9.0, 1, 2)]) == (math.inf, 1)


def test_the_loss_of_the_choice_is_measured_against_the_better_tile():
    cases = [case(0.2, 1, 2, chosen=2), case(9.0, 2, 1, chosen=2)]
    assert tune.mean_loss(cases, lambda _: "chosen") == pytest.approx(2)


def test_tiles_are_counted_with_those_that_stick_out():
    assert tune.tiles_each(1025, 81) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so_in_one_line(capfd):
    for main in (tune.main, sanitize.main):
        assert tune.exit_code(lambda main=main: main([])) == 1
        assert capfd.readouterr().err == "error: expected a CUDA device; torch finds none\n"


@pytest.mark.cuda
def test_both_tiles_are_timed(tmp_path):
    tune.main(
        ["--sizes", "128", "--precisions", "float16", "--repeats", "1", "--out", f"{tmp_path}"]
    )
    [run] = results.load(tmp_path / "tune.json")["runs"]
    times = [(row["ratio"], row["tile"]) for row in run["tables"]["tile times"]]
    assert times == [(r, tile) for r in tune.RATIOS for tile in (*tune.TILES, "chosen")]
    assert "| float16 | 128 | 100% |" in (tmp_path / "tune.md").read_text()


@pytest.mark.cuda
def test_an_unknown_tile_is_refused():
    call = (
        "import torch, spamm_torch as s; a = torch.ones(9, 9, device='cuda'); s.mm(a, a, tau=0.0)"
    )
    run = subprocess.run(
        [sys.executable, "-c", call],
        env=os.environ | {"SPAMM_TORCH_TILE": "huge"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 1
    assert "SPAMM_TORCH_TILE must be small or large; got huge" in run.stderr
