"""The error that a layer makes at the model's output, without labels.

Layers differ: of an error of a tenth, a pooling or a ReLU behind may leave nothing, and what a
batch normalisation made of dark background weighs much in a layer and little in an answer. So each
layer skips by itself, twice, and the model's output is compared. Between, the error of the output
follows a power of the layer's, which was seen in VGG13 (exponents of 1.1 to 3.1 of squares).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .._progress import Progress
from ..networks.config import SpAMMConfig
from ..networks.example import Example
from .calls import watch
from .form import Form
from .inputs import batch_size
from .statistics import Candidate, LayerStatistics

# Shares of the products without a loss: about where the search looks, and well below.
PROBES = (0.5, 0.26)
_INPUTS = 128


def with_output_errors(
    form: Form,
    inputs: Sequence[Example],
    statistics: Mapping[str, LayerStatistics],
    progress: Progress,
) -> dict[str, LayerStatistics]:
    """The statistics with each candidate's error at the model's output, on some 128 inputs.

    Two passes for each layer. Where a model has no floating output, or an output of zeros, the
    layer's own error stands.
    """
    inputs = list(_first(inputs))

    def outputs(settings: Mapping[str, SpAMMConfig]) -> list[Any]:
        with watch(form.model, settings=settings):
            return [pytree.tree_leaves(example.call(form.model)) for example in inputs]

    found = {}
    with form.observed_layers():
        exact = outputs({})
        for number, (name, layer) in enumerate(statistics.items()):
            progress.at("errors at the output", number, len(statistics))
            points = []
            for candidate in _probes(layer):
                skipping = outputs({name: candidate.setting})
                points.append((candidate.error, _relative_error(skipping, exact)))
            law = _power_law(points)
            candidates = (replace(each, output_error=law(each.error)) for each in layer.candidates)
            found[name] = replace(layer, candidates=tuple(candidates))
    return found


def _first(inputs: Sequence[Example]) -> Iterator[Example]:
    count = 0
    for example in inputs:
        if count < _INPUTS:
            yield example
        count += batch_size((example.args, example.kwargs))


def _probes(layer: LayerStatistics) -> list[Candidate]:
    """At most two candidates that lose something, and not the same."""
    found: list[Candidate] = []
    for share in PROBES:
        ratio = share * layer.exact_ratio
        errors = {candidate.error for candidate in found}
        rest = [each for each in layer.candidates if each.error > 0 and each.error not in errors]
        if rest:
            found.append(min(rest, key=lambda each: abs(each.valid_ratio - ratio)))
    return found


def _relative_error(found: list[Any], exact: list[Any]) -> float:
    """Of all floating tensors in Frobenius norms; 0 where there are none that are not zero."""
    lost = kept = 0.0
    for one, other in zip(pytree.tree_leaves(found), pytree.tree_leaves(exact), strict=True):
        if isinstance(one, Tensor) and one.is_floating_point():
            lost += torch.linalg.vector_norm(one.double() - other.double()).square().item()
            kept += torch.linalg.vector_norm(other.double()).square().item()
    return math.sqrt(lost / kept) if kept else 0.0


def _power_law(points: Sequence[tuple[float, float]]) -> Callable[[float], float]:
    """A power of the layer's error through these; a multiple through one; itself without any."""
    points = [point for point in points if all(0 < value < math.inf for value in point)]
    if not points:
        return lambda error: error
    (x, y), *others = points
    exponent = 1.0
    for other_x, other_y in others:
        # Below 1 by chance alone, and then more skipping would seem to be free.
        exponent = max(1.0, math.log(other_y / y) / math.log(other_x / x))
    return lambda error: y * (error / x) ** exponent if error else 0.0
