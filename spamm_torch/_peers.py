"""Shards of B that ranks on GPUs of one host read where they lie.

Copy engines then bring what is needed, which takes no multiprocessor from the multiply and little
time of the host. Each rank offers its shard in the header of the call. An offer is a row of
numbers: the host, and a handle of the memory; zeros where there is none.
"""

from __future__ import annotations

import functools
import os
import socket
import uuid
from collections.abc import Sequence

import torch
from torch import Tensor

from ._axis import Cut

_ops = torch.ops.spamm_torch

_WORDS = 12  # of a handle, int64; the first byte is its length
NO_OFFER = [0] * (1 + _WORDS)

# What this process has opened, with the end of its use. It stays open until a later call.
_opened: list[tuple[torch.cuda.Event, list[Tensor]]] = []


def offer(b: Tensor) -> list[int]:
    """The offer of this rank's shard."""
    is_forbidden = os.environ.get("SPAMM_TORCH_NO_PEER") == "1"
    if is_forbidden or not b.is_cuda or not b.is_contiguous() or not b.numel():
        return NO_OFFER
    handle = _ops.peer_rows(b)
    if not 0 < len(handle) < 8 * _WORDS:
        return NO_OFFER
    padded = torch.zeros(8 * _WORDS, dtype=torch.uint8)
    padded[0] = len(handle)
    padded[1 : 1 + len(handle)] = handle
    return [_host(), *padded.view(torch.int64).tolist()]


def are_offered(offers: Sequence[Sequence[int]]) -> bool:
    """Whether all ranks are on one host and offer their shards."""
    hosts = {host for host, *_ in offers}
    return len(hosts) == 1 and 0 not in hosts


def open_shards(offers: Sequence[Sequence[int]], depth: Cut, b: Tensor) -> list[Tensor]:
    """The shards of all ranks, in their order; none if one cannot be opened.

    Args:
        depth: the rows of B of each rank. b: this rank's shard.
    """
    _opened[:] = [entry for entry in _opened if not entry[0].query()]
    shards = []
    for rank, ((_, *words), rows) in enumerate(zip(offers, depth.lengths, strict=True)):
        size, *handle = torch.tensor(words).view(torch.uint8).split([1, 8 * _WORDS - 1])
        shard = b if rank == depth.axis.rank else _ops.peer_rows(b, handle[0][:size], rows)
        if not len(shard):
            return []
        shards.append(shard)
    return shards


def keep(shards: Sequence[Tensor]) -> None:
    """Keeps shards of others open until the current stream has done what it has been given."""
    event = torch.cuda.Event()
    event.record()
    _opened.append((event, [*shards]))


@functools.cache
def _host() -> int:
    """A number of this host since it started; not 0."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return uuid.UUID(file.read().strip()).int >> 65 | 1
    except OSError:
        return uuid.uuid5(uuid.NAMESPACE_DNS, socket.gethostname()).int >> 65 | 1
