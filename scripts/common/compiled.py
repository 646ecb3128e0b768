"""torch.compile as a peer, where it works."""

import copy

import torch

from models.errors import first_line


def compiled(model, example, console):
    """A compiled copy of a model, compiled for an example input; None where that fails.

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
