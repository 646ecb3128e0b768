"""kill -9 at any moment, or a disk that is full: what was finished is there, each file whole."""

import io
import itertools
import json
import multiprocessing
import os
import random
import re
import resource
import signal
import stat
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn

import spamm_torch
from models.files import UserError, read_arrays, write_atomically
from models.training import load_checkpoint, save_checkpoint
from spamm_torch import _output
from spamm_torch._output import Progress, write_text


def killed_at_work(work, seconds):
    """Kills a process that runs ``work(step)`` for 0, 1, 2, ...; how many steps it finished."""
    fork = multiprocessing.get_context("fork")
    done = fork.Value("i", 0, lock=False)

    def steps():
        for step in itertools.count():
            work(step)
            done.value = step + 1

    child = fork.Process(target=steps)
    child.start()
    while not done.value and child.is_alive():
        time.sleep(1e-3)
    time.sleep(seconds)
    child.kill()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    return done.value


def checkpoint(path):
    content = {"config": {}, "model": {"w": torch.ones(9000)}}
    return (
        lambda step: save_checkpoint(path, {**content, "data": step}),
        lambda: load_checkpoint(path)["data"],
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
        lambda step: _output.write_text(path, json.dumps({"step": step, "rest": [0] * 9000})),
        lambda: json.loads(path.read_text())["step"],
    )


KINDS = [checkpoint, arrays, settings]


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_finished_is_kept(tmp_path, kind):
    rng = random.Random(0)
    for attempt in range(4):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        work, last = kind(folder / "file")
        finished = killed_at_work(work, rng.random() / 20)
        assert last() in (finished - 1, finished)


@pytest.mark.parametrize("room", [0, 1000])
@pytest.mark.parametrize("kind", KINDS)
def test_a_full_disk_keeps_what_was_finished(tmp_path, kind, room):
    """The limit of a file's size stands for it: the system refuses what goes beyond ``room``."""
    work, last = kind(tmp_path / "file")
    work(0)
    before = os.listdir(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        with pytest.raises((UserError, OSError, ValueError)) as caught:
            work(1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "File too large" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert last() == 0
    assert os.listdir(tmp_path) == before
    work(2)
    assert last() == 2


# ---- Files that are written whole or not at all --------------------------------------------------


def test_a_file_takes_the_place_of_the_old_one_and_its_mode(tmp_path):
    path, link = tmp_path / "net.json", tmp_path / "link"
    link.symlink_to(path)
    old = os.umask(0o027)
    try:
        write_text(path, "old")
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    for mode in (0o640, 0o600):
        path.chmod(mode)
        write_text(link, "new")
        assert path.read_text() == "new"
        assert link.is_symlink()
        assert stat.S_IMODE(path.stat().st_mode) == mode
    path.chmod(0o400)
    with pytest.raises(PermissionError, match=r"read-only: .*/net\.json'$"):
        write_text(path, "newer")
    assert path.read_text() == "new"
    assert sorted(os.listdir(tmp_path)) == ["link", "net.json"]


def write_bytes(path, text):
    write_atomically(path, lambda file: file.write(text.encode()))


both_writers = pytest.mark.parametrize("write", [write_text, write_bytes])
SAID = (OSError(28, "first"), RuntimeError("first\nsecond"))  # by scripts, in a line


@both_writers
@pytest.mark.parametrize("error", [*SAID, KeyboardInterrupt(), SystemExit(), ValueError()], ids=str)
def test_a_failure_leaves_the_old_file_and_nothing_beside_it(tmp_path, monkeypatch, write, error):
    """A file that a kill leaves says what it is; scripts make folders."""
    path = (tmp_path if write is write_text else tmp_path / "new") / "net.json"
    for text in ("older", "old"):
        write(path, text)

    def fail(_):
        (other,) = set(os.listdir(path.parent)) - {path.name}
        assert re.fullmatch(r"\.spamm_torch_unfinished_\w+|net\.json\.\w+\.tmp", other)
        raise error

    monkeypatch.setattr(os, "fsync", fail)
    is_line = write is write_bytes and error in SAID
    with pytest.raises(UserError if is_line else type(error)) as caught:
        write(path, "new")
    assert not is_line or str(caught.value) == f"cannot write {path}: first"
    assert path.read_text() == "old"
    assert os.listdir(path.parent) == ["net.json"]


@pytest.mark.parametrize("name", ["é" * 120, "日" * 85, "n" * 255])
def test_a_name_as_long_as_names_can_be(tmp_path, name):
    write_text(tmp_path / name, "text")
    assert (tmp_path / name).read_text() == "text"


def test_an_error_names_the_path_of_the_user(tmp_path):
    for path in (tmp_path / "nope" / "net.json", tmp_path):
        with pytest.raises(OSError, match=rf"^\[Errno \d+\] .*: '{path}'$"):
            write_text(path, "text")
    for path in (3, None, b"net.json"):
        with pytest.raises(TypeError, match="path must be a path; got "):
            write_text(path, "text")


def test_what_is_no_file_is_written_to(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(pipe.read_text)
        write_text(pipe, "text")
    assert found.result() == "text"
    assert stat.S_ISFIFO(pipe.stat().st_mode)


@both_writers
def test_writers_do_not_share_their_unfinished_files(tmp_path, write):
    path, texts = tmp_path / "journal", [str(number) * 100_000 for number in range(4)]
    write(path, texts[0])
    with ThreadPoolExecutor(4) as pool:
        written = pool.map(write, [path] * 20, 5 * texts)
        seen = {path.read_text() for _ in range(50)}
        list(written)  # raises what a writer raised
    assert seen <= set(texts)
    assert os.listdir(tmp_path) == ["journal"]


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("is_terminal", [False, True])
def test_the_backend_says_where_somebody_looks_how_far_it_is(monkeypatch, is_terminal):
    found = Terminal() if is_terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", found)
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3)).eval()
    spamm_torch.fuse(torch.fx.symbolic_trace(model), [torch.rand(1, 3, 8, 8)], inner="eager")
    line = "spamm_torch: measuring convolutions, 0 of 2"
    assert (line in found.getvalue()) == is_terminal
    assert bool(found.getvalue()) == is_terminal


def test_stages_are_said(capsys, monkeypatch):
    """Each at once, its steps at most once in ten seconds."""
    times = iter([0.0, 1.0, 2.0, 11.0, 12.0])
    monkeypatch.setattr("spamm_torch._output.time.monotonic", lambda: next(times))
    progress = Progress("calibrate", True)
    progress.at("tracing")
    for done in range(3):
        progress.at("comparing", done, 4)
    progress.at("measuring", 3, 4)
    lines = ["tracing", "comparing, 0 of 4", "comparing, 2 of 4", "measuring, 3 of 4"]
    assert capsys.readouterr().err.splitlines() == [f"calibrate: {line}" for line in lines]
