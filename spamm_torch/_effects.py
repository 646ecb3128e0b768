"""Finds the line of the user's code in which a forward does more than compute its result."""

import linecache
import operator
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from torch import fx, nn

from ._state import Place, is_own

_OPERATORS = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"),
    *("and", "or", "xor", "lshift", "rshift"),
)
IN_PLACE = frozenset(getattr(operator, f"i{name}") for name in _OPERATORS) | {operator.setitem}
_IN_PLACE_METHODS = frozenset(f"__{function.__name__}__" for function in IN_PLACE)
# Names of functions whose result has the same memory, or a part of it.
_VIEWS = frozenset(
    (
        *("getitem", "getattr", "view", "view_as", "reshape", "flatten", "unflatten", "ravel"),
        *("squeeze", "unsqueeze", "permute", "detach", "transpose", "movedim", "swapaxes", "t"),
        *("expand", "expand_as", "narrow", "select", "diagonal", "chunk", "split", "unbind"),
        *("contiguous", "to", "float", "half", "double", "bfloat16", "type", "cpu", "cuda"),
    )
)
_LONGEST = 60  # characters of a line of code


def held_tensor_written(node: fx.Node) -> str | None:
    """The name of the Parameter or buffer that a node writes to, by its operands; or None."""
    written = node.kwargs.get("out")
    name = str(getattr(node.target, "__name__", node.target))
    is_in_place = name in _IN_PLACE_METHODS or (name.endswith("_") and not name.endswith("__"))
    if node.op == "call_function" and (node.target in IN_PLACE or node.kwargs.get("inplace")):
        is_in_place = True
    if node.op in ("call_function", "call_method") and is_in_place and node.args:
        written = node.args[0]
    for base in written if isinstance(written, (list, tuple)) else (written,):
        while isinstance(base, fx.Node) and base.op != "get_attr" and base.args:
            name = str(getattr(base.target, "__name__", base.target))
            if name not in _VIEWS and not name.endswith("_"):
                break
            base = base.args[0]
        if isinstance(base, fx.Node) and base.op == "get_attr":
            return str(base.target)
    return None


def line_of(error: BaseException) -> str:
    """The last line of the user's code on the way to an error, with its file and number."""
    frames = traceback.walk_tb(error.__traceback__)
    own = [(frame, line) for frame, line in frames if _is_own(frame)]
    return _quoted(*own[-1]) if own else ""


class Watch:
    """Finds the ``line`` of the user's code that changes a place, and its innermost ``module``."""

    def __init__(self, place: Place, stack: Sequence[nn.Module]) -> None:
        self.line = ""
        self.module: nn.Module | None = None
        self._place, self._stack = place, stack
        self._last: tuple[FrameType, int, nn.Module | None] | None = None

    def run(self, function: Callable[[], Any]) -> None:
        """Runs the function, whatever it raises."""
        before = sys.gettrace()
        sys.settrace(lambda frame, *_: self._step if _is_own(frame) else None)
        try:
            function()
        except Exception:  # its changes before count
            pass
        finally:
            sys.settrace(before)

    def _step(self, frame: FrameType, event: str, arg: Any) -> Any:
        if self.line:
            return None
        if self._last is not None and self._place.is_changed():
            self.line, self.module = _quoted(*self._last[:2]), self._last[2]
        caller: FrameType | None = frame
        while event == "return" and caller is not None:  # the line that called goes on
            caller = caller.f_back
            if caller is not None and _is_own(caller):
                break
        if caller is not None:
            self._last = caller, caller.f_lineno, self._stack[-1] if self._stack else None
        return self._step


def _is_own(frame: FrameType) -> bool:
    return is_own(frame.f_globals.get("__name__"))


def _quoted(frame: FrameType, line: int) -> str:
    file = frame.f_code.co_filename
    code = linecache.getline(file, line).strip()
    code = code if len(code) <= _LONGEST else f"{code[:_LONGEST]}..."
    return f"{os.path.basename(file)}, line {line}: {code}"
