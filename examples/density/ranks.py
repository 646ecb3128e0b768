"""Purification over the processes that torchrun started: each has some block rows of F."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from density.basis import is_sparse
from spamm_torch import linalg
from spamm_torch.sparse.blocks import Blocks, read


def started() -> int:
    """How many processes there are."""
    return int(os.environ.get("WORLD_SIZE", 1))


def is_first() -> bool:
    """Whether this process writes the results."""
    return os.environ.get("RANK", "0") == "0"


def on_ranks(main: Callable[[], None]) -> None:
    """Runs main in each process; only the first is heard."""
    if started() == 1:
        return main()
    dist.init_process_group("gloo")
    with (
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(sys.stdout if is_first() else nowhere),
    ):
        main()
    dist.destroy_process_group()


def purify(fock: Tensor, electrons: int, **options: Any) -> linalg.Result:
    """``linalg.purify`` of the whole F, which each process has here, to the whole projector.

    A dense F is each process's own.
    """
    if started() == 1 or not is_sparse(fock):
        return linalg.purify(fock, electrons, **options)
    whole, rank = read(fock, "fock", "purify"), dist.get_rank()
    begin, end = (whole.rows * part // started() for part in (rank, rank + 1))
    first, last = whole.crow[[begin, end]].tolist()
    crow, col, values = whole.crow[begin : end + 1] - first, *(x[first:last] for x in whole[1:3])
    own = Blocks(crow, col, values, whole.columns).matrix()
    result = linalg.purify(own, electrons, group=dist.group.WORLD, **options)
    parts: list[Any] = [None] * started()
    dist.all_gather_object(parts, read(result.matrix, "x", "purify")[:3])
    counts, col, values = map(torch.cat, zip(*((x.diff(), *y) for x, *y in parts), strict=True))
    x = Blocks(pad(counts.cumsum(0), (1, 0)), col, values, whole.columns)
    return replace(result, matrix=x.matrix())
