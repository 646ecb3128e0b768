"""The arguments of a product over ranks: checked on each rank, and compared between ranks.

A header of every rank travels first. It says whether the rank's own arguments are wrong, and what
has to be equal on all ranks. From the same headers every rank comes to the same end: it goes on, or
it raises the line that all others raise. So no rank enters a collective call that another one
skips, and a correct call may follow.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ._arguments import (
    as_knobs,
    check_block,
    check_bool,
    check_operands,
    check_tensor,
    dtype_name,
    held_tau,
)
from ._axis import Axis
from ._info import multiplied_dtype
from ._rank_product import Settings

_ERRORS = (RuntimeError, TypeError, ValueError)
_TERMS: tuple[tuple[str, type[Exception]], ...] = (  # what has to be equal on all ranks
    ("the kind of a and b", TypeError),
    ("the device type", RuntimeError),
    ("the dtype", TypeError),
    ("the number of a's columns", RuntimeError),
    ("the number of b's columns", RuntimeError),
    ("the block", ValueError),
    ("the knob", ValueError),
    ("balance", ValueError),
    ("which of a and b require a gradient", RuntimeError),
)
_TEXT_BYTES = 1024  # of a message that travels


@dataclass(frozen=True)
class Call:
    """The checked arguments of one rank. ``kind``: tensors, or DTensors of which placements."""

    a: Tensor
    b: Tensor
    settings: Settings
    kind: str

    @property
    def needs_grad(self) -> list[str]:
        operands = {"a": self.a, "b": self.b}
        return [name for name, x in operands.items() if torch.is_grad_enabled() and x.requires_grad]

    def texts(self) -> list[str]:
        """A text for each of the terms, equal where the term is."""
        return [
            self.kind,
            self.a.device.type,
            dtype_name(self.a.dtype),
            str(self.a.shape[1]),
            str(self.b.shape[1]),
            str(self.settings.block),
            self.settings.knob_text(),
            str(self.settings.balance),
            " and ".join(self.needs_grad) or "none",
        ]


def read_call(
    a: Any, b: Any, knobs: dict[str, Any], block: Any, balance: Any, backends: str, kind: str
) -> Call:
    """Checks what one rank can. A tau on a device is read on the host: all ranks compare it."""
    check_tensor(a, "a")
    check_tensor(b, "b")
    a, b = a.to(multiplied_dtype(a)), b.to(multiplied_dtype(b))
    check_operands(a, b)
    check_served(a, backends)
    checked = as_knobs(**knobs)
    tau = held_tau(checked)
    if tau is not None:  # in one form, so that it can be compared between ranks
        checked["tau"], checked["threshold"] = tau.double().cpu(), None
    check_bool(balance, "balance")
    return Call(a, b, Settings(checked, check_block(block), balance), kind)


def check_served(a: Tensor, backends: str) -> None:
    """RuntimeError unless the group's backends serve the device of ``a``."""
    if f"{a.device.type}:" not in backends:
        raise RuntimeError(
            f"a and b must be on a device that the group's backends serve ({backends}); got "
            f"{a.device}"
        )


def agree(axes: Sequence[Axis], read: Callable[[str], Call]) -> tuple[Call, list[tuple[int, int]]]:
    """Reads this rank's call, and returns it once all ranks have agreed, with each rank's rows of
    ``a`` and ``b``. A collective call.

    ``axes`` together hold all ranks; those that differ in the last one are neighbours. What
    ``read`` raises, given the backends of the ranks' groups, all ranks raise.
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
        rows, texts = [call.a.shape[0], call.b.shape[0]], call.texts()
    except _ERRORS as error:
        problem, rows, texts = error, [0, 0], [""] * len(_TERMS)
    status = next((i for i, kind in enumerate(_ERRORS) if isinstance(problem, kind)), -1)
    own = [*rows, dist.get_rank(), status, *map(_digest, [str(problem), *texts])]

    device = torch.device("cpu" if "cpu:" in backends else "cuda")
    table = torch.tensor([own], device=device)
    for axis in reversed(axes):
        table = axis.gather(table, [len(table)] * axis.size)
    headers = [_Header._make([*row[:5], row[5:]]) for row in table.tolist()]

    def text_of(source: int, own: str) -> str:
        """The text of the rank ``source``, counted in the order of the axes. A collective call."""
        encoded = own.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
        raw = torch.tensor(list(encoded), dtype=torch.uint8, device=device)
        for axis in reversed(axes):
            source, place = divmod(source, axis.size)
            axis.broadcast(raw, place)
        return bytes(raw.tolist()).rstrip(b"\0").decode(errors="replace")

    _raise_together(headers, text_of, problem, texts)
    return call, [(header.rows_a, header.rows_b) for header in headers]


class _Header(NamedTuple):
    """The header that a rank sends to all others."""

    rows_a: int
    rows_b: int
    rank: int  # of all processes, whatever the group
    status: int  # -1, or the kind of the rank's problem
    problem: int
    terms: list[int]


def _digest(text: str) -> int:
    """63 bits that differ where texts differ."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def _raise_together(
    headers: list[_Header],
    text_of: Callable[[int, str], str],
    problem: Exception | None,
    texts: list[str],
) -> None:
    """Raises on all ranks, or on none, the first thing that is wrong by the headers."""
    for place, header in enumerate(headers):
        if header.status >= 0:
            text = text_of(place, str(problem))
            everywhere = all(other.problem == header.problem for other in headers)
            raise _ERRORS[header.status](text if everywhere else f"{text} (on rank {header.rank})")
    first = headers[0]
    for term, (name, error) in enumerate(_TERMS):
        for place, header in enumerate(headers):
            if header.terms[term] != first.terms[term]:
                got, other = text_of(0, texts[term]), text_of(place, texts[term])
                raise error(
                    f"{name} must be the same on all ranks; got {got} on rank {first.rank} and "
                    f"{other} on rank {header.rank}"
                )
