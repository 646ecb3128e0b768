"""Tables as text, and files that are written whole or not at all."""

import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def table(lines: Sequence[Sequence[str]], place: Callable[[str, int], str] = str.ljust) -> str:
    """Lines of cells as text in columns, all to the left; the first line is the head."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(place, line, widths)).rstrip() for line in lines)


def check_path(path: Any, name: str) -> None:
    """Raises TypeError unless ``path`` is one: a number would be an open file's."""
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"{name} must be a path; got {path!r}")


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Puts a text file in the place of what the path names; readers find the old or the new one.

    The text goes to a file of another name beside it, which two writers do not share.

    Raises TypeError for a path of another type, OSError where it cannot be written; then the old
    file stays as it was.
    """
    check_path(path, "path")
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():  # a pipe, say, which nothing can take the place of
        target.write_text(text)
        return
    unfinished = target.with_name(f".{target.name[:200]}.{secrets.token_hex(8)}")
    try:
        with open(unfinished, "x") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, target)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
