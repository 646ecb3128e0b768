"""The paper's tables, measured on this machine: cases of bench.py, each figure beside the paper's.

At sizes that fit: on a CPU small ones, all tables in less than a quarter of an hour on two cores;
on a GPU the paper's. The paper's figures, in columns of their own, are from a Tesla V100 with CUDA
10 (paper.py). What cannot be measured on a machine is a row that says why.
"""

from common import options as cli

DEFAULTS = {"cpu": {"repeats": 3}, "cuda": {"repeats": 7}}


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
