"""The paper's tables, measured on this machine: cases of bench.py, each figure beside the paper's.

At sizes that fit: on a CPU small ones, all tables in less than a quarter of an hour on two cores;
on a GPU the paper's. The paper's figures, in columns of their own, are from a Tesla V100 with CUDA
10 (paper.py). What cannot be measured on a machine is a row that says why.
"""

import torch

from common import options as cli

DEFAULTS = {"cpu": {"repeats": 3}, "cuda": {"repeats": 7}}
GPU_COUNTS = (2, 4, 8)  # the paper's, beside one


def add_options(parser):
    cli.add_device_option(parser)
    cli.add_repeats_option(parser, DEFAULTS)


def add_options_with_sizes(parser):
    add_options(parser)
    what = "edges of the square matrices"
    cli.add_numbers(parser, "--sizes", what, None, "N", said="the table's own")


def sizes(run, defaults):
    """The edges of matrices that the options name, else those of {"cpu" or "cuda": edges}."""
    return tuple(run.sizes or defaults[run.device.type])


def gpus(run):
    """All CUDA devices; none where the device is the CPU."""
    count = torch.cuda.device_count() if run.device.type == "cuda" else 0
    return [torch.device("cuda", index) for index in range(count)]


def gpu_counts(run):
    """Those of GPU_COUNTS that there are, and 2 in any case, for a row that says why not."""
    return [count for count in GPU_COUNTS if count <= max(2, len(gpus(run)))]


def first_gpus(run, count):
    """So many of the run's GPUs; RuntimeError: there are fewer."""
    if len(gpus(run)) < count:
        raise RuntimeError(f"needs {count} GPUs; got {len(gpus(run))}")
    return gpus(run)[:count]
