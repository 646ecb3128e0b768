"""Tables as text, files that are written whole or not at all, and progress on the terminal."""

import errno
import os
import secrets
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar


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


# ---- Progress on standard error: one line on a terminal, else one now and then -------------------


_EVERY_S = 10
_BAR = 20  # characters
_CLEAR = "\r\x1b[K"  # the line of a terminal

Item = TypeVar("Item")


class Progress:
    """The progress of the stages of ``what``; at the end the line is cleared. ``is_shown``: None
    where standard error is a terminal.
    """

    def __init__(self, what: str, is_shown: bool | None) -> None:
        is_terminal = is_shown is not False and sys.stderr.isatty()
        self._what, self._is_shown = what, is_terminal if is_shown is None else is_shown
        self._is_line = self._is_shown and is_terminal
        self._stage, self._began, self._shown = "", 0.0, 0.0

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: Any) -> None:
        if self._is_line:
            print(_CLEAR, end="", file=sys.stderr, flush=True)

    def at(self, stage: str, done: int = 0, total: int = 1, each: bool = False) -> None:
        """Says that ``done`` steps of a stage are done; ``each`` has a line for every step."""
        now = time.monotonic()
        if stage != self._stage:
            self._stage, self._began, self._shown = stage, now, -_EVERY_S
        if not self._is_shown or not (each or self._is_line or now - self._shown >= _EVERY_S):
            return
        self._shown = now
        line = f"{self._what}: {stage}" + (f", {done} of {total}" if total > 1 else "")
        seconds = (now - self._began) / done * (total - done) if done else 0.0
        if seconds >= 1:  # less, of one stage, would seem to be the end of all
            line += f", about {seconds:.0f} s left of these"
        if self._is_line:  # a wrapped line could not be cleared
            bar = f"[{'#' * (_BAR * done // total):<{_BAR}}] "
            width = shutil.get_terminal_size().columns - 1
            print(_CLEAR + (bar + line)[:width], end="", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)

    def over(self, stage: str, items: Sequence[Item]) -> Iterator[Item]:
        """The items, and says before each how many are done."""
        for number, item in enumerate(items):
            self.at(stage, number, len(items))
            yield item
