"""Block-sparse matrices over the processes that torchrun started: each has some block rows."""

import contextlib
import os
import sys
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from spamm_torch import sparse
from spamm_torch.sparse.blocks import Blocks, is_sparse, read


def started() -> int:
    """The number of processes."""
    return int(os.environ.get("WORLD_SIZE", 1))


def is_first() -> bool:
    """Tells whether this process writes the results."""
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


# ---- Matrices ------------------------------------------------------------------------------------


def group(a: Tensor) -> dist.ProcessGroup | None:
    """The processes that hold the block rows of a matrix; None: each has all of it."""
    return dist.group.WORLD if started() > 1 and is_sparse(a) else None


def part(length: int, multiple: int = 1) -> slice:
    """The part of a length that is for this process, cut at multiples."""
    each = -(-length // (multiple * started())) * multiple
    begin = min(length, int(os.environ.get("RANK", "0")) * each)
    return slice(begin, min(length, begin + each))


def block_rows(a: Tensor, begin: int, end: int) -> Tensor:
    """Some block rows of a whole matrix."""
    rows = read(a, "a", "block_rows").of_rows(begin, end)
    return rows._replace(crow=rows.crow[begin : end + 1]).matrix()


def own_rows(a: Tensor) -> Tensor:
    """This process's block rows of a whole matrix; all of a dense one."""
    if group(a) is None:
        return a
    own = part(len(a.crow_indices()) - 1)
    return block_rows(a, own.start, own.stop)


def identity(size: int, like: Tensor) -> Tensor:
    """The identity, cut as a block-sparse matrix is."""
    one, rows = sparse.identity(size, like=like), len(like.crow_indices()) - 1
    if group(like) is None:
        return one
    end = list(accumulate(_from_all(rows)))[dist.get_rank()]
    return block_rows(one, end - rows, end)


def summed(x: Tensor, of: Tensor) -> float:
    """A sum over the entries of a matrix, from those of each process."""
    if group(of) is not None:
        dist.all_reduce(x)
    return x.item()


def whole(a: Tensor) -> Tensor:
    """All block rows, on each process."""
    if group(a) is None:
        return a
    own = read(a, "a", "whole")
    counts, col, values = map(
        torch.cat, zip(*_from_all((own.crow.diff(), own.col, own.values)), strict=True)
    )
    return Blocks(pad(counts.cumsum(0), (1, 0)), col, values, own.columns).matrix()


def _from_all(x: Any) -> list[Any]:
    found: list[Any] = [None] * started()
    dist.all_gather_object(found, x)
    return found
