"""The rules of arguments, for the functions, the modules and the fake kernels alike.

Each function checks an argument and returns it in the form that the ops take. Plain ``if`` and
``raise`` rather than ``torch._check_value``: it costs a tenth, and torch.compile can trace it.
"""

import math
import numbers
import sys
import textwrap
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any, TypedDict

import torch
from torch import Tensor
from torch.masked import MaskedTensor
from torch.nn import Module, Parameter

EDGES = (32, 64, 128)
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


# By their names in torch.nn.functional; csrc/activation.h has the same.
ACTIVATIONS = ("none", "relu", "relu6", "hardswish", "silu", "leaky_relu")


class Knobs(TypedDict):
    """The one knob given, as keyword arguments of an op: a ``tau`` that is a number is its
    ``threshold``, unless torch.compile has found that it changes from call to call.
    """

    tau: Tensor | None
    threshold: float | None
    valid_ratio: float | None
    max_error: float | None


# ---- Knobs --------------------------------------------------------------------------------------


def is_threshold(tau: Any, valid_ratio: Any, max_error: Any) -> bool:
    """Tells whether the one knob is a valid float ``tau`` that is a ``threshold``, as usual."""
    return (
        type(tau) is float
        and valid_ratio is max_error is None
        and tau == tau
        and not torch.compiler.is_compiling()
    )


def as_knobs(tau: Any, valid_ratio: float | None, max_error: float | None) -> Knobs:
    """The op's keyword arguments for the one knob given; raises as :func:`check_knobs`."""
    if is_threshold(tau, valid_ratio, max_error):
        return {"tau": None, "threshold": tau, "valid_ratio": None, "max_error": None}
    check_knobs(tau, valid_ratio, max_error)
    threshold = None
    if tau is not None and not isinstance(tau, Tensor):
        if torch.compiler.is_compiling() and not _is_constant(tau):
            tau = as_tau(tau)  # a number in the schema would compile anew for each value
        else:
            threshold = float(tau)
    held = tau if isinstance(tau, Tensor) else None
    return {"tau": held, "threshold": threshold, "valid_ratio": valid_ratio, "max_error": max_error}


def _is_constant(number: Any) -> bool:
    """Tells whether a number that is traced has the same value in each call, as far as is known."""
    from torch.fx.experimental.symbolic_shapes import has_static_value  # takes half a second

    followed = isinstance(number, (float, int, torch.SymFloat, torch.SymInt))
    return not followed or has_static_value(number)


def check_knobs(tau: Any, valid_ratio: float | None, max_error: float | None) -> None:
    """Raises unless exactly one knob is given, of the right type and within its range."""
    if (tau is not None) + (valid_ratio is not None) + (max_error is not None) != 1:
        knobs = {"tau": tau, "valid_ratio": valid_ratio, "max_error": max_error}
        given = [name for name, value in knobs.items() if value is not None]
        raise ValueError(
            "exactly one of tau, valid_ratio and max_error must be given; got "
            + (" and ".join(given) or "none")
        )
    if tau is not None:
        check_tau(tau)
    elif valid_ratio is not None:
        check_valid_ratio(valid_ratio)
    else:
        check_max_error(max_error)


def check_tau(tau: Any) -> None:
    """Raises unless ``tau`` is a number other than NaN, or a 0-d floating-point tensor."""
    if isinstance(tau, Tensor):
        if not tau.is_floating_point():
            raise TypeError(f"tau must be a floating-point tensor; got {dtype_name(tau.dtype)}")
        if tau.dim() != 0:
            raise RuntimeError(f"tau must be a 0-d tensor; got shape {list(tau.shape)}")
        if tau.requires_grad:
            raise RuntimeError(
                "tau must not require a gradient, since a threshold has none (detach it); got a "
                f"{type(tau).__name__} that does"
            )
    elif not is_number(tau):
        raise TypeError(f"tau must be a number or a 0-d floating-point tensor; got {shown(tau)}")
    elif tau != tau:  # NaN; math.isnan of a changing float is not traceable
        raise ValueError(f"tau must be a number; got {tau}")
    else:
        _check_range(tau, "tau")


def check_valid_ratio(valid_ratio: Any) -> None:
    check_number(valid_ratio, "valid_ratio")
    if not 0 < valid_ratio <= 1:
        raise ValueError(f"valid_ratio must be in (0, 1]; got {valid_ratio}")


def check_max_error(max_error: Any) -> None:
    check_number(max_error, "max_error")
    if not max_error >= 0:
        raise ValueError(f"max_error must be at least 0; got {max_error}")


def check_search(valid_ratio: Any, max_error: Any, max_iterations: Any, tolerance: Any) -> None:
    """Raises unless these are numbers that the op find_tau takes; ValueError, TypeError."""
    if valid_ratio is not None:
        check_valid_ratio(valid_ratio)
    if max_error is not None:
        check_max_error(max_error)
    check_integer(max_iterations, "max_iterations")
    check_number(tolerance, "tolerance")


