"""Symmetric matrices in Matrix Market files, as ergo writes them."""

import re
import warnings

import numpy as np

from models.errors import UserError, first_line

_HEAD = "%%MatrixMarket matrix coordinate real symmetric"


def read_symmetric(path):
    """The matrix (N, N) float64 in a file, and the version of ergo that its comments name.

    Raises:
        UserError: the file is missing, cannot be read, is not such a file, or is damaged.
    """
    try:
        with open(path) as file:
            head = file.readline().strip()
            if head != _HEAD:
                raise UserError(f"expected {path} to open with {_HEAD!r}; got {head[:60]!r}")
            return _parsed(file)
    except FileNotFoundError:
        raise UserError(f"expected a matrix of ergo in {path}; there is no such file") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {first_line(error)}") from error
    except ValueError as error:  # bytes that are no text, too
        raise UserError(
            f"expected a whole, finite and square matrix in {path}; it is damaged"
        ) from error


def _parsed(file):
    """Matrix and version from the lines after the first; ValueError unless they fit each other."""
    version = "unknown"
    for line in file:
        if not line.startswith("%"):
            break
        named = re.search(r"Ergo.* version (\S+)", line)
        version = named.group(1) if named else version
    else:
        raise ValueError("no sizes")
    rows, columns, entries = map(int, line.split())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of a file that ends here
        numbers = np.loadtxt(file, comments="%", ndmin=2)
    if rows != columns or numbers.shape != (entries, 3) or not np.isfinite(numbers).all():
        raise ValueError("not whole")
    i, j = (numbers[:, axis].astype(np.int64) - 1 for axis in (0, 1))
    if entries and (min(i.min(), j.min()) < 0 or max(i.max(), j.max()) >= rows):
        raise ValueError("an index outside")
    matrix = np.zeros((rows, rows))
    matrix[i, j] = matrix[j, i] = numbers[:, 2]
    return matrix, version
