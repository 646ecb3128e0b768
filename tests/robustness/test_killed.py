"""kill -9 at any moment: what was finished is there, and each file is whole."""

import json
import os
import random
import signal
import time

import numpy as np
import pytest
import torch

from common.journal import Journal
from models.checkpoint import load_checkpoint, save_checkpoint
from models.files import read_arrays, write_atomically
from spamm_torch import _files
from spamm_torch.calibration import journal as calibration


def killed_at_work(work, seconds):
    """Kills a process that runs ``work(step)`` for 0, 1, 2, ...; how many steps it finished."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(read)
            step = 0
            while True:
                work(step)
                os.write(write, b".")
                step += 1
        finally:
            os._exit(1)
    os.close(write)
    done = os.read(read, 1)  # at least one step
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    while more := os.read(read, 65536):
        done += more
    os.close(read)
    return len(done)


def checkpoint(path):
    content = {"config": {}, "data": "", "model": {"w": torch.ones(9000)}, "optimizer": {}}
    return (
        lambda step: save_checkpoint(path, {**content, "step": step}),
        lambda: load_checkpoint(path)["step"],
    )


def arrays(path):
    return (
        lambda step: write_atomically(
            path, lambda file: np.savez(file, step=step, rest=np.ones(9000))
        ),
        lambda: int(read_arrays(path)["step"]),
    )


def settings(path):
    return (
        lambda step: _files.write_text(path, json.dumps({"step": step, "rest": [0] * 9000})),
        lambda: json.loads(path.read_text())["step"],
    )


def results(path):
    """The groups of a long measurement: none that was finished is measured again."""
    journal = Journal(path.parent, path.name, {})

    def last():
        again, step = Journal(path.parent, path.name, {}), 0
        while str(step) in again:
            assert again.measured(str(step), pytest.fail) == [step] * 500
            step += 1
        return step - 1

    return lambda step: journal.measured(str(step), lambda: [step] * 500), last


def trials(path):
    """The trials of a calibration."""
    journal = calibration.Journal(path, {"model": "m"})

    def last():
        kept = json.loads(path.read_text())["results"]
        assert all(kept[f"trial {step}"] == [step] * 500 for step in range(len(kept)))
        return len(kept) - 1

    return lambda step: journal.measured(f"trial {step}", lambda: [step] * 500, list), last


@pytest.mark.parametrize("kind", [checkpoint, arrays, settings, results, trials])
def test_what_was_finished_is_kept(tmp_path, kind):
    rng = random.Random(0)
    for attempt in range(4):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        work, last = kind(folder / "file")
        finished = killed_at_work(work, rng.random() / 20)
        assert last() in (finished - 1, finished)
