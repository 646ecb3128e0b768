"""Block-sparse matrices over the processes that torchrun started: each has some block rows."""

import contextlib
import os
import sys
from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

from spamm_torch.linalg.matrices import Matrices
from spamm_torch.sparse.blocks import is_sparse, read


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


def own_rows(a: Tensor) -> Tensor:
    """This process's block rows of a whole matrix; all of a dense one."""
    if group(a) is None:
        return a
    blocks = read(a, "a", "own_rows")
    own = part(blocks.rows)
    rows = blocks.of_rows(own.start, own.stop)
    return rows._replace(crow=rows.crow[own.start : own.stop + 1]).matrix()


def products(a: Tensor, size: int | None = None) -> tuple[Matrices, Tensor]:
    """The library's products of matrices like this one, and it as they keep it."""
    given = "density_matrix", a, 32, size, None
    options = {"group": group(a), "alike": {"max_error": 0.0}}
    return Matrices.opened(*given, **options, symmetric=False, needs_size=False)


def whole(a: Tensor) -> Tensor:
    """All block rows, on each process."""
    of, a = products(a)
    return a if of.rows is None else of.rows.gathered(read(a, "a", "whole")).matrix()
