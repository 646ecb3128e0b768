"""The generated forward of a module, its operands, and the guards that say where it is right.

It is taken in eval mode, without gradients, autocast and hooks, for plain tensors; elsewhere the
module's own forward runs.
"""

import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as torch_module
from torch.utils._python_dispatch import _get_current_dispatch_mode

from .config import Engine
from .generate import Forward, generate
from .nodes import constant_when_compiled
from .operands import Made, Source
from .plan import Island, Plan, Site, computes_output_norms, fills_norm_block, norm_flow
from .proof import Origin, Proof

_registry: "weakref.WeakValueDictionary[int, Fused]" = weakref.WeakValueDictionary()
_keys = itertools.count()


@dataclass(frozen=True)
class Recipe:
    """A pickle generates a module's forward from it: the engine of each call and what it absorbed,
    by names below the module, and the form of the call (:attr:`Signature.form`).
    """

    calls: Mapping[str, tuple[Engine, tuple[str, ...]]]
    form: tuple[tuple[str, ...], dict[str, Any]]

    def fused(self, island: Island, sites: Sequence[Site]) -> "Fused | None":
        """The generated forward of an island of the module; None where nothing is computed."""
        plan = Plan(island, sites, self.engines)
        return Fused(plan) if plan.fused else None

    @property
    def engines(self) -> dict[str, Engine]:
        """The engines by the names of calls."""
        return {name: engine for name, (engine, _) in self.calls.items()}


