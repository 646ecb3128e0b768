"""What the tables share while they measure."""

import argparse
from dataclasses import dataclass

import torch
from rich.console import Console


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
