"""How a benchmark measures its cells: each by itself, once, and whatever happens to the others."""

import gc
from dataclasses import asdict

import torch

from common.errors import UserError, first_line


def measure_all(cells, journal, steps, said_of):
    """What each cell gives, from the journal where it has been measured before.

    Args:
        cells: {name: call that measures it and gives plain data}. journal: a Journal.
        steps: Steps, which tell of each new cell what ``said_of`` makes of its data.
    """
    finished = sum(name in journal for name in cells)
    steps.at(finished, len(cells), journal.resumed(finished, len(cells)))
    found = []
    for done, (name, measure) in enumerate(cells.items(), start=1):
        new = name not in journal
        found.append(journal.measured(name, measure))
        if new:
            steps.at(done, len(cells), f"{name}: {said_of(found[-1])}")
    return found


def attempt(measure, what, without):
    """What ``measure(what)`` gives, as plain data; if it fails, why it did.

    Args:
        measure: gives a dataclass with a field ``absent``.
        without: that dataclass without figures. Its ``absent`` becomes the error's first line.

    Raises:
        UserError: ``measure`` does. It ends the run, as a wrong result must.
    """
    try:
        return asdict(measure(what))
    except UserError:
        raise
    except Exception as error:
        reason = first_line(error)
    gc.collect()  # what the failed call held, so that the next one finds memory
    torch.cuda.empty_cache()
    return asdict(without) | {"absent": reason}
