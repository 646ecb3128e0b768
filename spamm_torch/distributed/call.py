"""The arguments of a product over ranks: checked on each rank, and compared between ranks.

A header of every rank travels first. It says whether the rank's own arguments are wrong, and what
has to be equal on all ranks. From the same headers every rank comes to the same end: it goes on, or
it raises the line that all others raise. So no rank enters a collective call that another one
skips, and a correct call may follow.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._arguments import check_block, check_bool, check_operands, check_tensor, dtype_name
from .._info import multiplied_dtype
from .axis import Axis
from .rank_product import Settings

_ERRORS = (RuntimeError, TypeError, ValueError)


@dataclass(frozen=True)
class Call:
    """The checked arguments of one rank. ``kind``: tensors, or DTensors of which placements.

    ``stored``: the numbers of blocks of block-sparse operands.
    """

    a: Tensor
    b: Tensor
    settings: Settings
    kind: str
    stored: tuple[int, int] = (0, 0)

    @property
    def needs_grad(self) -> str:
        """The names of operands that require a gradient."""
        operands = {"a": self.a, "b": self.b} if torch.is_grad_enabled() else {}
        return " and ".join(name for name, x in operands.items() if x.requires_grad)


_TERMS: tuple[tuple[str, type[Exception], Callable[[Call], Any]], ...] = (  # equal on all ranks
    ("the kind of a and b", TypeError, lambda call: call.kind),
    ("the device type", RuntimeError, lambda call: call.a.device.type),
    ("the dtype", TypeError, lambda call: dtype_name(call.a.dtype)),
    ("the number of a's columns", RuntimeError, lambda call: call.a.shape[1]),
    ("the number of b's columns", RuntimeError, lambda call: call.b.shape[1]),
    ("the block", ValueError, lambda call: call.settings.block),
    ("the knob", ValueError, lambda call: call.settings.text),
    ("balance", ValueError, lambda call: call.settings.balance),
    ("which of a and b require a gradient", RuntimeError, lambda call: call.needs_grad or "none"),
)


def read_call(
    a: Any, b: Any, knobs: dict[str, Any], block: Any, balance: Any, backends: str, kind: str
) -> Call:
    """Checks what one rank can. A tau on a device is read on the host: all ranks compare it."""
    check_tensor(a, "a")
    check_tensor(b, "b")
    a, b = a.to(multiplied_dtype(a)), b.to(multiplied_dtype(b))
    check_operands(a, b)
    check_served(a, backends)
    check_bool(balance, "balance")
    return Call(a, b, Settings.of(knobs, check_block(block), balance), kind)


def check_served(a: Tensor, backends: str) -> None:
    """RuntimeError unless the group's backends serve the device of ``a``."""
    if f"{a.device.type}:" not in backends:
        raise RuntimeError(
            f"a and b must be on a device that the group's backends serve ({backends}); got "
            f"{a.device}"
        )


def agree(
    axes: Sequence[Axis], read: Callable[[str], Call], meanwhile: Callable[[], Any] = lambda: None
) -> tuple[Call, list[list[int]]]:
    """Reads this rank's call, and returns it once all ranks have agreed, with each rank's rows of
    ``a`` and ``b``, and their stored blocks. A collective call.

    ``axes`` together hold all ranks; those that differ in the last one are neighbours. What
    ``read`` raises, given the backends of the ranks' groups, all ranks raise. ``meanwhile`` is done
    while headers travel, after ``read``.
    """
    backends = dist.get_backend_config(axes[0].group)
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a product over ranks must not be captured into a CUDA graph, since the host reads "
            "which blocks travel; got a stream that is being captured"
        )
    problem = None
    try:
        call = read(backends)
        sizes = [call.a.shape[0], call.b.shape[0], *call.stored]
        texts = [str(text_of(call)) for *_, text_of in _TERMS]
    except _ERRORS as error:
        problem, sizes, texts = error, [0] * 4, [""] * len(_TERMS)
    status = next((i for i, kind in enumerate(_ERRORS) if isinstance(problem, kind)), -1)
    digest = hashlib.blake2b(repr(texts).encode(), digest_size=8).digest()
    own = [status, int.from_bytes(digest, "big") >> 1, *sizes]  # 63 bits

    on_host = "cpu:" in backends
    side = None if on_host else _side_stream(torch.cuda.current_device())
    with torch.cuda.stream(side):
        table = torch.tensor([own], device="cpu" if on_host else "cuda")
        for axis in reversed(axes):
            table = axis.gather(table, [len(table)] * axis.size)
    if problem is None:
        meanwhile()
    with torch.cuda.stream(side):
        headers = table.tolist()
    if any(status >= 0 or digest != own[1] for status, digest, *_ in headers):
        _raise_together(axes, (dist.get_rank(), status, str(problem), texts))
    return call, [sizes for _, _, *sizes in headers]


@functools.cache
def _side_stream(device: int) -> Any:
    """A stream on which the host waits for nothing that other streams do."""
    return torch.cuda.Stream(device)


def _raise_together(axes: Sequence[Axis], own: tuple[int, int, str, list[str]]) -> None:
    """Raises on all ranks the first thing that is wrong: with each rank's number, the kind of its
    problem (-1: none) and the text of that, and its terms.
    """
    said: list[Any] = [own]
    for axis in reversed(axes):
        parts: list[Any] = [None] * axis.size
        dist.all_gather_object(parts, said, group=axis.group)
        said = [each for part in parts for each in part]
    for rank, status, text, _ in said:
        if status >= 0:
            everywhere = all(other == text for _, _, other, _ in said)
            raise _ERRORS[status](text if everywhere else f"{text} (on rank {rank})")
    first, *_, expected = said[0]
    for term, (name, error, _) in enumerate(_TERMS):
        for rank, *_, terms in said:
            if terms[term] != expected[term]:
                raise error(
                    f"{name} must be the same on all ranks; got {expected[term]} on rank {first} "
                    f"and {terms[term]} on rank {rank}"
                )
