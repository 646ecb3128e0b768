"""The search for the most moves within the accuracy drop, by a user's ``evaluate``."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..networks.state import in_eval_mode
from .inputs import Half, Randomness

LEAST_EVALUATIONS = 5
_HELD_SHARE = 4  # one evaluation in so many is kept for the second half
_STEP_BACK = 0.7  # of the squared error, where the second half refuses


@dataclass(frozen=True)
class Score:
    """What ``evaluate`` gave: a number, and the answer to each input where it gives them."""

    value: float
    answers: Tensor | None = None


@dataclass(frozen=True)
class Loss:
    """What a setting costs on one half of the data, against the model as it was.

    Attributes:
        drop: of the score; negative where it rose.
        changed: the percentage of answers that changed; None without answers.
    """

    drop: float
    changed: float | None = None

    def is_within(self, max_drop: float) -> bool:
        """Whether it is allowed: changed answers bound the drop, and no luck hides them."""
        return self.drop <= max_drop and (self.changed is None or self.changed <= 2 * max_drop)


class Evaluator:
    """Calls ``evaluate`` on the halves of a loader, and compares with the model as it was."""

    def __init__(
        self,
        model: nn.Module,
        evaluate: Callable[..., Any],
        halves: tuple[Half, Half],
        randomness: Randomness,
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
        if first.value != second.value or _changed(first, second):
            raise ValueError(
                "evaluate must give the same for the same model and batches; got "
                f"{first.value:g} and then {second.value:g} (does the loader shuffle?)"
            )

    def loss(self, half: int, installed: AbstractContextManager[Any]) -> Loss:
        """What the form of the model costs that ``installed`` gives it."""
        dense = self.dense(half)
        with installed:
            score = self._score(half)
        return Loss(dense.value - score.value, _changed(dense, score))

    def resolution(self, half: int) -> float | None:
        """What one answer is worth, in percent; None without answers."""
        answers = self.dense(half).answers
        return None if answers is None or not len(answers) else 100 / len(answers)

    def _score(self, half: int) -> Score:
        with torch.no_grad(), in_eval_mode(self._model), self._randomness.again():
            with _left_in_place(self._model):
                result = self._evaluate(self._model, self._halves[half])
            return _read_score(result)


@contextmanager
def _left_in_place(model: nn.Module) -> Iterator[None]:
    """Raises ValueError if the model's tensors are moved or cast inside; they are put back.

    ``Module.to`` writes to the ``data`` of parameters, which no list of a module's attributes sees.
    """
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
    return Score(number, None if answers is None else _read_answers(answers))


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
    if one.answers is None and other.answers is None:
        return None
    if one.answers is None or other.answers is None or one.answers.shape != other.answers.shape:
        raise ValueError(
            "evaluate must give as many answers each time; got "
            f"{_count(one.answers)} and then {_count(other.answers)}"
        )
    return 100 * (one.answers != other.answers).double().mean().item() if len(one.answers) else 0.0


def _count(answers: Tensor | None) -> str:
    return "none" if answers is None else str(len(answers))


# ---- The search ---------------------------------------------------------------------------------

LossOf = Callable[[int, int], Loss]  # of the first n moves, on a half


@dataclass(frozen=True)
class Found:
    """Attributes: the number of moves, and what they cost on both halves; None for no moves."""

    moves: int
    searched: Loss | None = None
    held: Loss | None = None


def search(errors: list[float], max_drop: float, evaluations: int, loss: LossOf) -> Found:
    """The most moves whose loss is allowed on the first half, by bisection, held on the second.

    Where the second half does not allow them, fewer moves are tried: those with 0.7 of the sum of
    squared errors, and so on. What is left of its evaluations goes to numbers between the last that
    it refused and the one that it allowed.

    Args:
        errors: the sum of squared errors after one move, after two, and so on.
        evaluations: the most calls of ``loss``.
    """
    for_second = max(1, (evaluations + 3) // _HELD_SHARE)
    losses = {}
    low, high = 0, len(errors) + 1
    for _ in range(evaluations - for_second):
        if high - low < 2:
            break
        middle = (low + high) // 2
        losses[middle] = loss(0, middle)
        if losses[middle].is_within(max_drop):
            low = middle
        else:
            high = middle
    found, moves, refused = Found(0), low, None
    for _ in range(for_second):
        if moves <= found.moves:
            break
        held = loss(1, moves)
        if held.is_within(max_drop):
            found = Found(moves, losses.get(moves), held)
            if refused is None:
                break
        else:
            refused = moves
        moves = _between(errors, found.moves, refused) if found.moves else _fewer(errors, moves)
    return found


def _between(errors: list[float], least: int, most: int) -> int:
    """The number of moves halfway between two by their squared errors, less than the second."""
    limit = (errors[least - 1] + errors[most - 1]) / 2
    return sum(error <= limit for error in errors[: most - 1])


def _fewer(errors: list[float], moves: int) -> int:
    """The number of moves with 0.7 of the squared error of so many, and at least one less."""
    limit = _STEP_BACK * errors[moves - 1]
    return sum(error <= limit for error in errors[: moves - 1])
