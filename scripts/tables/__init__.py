"""The paper's tables, measured here: the parts of reproduce.py.

A module table_N measures a table. It has

- ``TITLE``: a few words.
- ``cells(run)``: {name: call}, in the order of measuring. It is called when the table's turn comes,
  and may prepare what its cells share (train a network). A call measures one cell as
  common.measuring.cell says: it gives {kind: rows}, the paper's figures in columns of their own.
  What cannot be measured on a machine is a row that says why.
- ``said(tables)``: what was found, in one line; without it common.results.said's.

Every cell is verified before it is timed: a wrong result is a UserError, which ends the run.
A run is the options of the command line, with ``gpus``, all CUDA devices or none where ``device``
is the CPU. paper.py holds the paper's figures.
"""


def sizes(run, defaults):
    """The edges of matrices that the options name, else those of {"cpu" or "cuda": edges}."""
    return tuple(run.sizes or defaults[run.device.type])


GPU_COUNTS = (2, 4, 8)  # the paper's, beside one


def gpu_counts(run):
    """Those of GPU_COUNTS that there are, and 2 in any case, for a row that says why not."""
    return [count for count in GPU_COUNTS if count <= max(2, len(run.gpus))]


def first_gpus(run, count):
    """So many of the run's GPUs; RuntimeError: there are fewer."""
    if len(run.gpus) < count:
        raise RuntimeError(f"needs {count} GPUs; got {len(run.gpus)}")
    return run.gpus[:count]
