"""How a benchmark measures its cells: each by itself, once, and whatever happens to the others."""

import gc
from dataclasses import asdict

import torch

from common.errors import UserError, first_line


def measure_all(cells, journal, steps, said_of, keep=lambda found: True):
    """What each cell gives, from the journal where it has been measured before.

    Args:
        cells: {name: call that measures it and gives plain data}. journal: a Journal.
        steps: Steps, which tell of each new cell what ``said_of`` makes of its data.
        keep: as of Journal.measured.
    """
    finished = sum(name in journal for name in cells)
    steps.at(finished, len(cells), journal.resumed(finished, len(cells)))
    found = []
    for done, (name, measure) in enumerate(cells.items(), start=1):
        new = name not in journal
        found.append(journal.measured(name, measure, keep))
        if new:
            steps.at(done, len(cells), f"{name}: {said_of(found[-1])}")
    return found


def may_pass(error):
    """Whether what raised this error may succeed another time, as when others left no memory."""
    passing = (torch.OutOfMemoryError, MemoryError, torch.AcceleratorError, OSError)
    signs = ("CUDA error", "out of memory", "allocate memory")  # what a RuntimeError says then
    return isinstance(error, passing) or any(sign in first_line(error) for sign in signs)


def attempt(measure, what, without):
    """What ``measure(what)`` gives, as plain data; if it fails, why it did.

    Args:
        measure: gives a dataclass with a field ``absent``.
        without: that dataclass without figures. Its ``absent`` becomes the error's first line; a
            field ``may_pass``, if it has one, whether another try may succeed.

    Raises:
        UserError: ``measure`` does. It ends the run, as a wrong result must.
    """
    try:
        return asdict(measure(what))
    except UserError:
        raise
    except Exception as error:
        failure = {"absent": first_line(error), "may_pass": may_pass(error)}
    gc.collect()  # what the failed call held, so that the next one finds memory
    torch.cuda.empty_cache()
    fields = asdict(without)
    return fields | {name: value for name, value in failure.items() if name in fields}