def as_tau(tau: float | Tensor) -> Tensor:
    """The op's form of a threshold: a number becomes a host scalar, passed to kernels by value."""
    check_tau(tau)
    if isinstance(tau, Tensor):
        return tau
    return torch.tensor(tau, dtype=torch.float64, device="cpu")


def held_tau(knobs: Knobs) -> Tensor | None:
    """The threshold of checked knobs as a 0-d tensor; None if it is to be searched for."""
    return knobs["tau"] if knobs["threshold"] is None else as_tau(knobs["threshold"])


def has_tau(knobs: Knobs) -> bool:
    """Tells whether the knob of checked knobs is a threshold."""
    return knobs["tau"] is not None or knobs["threshold"] is not None


# ---- Numbers ------------------------------------------------------------------------------------


def shown(value: Any) -> str:
    """The repr of a value, in a line that is no longer than an error has room for."""
    return textwrap.shorten(repr(value), 80, placeholder="...")


def check_number(value: Any, name: str, expected: str = "a number") -> None:
    if isinstance(value, Tensor):
        raise TypeError(
            f"{name} must be a number; got tensor (item() reads it, and waits for the device)"
        )
    if not is_number(value):
        raise TypeError(f"{name} must be {expected}; got {shown(value)}")
    _check_range(value, name)


def _check_range(value: Any, name: str) -> None:
    if type(value) in (int, Fraction) and abs(value) > sys.float_info.max:
        raise ValueError(f"{name} must be a number that float64 holds; got a larger one")


def is_number(value: Any) -> bool:
    """Tells whether a value can be read as one real number. Traced numbers are symbolic."""
    if type(value) in (float, int):  # the usual case, without the cost of the others
        return True
    kinds = (float, int, torch.SymFloat, torch.SymInt, numbers.Real)
    return isinstance(value, kinds) and not isinstance(value, bool)


def is_integer(value: Any) -> bool:
    if type(value) is int:
        return True
    return isinstance(value, (numbers.Integral, torch.SymInt)) and not isinstance(value, bool)


def check_integer(value: Any, name: str) -> None:
    if not is_integer(value):
        raise TypeError(f"{name} must be an integer; got {shown(value)}")


def check_bool(value: Any, name: str) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False; got {shown(value)}")


def check_integers(value: Any, name: str) -> None:
    """TypeError unless ``value`` is an integer or a sequence of integers."""
    kind = type(value)
    if kind is int or (
        kind is tuple and len(value) == 2 and type(value[0]) is type(value[1]) is int
    ):
        return  # the usual cases, without the cost of the others
    every = value if isinstance(value, Sequence) and not isinstance(value, str) else (value,)
    if not all(map(is_integer, every)):
        raise TypeError(f"{name} must be an integer or a pair of integers; got {shown(value)}")


# ---- Activations --------------------------------------------------------------------------------


def as_activation(activation: Any, relu: Any = False) -> str:
    """The name that ops take; ``relu=True`` is another way to say "relu"."""
    check_bool(relu, "relu")
    if activation is None:
        return "relu" if relu else "none"
    if relu:
        raise ValueError(
            f"activation must not be given with relu=True, which means 'relu'; got {activation!r}"
        )
    if not isinstance(activation, str):
        raise TypeError(f"activation must be a string or None; got {shown(activation)}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}; got {activation!r}")
    return activation


# ---- Blocks -------------------------------------------------------------------------------------


def check_block(block: Any) -> tuple[int, int, int]:
    """The triple (m, k, n) that ``block`` means; ValueError unless its edges are 32, 64 or 128."""
    if type(block) is int and block in EDGES:  # the usual case, without the cost of the others
        return block, block, block
    m, k, n = _edges(block, 3, "a triple (m, k, n)")
    return m, k, n


def check_block_pair(block: Any) -> tuple[int, int]:
    """The pair (rows, columns) that ``block`` means; ValueError as :func:`check_block`."""
    rows, columns = _edges(block, 2, "a pair (rows, columns)")
    return rows, columns


def _is_several(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, (str, Tensor))


def _edges(block: Any, count: int, form: str) -> tuple[int, ...]:
    several = _is_several(block)
    edges = tuple(block) if several else (block,) * count
    if len(edges) != count or not all(is_integer(edge) and edge in EDGES for edge in edges):
        got = list(edges) if several else block
        raise ValueError(f"block must be 32, 64 or 128, or {form} of these; got {shown(got)}")
    return tuple(int(edge) for edge in edges)


