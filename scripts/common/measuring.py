"""How cells are measured: each by itself, once, and whatever happens to the others."""

import copy
import functools
import gc
from dataclasses import dataclass

import torch

from common.console import Steps
from common.journal import Journal
from models.errors import UserError, first_line


@dataclass(frozen=True)
class Measuring:
    """What a measurement needs beside its options."""

    journal: Journal
    steps: Steps
    console: object

    def tables(self, cells, said_of, keep=lambda found: True):
        """The tables of rows of all cells, joined.

        Args:
            cells: {name: call that measures it}; a call gives {kind: rows} as plain data. Cells
                whose name the journal has are not measured again.
            said_of: words for the terminal about what a call gave. keep: as of Journal.measured.
        """
        journal, steps = self.journal, self.steps
        finished = sum(name in journal for name in cells)
        resumed = f"resumed from {journal.path} at {finished} of {len(cells)}"
        steps.at(finished, len(cells), resumed if finished else None)
        tables = {}
        for done, (name, measure) in enumerate(cells.items(), start=1):
            new = name not in journal
            found = journal.measured(name, measure, keep)
            if new:
                steps.at(done, len(cells), f"{name}: {said_of(found)}")
            for kind, rows in found.items():
                tables.setdefault(kind, []).extend(rows)
        return tables


def may_pass(error):
    """Whether what raised this error may succeed another time, as when others left no memory."""
    passing = (torch.OutOfMemoryError, MemoryError, torch.AcceleratorError, OSError)
    signs = ("CUDA error", "out of memory", "allocate memory")  # what a RuntimeError says then
    return isinstance(error, passing) or any(sign in first_line(error) for sign in signs)


def attempt(kind, measure, **place):
    """The rows of a cell: its place and what ``measure()`` gives; if it fails, why it did.

    Args:
        kind: of the rows, if ``measure`` gives a list, and of the row of a failure.
        measure: gives rows, or {kind: rows}.

    Returns:
        {kind: rows}. A row without figures has "absent", the error's first line, and "may_pass"
        where another try may succeed.

    Raises:
        UserError: ``measure`` does. It ends the run, as a wrong result must.
    """
    try:
        found = measure()
        tables = found if isinstance(found, dict) else {kind: found}
        return {name: [place | row for row in rows] for name, rows in tables.items()}
    except UserError:
        raise
    except Exception as error:
        failure = {"absent": first_line(error)} | ({"may_pass": True} if may_pass(error) else {})
    gc.collect()  # what the failed call held, so that the next one finds memory
    torch.cuda.empty_cache()
    return {kind: [place | failure]}


def cell(kind, measure, **place):
    """The call that measures a cell: ``measure(**place)``, as of attempt."""
    return functools.partial(attempt, kind, functools.partial(measure, **place), **place)


def failed(tables):
    """How many rows another try may fill."""
    return sum(row.get("may_pass", False) for rows in tables.values() for row in rows)


def not_measured(row):
    """Words for the terminal about a row without figures."""
    return f"not measured: {row['absent']}"


def compiled(model, example, console):
    """A copy of a model by torch.compile, for an example input; None where that fails.

    Args:
        console: on which it says why nothing was compiled.
    """
    found = torch.compile(copy.deepcopy(model), dynamic=False)
    try:
        found(example)
    except Exception as error:  # Inductor has no compiler, or none that works here
        console.print(f"torch.compile is left out: {first_line(error)}")
        return None
    return found
