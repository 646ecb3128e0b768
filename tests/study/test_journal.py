"""The journal of a long measurement, and files that are there in full or not at all."""

import concurrent.futures
import contextlib
import resource
import signal

import pytest
import torch
from support import raises_line

from common.journal import Journal, run_settings
from models.checkpoint import save_checkpoint
from models.errors import UserError
from models.files import write_atomically

SETTINGS = {"device": "a machine", "repeats": 3}


def never():
    raise AssertionError("measured again")


def test_a_group_is_on_disk_at_once_and_not_measured_again(tmp_path):
    first = Journal(tmp_path, "mm", SETTINGS)
    assert first.measured("a", lambda: {"block": (64, 32), 0.5: 1.25}) == {
        "block": [64, 32],
        "0.5": 1.25,
    }
    second = Journal(tmp_path, "mm", SETTINGS)
    assert "a" in second
    assert "b" not in second
    assert second.measured("a", never) == {"block": [64, 32], "0.5": 1.25}


def test_fresh_forgets(tmp_path):
    Journal(tmp_path, "mm", SETTINGS).measured("a", lambda: 1)
    assert Journal(tmp_path, "mm", SETTINGS, fresh=True).measured("a", lambda: 2) == 2
    assert Journal(tmp_path, "mm", SETTINGS).measured("a", never) == 2


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (SETTINGS | {"repeats": 4}, "expected repeats 3, as in .*; got 4: give the same options"),
        (SETTINGS | {"device": "b"}, 'expected device "a machine", .*; got "b"'),
        (SETTINGS | {"cold": True}, "expected cold null, .*; got true"),
        ({"device": "a machine"}, "expected repeats 3, .*; got null"),
    ],
)
def test_other_settings_are_refused(tmp_path, settings, words):
    journal = Journal(tmp_path, "mm", SETTINGS)
    journal.measured("a", lambda: 1)
    with pytest.raises(UserError, match=words):
        Journal(tmp_path, "mm", settings)
    assert Journal(tmp_path, "mm", SETTINGS).measured("a", never) == 1


def test_a_group_that_is_not_to_be_kept(tmp_path):
    journal = Journal(tmp_path, "mm", SETTINGS)
    assert journal.measured("a", lambda: (1, 2), keep=lambda group: False) == [1, 2]
    assert journal.measured("a", lambda: (3,), keep=lambda group: group == [3]) == [3]
    assert Journal(tmp_path, "mm", SETTINGS).measured("a", never) == [3]


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"settings": {}, "groups": [1]}'])
def test_a_file_of_something_else_is_refused(tmp_path, content):
    path = tmp_path / "mm.partial.json"
    path.write_text(content)
    with pytest.raises(UserError) as caught:
        Journal(tmp_path, "mm", SETTINGS)
    assert str(caught.value) == (
        f"expected groups of an unfinished run; got something else in {path}: measure anew with "
        "--fresh"
    )


def test_an_interrupt_says_what_is_kept_and_how_to_go_on(tmp_path):
    def interrupted(finished):
        with Journal(tmp_path, "mm", SETTINGS) as journal:
            for key in finished:
                journal.measured(key, lambda: 1)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        interrupted([])
    assert str(caught.value).startswith("no group of measurements was finished; the same command")
    with pytest.raises(KeyboardInterrupt) as caught:
        interrupted(["a"])
    assert str(caught.value) == (
        f"finished groups are in {tmp_path / 'mm.partial.json'}; the same command goes on from "
        "there"
    )


def test_settings_tell_machines_libraries_and_forced_kernels_apart(monkeypatch):
    header = {"device": "d", "torch": "t", "spamm_torch": "s", "command": "c", "date": "today"}
    monkeypatch.delenv("SPAMM_TORCH_FORCE_SM80", raising=False)
    plain = run_settings(header, repeats=3)
    assert plain == run_settings(header | {"command": "e", "date": "tomorrow"}, repeats=3)
    assert plain != run_settings(header | {"torch": "u"}, repeats=3)
    assert plain != run_settings(header, repeats=4)
    monkeypatch.setenv("SPAMM_TORCH_FORCE_SM80", "1")
    assert plain != run_settings(header, repeats=3)


# ---- Files, whatever interrupts their writing ----------------------------------------------------


@contextlib.contextmanager
def small_disk():
    """No file grows beyond 1,000 bytes, as if the disk were full: pytest's own log neither, so that
    this must be over before a test is.
    """
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # an error, then, not a dead process
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


def assert_only_the_old_content(path):
    assert path.read_bytes() == b"old"
    assert list(path.parent.iterdir()) == [path]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    return path


def test_the_content_replaces_the_old_one(path):
    write_atomically(path, lambda file: file.write(b"new"))
    assert path.read_bytes() == b"new"
    assert list(path.parent.iterdir()) == [path]


def test_missing_folders_are_made(tmp_path):
    write_atomically(tmp_path / "a" / "b" / "c", lambda file: file.write(b"new"))
    assert (tmp_path / "a" / "b" / "c").read_bytes() == b"new"


OTHERS = [KeyboardInterrupt, SystemExit, ValueError, MemoryError]


@pytest.mark.parametrize("error", [RuntimeError("first\nsecond"), OSError(28, "first"), *OTHERS])
def test_an_error_of_the_writer_is_one_line_and_whatever_else_passes(path, error):
    def write(file):
        file.write(b"half")
        raise error

    with pytest.raises(error if error in OTHERS else UserError) as caught:
        write_atomically(path, write)
    assert error in OTHERS or str(caught.value) == f"cannot write {path}: first"
    assert_only_the_old_content(path)


def test_a_full_disk(path):
    with pytest.raises(UserError) as caught, small_disk():
        write_atomically(path, lambda file: file.write(bytes(5000)))
    assert str(caught.value) == f"cannot write {path}: File too large"
    assert_only_the_old_content(path)


def test_a_full_disk_under_a_checkpoint(path):
    """torch.save then raises a RuntimeError about positions in its archive."""
    content = {"config": {}, "data": "", "step": 0, "model": {"w": torch.zeros(5000)}}
    with raises_line(UserError, f"{path}.*File too large"), small_disk():
        save_checkpoint(path, {**content, "optimizer": {}})
    assert_only_the_old_content(path)


def test_writers_do_not_share_their_unfinished_files(path):
    contents = [bytes([number]) * 200_000 for number in range(4)]

    def write(content):
        for _ in range(20):
            write_atomically(path, lambda file: file.write(content))

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(write, contents))
    assert path.read_bytes() in contents
    assert list(path.parent.iterdir()) == [path]