class Fused:
    """The generated forward of a module, its operands, and the proof that they are right.

    ``names``: of the calls of convolutions that it computes, in the order of their operands.
    ``forward``: the generated function, in which no norms travel. ``on_other_call``: called with
    the arguments before the module's own forward runs instead.
    """

    on_other_call: Callable[[tuple[Any, ...], Mapping[str, Any]], None] | None = None
    forward: Forward
    _packs: ClassVar[bool] = True  # whether dense calls take packed weights

    def __init__(self, plan: Plan, made: Made | None = None) -> None:
        """``made``: as of :meth:`Source.operands`; other forms of the model share it."""
        self.root = plan.island.module
        self.signature = plan.island.signature
        self.names = [site.name for site in plan.fused]
        self._calls = {
            site.name.removeprefix(f"{plan.island.name}."): (plan.engines[site.name], site.absorbed)
            for site in plan.sites
        }
        # Forwards in which norms travel, for batches that fill a block of images and for others:
        # each is generated when it is first called.
        self._plan: Plan | None = plan
        self._with_norms: dict[bool, Forward | None] = {}
        self._reads_norms = any(engine.may_skip for engine in plan.engines.values())
        self._generate(plan)
        self._sources = [
            Source(s.conv, s.batch_norm, plan.engines[s.name], s.input_shape, self._packs)
            for s in plan.fused
        ]
        modules = [m for s in self._sources for m in (s.conv, s.batch_norm) if m is not None]
        self._proof = Proof(plan.modules_replaced(), list(dict.fromkeys(modules)))
        self._prepare()
        self.renew(made={} if made is None else made)

    @property
    def recipe(self) -> Recipe:
        """The parts from which copies generate it again."""
        return Recipe(self._calls, self.signature.form)

    def _generate(self, plan: Plan) -> None:
        self.forward = generate(plan)

    def forward_with_norms(self, fills: bool) -> Forward | None:
        """The forward in which norms travel, of batches that fill blocks or not; or None."""
        if fills not in self._with_norms:
            assert self._plan is not None
            flow = norm_flow(self._plan, of_few=not fills)
            self._with_norms[fills] = generate(self._plan, flow) if flow.readers else None
        return self._with_norms[fills]

    def _prepare(self) -> None:
        # Operands, and of what they are: one attribute, which threads may replace. They are folded
        # anew before they are used again where it is None.
        self._folded: tuple[list[Tensor | None], Origin | None] = ([], None)
        self._read_elsewhere: list[Tensor | None] = []  # by captured graphs and compiled code
        self._held: list[tuple[nn.Module, str, Tensor | None]] = []
        self.key = next(_keys)
        _registry[self.key] = self

    def watch_operands(self, mark: Callable[[str], None]) -> None:
        """Calls ``mark`` with a call's name when its operands are read, right before it."""
        places = {3 * place: name for place, name in enumerate(self.names)}
        self.operands = _Watched(self.operands, places, mark)

    @property
    def operands(self) -> list[Tensor | None]:
        """The second argument of the generated function; empty before the first call."""
        return self._folded[0]

    @operands.setter
    def operands(self, operands: list[Tensor | None]) -> None:
        self._folded = (operands, self._folded[1])

    def run(self, args: tuple[Any, ...]) -> Any:
        """The result of the generated forward."""
        forward = self.forward
        if self._passes_norms_on(args):
            forward = self.forward_with_norms(fills_norm_block(args[0])) or forward
        operands = self.operands
        is_eager_on_cuda = not torch.compiler.is_compiling() and args and args[0].is_cuda
        if is_eager_on_cuda and torch.cuda.is_current_stream_capturing():
            self._read_elsewhere = operands
        return forward(self.root, operands, *args)

    def _passes_norms_on(self, args: tuple[Any, ...]) -> bool:
        """Whether layers compute norms with their output there, for others to read."""
        if not self._reads_norms or torch.compiler.is_compiling() or torch.is_grad_enabled():
            return False
        return args[0].dim() == 4 and computes_output_norms(args[0].device, args[0].dtype)

    def serves(self, args: tuple[Any, ...]) -> bool:
        """Whether the generated forward is right for these arguments, as things are now."""
        if is_compiling := torch.compiler.is_compiling():
            if not all(isinstance(arg, Tensor) for arg in args) or self.root.training:
                return False
        else:
            for arg in args:
                kind = type(arg)
                if kind is not Tensor and kind is not nn.Parameter:
                    return False
            if (
                torch_module._has_any_global_hook()
                or torch._C._functorch.peek_interpreter_stack() is not None
                or torch._C._is_tracing()
                or forward_ad._current_level >= 0
            ):
                return False
        if torch._C._is_any_autocast_enabled():
            return False
        if torch.is_grad_enabled() and any(arg.requires_grad for arg in args):
            return False
        return self._is_ready_compiled() if is_compiling else self.is_ready()

    def _is_ready_compiled(self) -> bool:
        """For a call that is compiled or exported: what can change later is guarded."""
        if torch.compiler.is_dynamo_compiling():
            # functional_call puts other tensors there, which only the compiler sees.
            for module, name, tensor in self._held:
                if getattr(module, name) is not tensor:
                    return False
            return _is_ready(self.key, torch.is_grad_enabled())
        # An export that puts fake tensors in the place of Parameters: which are there is unknown.
        origin = self._folded[1]
        return origin is not None and origin.is_unchanged()

    def is_ready(self) -> bool:
        """Whether the plan still fits; operands are folded anew where their tensors changed."""
        proof = self._proof
        if not proof.is_in_eval_mode() or not proof.fits() or proof.wants_gradient():
            return False
        origin = self._folded[1]
        if origin is not None and origin.tensors is proof.tensors and origin.is_unchanged():
            return True
        return self.renew(in_place=False)

    def is_stale(self) -> bool:
        """Whether modules or hooks are no longer those that were traced."""
        return not self._proof.fits()

    def forget_what_may_change(self) -> None:
        """The module's own forward runs: batch norms and fused optimisers write unseen."""
        if not self._proof.is_in_eval_mode() or self._proof.wants_gradient():
            self.forget()

    def forget(self) -> None:
        """Marks the operands as old: they are folded anew before they are used again."""
        self._folded = (self.operands, None)

    def spamm_weights(self) -> list[tuple[nn.Conv2d, Tensor | None]]:
        """The convolutions of the op conv2d, with their weights; None before the first call."""
        weights = [*self.operands[::3], *(None for _ in self._sources)]
        both = zip(self._sources, weights, strict=False)
        return [(source.conv, weight) for source, weight in both if source.engine.of_op is not None]

    def prove_again(self) -> None:
        """Takes classes and settings as they are now for those that were traced."""
        self._proof.take()

    def renew(self, in_place: bool = True, made: Made | None = None) -> bool:
        """Folds weights and biases anew; False where that cannot be done now. With ``in_place``
        operands keep their addresses where they can, for captured graphs and compiled code; else
        nothing is written that others may be reading. ``made``: as of :meth:`Source.operands`.
        """
        self.forget()
        if not self._proof.fits() or not all(source.can_be_read for source in self._sources):
            return False
        is_capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        if _get_current_dispatch_mode() is not None or is_capturing:
            return False
        origin = Origin(self._proof.tensors)
        if not origin.is_possible:
            return False
        with torch.inference_mode(False), torch.no_grad():
            found = self._operands_now({} if made is None else made)
            read = self._read_elsewhere or self.operands
            if in_place and len(read) == len(found):
                own = zip(read, found, self._owned(), strict=True)
                found = [_written(old, new) if is_owned else new for old, new, is_owned in own]
                self._read_elsewhere = found if self._read_elsewhere else []
        made_now = [tensor for tensor in found if tensor is not None]
        for tensor in made_now:
            torch._dynamo.mark_static_address(tensor)
        for device in {tensor.device for tensor in made_now if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()  # every stream may read them
        self._folded, self._held = (found, origin), self._proof.places()
        return True

    def _operands_now(self, made: Made) -> list[Tensor | None]:
        return [tensor for source in self._sources for tensor in source.operands(made)]

    def _owned(self) -> list[bool]:
        """Which operands have memory of their own; the others are Parameters, not to be written."""
        return [is_owned for source in self._sources for is_owned in source.is_owned]

    def __getstate__(self) -> dict[str, Any]:
        # A copy has tensors of its own, and folds them when it is first called. The graph stays
        # behind, so that what may be generated from it is generated now.
        if self._reads_norms:
            for fills in (True, False):
                self.forward_with_norms(fills)
        own = ("_folded", "_read_elsewhere", "_held", "key", "_plan")
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._plan = None
        self._prepare()


class _Watched(list[Any]):
    """Operands that say when those of a call are read."""

    def __init__(
        self, operands: Iterable[Any], places: Mapping[int, str], mark: Callable[[str], None]
    ) -> None:
        super().__init__(operands)
        self.places, self._mark = places, mark

    def __getitem__(self, place: Any) -> Any:
        if (name := self.places.get(place)) is not None:
            self._mark(name)
        return super().__getitem__(place)


def _written(old: Tensor | None, new: Tensor | None) -> Tensor | None:
    """The new values, in the old memory where that fits."""
    if old is None or new is None:
        return new
    one, other = ((x.shape, x.dtype, x.device, x.stride()) for x in (old, new))
    if one != other or old.data_ptr() == new.data_ptr():
        return new
    return old.copy_(new)


@constant_when_compiled
def _is_ready(key: int, is_grad_enabled: bool) -> bool:
    """:meth:`Fused.is_ready`, asked once while a call is compiled."""
    fused = _registry[key]
    with torch.set_grad_enabled(is_grad_enabled):
        is_ready = fused.is_ready()
    fused._read_elsewhere = fused.operands  # which the code goes on to read
    return is_ready
