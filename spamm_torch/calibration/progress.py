"""Lines on standard error that say how far a calibration is, and about how long it still takes."""

from __future__ import annotations

import sys
import time

_EVERY_S = 10


class Progress:
    """The progress of one stage after the other."""

    def __init__(self, is_shown: bool) -> None:
        self._is_shown = is_shown
        self._stage, self._began, self._shown = "", 0.0, 0.0

    def at(self, stage: str, done: int, total: int, each: bool = False) -> None:
        """Says that ``done`` steps of a stage are done; ``each`` has a line for every step."""
        now = time.monotonic()
        if stage != self._stage:
            self._stage, self._began, self._shown = stage, now, -_EVERY_S
        if self._is_shown and (each or now - self._shown >= _EVERY_S):
            self._shown = now
            left = ""
            if done:
                seconds = (now - self._began) / done * (total - done)
                left = f", about {seconds:.0f} s left of these"
            print(f"calibrate: {stage}, {done} of {total}{left}", file=sys.stderr, flush=True)
