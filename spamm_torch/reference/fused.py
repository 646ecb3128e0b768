"""The reference form of a module: a generated forward that works on deviations from a reference."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._state import in_eval_mode
from ..networks.fused import Fused, Recipe
from ..networks.operands import Made
from ..networks.plan import Island, Plan, Site, computes_output_norms
from ..networks.shapes import shapes_of
from .code import generate_reference_code
from .layouts import ReferencePlan


@dataclass(frozen=True)
class ReferenceRecipe(Recipe):
    """As of a generated forward, with the module's arguments for the reference picture."""

    reference: tuple[Tensor, ...]

    def fused(self, island: Island, sites: Sequence[Site]) -> Fused | None:
        """The reference form of the module itself; parts of it get generated forwards."""
        if island.name:
            return super().fused(island, sites)
        plan = ReferencePlan(island, sites, self.engines, self.reference)
        return ReferenceForm(plan) if plan.fused else None


class ReferenceForm(Fused):
    """Takes pictures of the reference's size; what the module makes of it are operands, too."""

    _packs = False  # dense convolutions of deviations are no calls of dense_conv2d

    @property
    def recipe(self) -> Recipe:
        """The parts from which copies generate it again."""
        return ReferenceRecipe(self._calls, self.signature.form, self.reference)

    def _generate(self, plan: Plan) -> None:
        assert isinstance(plan, ReferencePlan)
        self.reference = plan.reference
        with in_eval_mode(plan.island.module):
            reference = _like(self.reference, plan.fused[0].conv.weight)
            code = generate_reference_code(plan, shapes_of(plan.island, reference))
        self.forward, with_norms, self._layouts, self._base = code
        self._first_in_layouts = 0
        # Its norms are of single images: the same for batches of few.
        self._with_norms = dict.fromkeys((True, False), with_norms)
        self._reads_norms = with_norms is not None
        self._taken: list[tuple[Any, ...]] = []  # what arguments must have

    def watch_operands(self, mark: Callable[[str], None]) -> None:
        super().watch_operands(mark)
        count = len(self._layouts)
        watched: Any = self.operands
        for number, (place, _, _) in enumerate(self._layouts):  # the last operands
            watched.places[3 * (number - count)] = self.names[place]

    def serves(self, args: tuple[Any, ...]) -> bool:
        """As of the base, for arguments like the reference; deviations have no gradient."""
        if torch.is_grad_enabled() and any(p.requires_grad for p in self.root.parameters()):
            return False
        return super().serves(args) and list(map(_kind, args)) == self._taken

    def spamm_weights(self) -> list[tuple[nn.Conv2d, Tensor | None]]:
        """As of a generated forward, with the weights in layouts of their own."""
        weights = self.operands[self._first_in_layouts :: 3]  # none where no norms are passed on
        in_layouts = zip(self._layouts, weights, strict=False)
        return [*super().spamm_weights(), *((conv, weight) for (_, conv, _), weight in in_layouts)]

    def _passes_norms_on(self, args: tuple[Any, ...]) -> bool:
        return not torch.compiler.is_compiling() and computes_output_norms(
            args[0].device, args[0].dtype
        )

    def renew(self, in_place: bool = True, made: Made | None = None) -> bool:
        """Computes the operands anew; False where that cannot be done now, as in training mode."""
        self.forget()
        is_in_training = any(module.training for module in self.root.modules())
        return not is_in_training and super().renew(in_place, made)

    def _operands_now(self, made: Made) -> list[Tensor | None]:
        found = super()._operands_now(made)
        reference = _like(self.reference, self._sources[0].conv.weight)
        computed = self._base(self.root, found, *reference)
        bases, held = computed[: len(self._sources)], computed[len(self._sources) :]
        found[1::3] = bases
        self._taken = [_kind(arg) for arg in reference]
        # All or none: they are counted from the end, whatever their types.
        norms = computes_output_norms(reference[0].device, reference[0].dtype)
        self._first_in_layouts = len(found) + len(held)
        return [*found, *held, *(self._operands_of_layouts(found) if norms else [])]

    def _operands_of_layouts(self, found: list[Tensor | None]) -> list[Tensor | None]:
        """Those that the forward with norms takes alone."""
        own: list[Tensor | None] = []
        for place, conv, layout in self._layouts:
            weight, base = found[3 * place : 3 * place + 2]
            assert weight is not None
            assert base is not None
            own += layout.operands(conv, weight, base)
        return own

    def _owned(self) -> list[bool]:
        owned = [flag for s in self._sources for flag in (s.batch_norm is not None, True, True)]
        return owned + [True] * (len(self.operands) - len(owned))


def _kind(arg: Any) -> tuple[Any, ...]:
    """The properties that arguments share with the reference: all but the number of pictures."""
    if not isinstance(arg, Tensor) or arg.dim() < 2:
        return (type(arg),)
    return tuple(arg.shape[1:]), arg.dtype, arg.device


def _like(reference: tuple[Tensor, ...], weight: Tensor) -> list[Tensor]:
    """Copies of the reference, of the weight's dtype and on its device."""
    return [arg.to(weight.device, weight.dtype, copy=True) for arg in reference]
