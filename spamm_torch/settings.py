"""Knobs and blocks as users give them: checked, and brought into the form that the ops take."""

import math
import numbers
from collections.abc import Iterable

import torch

_EDGES = (32, 64, 128)


def check_knobs(tau, valid_ratio, max_error):
    """Raises unless exactly one knob is given, of the right type and within its range.

    ValueError for none, several, NaN or out of range; TypeError for what is no number and no
    floating-point tensor; RuntimeError for a tensor that is not 0-d.
    """
    knobs = {"tau": tau, "valid_ratio": valid_ratio, "max_error": max_error}
    given = [name for name, value in knobs.items() if value is not None]
    if len(given) != 1:
        raise ValueError(
            "exactly one of tau, valid_ratio and max_error must be given; got "
            + (" and ".join(given) or "none")
        )
    (name,) = given
    value = knobs[name]
    if name == "tau" and isinstance(value, torch.Tensor):
        if not value.is_floating_point():
            raise TypeError(f"tau must be a floating-point tensor; got {value.dtype}")
        if value.dim() != 0:
            raise RuntimeError(f"tau must be a 0-d tensor; got shape {list(value.shape)}")
    elif not is_number(value):
        raise TypeError(f"{name} must be a number; got {value!r}")
    elif name == "tau" and value != value:  # NaN; math.isnan of a changing float is not traceable
        raise ValueError(f"tau must be a number; got {value}")
    elif name == "valid_ratio" and not 0 < value <= 1:
        raise ValueError(f"valid_ratio must be in (0, 1]; got {value}")
    elif name == "max_error" and not value >= 0:
        raise ValueError(f"max_error must be at least 0; got {value}")


def check_search(valid_ratio, max_iterations, tolerance):
    """Raises unless these are what the op find_tau takes; ValueError, TypeError."""
    check_knobs(None, valid_ratio, None)
    if not max_iterations > 0:
        raise ValueError(f"max_iterations must be positive; got {max_iterations}")
    if not tolerance >= 0:
        raise ValueError(f"tolerance must be at least 0; got {tolerance}")


def is_number(value):
    """Whether a knob can be read as one real number. Traced floats are symbolic."""
    return isinstance(value, (float, int, torch.SymFloat, torch.SymInt, numbers.Real))


def as_tau(tau):
    """The op's form of a threshold: a number becomes a host scalar, passed to kernels by value."""
    if isinstance(tau, torch.Tensor):
        return tau
    if not is_number(tau):
        raise TypeError(f"tau must be a float or a 0-d floating-point tensor; got {tau!r}")
    if tau != tau:
        raise ValueError(f"tau must be a number; got {tau}")
    return torch.tensor(tau, dtype=torch.float64, device="cpu")


def as_knobs(tau, valid_ratio, max_error):
    """The op's keyword arguments for the one knob given; raises as :func:`check_knobs`."""
    check_knobs(tau, valid_ratio, max_error)
    return {
        "tau": None if tau is None else as_tau(tau),
        "valid_ratio": valid_ratio,
        "max_error": max_error,
    }


def check_block(block):
    """The triple (m, k, n) that ``block`` means; ValueError unless its edges are 32, 64 or 128."""
    return _edges(block, 3, "a triple (m, k, n)")


def check_block_pair(block):
    """The pair (rows, columns) that ``block`` means; ValueError as :func:`check_block`."""
    return _edges(block, 2, "a pair (rows, columns)")


def _edges(block, count, form):
    if type(block) is int and block in _EDGES:  # the usual case, without the cost of the others
        return (block,) * count
    edges = tuple(block) if isinstance(block, Iterable) else (block,) * count
    if len(edges) != count or not all(_is_integer(edge) and edge in _EDGES for edge in edges):
        raise ValueError(f"block must be 32, 64 or 128, or {form} of these; got {list(edges)}")
    return tuple(int(edge) for edge in edges)


def check_pixel_block(pixel_block, block=None):
    """The triple that ``pixel_block`` means.

    ValueError unless it is three powers of two whose product is 32, 64 or 128, and the n of
    ``block`` where that is given.
    """
    edges = tuple(pixel_block) if isinstance(pixel_block, Iterable) else (pixel_block,)
    powers = all(_is_integer(edge) and edge > 0 and edge & (edge - 1) == 0 for edge in edges)
    if len(edges) != 3 or not powers or math.prod(edges) not in _EDGES:
        raise ValueError(
            "pixel_block must be (images, rows, columns), powers of two whose product is 32, 64 "
            f"or 128; got {list(edges)}"
        )
    if block is not None and math.prod(edges) != (n := check_block(block)[2]):
        raise ValueError(
            f"pixel_block's product must be the block's n, {n}; got pixel_block "
            f"{list(edges)}, whose product is {math.prod(edges)}"
        )
    return tuple(int(edge) for edge in edges)


def _is_integer(value):
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def check_tensors(**tensors):
    """TypeError unless each is a dense tensor."""
    for name, value in tensors.items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{name} must be a tensor; got {type(value).__name__}")
        if value.layout != torch.strided:
            raise TypeError(f"{name} must be a dense (strided) tensor; got {value.layout}")


def check_optional_tensors(**tensors):
    """TypeError unless each is a dense tensor or None."""
    check_tensors(**{name: value for name, value in tensors.items() if value is not None})
