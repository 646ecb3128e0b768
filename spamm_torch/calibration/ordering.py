"""Whether batches can be put in order of likeness for a model, and whether it is worth a trial."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..networks.example import Example, difference
from ..networks.fused import fused_of
from .form import IMAGES_FIRST, SPAMM, Form
from .statistics import LayerStatistics, OnBatch, measure_layers

_AT = 0.5  # the valid ratio at which the errors are compared
_MUST_GAIN = 0.95  # of the squared error as batches come: in order it must be less


def reason_not_to_order(
    model: nn.Module, plain: Form, ordered: Form, inputs: Sequence[Example]
) -> str | None:
    """Why batches of this model cannot be put in order, or None.

    Both forms are run on the first inputs with nothing skipped: their results must be the same.
    """
    example = inputs[0]
    leaves = pytree.tree_leaves((example.args, example.kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if tensors[0].dim() != 4:
        return f"batches of images; got an input of shape {tuple(tensors[0].shape)}"
    engines = dict.fromkeys(plain.layers, SPAMM)
    with plain.installed(engines):
        expected = example.call(model)
    with ordered.installed(engines):
        if fused_of(model) is None:
            return f"a model that is converted as a whole; got {type(model).__name__}, which is not"
        try:
            found = example.call(model)
        except (TypeError, ValueError, RuntimeError) as error:
            return f"a model that treats each image by itself; got one where {error}"
    problem = difference(expected, found)
    if problem is None:
        return None
    return f"a model that treats each image by itself; got one where, in another order, {problem}"


def is_worth_a_trial(
    model: nn.Module,
    ordered: Form,
    inputs: Sequence[Example],
    plain: Mapping[str, LayerStatistics],
    on_batch: OnBatch,
) -> bool:
    """Whether layers lose less in blocks of several images if batches are in order of likeness.

    The squared relative errors of layers at half of their products, weighted by multiplications,
    are compared with those of batches as they come. Where pictures are centred both are alike.
    """
    found = measure_layers(model, ordered, inputs, on_batch, (_AT,), (IMAGES_FIRST,))
    ordered_error = plain_error = 0.0
    for name, layer in found.items():
        errors = [_error_at_half(layer), _error_at_half(plain[name])]
        if all(map(math.isfinite, errors)):
            ordered_error += layer.multiplications * errors[0] ** 2
            plain_error += layer.multiplications * errors[1] ** 2
    return ordered_error < _MUST_GAIN * plain_error


def _error_at_half(layer: LayerStatistics) -> float:
    """The error in blocks of several images at half of the products; infinite where unknown."""
    by_distance = {
        abs(candidate.valid_ratio - _AT): candidate.error
        for candidate in layer.candidates
        if candidate.setting.pixel_block == IMAGES_FIRST
    }
    return by_distance[min(by_distance)] if by_distance else math.inf
