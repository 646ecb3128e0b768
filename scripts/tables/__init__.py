"""The paper's tables, measured here: the parts of reproduce.py.

A module table_N measures a table. It has

- ``TITLE``: a few words.
- ``settings(run)``: a dict of what decides its figures besides machine, versions and repeats. It is
  called for every table asked for before anything is measured, so it must be cheap; bad input
  raises UserError here. The journal of the table refuses to go on with other settings.
- ``cells(run)``: {name: call}, in the order of measuring. It is called when the table's turn comes,
  and may prepare what its cells share (train a network). A call measures one cell as
  common.measuring.cell says: it gives {kind: rows}, the paper's figures in columns of their own.
  What cannot be measured on a machine is a row that says why.
- ``said(tables)``: what was found, in one line; without it common.results.said's.

Every cell is verified before it is timed: a wrong result is a UserError, which ends the run.
paper.py holds the paper's figures.
"""

import argparse
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Run:
    """The options of a run, and the devices that it runs on."""

    device: torch.device
    gpus: tuple[torch.device, ...]  # all CUDA devices; empty where ``device`` is the CPU
    repeats: int  # rounds of each timing
    options: argparse.Namespace  # of the command line
    console: object

    def sizes(self, defaults):
        """The edges of matrices asked for, else those of {"cpu" or "cuda": edges}."""
        return tuple(self.options.sizes or defaults[self.device.type])

    def synchronize(self):
        """Waits for all devices."""
        for device in self.gpus:
            torch.cuda.synchronize(device)
