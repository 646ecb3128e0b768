"""Compares two results of a model: tells a difference from rounding."""

import copy
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .._state import Snapshot
from .plan import Island
from .shapes import small_images

# Relative Frobenius norms of differences that rounding alone may make, over a deep network.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
_TF32_TOLERANCE = 1e-2
_LIKE_ROUNDING = 1.5  # of the rounding of the model itself
_MOST_ROUNDING = 0.1


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
    return next(filter(None, map(other_form, parts[0], other_parts[0])), None)


def _parts(value: Any) -> tuple[list[Any], Any] | None:
    """The parts of a result, and the context that tells it from others; None for no container."""
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
    if (problem := other_form(expected, found)) is not None:
        return problem
    pairs = zip(_numbers(expected), _numbers(found), strict=True)
    problems = (_tensor_difference(*map(torch.as_tensor, pair)) for pair in pairs)
    return next(filter(None, problems), None)


def are_equal(one: Any, other: Any) -> bool:
    """Whether two results have one form and the same numbers, none of which is a NaN."""
    if other_form(one, other) is not None:
        return False
    pairs = zip(_numbers(one), _numbers(other), strict=True)
    return all(torch.equal(*map(torch.as_tensor, pair)) for pair in pairs)


def is_rounding(expected: Any, found: Any, wide: Any) -> bool:
    """Whether ``found`` is about as near to ``wide`` as ``expected`` is, which has to be near."""
    own = distance(expected, wide)
    is_near = own <= _MOST_ROUNDING * size_of(wide)
    return is_near and distance(found, wide) <= _LIKE_ROUNDING * own


def is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def distance(value: Any, other: Any) -> float:
    """The Frobenius norm of the difference of all floating tensors."""
    pairs = zip(_numbers(value), _numbers(other), strict=True)
    return size_of([a.double() - b.double() for a, b in pairs if is_floating(a)])


def size_of(value: Any) -> float:
    """The Frobenius norm of all floating tensors."""
    norms = [x.double().norm() for x in _numbers(value) if is_floating(x)]
    return torch.stack(norms).norm().item() if norms else 0.0


def _tensor_difference(a: Tensor, b: Tensor) -> str | None:
    if not a.is_floating_point():
        return None if torch.equal(a, b) else "its result differs"
    wide_a, wide_b = a.double(), b.double()
    finite = torch.isfinite(wide_a)
    infinite = wide_a.isinf(), wide_b.isinf()
    same = torch.equal(wide_a.isnan(), wide_b.isnan()) and torch.equal(*infinite)
    if not same or not torch.equal(wide_a[infinite[0]], wide_b[infinite[1]]):
        return "its result has other infinities or NaNs"
    error, size = (wide_a - wide_b)[finite].norm().item(), wide_a[finite].norm().item()
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


def beyond_rounding(
    module: nn.Module, run: Callable[[nn.Module, Any], Any], given: Any, expected: Any, found: Any
) -> str | None:
    """As :func:`difference`; None also where a wider type shows that the module rounds as much."""
    problem = difference(expected, found)
    if problem is None or other_form(expected, found) is not None:
        return problem
    is_single = any(is_floating(x) and x.dtype == torch.float32 for x in pytree.tree_leaves(given))
    wider = torch.float64 if is_single else torch.float32
    widened = pytree.tree_map(lambda x: x.to(wider) if is_floating(x) else x, given)
    try:
        wide = run(copy.deepcopy(module).to(wider), widened)
        return None if is_rounding(expected, found, wide) else problem
    except Exception:  # it may know one dtype alone, or not fit into memory a second time
        return problem


def own_result(island: Island, module: nn.Module, args: tuple[Any, ...]) -> Any:
    """The result of an island's own forward, of its module or of a copy of that."""
    positional, keywords = island.signature.arguments(tuple(args))
    return type(island.module).forward(module, *positional, **keywords)


def made_up_calls(island: Island, before: Snapshot) -> list[tuple[tuple[Tensor, ...], Any]]:
    """A call with made-up images and its result, if one runs; two if it changes the model."""

    def call(image: Tensor) -> tuple[tuple[Tensor, ...], Any]:
        return (image,), own_result(island, island.module, (image.clone(),))

    for image in small_images(island):
        try:
            first = call(image)
            return [first, call(image)] if before.changed() else [first]
        except Exception:  # it takes images of another size
            continue
    return []
