"""What the tables share while they measure."""

import argparse
from dataclasses import dataclass, field

import torch
from rich.console import Console

from bench.run import attempt


@dataclass(frozen=True)
class Run:
    """What a run was asked for, and what it runs on."""

    device: torch.device
    gpus: tuple[torch.device, ...]  # all CUDA devices; empty where ``device`` is the CPU
    repeats: int  # rounds of each timing
    options: argparse.Namespace  # of the command line
    console: Console

    def sizes(self, defaults):
        """The edges of matrices asked for, else those of {"cpu" or "cuda": edges}."""
        return tuple(self.options.sizes or defaults[self.device.type])

    def synchronize(self):
        """Waits for all devices."""
        for device in self.gpus:
            torch.cuda.synchronize(device)


@dataclass(frozen=True)
class Found:
    """What one cell found."""

    place: dict  # what names the cell: size, type, block and so on
    rows: list = field(default_factory=list)  # plain data
    absent: str | None = None  # why there are no rows
    may_pass: bool = False  # if there are none: whether another try may find some


def cell(measure, **place):
    """The call that measures a cell.

    Args:
        measure: ``measure(**place)`` gives the rows. What it raises, except a UserError, becomes
            the reason why there are none.
    """
    return lambda: attempt(lambda of: Found(of, rows=measure(**of)), place, without=Found(place))
