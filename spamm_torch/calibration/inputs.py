"""Reads a loader: its two halves, and inputs for statistics; refuses bad ones."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..networks.example import Example

_STATISTICS_INPUTS = 512


class Half:
    """Every other batch of a loader, the first one or the second one first."""

    def __init__(self, loader: Iterable[Any], first: int) -> None:
        self._loader, self._first = loader, first

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self._loader), self._first, None, 2)

    def __len__(self) -> int:
        loader: Any = self._loader
        return (len(loader) + 1 - self._first) // 2


def halves_of(loader: Any) -> tuple[Half, Half]:
    """The batches of even and of odd number. Raises unless there are both, each time anew."""
    try:
        batches = iter(loader)
    except TypeError:
        raise TypeError(
            f"loader must be iterable, as a DataLoader is; got {type(loader).__name__}"
        ) from None
    if batches is loader:
        raise ValueError(
            "loader must give its batches anew each time it is iterated over; got "
            f"{type(loader).__name__}, which is used up (pass a list or a DataLoader)"
        )
    found = len(list(itertools.islice(batches, 2)))
    if found < 2:
        raise ValueError(
            f"loader must give at least two batches, one for each half; got {found or 'none'}"
        )
    return Half(loader, 0), Half(loader, 1)


def statistics_inputs(model: nn.Module, half: Half, like: Any) -> list[Example]:
    """The inputs of some 512 pictures of a loader, on the model's device and in its type.

    Of a batch that is a tuple or a list the first element is the input, a dict holds arguments by
    name, and anything else is the input itself.

    Args:
        like: an example input whose type tensors get; None: the model's.
    """
    parameter = next(model.parameters())
    floating = [x.dtype for x in pytree.tree_leaves(like) if _is_floating(x)]
    dtype = floating[0] if floating else parameter.dtype
    examples, count = [], 0
    for batch in half:
        value = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
        value = pytree.tree_map(lambda x: _moved(x, parameter.device, dtype), value)
        tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
        if not tensors:
            raise ValueError(
                "loader must give batches with tensors: an input, or a tuple whose first element "
                f"is the input; got a {type(batch).__name__}"
            )
        if not batch_size(value):
            raise ValueError(
                "loader must give batches of at least one image along the first dimension; got an "
                f"input of shape {tuple(tensors[0].shape)}"
            )
        examples.append(Example(value, "the loader's first batch"))  # only that one is named
        count += batch_size(value)
        if count >= _STATISTICS_INPUTS:
            break
    return examples


def batch_size(value: Any) -> int:
    """The length of the first tensor in it that has a dimension; 0 where there is none."""
    leaves = pytree.tree_leaves(value)
    return next((len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()), 0)


def _moved(value: Any, device: torch.device, dtype: torch.dtype) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.to(device, dtype) if value.is_floating_point() else value.to(device)


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


class Randomness:
    """The states of Python's and torch's generators, as they are when it is made."""

    def __init__(self, device: torch.device) -> None:
        self._devices = [device] if device.type == "cuda" else []
        self._python, self._host = random.getstate(), torch.get_rng_state()
        self._on_devices = [torch.cuda.get_rng_state(device) for device in self._devices]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside, the same numbers are drawn each time; outside, nothing of it is seen."""
        before = random.getstate()
        with torch.random.fork_rng(self._devices):
            random.setstate(self._python)
            torch.set_rng_state(self._host)
            for state, device in zip(self._on_devices, self._devices, strict=True):
                torch.cuda.set_rng_state(state, device)
            try:
                yield
            finally:
                random.setstate(before)
