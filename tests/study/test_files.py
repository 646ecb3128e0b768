"""Files that are there in full or not at all, whatever interrupts their writing."""

import contextlib
import resource
import signal

import pytest
import torch

from models.checkpoint import save_checkpoint
from models.errors import UserError
from models.files import write_atomically


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


@pytest.mark.parametrize("error", [RuntimeError("first\nsecond"), OSError(28, "first")])
def test_an_error_of_the_writer_is_one_line(path, error):
    def write(file):
        file.write(b"half")
        raise error

    with pytest.raises(UserError) as caught:
        write_atomically(path, write)
    assert str(caught.value) == f"cannot write {path}: first"
    assert_only_the_old_content(path)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError, MemoryError])
def test_whatever_else_interrupts_a_write_passes_and_leaves_nothing(path, error):
    def write(file):
        file.write(b"half")
        raise error

    with pytest.raises(error):
        write_atomically(path, write)
    assert_only_the_old_content(path)


def test_a_full_disk(path):
    with pytest.raises(UserError) as caught, small_disk():
        write_atomically(path, lambda file: file.write(bytes(5000)))
    assert str(caught.value) == f"cannot write {path}: File too large"
    assert_only_the_old_content(path)


def test_a_full_disk_under_a_checkpoint(path):
    """torch.save then raises a RuntimeError about positions in its archive."""
    content = {"config": {}, "data": "", "step": 0, "model": {"w": torch.zeros(5000)}}
    with pytest.raises(UserError, match="File too large") as caught, small_disk():
        save_checkpoint(path, {**content, "optimizer": {}})
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    assert_only_the_old_content(path)
