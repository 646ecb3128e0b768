"""Symmetric matrices in Matrix Market files, as ergo writes them."""

import re

import numpy as np

from common.errors import UserError, first_line

_HEAD = "%%MatrixMarket matrix coordinate real symmetric"


def read_symmetric(path):
    """The matrix (N, N) float64 in a file, and the version of ergo that its comments name.

    Raises:
        UserError: the file is missing, cannot be read, is not such a file, or is damaged.
    """
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        raise UserError(f"expected a matrix of ergo in {path}; there is no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {first_line(error)}") from error
    if not lines or lines[0].strip() != _HEAD:
        got = lines[0][:60] if lines else "an empty file"
        raise UserError(f"expected {path} to open with {_HEAD!r}; got {got!r}")
    comments = sum(1 for _ in _leading(lines, "%"))
    version = re.search(r"Ergo.* version (\S+)", "\n".join(lines[:comments]))
    try:
        rows, columns, entries = map(int, lines[comments].split())
        numbers = np.array([line.split() for line in lines[comments + 1 :]], dtype=float)
        i, j = (numbers[:, axis].astype(int) - 1 for axis in (0, 1))
        whole = numbers.shape == (entries, 3) and rows == columns
        whole = whole and min(i.min(), j.min()) >= 0 and max(i.max(), j.max()) < rows
    except (ValueError, IndexError):
        whole = False
    if not whole or not np.isfinite(numbers).all():
        raise UserError(f"expected a whole, finite and square matrix in {path}; it is damaged")
    matrix = np.zeros((rows, rows))
    matrix[i, j] = matrix[j, i] = numbers[:, 2]
    return matrix, version.group(1) if version else "unknown"


def _leading(lines, start):
    """The lines before the first that does not start so."""
    for line in lines:
        if not line.startswith(start):
            return
        yield line
