"""The progress of a long call on standard error: one line on a terminal, else one now and then."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

_EVERY_S = 10
_BAR = 20  # characters
_CLEAR = "\r\x1b[K"  # the line of a terminal

Item = TypeVar("Item")


class Progress:
    """The progress of one stage after the other; at the end of the context the line is cleared.

    Args:
        what: the function that runs.
    """

    def __init__(self, what: str, is_shown: bool) -> None:
        self._what, self._is_shown = what, is_shown
        self._is_line = is_shown and sys.stderr.isatty()
        self._stage, self._began, self._shown = "", 0.0, 0.0

    def __enter__(self) -> Progress:
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


SILENT = Progress("", False)
