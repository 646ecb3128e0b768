"""The search for the most moves within the accuracy drop, by a user's ``evaluate``."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._state import in_eval_mode
from .inputs import Half, Randomness

LEAST_EVALUATIONS = 5
_HELD_SHARE = 3  # one evaluation in so many is kept for the second half
_STEP_BACK = 0.7  # of the squared error, where the second half refuses
_ONE_SIDED = 2  # so many steps in a row that end on the same side are too short
_LIKELY_ERROR = 0.03  # squared, of a model's output, where some answers change; a first guess
_BEYOND = 1.2  # steps to where the loss is expected to be the limit go further, to get past it


@dataclass(frozen=True)
class Score:
    """The result of ``evaluate``: a number, and the answer to each input where it gives them."""

    value: float
    answers: Tensor | None = None


@dataclass(frozen=True)
class Loss:
    """The cost of a setting on one half of the data, against the model as it was.

    Attributes:
        drop: of the score; negative where it rose.
        changed: the percentage of answers that changed; None without answers.
    """

    drop: float
    changed: float | None = None

    def is_within(self, max_drop: float) -> bool:
        """Whether it is allowed: changed answers bound the drop, and no luck hides them."""
        return self.drop <= max_drop and (self.changed is None or self.changed <= 2 * max_drop)

    def share(self, max_drop: float) -> float:
        """The share of what is allowed that it takes; above 1 where it is not allowed."""
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
        """The cost of the form of the model that ``installed`` gives it."""
        dense = self.dense(half)
        with installed:
            score = self._score(half)
        return Loss(dense.value - score.value, _changed(dense, score))

    def resolution(self, half: int) -> float | None:
        """The percentage that one answer stands for; None without answers."""
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

LossOf = Callable[[int, int], Loss]  # on a half, of the first n moves


@dataclass(frozen=True)
class Found:
    """The end of a search.

    Attributes:
        moves: how many. searched, held: what they cost on both halves; None for no moves.
    """

    moves: int
    searched: Loss | None = None
    held: Loss | None = None


def search(errors: Sequence[float], max_drop: float, evaluations: int, loss: LossOf) -> Found:
    """The most moves whose loss both halves allow.

    The most moves that the first half allows are found by bisection, between losses that are known
    by a power law of the error. The second half only allows or refuses. Where it refuses, 0.7 of
    the sum of squared errors is tried, and so on, and then numbers between the last that it refused
    and the one that it allowed. Where it allows the first choice, what is left goes to more moves
    within the first half's limit.

    Args:
        errors: the sums of squared errors after one move, after two, and so on.
        evaluations: the most calls of ``loss``.
    """
    run = _Search(max_drop, evaluations, loss)
    first = _FirstHalf(run, errors)
    first.narrow(max(1, (evaluations + 3) // _HELD_SHARE))
    return _held(run, first)


class _Search:
    """The evaluations of a search: what they give, and how many are left."""

    def __init__(self, max_drop: float, evaluations: int, loss: LossOf) -> None:
        self.max_drop, self.left = max_drop, evaluations
        self._loss = loss

    def loss(self, half: int, moves: int) -> Loss:
        self.left -= 1
        return self._loss(half, moves)


class _FirstHalf:
    """The choices that the first half allows, as far as it has been tried.

    Attributes:
        low: the most moves that it allowed.
        high: the fewest that it did not; at first one more than there are.
    """

    def __init__(self, run: _Search, errors: Sequence[float]) -> None:
        self.errors = errors
        self.low, self.high = 0, len(errors) + 1
        self.losses: dict[int, Loss] = {}
        self._run = run
        self._side, self._in_a_row = True, 0  # on which side steps ended, and how many in a row

    @property
    def is_open(self) -> bool:
        return self.high - self.low > 1

    def moves_within(self, error: float, below: int) -> int:
        """The most moves whose error is at most this, and fewer than so many."""
        return sum(each <= error for each in self.errors[: below - 1])

    def narrow(self, left: int) -> None:
        """Tries numbers between the two, until there is none or so many evaluations are left."""
        while self.is_open and self._run.left > left:
            self.allows(self._next())

    def allows(self, moves: int) -> bool:
        """Whether the first half allows so many moves."""
        self.losses[moves] = self._run.loss(0, moves)
        is_allowed = self.losses[moves].is_within(self._run.max_drop)
        self._in_a_row = self._in_a_row + 1 if is_allowed == self._side else 1
        self._side = is_allowed
        if is_allowed:
            self.low = moves
        else:
            self.high = moves
        return is_allowed

    def _next(self) -> int:
        """Where the loss is likely to reach the limit; halfway where nothing tells or it misled."""
        halfway = (self.low + self.high) // 2
        error = self._likely_error()
        if error is None:
            return halfway
        return max(self.low + 1, self.moves_within(error, self.high))

    def _likely_error(self) -> float | None:
        """The sum of squared errors at which the loss may reach the limit, if anything tells."""
        if not self.losses:
            return _LIKELY_ERROR
        known = [
            (math.log(self.errors[moves - 1]), math.log(share))
            for moves, share in ((n, self._share(n)) for n in (self.low, self.high))
            if 0 < share < math.inf and self.errors[moves - 1] > 0
        ]
        if len(known) == 2 and self._in_a_row < _ONE_SIDED:
            (least, below), (most, above) = known
            return math.exp(least - below * (most - least) / (above - below))
        if len(known) == 1 and (not self.low or self.high > len(self.errors)):
            ((error, share),) = known
            beyond = self._in_a_row if share <= 0 else -self._in_a_row
            return math.exp(error - share) * _BEYOND**beyond
        return None

    def _share(self, moves: int) -> float:
        loss = self.losses.get(moves)
        return math.inf if loss is None else loss.share(self._run.max_drop)


def _held(run: _Search, first: _FirstHalf) -> Found:
    """The most moves that the second half allows, of those that the first does."""
    errors, found, moves, refused = first.errors, Found(0), first.low, None
    while run.left and moves > found.moves:
        held = run.loss(1, moves)
        if held.is_within(run.max_drop):
            found = Found(moves, first.losses.get(moves), held)
        else:
            refused = moves
        if refused is None:
            first.narrow(1)
            moves = first.low
        elif found.moves:
            middle = (errors[found.moves - 1] + errors[refused - 1]) / 2
            moves = first.moves_within(middle, refused)
        else:
            moves = first.moves_within(_STEP_BACK * errors[refused - 1], refused)
    return found
