"""Running a model on the example input: what its parts take and give, and how results differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .state import in_eval_mode

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

    def record(
        self, model: nn.Module, watched: Sequence[nn.Module]
    ) -> tuple[dict[nn.Module, Calls], dict[nn.Module, list[Tensor]]]:
        """Runs the model as it is, in eval mode.

        Returns:
            The calls of the watched modules, and the first input of each convolution's calls.

        Raises ValueError where the model cannot take the example.
        """
        calls = {module: Calls() for module in watched}
        inputs: dict[nn.Module, list[Tensor]] = {}
        with in_eval_mode(model), torch.no_grad():
            handles: list[Any] = []
            for module, found in calls.items():
                handles += _watch(module, found)
            for module in model.modules():
                if isinstance(module, nn.Conv2d):
                    found_inputs = inputs.setdefault(module, [])
                    handles.append(module.register_forward_pre_hook(_keep(found_inputs)))
            try:
                self.call(model)
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
        return calls, inputs


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


def _keep(inputs: list[Tensor]) -> Callable[..., None]:
    def before(_: Any, args: Any) -> None:
        if args and isinstance(args[0], Tensor) and len(inputs) < _MOST_CALLS:
            inputs.append(args[0].detach().clone())

    return before


def copied(value: Any) -> Any:
    """The value with copies of its tensors."""
    return pytree.tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, value)


def describe(value: Any) -> str:
    """A value's type, and its shape where it is a tensor."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and {str(value.dtype)[6:]}"
    return f"a {type(value).__name__}"


def difference(expected: Any, found: Any) -> str | None:
    """How two results differ by more than rounding, or None."""
    one, one_spec = pytree.tree_flatten(expected)
    other, other_spec = pytree.tree_flatten(found)
    if one_spec != other_spec:
        return "its result has another structure"
    for a, b in zip(one, other, strict=True):
        if isinstance(a, Tensor) != isinstance(b, Tensor):
            return "its result has another structure"
        if isinstance(a, Tensor) and (problem := _tensor_difference(a, b)) is not None:
            return problem
    return None


def is_rounding(expected: Any, found: Any, wide: Any) -> bool:
    """Whether ``found`` is about as near to the result in a wider type as ``expected`` is.

    In deep networks rounding alone may grow beyond what :func:`difference` allows. A result that is
    far from that of the wider type is no proof of anything: the model may draw random numbers.
    """
    own = _distance(expected, wide)
    is_near = own <= _MOST_ROUNDING * _distance(wide, pytree.tree_map(_zeros, wide))
    return is_near and _distance(found, wide) <= _LIKE_ROUNDING * own


def _zeros(value: Any) -> Any:
    return torch.zeros_like(value) if isinstance(value, Tensor) else value


def _distance(value: Any, wide: Any) -> float:
    """The Frobenius norm of the difference of all tensors."""
    pairs = zip(pytree.tree_leaves(value), pytree.tree_leaves(wide), strict=True)
    norms = [
        (a.double() - b.double()).norm()
        for a, b in pairs
        if isinstance(a, Tensor) and a.is_floating_point()
    ]
    return torch.stack(norms).norm().item() if norms else 0.0


def _tensor_difference(a: Tensor, b: Tensor) -> str | None:
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return f"its result is {tuple(b.shape)} {b.dtype} where it was {tuple(a.shape)} {a.dtype}"
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
