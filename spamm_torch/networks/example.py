"""Running a model on the example input: what its parts take and give, and how results differ."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .signature import Signature
from .state import Place, Snapshot, in_eval_mode

# Relative Frobenius norms of differences that rounding alone may make, over a deep network.
_TOLERANCE = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.float16: 2e-2,
    torch.bfloat16: 1e-1,
}
_TF32_TOLERANCE = 1e-2
_LIKE_ROUNDING = 1.5  # of the rounding of the model itself
_MOST_ROUNDING = 0.1
_MOST_CALLS = 8  # of one module that are kept


@dataclass
class Calls:
    """The arguments and results of the calls of one module, copied as they were."""

    args: list[tuple[Any, ...]] = field(default_factory=list)
    kwargs: list[dict[str, Any]] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)


class Example:
    """An example input, in the form in which the model is called.

    Args:
        value: a tensor, or what else the model's only argument is; a tuple of all positional
            arguments; a dict of arguments by name.
        name: what the user calls it.
    """

    def __init__(self, value: Any, name: str = "example_input") -> None:
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}
        if isinstance(value, dict):
            self.kwargs = value
        else:
            self.args = value if isinstance(value, tuple) else (value,)
        self._value, self._name = value, name

    def call(self, model: nn.Module) -> Any:
        """The model's result; the caller sets modes. The model may write to what it is given."""
        return model(*copied(self.args), **copied(self.kwargs))

    def check_values(self) -> None:
        """Raises ValueError for tensors without entries, with NaN, or of infinities alone.

        Forms compared on these would agree whatever they compute.
        """
        for value in pytree.tree_leaves((self.args, self.kwargs)):
            if not isinstance(value, Tensor) or value.is_meta or value.layout != torch.strided:
                continue
            if value.numel() == 0:
                raise ValueError(f"{self._name} must not be empty; got {describe(value)}")
            if bool(value.isnan().any()) or not bool(value.isfinite().any()):
                raise ValueError(
                    f"{self._name} must hold finite numbers; got {describe(value)} with NaN, or "
                    "with infinities alone"
                )

    def record(
        self, model: nn.Module, watched: Sequence[nn.Module], times: int = 2
    ) -> tuple[dict[nn.Module, Calls], list[Place]]:
        """Runs the model, as it is but in eval mode, twice in a row.

        Returns:
            The calls of the watched modules, and what the calls changed in the model.

        Raises ValueError where the model cannot take the example.
        """
        calls = {module: Calls() for module in watched}

        def hooks() -> Iterator[Any]:
            for module, found in calls.items():
                yield from _watch(module, found)

        return calls, self._run(model, hooks, times)

    def forms(self, model: nn.Module) -> dict[nn.Module, Signature]:
        """How the modules are called that are called; raises as :meth:`record`."""
        forms: dict[nn.Module, Signature] = {}

        def look(module: nn.Module, args: Any, kwargs: Any) -> None:
            if module not in forms:
                forms[module] = Signature.of_call(type(module).forward, args, kwargs)

        def hooks() -> Iterator[Any]:
            for module in model.modules():
                if inspect.isfunction(type(module).forward):
                    yield module.register_forward_pre_hook(look, with_kwargs=True)

        self._run(model, hooks, 1)
        return forms

    def _run(self, model: nn.Module, hooks: Callable[[], Iterator[Any]], times: int) -> list[Place]:
        """Calls the model in eval mode with these hooks, and says what that changed in it."""
        with in_eval_mode(model), torch.no_grad():
            handles = list(hooks())
            before = Snapshot(model)
            try:
                for _ in range(times):
                    self.call(model)
                return before.changed()
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # whatever the model raises for what it cannot take
                line = str(error).strip().partition("\n")[0]
                raise ValueError(
                    f"{self._name} must be what the model takes; got "
                    f"{describe(self._value)} ({type(error).__name__}: {line})"
                ) from error
            finally:
                for handle in handles:
                    handle.remove()


def _watch(module: nn.Module, calls: Calls) -> list[Any]:
    def before(_: Any, args: Any, kwargs: Any) -> None:
        if len(calls.args) < _MOST_CALLS:
            calls.args.append(copied(args))
            calls.kwargs.append(copied(kwargs))

    def after(_: Any, args: Any, kwargs: Any, result: Any) -> None:
        if len(calls.results) < len(calls.args):
            calls.results.append(copied(result))

    return [
        module.register_forward_pre_hook(before, with_kwargs=True),
        module.register_forward_hook(after, with_kwargs=True),
    ]


