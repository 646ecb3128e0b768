"""Table 4: squares of matrices of electronic structure theory, with blocks skipped."""

import hashlib
from dataclasses import asdict
from functools import partial
from pathlib import Path

from ergo import table_4
from ergo.basis import functions_of
from ergo.embedded import FILES, FOLDER
from ergo.geometry import ATOMS
from ergo.matrices import MATRICES
from tables.frame import cell


def settings(run):
    return {
        "sources": [asdict(source) for source in _sources(run)],
        "digests": [_digest(path) for path in (FOLDER / FILES["default"], *run.options.matrices)],
    }


def cells(run):
    found = {}
    for source in _sources(run):
        n = source.waters * sum(functions_of(symbol, source.basis) for symbol in ATOMS)
        for name in MATRICES:
            for precision in table_4.PRECISIONS:
                place = asdict(source) | {"n": n, "matrix": name, "precision": precision}
                key = f"{name}, {source.waters} waters, {source.basis}, {source.origin}"
                found[f"{key}, {precision}"] = cell(partial(_rows, run), **place)
    return found


def said_of(found):
    if found["absent"]:
        return f"not measured: {found['absent']}"
    best = {}
    for row in found["rows"]:
        best[row["tau"]] = max(best.get(row["tau"], 0), row["speedup"])
    return ", ".join(f"{tau:g}: {speedup:.2f}x" for tau, speedup in best.items())


def _sources(run):
    return table_4.sources(run.device, run.options.matrices)


def _rows(run, origin, waters, basis, n, matrix, precision):
    a = table_4.matrix(table_4.Source(origin, waters, basis), matrix, run.device)
    return table_4.measure(a, precision, run.repeats)


def _digest(path):
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]
