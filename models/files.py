"""Files that are there in full or not at all, and the exception that scripts turn into a line."""

import contextlib
import os
import secrets
import tempfile
from pathlib import Path


class UserError(Exception):
    """Something the user can mend; the message is one line: what was expected, what came."""


def first_line(error):
    """An exception's message in one line, and the next if that ends in a colon; else its type."""
    first, *more = (str(error).strip() or type(error).__name__).splitlines()
    said = next((line.strip() for line in more if line.strip()), "")
    return f"{first} {said}" if first.endswith(":") and said else first


def write_atomically(path, write):
    """Replaces the file at ``path`` by what ``write`` writes into a binary file beside it: readers
    get the old content or the new, even after a crash. UserError: it cannot be written.
    """
    path = Path(path)
    unfinished = path.with_name(f"{path.name[:200]}.{secrets.token_hex(4)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _removed_on_failure(unfinished):
            with open(unfinished, "wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or first_line(error)}") from error
    except RuntimeError as error:  # torch.save's, about a file whose disk is full
        reason = error.__context__ if isinstance(error.__context__, OSError) else error
        raise UserError(f"cannot write {path}: {first_line(reason)}") from error


@contextlib.contextmanager
def _removed_on_failure(path):
    """Removes the file at ``path`` if what happens inside fails or is interrupted."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            path.unlink()
        raise


def read_arrays(path):
    """The arrays in an .npz file, by name; pickled objects are refused. UserError: it cannot be
    read, or is none or damaged.
    """
    import numpy as np  # not above: files are written where there is no numpy

    try:
        with np.load(path) as file:
            return dict(file)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or first_line(error)}") from error
    except Exception as error:  # sizes, names and streams of damaged bytes raise almost anything
        raise UserError(f"expected an .npz file of plain arrays; got {path}") from error


def require_writable(folder):
    """Makes the folder, and a file in it that is gone at once; UserError: that cannot be done."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(
            f"expected a folder that can be written; got {folder}: {error.strerror}"
        ) from error
