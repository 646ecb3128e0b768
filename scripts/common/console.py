"""Output of the scripts: bars on a terminal, plain lines elsewhere. rich is imported where used."""

import os
import sys
import time

from models.files import UserError

_PLAIN_WIDTH = 140  # where there is no terminal to ask, tables must not break
_PLAIN_EVERY_S = 15


def make_console():
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_PLAIN_WIDTH)


class Steps:
    """Progress of one job: a bar on a terminal, now and then a line elsewhere."""

    def __init__(self, console, title):
        from rich.progress import MofNCompleteColumn, Progress

        self._console, self._title = console, title
        columns = (*Progress.get_default_columns(), MofNCompleteColumn())
        self._bar = Progress(*columns, console=console, transient=True)
        self._task = self._bar.add_task(title, total=None)
        self._printed = time.monotonic()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self._console.is_terminal:
            self._bar.stop()

    def at(self, step, total, message=None):
        """Says that ``step`` steps of ``total`` are done; a ``message`` stands on a line of its
        own, on a terminal too.
        """
        self._bar.update(self._task, completed=step, total=total)
        if self._console.is_terminal:
            if step < total:
                self._bar.start()
        elif message is None and time.monotonic() - self._printed > _PLAIN_EVERY_S:
            message = f"{step} of {total}"
        if message is not None:
            self._console.print(f"{self._title}: {message}")
            self._printed = time.monotonic()


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
        # Else the interpreter's end would fail to write again what stdout still holds.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        where = error.filename or "standard output"
        print(f"error: {where}: {error.strerror or error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: files that are written are whole", file=sys.stderr)
        return 130
    return 0
