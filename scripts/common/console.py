"""What the scripts show: bars and tables on a terminal, plain lines elsewhere.

rich is imported where it is used: who shows no table needs no rich.
"""

import os
import sys
import time

from models.errors import UserError

_PLAIN_WIDTH = 140  # where there is no terminal to ask, tables must not break
_PLAIN_EVERY_S = 15


def make_console():
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_PLAIN_WIDTH)


class Steps:
    """Progress of one job: a bar on a terminal, now and then a line elsewhere.

    Both tell about how much time remains, by the steps since the first call of :meth:`at`.
    """

    def __init__(self, console, title):
        self._console, self._title = console, title
        self._bar = self._task = None
        self._printed = time.monotonic()
        self._first = None  # (step, time) of the first call: what an earlier run did took no time

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self._bar is not None:
            self._bar.stop()

    def at(self, step, total, message=None, *, what=""):
        """Says that ``step`` steps of ``total`` are done, the last being ``what``.

        A ``message`` stands on a line of its own, on a terminal too.
        """
        now = time.monotonic()
        self._first = self._first or (step, now)
        if self._console.is_terminal and self._bar is None and step < total:
            self._start()
        if self._bar is not None:
            description = f"{self._title}: {what}" if what else self._title
            self._bar.update(self._task, completed=step, total=total, description=description)
        else:
            if message is None and now - self._printed > _PLAIN_EVERY_S:
                message = f"{step} of {total}" + (f" ({what})" if what else "")
            if message is not None:
                message += self._remaining(step, total, now)
        if message is not None:
            self._console.print(f"{self._title}: {message}")
            self._printed = now

    def _start(self):
        """Draws the bar, at the first step that leaves others: what was done needs none."""
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
        )
        self._task = self._bar.add_task(self._title, total=None)
        self._bar.start()

    def _remaining(self, step, total, now):
        """As in ", about 5 min left"; nothing before this run has made a step or when all are."""
        first, since = self._first
        if step <= first or step >= total:
            return ""
        return f", about {duration((now - since) / (step - first) * (total - step))} left"


def duration(seconds):
    """A time to wait, for people: "40 s", "5 min", "2 h 10 min"."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


def exit_code(main):
    """Runs ``main()``: 0; 1 with one line if input or output is bad; 130 if it is interrupted."""
    try:
        try:
            main()
        finally:
            sys.stdout.flush()  # what does not fit must be known here, not at the interpreter's end
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        _drop_output()
        where = error.filename or "standard output"
        print(f"error: {where}: {error.strerror or error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as error:
        kept = str(error) or "files that are written are whole; the same command makes the others"
        print(f"interrupted: {kept}", file=sys.stderr)
        return 130
    return 0


def _drop_output():
    """Sends what stdout still holds nowhere: the interpreter's end would fail to write it again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
