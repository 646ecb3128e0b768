"""Tables as text, files that are written whole or not at all, and progress of long work."""

import errno
import os
import secrets
import stat
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar


def table(lines: Sequence[Sequence[str]], place: Callable[[str, int], str] = str.ljust) -> str:
    """Lines of cells as text in columns, all to the left; the first line is the head."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(place, line, widths)).rstrip() for line in lines)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Writes a text file whole: readers find the old one (too where it raises) or the new one.

    The new one has the old one's mode; a file that nobody may write to stays. OSError names the
    path. What is killed leaves the old file, and at most a hidden one named as unfinished.
    """
    if not isinstance(path, (str, os.PathLike)):  # a number would be an open file's
        raise TypeError(f"path must be a path; got {path!r}")
    try:
        _write(Path(os.path.realpath(path)), text)
    except OSError as error:  # which may name the unfinished file
        raise OSError(error.errno, error.strerror or str(error), os.fspath(path)) from None


def _write(target: Path, text: str) -> None:
    mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else None
    if mode is not None and not target.is_file():  # a pipe, say, which nothing can replace
        target.write_text(text)
        return
    if mode is not None and not (mode & _WRITABLE and os.access(target, os.W_OK)):
        raise PermissionError(errno.EACCES, "read-only")
    # Not of the target's name, which may have all the bytes that a name can have.
    unfinished = target.with_name(f".spamm_torch_unfinished_{secrets.token_hex(8)}")
    try:
        with open(unfinished, "x") as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, target)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


_WRITABLE = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH


_EVERY_S = 10
Item = TypeVar("Item")


class Progress:
    """Says how far ``what`` is: a line for each stage, and for its steps one in ten seconds.
    ``is_shown``: None where standard error is a terminal.
    """

    def __init__(self, what: str, is_shown: bool | None) -> None:
        self._what, self._stage, self._shown = what, "", 0.0
        self._is_shown = sys.stderr.isatty() if is_shown is None else is_shown

    def at(self, stage: str, done: int = 0, total: int = 1, each: bool = False) -> None:
        """Says that ``done`` steps of a stage are done; ``each`` has a line for every step."""
        now = time.monotonic()
        is_due = each or stage != self._stage or now - self._shown >= _EVERY_S
        if not self._is_shown or not is_due:
            return
        self._stage, self._shown = stage, now
        steps = f", {done} of {total}" if total > 1 else ""
        print(f"{self._what}: {stage}{steps}", file=sys.stderr, flush=True)

    def over(self, stage: str, items: Sequence[Item]) -> Iterator[Item]:
        """The items, and says before each how many are done."""
        for number, item in enumerate(items):
            self.at(stage, number, len(items))
            yield item
