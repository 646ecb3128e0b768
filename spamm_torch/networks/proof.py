"""The proof that folded weights are still those of their tensors, and that a plan still fits.

It is asked for in every eager call, for the whole network at once, and written for speed: tuples
that are compared by functions of C, no loop in Python over what a network has hundreds of.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn

_PLAIN = (Tensor, nn.Parameter)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")  # without gradients no others run
_NAMES = ("weight", "bias", "running_mean", "running_var")
_IN_THE_CODE = (  # or in what was folded
    *("tau", "valid_ratio", "max_error", "block", "pixel_block", "activation"),
    *("stride", "padding", "dilation", "groups", "eps"),
    *("kernel_size", "ceil_mode", "return_indices", "negative_slope"),
    # Of linear layers, which take deviations: what they make of the reference is held.
    *("count_include_pad", "divisor_override", "output_size", "upscale_factor"),
    *("size", "scale_factor", "recompute_scale_factor", "mode", "align_corners"),
)
_PLAIN_SETTINGS = (type(None), bool, int, float, str)

_version = operator.attrgetter("_version")


class Proof:
    """What modules and tensors were when operands were folded.

    Args:
        sources: the modules whose tensors were folded.
        links: (parent, name, child) of every module that the generated forward passes by.
        parents: the modules that hold what is called, by what they hold.
        root: the module whose forward was generated.
    """

    def __init__(
        self,
        sources: Sequence[nn.Module],
        links: Iterable[tuple[nn.Module, str, nn.Module]],
        parents: Iterable[nn.Module],
        root: nn.Module,
    ) -> None:
        places: list[tuple[dict[str, Any], str]] = []
        tensors: list[Tensor] = []
        self.held: list[tuple[nn.Module, str, Tensor]] = []  # where each tensor is
        for module in sources:
            for name in _NAMES:
                for register in (module._parameters, module._buffers):
                    tensor = register.get(name)
                    if isinstance(tensor, Tensor):
                        places.append((register, name))
                        tensors.append(tensor)
                        self.held.append((module, name, tensor))
        self._tensors = tensors
        self.is_possible = all(
            type(tensor) in _PLAIN and not tensor.is_inference() for tensor in tensors
        )
        self._versions = list(map(_version, tensors)) if self.is_possible else []
        links = list(links)
        passed = [child for _, _, child in links]
        values: list[Any] = []
        for module in dict.fromkeys((*sources, *passed)):
            own = module.__dict__
            names = [name for name in _IN_THE_CODE if name in own]
            places += [(own, name) for name in names]
            values += [own[name] for name in names]
        places += [(parent._modules, name) for parent, name, _ in links]
        self._children = [parent._modules for parent in parents]
        self._counts = list(map(len, self._children))
        self._registers = [register for register, _ in places]
        self._keys = [name for _, name in places]
        self._values = values  # kept, so that no other value gets the identity of one of these
        self._ids = list(map(id, [*tensors, *values, *passed]))
        self._attributes = [module.__dict__ for module in passed]
        self._hooks = [own[name] for own in self._attributes for name in _HOOKS]
        # A convolution computes the same in both modes.
        with_modes = (root, *(module for module in passed if not isinstance(module, nn.Conv2d)))
        self._modes = [module.__dict__ for module in with_modes]

    def is_in_eval_mode(self) -> bool:
        """Whether all modules are that the generated forward passes by, and the root."""
        return not any(map(operator.getitem, self._modes, repeat("training")))

    def fits(self) -> bool:
        """Whether modules, tensors and settings are the same, and no module got hooks since."""
        try:
            found = list(map(id, map(operator.getitem, self._registers, self._keys)))
        except KeyError:
            return False
        return (
            (found == self._ids or self._are_equal(found))
            and list(map(len, self._children)) == self._counts
            and not any(self._hooks)
            and not any(map(operator.contains, self._attributes, repeat("forward")))
        )

    def _are_equal(self, found: list[int]) -> bool:
        """Whether nothing but settings has another identity, and these are equal to what they were.

        torch.export, for one, puts equal tuples in the place of strides. Their identities are
        remembered, so that the next call compares nothing but these.
        """
        first = len(self._tensors)
        values, ids = list(self._values), list(self._ids)
        for place, (old, new) in enumerate(zip(self._ids, found, strict=True)):
            if old == new:
                continue
            setting = place - first
            if not 0 <= setting < len(values):
                return False
            value = self._registers[place].get(self._keys[place])
            if not _is_equal_setting(values[setting], value):
                return False
            values[setting], ids[place] = value, id(value)
        self._values, self._ids = values, ids
        return True

    def is_current(self) -> bool:
        """Whether no tensor has been changed in place."""
        return list(map(_version, self._tensors)) == self._versions

    def wants_gradient(self) -> bool:
        """Whether a tensor that was folded is to be learned."""
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self._tensors)


def _is_equal_setting(old: Any, new: Any) -> bool:
    """Whether two settings are of the same types and equal; never for tensors and modules."""
    if type(old) is not type(new):
        return False
    if type(old) in (tuple, list):
        return len(old) == len(new) and all(map(_is_equal_setting, old, new))
    return type(old) in _PLAIN_SETTINGS and bool(old == new)