def copied(value: Any) -> Any:
    """The value with copies of its tensors."""
    return pytree.tree_map(_copy, value)


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if is_dataclass(value) and not isinstance(value, type):  # one that pytree does not know
        value = copy.copy(value)
        for each in fields(value):
            object.__setattr__(value, each.name, copied(getattr(value, each.name)))
    return value


def describe(value: Any) -> str:
    """A value's type, and its shape where it is a tensor."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and {str(value.dtype)[6:]}"
    return f"a {type(value).__name__}"


def other_form(expected: Any, found: Any) -> str | None:
    """How two results differ but for their numbers, or None."""
    if type(expected) is not type(found):
        kinds = [type(value).__name__ for value in (found, expected)]
        return f"its result is a {kinds[0]} where it was a {kinds[1]}"
    if isinstance(expected, Tensor):
        kinds = [f"{tuple(x.shape)} {x.dtype}" for x in (found, expected)]
        return None if kinds[0] == kinds[1] else f"its result is {kinds[0]} where it was {kinds[1]}"
    parts, other_parts = _parts(expected), _parts(found)
    if parts is None or other_parts is None:
        return None
    if parts[1] != other_parts[1] or len(parts[0]) != len(other_parts[0]):
        return "its result has another structure"
    found_forms = map(other_form, parts[0], other_parts[0])
    return next((form for form in found_forms if form is not None), None)


def _parts(value: Any) -> tuple[list[Any], Any] | None:
    """What a result consists of, and what else tells it from others; None for no container."""
    known = pytree.SUPPORTED_NODES.get(type(value))
    if known is not None:
        children, context = known.flatten_fn(value)
        return list(children), context
    if is_dataclass(value):
        return [getattr(value, each.name) for each in fields(value)], None
    if hasattr(value, "_fields"):
        return list(value), None
    return None


def _numbers(value: Any) -> list[Any]:
    """The tensors and numbers of a result."""
    parts = _parts(value)
    if parts is None:
        return [value] if isinstance(value, (Tensor, bool, int, float)) else []
    return [number for part in parts[0] for number in _numbers(part)]


def difference(expected: Any, found: Any) -> str | None:
    """How two results differ by more than rounding, or None."""
    problem = other_form(expected, found)
    if problem is not None:
        return problem
    for pair in zip(_numbers(expected), _numbers(found), strict=True):
        problem = _tensor_difference(*map(torch.as_tensor, pair))
        if problem is not None:
            return problem
    return None


def is_rounding(expected: Any, found: Any, wide: Any) -> bool:
    """Whether ``found`` is about as near to the result in a wider type as ``expected`` is.

    In deep networks rounding alone may grow beyond what :func:`difference` allows. A result that is
    far from that of the wider type is no proof of anything: the model may draw random numbers.
    """
    own = _distance(expected, wide)
    sizes = [x.double().norm() for x in _numbers(wide) if _is_floating(x)]
    is_near = own <= _MOST_ROUNDING * (torch.stack(sizes).norm().item() if sizes else 0.0)
    return is_near and _distance(found, wide) <= _LIKE_ROUNDING * own


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _distance(value: Any, wide: Any) -> float:
    """The Frobenius norm of the difference of all tensors."""
    pairs = zip(_numbers(value), _numbers(wide), strict=True)
    norms = [(a.double() - b.double()).norm() for a, b in pairs if _is_floating(a)]
    return torch.stack(norms).norm().item() if norms else 0.0


def _tensor_difference(a: Tensor, b: Tensor) -> str | None:
    if not a.is_floating_point():
        return None if torch.equal(a, b) else "its result differs"
    wide_a, wide_b = a.double(), b.double()
    finite = torch.isfinite(wide_a)
    infinite = wide_a.isinf(), wide_b.isinf()
    if (
        not torch.equal(wide_a.isnan(), wide_b.isnan())
        or not torch.equal(*infinite)
        or not torch.equal(wide_a[infinite[0]], wide_b[infinite[1]])
    ):
        return "its result has other infinities or NaNs"
    wide_a, wide_b = wide_a[finite], wide_b[finite]
    error = (wide_a - wide_b).norm().item()
    size = wide_a.norm().item()
    limit = _tolerance(a)
    if error <= limit * size:
        return None
    return f"its result differs by {error / size if size else error:.2g}, more than {limit:.2g}"


def _tolerance(a: Tensor) -> float:
    uses_tf32 = a.is_cuda and (
        torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32
    )
    if a.dtype == torch.float32 and uses_tf32:
        return _TF32_TOLERANCE
    return _TOLERANCE.get(a.dtype, 0.0)
