"""spamm_torch.distributed: one set of processes for each number of ranks, which runs all cases.

The cases are in distributed_cases.py; a test here is the outcome of one of them.
"""

import functools
import json
import multiprocessing
import re
import tempfile
import time
from pathlib import Path

import distributed_cases
import pytest
import torch
from processes import FORKS, forked

import spamm_torch

ROOT = Path(__file__).parents[2]
LIMIT = 900  # seconds for all ranks of a world together, on a machine with much else to do


@functools.cache
def outcomes(world, device):
    """For each rank, what has come of each case, and what the rank wrote."""
    processes = FORKS if device == "cpu" else multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            processes.Process(
                target=distributed_cases.main, args=(rank, world, device, Path(folder)), daemon=True
            )
            for rank in range(world)
        ]
        records = [Path(folder) / f"rank{rank}.json" for rank in range(world)]
        logs = [record.with_suffix(".log") for record in records]
        for rank, log in zip(ranks, logs, strict=True):
            log.touch()
            rank.start()
        deadline = time.monotonic() + LIMIT
        for rank in ranks:
            rank.join(max(0, deadline - time.monotonic()))
            rank.kill()
            rank.join()
        return [
            (json.loads(record.read_text()) if record.exists() else {}, log.read_text())
            for record, log in zip(records, logs, strict=True)
        ]


def check(world, device, case):
    ranks = enumerate(outcomes(world, device))
    # A rank that has failed says why the others did not run.
    for rank, (record, log) in sorted(ranks, key=lambda of: case not in of[1][0]):
        outcome = record.get(case, f"did not run; the rank wrote:\n{log}")
        assert outcome == "passed", f"{case} on rank {rank} of {world}: {outcome}"


def every_case(device, worlds, marks=()):
    return [
        pytest.param(world, case, marks=marks)
        for world in worlds
        for case in distributed_cases.cases(world, device)
    ]


@pytest.mark.parametrize(
    ("world", "case"),
    [*every_case("cpu", (1, 4)), *every_case("cpu", (2, 3), pytest.mark.thorough)],
)
def test_gloo(world, case):
    check(world, "cpu", case)


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("world", "case"), [*every_case("cuda", (1,)), *every_case("cuda", (2,), pytest.mark.multi_gpu)]
)
def test_nccl(world, case):
    check(world, "cuda", case)


def test_without_process_group():
    a = torch.ones(64, 64)
    with pytest.raises(ValueError, match=r"^the ranks must have met in .*init_process_group"):
        spamm_torch.distributed.mm(a, a, tau=1.0)


def test_example():
    """examples/distributed_mm.py under torchrun compares with one process itself."""
    launcher = "from torch.distributed.run import main; main()"
    command = ("--standalone", "--nproc-per-node", 2, ROOT / "examples/distributed_mm.py")
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    options = ("--rows", 700, "--valid-ratio", 0.1)
    result = forked("-c", launcher, *command, *options, **environment)
    assert result.returncode == 0, result.stderr
    assert re.search(r"^2 ranks with gloo: .* equal to one process", result.stdout, re.MULTILINE)
    assert re.search(r"travel in float32", result.stdout)