def check_pixel_block(pixel_block: Any, block: Any = None) -> tuple[int, int, int]:
    """The triple that ``pixel_block`` means, whose product is the n of a given ``block``."""
    several = _is_several(pixel_block)
    edges = tuple(pixel_block) if several else (pixel_block,)
    powers = all(is_integer(edge) and edge > 0 and edge & (edge - 1) == 0 for edge in edges)
    if len(edges) != 3 or not powers or math.prod(edges) not in EDGES:
        got = list(edges) if several else pixel_block
        raise ValueError(
            "pixel_block must be (images, rows, columns), powers of two whose product is 32, 64 "
            f"or 128; got {shown(got)}"
        )
    if block is not None and math.prod(edges) != (n := check_block(block)[2]):
        raise ValueError(
            f"pixel_block's product must be the block's n, {n}; got pixel_block "
            f"{list(edges)}, whose product is {math.prod(edges)}"
        )
    images, rows, columns = edges
    return int(images), int(rows), int(columns)


def conv_block(
    out_channels: int, in_channels: int, block: Any, pixel_block: Any
) -> tuple[int, int, int]:
    """(m, k, n) of a convolution whose groups have so many channels, by the documented rule."""
    if pixel_block is not None:
        pixel_block = check_pixel_block(pixel_block, block)
    if block is not None:
        return check_block(block)
    return (
        32 if out_channels <= 32 else 64,
        32 if in_channels <= 32 else 64,
        64 if pixel_block is None else math.prod(pixel_block),
    )


# ---- Devices ------------------------------------------------------------------------------------


def as_devices(devices: Any) -> list[int]:
    """The numbers of the CUDA devices that ``devices`` names; the op checks that they exist."""
    if not _is_several(devices):
        raise TypeError(
            f"devices must be a sequence of GPU numbers or torch.devices; got {devices!r}"
        )
    numbers = []
    for device in devices:
        if not is_integer(device):
            place = torch.device(device)
            if place.type != "cuda" or place.index is None:
                raise ValueError(f"devices must be CUDA devices with a number; got {str(place)!r}")
            device = place.index
        numbers.append(int(device))
    return numbers


# ---- Tensors ------------------------------------------------------------------------------------


def check_tensor(value: Any, name: str) -> None:
    """TypeError unless ``value`` is a dense tensor."""
    kind = type(value)
    is_plain = kind is Tensor or kind is Parameter
    if is_plain and value.layout is torch.strided and not value.is_nested:
        return  # the usual case
    if not isinstance(value, Tensor):
        hint = {
            "numpy": " (torch.from_numpy makes a tensor of it)",
            "scipy": " (torch.from_numpy makes a tensor of its toarray())",
        }.get(kind.__module__.partition(".")[0], "")
        raise TypeError(f"{name} must be a tensor; got {kind.__name__}{hint}")
    if value.is_nested:
        raise TypeError(f"{name} must be a dense tensor; got a nested tensor (pad it)")
    if value.layout != torch.strided:
        raise TypeError(
            f"{name} must be a dense (strided) tensor; got {value.layout} (call to_dense())"
        )
    if isinstance(value, MaskedTensor):
        raise TypeError(f"{name} must be a dense tensor; got a masked tensor (call to_tensor(0))")


def check_tensors(value: Any, name: str) -> None:
    """TypeError unless ``value`` is a list of dense tensors."""
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"{name} must be a list of tensors; got {type(value).__name__}")
    for tensor in value:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a list of tensors; got {type(tensor).__name__} in it")
        check_tensor(tensor, name)


def check_optional_tensor(value: Any, name: str) -> None:
    """TypeError unless ``value`` is a dense tensor or None."""
    if value is not None:
        check_tensor(value, name)


def check_operands(a: Tensor, b: Tensor) -> None:
    """Raises unless two dense tensors are matrices of one supported dtype, on one device."""
    if a.dtype not in DTYPES:
        got = dtype_name(a.dtype)
        raise TypeError(f"a must be float16, bfloat16, float32 or float64; got {got}")
    check_alike(a, b)
    if a.dim() != 2 or b.dim() != 2:
        raise RuntimeError(
            f"a and b must be matrices (2-d); got shapes {tuple(a.shape)} and {tuple(b.shape)}"
        )


def check_alike(a: Tensor, b: Tensor, names: str = "a and b") -> None:
    """Raises unless two tensors have one dtype and one device."""
    if a.device != b.device:
        raise RuntimeError(f"{names} must be on the same device; got {a.device} and {b.device}")
    if a.dtype != b.dtype:
        raise TypeError(
            f"{names} must have one dtype; got {dtype_name(a.dtype)} and {dtype_name(b.dtype)}"
        )


def holds_dtensor(*values: Any) -> bool:
    """Tells whether one of the values is a DTensor, without importing it, which is slow."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(value, module.DTensor) for value in values)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def norm_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of norms of such numbers."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_module(value: Any, function: str) -> None:
    if isinstance(value, torch.jit.ScriptModule):
        got = "one scripted: pass the module itself"
        raise TypeError(f"{function} expects an nn.Module; got {got}")
    if not isinstance(value, Module):
        raise TypeError(f"{function} expects an nn.Module; got {type(value).__name__}")
