"""The inputs and scores of a calibration: halves of a loader, a model's calls, ``evaluate``."""

import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

# Inputs that thresholds are found on: so many, or as many as have so many values.
_MOST_INPUTS, _MOST_VALUES = 512, 1 << 24


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
    if (batches := iter(loader)) is loader:
        raise ValueError(
            "loader must give its batches anew each time it is iterated over; got "
            f"{type(loader).__name__}, which is used up (pass a list or a DataLoader)"
        )
    if (found := len(list(itertools.islice(batches, 2)))) < 2:
        raise ValueError(f"loader must give at least two batches, one for each half; got {found}")
    return Half(loader, 0), Half(loader, 1)


def inputs_of(model: nn.Module, half: Half) -> list[Any]:
    """The inputs of the first batches, on the model's device and of its type. A batch that is a
    tuple or a list begins with the model's input.
    """
    parameter, inputs, count, size = next(model.parameters()), [], 0, 0

    def moved(x: Tensor) -> Tensor:
        return x.to(parameter.device, parameter.dtype if x.is_floating_point() else x.dtype)

    for batch in half:
        value = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
        if not batch_size(value):
            got = f"a {type(batch).__name__} with {[tuple(x.shape) for x in tensors_of(value)]}"
            raise ValueError(
                f"loader must give batches of tensors of at least one input; got {got}"
            )
        inputs.append(pytree.tree_map_only(Tensor, moved, value))
        count, size = count + batch_size(value), size + sum(x.numel() for x in tensors_of(value))
        if count >= _MOST_INPUTS or size >= _MOST_VALUES:
            break
    return inputs


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors inside of lists, tuples and dicts."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def batch_size(value: Any) -> int:
    """The length of the first tensor in it that has a dimension; 0 where there is none."""
    return next((len(leaf) for leaf in tensors_of(value) if leaf.dim()), 0)


def call(model: nn.Module, value: Any) -> Any:
    """The result for a tuple of positional arguments, a dict of arguments by name, or one argument;
    copies of them, since a model may write to its input.
    """
    value = pytree.tree_map_only(Tensor, Tensor.clone, value)
    if isinstance(value, dict):
        return model(**value)
    return model(*value) if isinstance(value, tuple) else model(value)


@contextmanager
def isolated(model: nn.Module) -> Iterator[None]:
    """Inside, eval mode without gradients, and Python and torch draw the same numbers each time;
    afterwards modes, generators, buffers and the places of tensors are as before.

    Raises ValueError where a tensor was moved or cast.
    """

    def place(tensor: Tensor) -> tuple[Any, ...]:
        return tensor.data_ptr(), tensor.dtype, tensor.device

    state = random.getstate()
    modules = [(module, module.training, dict(module._buffers)) for module in model.modules()]
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [x.grad for x in model.parameters() if x.grad is not None]
    # Tensors of subclasses may have no address.
    places = [(x, x.data, place(x)) for x in tensors if type(x) in (Tensor, nn.Parameter)]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    devices = range(torch.cuda.device_count() if tensors[0].is_cuda else 0)
    with torch.no_grad(), torch.random.fork_rng(devices):
        for module, *_ in modules:
            module.training = False
        torch.manual_seed(0)
        random.seed(0)
        try:
            yield
        finally:
            random.setstate(state)
            for module, module.training, own in modules:
                module._buffers.update(own)
            moved = [(tensor, data) for tensor, data, before in places if place(tensor) != before]
            for tensor, data in moved:
                tensor.data = data
            for buffer, values in buffers:
                if not torch.equal(buffer, values):
                    buffer.copy_(values)
    if moved:
        names = [name for name, x in model.state_dict(keep_vars=True).items() if x is moved[0][0]]
        raise ValueError(
            "evaluate must leave the model as it is; got one that moves or casts its "
            f"{', '.join(names)} (do that before calibrate, or to a copy)"
        )


class Evaluator:
    """Calls ``evaluate`` on the halves of a loader, and compares with the model as it is."""

    def __init__(self, model: nn.Module, evaluate: Callable[..., Any], halves: Any) -> None:
        if not callable(evaluate):
            raise TypeError(f"evaluate must be a function; got {type(evaluate).__name__}")
        self._model, self._evaluate, self._halves = model, evaluate, halves
        self._dense: dict[int, float] = {}
        self.calls = 0

    def see(self, half: int) -> None:
        """Notes the score of the model as it is, if that is not known."""
        if half not in self._dense:
            self._dense[half] = self._score(half)

    def check_repeats(self) -> None:
        """Raises unless a second evaluation of the model as it is gives the same."""
        self.see(0)
        if drop := self.drop(0):
            first = self._dense[0]
            raise ValueError(
                "evaluate must give the same for the same model and batches; got "
                f"{first:g} and then {first - drop:g} (does the loader shuffle?)"
            )

    def drop(self, half: int) -> float:
        """The loss of score by the settings that the model has now."""
        return self._dense[half] - self._score(half)

    def _score(self, half: int) -> float:
        self.calls += 1
        with isolated(self._model):
            result = self._evaluate(self._model, self._halves[half])
        try:
            score = float(result)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            got = type(result).__name__
            raise TypeError(f"evaluate must return a number; got {got}") from None
        if not math.isfinite(score):
            raise ValueError(f"evaluate must return a finite number; got {score}")
        return score
