"""Names and arguments that left, each with the line that says what is used in its place."""

import functools
from collections.abc import Callable
from typing import NoReturn, ParamSpec, TypeVar

_NO_REFERENCE = "calibrate(model, loader, evaluate, max_drop) finds what such pictures may skip"
_ORDER = "docs/serving.md orders a batch by centres of mass with torch.argsort"

# By the module of a name, and by the function of an argument.
HINTS: dict[str, dict[str, str]] = {
    "spamm_torch": {"OrderedBatch": _ORDER, "likeness_order": _ORDER, "order_batch": _ORDER},
    "calibrate": {"reference": _NO_REFERENCE},
    "conv2d": {"devices": "torch.nn.DataParallel, or mm(devices=) of its im2col matrix"},
    "convert_": {"reference": _NO_REFERENCE},
}

P = ParamSpec("P")
T = TypeVar("T")


def with_hints(function: Callable[P, T]) -> Callable[P, T]:
    """The function, which raises TypeError with a hint for an argument that left."""
    hints = HINTS[function.__name__]

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        for name, hint in hints.items():
            if name in kwargs:
                raise TypeError(f"{function.__name__} takes no {name} any more: {hint}")
        return function(*args, **kwargs)

    return call


def attribute_of(module: str) -> Callable[[str], NoReturn]:
    """The ``__getattr__`` of a module: AttributeError, with a hint where there is one."""

    def getattr(name: str) -> NoReturn:
        hint = HINTS[module].get(name)
        line = f"module {module!r} has no attribute {name!r}"
        raise AttributeError(f"{line}: {hint}" if hint else line)

    return getattr
