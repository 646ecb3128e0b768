"""Reads a loader, its halves and inputs, and calls ``evaluate``; refuses bad ones."""

import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .._state import RandomStates, in_eval_mode
from ..networks.compare import is_floating
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
    """Some 512 inputs of a loader, on the model's device, of the type of ``like`` or the model."""
    parameter = next(model.parameters())
    floating = [x.dtype for x in pytree.tree_leaves(like) if is_floating(x)]
    dtype = floating[0] if floating else parameter.dtype
    examples, count = [], 0
    for batch in half:
        value = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
        value = pytree.tree_map_only(
            Tensor, lambda x: x.to(parameter.device, dtype if is_floating(x) else None), value
        )
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


# ---- Results of evaluate ------------------------------------------------------------------------


# The result of ``evaluate``: a number, and the answer to each input where it gives them.
Score: TypeAlias = tuple[float, Tensor | None]


@dataclass(frozen=True)
class Loss:
    """The cost of a setting on a half of the data: the score's drop, changed answers in percent."""

    drop: float
    changed: float | None = None

    def is_within(self, max_drop: float) -> bool:
        """Tells whether it is allowed: changed answers bound the drop, and no luck hides them."""
        return self.drop <= max_drop and (self.changed is None or self.changed <= 2 * max_drop)

    def share(self, max_drop: float) -> float:
        """Its part of the allowed loss; above 1 where it is not allowed."""
        drop, changed = max(self.drop, 0.0), self.changed or 0.0
        if not max_drop:
            return math.inf if drop or changed else 0.0
        return max(drop / max_drop, changed / (2 * max_drop))


class Evaluator:
    """Calls ``evaluate`` on the halves of a loader, and compares with the model as it was."""

    def __init__(
        self,
        model: nn.Module,
        evaluate: Callable[..., Any],
        halves: tuple[Half, Half],
        randomness: RandomStates,
    ) -> None:
        _check_evaluate(evaluate, model, halves[0])
        self._model, self._evaluate, self._halves = model, evaluate, halves
        self._randomness = randomness
        self._dense: dict[int, Score] = {}

    def dense(self, half: int) -> Score:
        """The score of the model as it is; call it before the model is changed."""
        if half not in self._dense:
            self._dense[half] = self._score(half)
        return self._dense[half]

    def check_repeats(self) -> None:
        """Raises unless a second evaluation of the same model gives the same."""
        first, second = self.dense(0), self._score(0)
        if first[0] != second[0] or _changed(first, second):
            raise ValueError(
                "evaluate must give the same for the same model and batches; got "
                f"{first[0]:g} and then {second[0]:g} (does the loader shuffle?)"
            )

    def loss(self, half: int, installed: AbstractContextManager[Any]) -> Loss:
        """The cost of the form of the model that ``installed`` gives it."""
        dense = self.dense(half)
        with installed:
            score = self._score(half)
        return Loss(dense[0] - score[0], _changed(dense, score))

    def resolution(self, half: int) -> float | None:
        """The percentage that one answer stands for; None without answers."""
        _, answers = self.dense(half)
        return None if answers is None or not len(answers) else 100 / len(answers)

    def _score(self, half: int) -> Score:
        with torch.no_grad(), in_eval_mode(self._model), self._randomness.again():
            with _left_in_place(self._model):
                result = self._evaluate(self._model, self._halves[half])
            return _read_score(result)


@contextmanager
def _left_in_place(model: nn.Module) -> Iterator[None]:
    """Raises ValueError if the model's tensors are moved or cast inside; they are put back."""
    named = [*model.named_parameters(), *model.named_buffers()]
    named += [(name, x.grad) for name, x in model.named_parameters() if x.grad is not None]
    # Tensors of subclasses may have no address.
    plain = [(name, x) for name, x in named if type(x) in (Tensor, nn.Parameter)]
    before = [(name, x, x.data, _place(x)) for name, x in plain]
    moved = []
    try:
        yield
    finally:
        for name, tensor, data, place in before:
            if _place(tensor) != place:
                tensor.data = data
                moved.append(name)
    if moved:
        raise ValueError(
            "evaluate must leave the model as it is; got one that moves or casts its "
            f"{moved[0]} (do that before calibrate, or to a copy)"
        )


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.device


def _check_evaluate(evaluate: Any, model: nn.Module, half: Half) -> None:
    if not callable(evaluate):
        raise TypeError(f"evaluate must be a function; got {type(evaluate).__name__}")
    try:
        signature = inspect.signature(evaluate)
    except ValueError:  # it tells nothing of itself
        return
    try:
        signature.bind(model, half)
    except TypeError:
        raise TypeError(f"evaluate must take (model, loader); got one of {signature}") from None


def _read_score(result: Any) -> Score:
    value, answers = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(
            "evaluate must return a number, or a number and the answers; got "
            f"{type(result).__name__}"
        ) from None
    if not math.isfinite(number):
        raise ValueError(f"evaluate must return a finite number; got {number}")
    return number, None if answers is None else _read_answers(answers)


def _read_answers(answers: Any) -> Tensor:
    try:
        return torch.as_tensor(answers).flatten().cpu()
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise TypeError(
            "evaluate must return answers that are a tensor or a list of numbers; got "
            f"a {type(answers).__name__} that is none"
        ) from None


def _changed(one: Score, other: Score) -> float | None:
    """The percentage of answers that differ."""
    (_, before), (_, after) = one, other
    if before is None and after is None:
        return None
    if before is None or after is None or before.shape != after.shape:
        raise ValueError(
            "evaluate must give as many answers each time; got "
            f"{_count(before)} and then {_count(after)}"
        )
    return 100 * (before != after).double().mean().item() if len(before) else 0.0


def _count(answers: Tensor | None) -> str:
    return "none" if answers is None else str(len(answers))
