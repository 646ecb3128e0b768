"""spamm_torch.distributed: one set of processes for each number of ranks, which runs all cases.

The cases are in distributed_cases.py; a test here is the outcome of one of them.
"""

import functools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import distributed_cases
import pytest
import torch

import spamm_torch

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LIMIT = 900  # seconds for all ranks of a world together, on a machine with much else to do


def environment():
    """That of the ranks: they import this package and these tests; one CPU thread each."""
    path = os.pathsep.join(map(str, (ROOT, HERE.parent, HERE)))
    return {
        **os.environ,
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # for torch's deterministic mode
    }


@functools.cache
def outcomes(world, device):
    """For each rank, what has come of each case, and what the rank wrote."""
    with tempfile.TemporaryDirectory() as folder:
        script = str(HERE / "distributed_cases.py")
        ranks = range(world)
        logs = [Path(folder) / f"log{rank}" for rank in ranks]
        processes = [
            subprocess.Popen(
                [sys.executable, script, str(rank), str(world), device, folder],
                env=environment(),
                stdout=logs[rank].open("w"),
                stderr=subprocess.STDOUT,
            )
            for rank in ranks
        ]
        deadline = time.monotonic() + LIMIT
        for process in processes:
            try:
                process.wait(max(0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        records = [Path(folder) / f"rank{rank}.json" for rank in ranks]
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
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    options = ["--rows", "700", "--valid-ratio", "0.1"]
    result = subprocess.run(
        [*command, "--nproc-per-node", "2", str(ROOT / "examples/distributed_mm.py"), *options],
        env={**environment(), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert result.returncode == 0, result.stderr
    assert re.search(r"^2 ranks with gloo: .* equal to one process", result.stdout, re.MULTILINE)
    assert re.search(r"travel in float32", result.stdout)
