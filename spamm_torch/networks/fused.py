"""A module whose generated forward takes the place of its own where that is right.

The module stays the same object and gets a subclass of its class. The generated forward is taken in
eval mode, without gradients, autocast and hooks, for plain tensors; elsewhere the module's own
forward runs. See :class:`Fused` for what the module carries.
"""

from __future__ import annotations

import copy
import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as torch_module
from torch.utils._python_dispatch import _get_current_dispatch_mode

from .._arguments import DTYPES
from ..nn import _SpAMM
from .fold import folded
from .generate import Forward, generate
from .joined_groups import joined_weight
from .leaves import Band
from .norm_flow import computes_output_norms, fills_norm_block, norm_flow
from .plan import LINEAR_MODULES, Engine, Plan
from .proof import Origin, Proof

_ops = torch.ops.spamm_torch

# The engine of each call of a convolution, and what it absorbed.
Recipe: TypeAlias = dict[str, tuple[Engine, tuple[str, ...]]]

_registry: weakref.WeakValueDictionary[int, Fused] = weakref.WeakValueDictionary()
_keys = itertools.count()


@dataclass(frozen=True, eq=False)
class Source:
    """Where three operands of a fused call come from: weight, bias and weight norms."""

    conv: nn.Conv2d
    batch_norm: nn.Module | None
    engine: Engine

    @property
    def is_owned(self) -> tuple[bool, bool, bool]:
        """Which operands have memory of their own; the others are the convolution's Parameters."""
        is_folded = self.batch_norm is not None
        return is_folded or self.engine.joined is not None, is_folded, True

    def operands(self) -> list[Tensor | None]:
        """The operands as they are to be now.

        The op conv2d reads weights on CUDA as channels-last, and would copy others in each call;
        its results have the input's format all the same.
        """
        weight, bias = folded(self.conv, self.batch_norm)
        setting, groups = self.engine.of_op, self.conv.groups
        if self.engine.joined is not None:
            weight, groups = joined_weight(weight, groups), 1
        if setting is not None and weight.is_cuda:
            weight = weight.contiguous(memory_format=torch.channels_last)
        norms = None
        if setting is not None:  # where nothing is skipped they tell what meets padding alone
            options = setting.op_arguments()
            blocks = {name: options.get(name) for name in ("block", "pixel_block")}
            norms = _ops.conv2d_weight_norm(weight, groups, **blocks)
        return [weight, bias, norms]


class Fused:
    """The generated forward of a module, its operands, and the proof that they are right.

    Attributes:
        recipe: the engine of each call of a convolution and what it absorbed, by names below the
            module; from these the forward is generated again after unpickling.
        reference: the arguments from which the reference form computes deviations; None elsewhere.
        forward: the generated function.
        on_other_call: called with the arguments before the module's own forward runs instead.
    """

    on_other_call: Callable[[tuple[Any, ...], Mapping[str, Any]], None] | None = None

    def __init__(self, root: nn.Module, plan: Plan) -> None:
        self.root = root
        self.recipe: Recipe = {
            _below(plan.island.name, site.name): (
                plan.engines[site.name],
                site.absorbed,
            )
            for site in plan.sites
        }
        self.reference = plan.island.reference
        self.forward: Forward
        # Forwards in which norms travel: for batches that fill a block of images, and for others.
        self._forward_with_norms: Forward | None = None
        self._forward_of_few: Forward | None = None
        self._generate(plan)
        self._sources = [
            Source(site.conv, site.batch_norm, plan.engines[site.name]) for site in plan.fused
        ]
        modules = [m for s in self._sources for m in (s.conv, s.batch_norm) if m is not None]
        self._proof = Proof(_passed_by(plan), list(dict.fromkeys(modules)))
        self.signature = plan.island.signature
        self._prepare()
        self.renew()

    def _generate(self, plan: Plan) -> None:
        self.forward = generate(plan)
        self._forward_with_norms, self._forward_of_few = (
            generate(plan, flow) if flow.readers else None
            for flow in (norm_flow(plan), norm_flow(plan, of_few=True))
        )

    def _prepare(self) -> None:
        # Operands, and of what they are: one attribute, which threads may replace. They are folded
        # anew before they are used again where it is None.
        self._folded: tuple[list[Tensor | None], Origin | None] = ([], None)
        self._read_elsewhere: list[Tensor | None] = []  # by captured graphs and compiled code
        self._held: list[tuple[nn.Module, str, Tensor | None]] = []
        self.key = next(_keys)
        _registry[self.key] = self

    def watch_operands(self, names: Sequence[str], mark: Callable[[str], None]) -> None:
        """Has ``mark`` called with a call's name when its operands are read, right before it.

        Args:
            names: of the calls, in the order of their operands.
        """
        places = {3 * place: name for place, name in enumerate(names)}
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
            fills = fills_norm_block(args[0])
            forward = (self._forward_with_norms if fills else self._forward_of_few) or forward
        operands = self.operands
        is_eager_on_cuda = not torch.compiler.is_compiling() and args and args[0].is_cuda
        if is_eager_on_cuda and torch.cuda.is_current_stream_capturing():
            self._read_elsewhere = operands
        return forward(self.root, operands, *args)

    def _passes_norms_on(self, args: tuple[Any, ...]) -> bool:
        """Whether there are norms to pass on, and layers that compute them with their output."""
        return (
            self._forward_with_norms is not None
            and not torch.compiler.is_compiling()
            and not torch.is_grad_enabled()
            and args[0].dim() == 4
            and computes_output_norms(args[0].device, args[0].dtype)
        )

    # ---- Whether it may be taken ----------------------------------------------------------------

    def serves(self, args: tuple[Any, ...]) -> bool:
        """Whether the generated forward is right for these arguments, as things are now."""
        if torch.compiler.is_compiling():
            return self._serves_compiled(args)
        for arg in args:
            kind = type(arg)
            if kind is not Tensor and kind is not nn.Parameter:
                return False
        if (
            torch._C._is_any_autocast_enabled()
            or torch_module._has_any_global_hook()
            or torch._C._functorch.peek_interpreter_stack() is not None
            or torch._C._is_tracing()
            or forward_ad._current_level >= 0
        ):
            return False
        if torch.is_grad_enabled() and any(arg.requires_grad for arg in args):
            return False
        return self.is_ready()

    def _serves_compiled(self, args: tuple[Any, ...]) -> bool:
        """The same for a call that is compiled or exported: what can change later is guarded."""
        if not all(isinstance(arg, Tensor) for arg in args) or self.root.training:
            return False
        if torch._C._is_any_autocast_enabled():
            return False
        if torch.is_grad_enabled() and any(arg.requires_grad for arg in args):
            return False
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
        return (origin is not None and origin.is_of(proof.tensors)) or self.renew(in_place=False)

    def is_ready_to_compile(self) -> bool:
        """As :meth:`is_ready`, for code that goes on to read these operands."""
        is_ready = self.is_ready()
        self._read_elsewhere = self.operands
        return is_ready

    def is_stale(self) -> bool:
        """Whether modules or hooks are no longer those that were traced."""
        return not self._proof.fits()

    def forget_what_may_change(self) -> None:
        """Where the module's own forward runs: batch norms that train write statistics, and fused
        optimisers write what is learned, and no version tells.
        """
        if not self._proof.is_in_eval_mode() or self._proof.wants_gradient():
            self.forget()

    def forget(self) -> None:
        """Has operands folded anew before they are used again."""
        self._folded = (self.operands, None)

    def spamm_weights(self) -> list[tuple[nn.Conv2d, Tensor | None]]:
        """The convolutions that the op conv2d computes, with their weights as it multiplies them.

        A weight is None before the first call.
        """
        weights = [*self.operands[::3], *(None for _ in self._sources)]
        both = zip(self._sources, weights, strict=False)
        return [(source.conv, weight) for source, weight in both if source.engine.of_op is not None]

    def bands(self) -> dict[nn.Module, Band | None]:
        """The valid ratios that convolutions had when they were calibrated."""
        return {source.conv: source.engine.band for source in self._sources}

    # ---- Operands -------------------------------------------------------------------------------

    def prove_again(self) -> None:
        """Takes classes and settings as they are now for those that were traced."""
        self._proof.take()

    def renew(self, in_place: bool = True) -> bool:
        """Folds weights and biases anew; False where that cannot be done now.

        Args:
            in_place: operands keep their addresses where shape, dtype and device are the same, so
                that captured graphs and compiled code read the new values. Without, nothing is
                written that another thread may be reading.
        """
        self.forget()
        if not self._proof.fits() or not all(map(_is_served, self._sources)):
            return False
        if _get_current_dispatch_mode() is not None or _is_capturing():
            return False
        origin = Origin(self._proof.tensors)
        if not origin.is_possible:
            return False
        with torch.inference_mode(False), torch.no_grad():
            found = self._operands_now()
            read = self._read_elsewhere or self.operands
            if in_place and len(read) == len(found):
                own = zip(read, found, self._owned(), strict=True)
                found = [_written(old, new) if is_owned else new for old, new, is_owned in own]
                self._read_elsewhere = found if self._read_elsewhere else []
        for tensor in found:
            if tensor is not None:
                torch._dynamo.mark_static_address(tensor)
        _wait_for(found)
        self._folded, self._held = (found, origin), self._proof.places()
        return True

    def _operands_now(self) -> list[Tensor | None]:
        found: list[Tensor | None] = []
        for source in self._sources:
            found += source.operands()
        return found

    def _owned(self) -> list[bool]:
        """Which operands have memory of their own; the others are Parameters, not to be written."""
        return [is_owned for source in self._sources for is_owned in source.is_owned]

    def __getstate__(self) -> dict[str, Any]:
        # A copy has tensors of its own, and folds them when it is first called.
        own = ("_folded", "_read_elsewhere", "_held", "key")
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
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


def _is_served(source: Source) -> bool:
    weight, batch_norm = source.conv.weight, source.batch_norm
    if weight is None or (batch_norm is not None and not _keeps_statistics(batch_norm)):
        return False
    return weight.device.type in ("cpu", "cuda", "meta") and weight.dtype in DTYPES


def _keeps_statistics(batch_norm: Any) -> bool:
    """Whether a batch norm computes with running statistics, and every change of these is told:
    training counts its batches.
    """
    counts = "num_batches_tracked" in batch_norm._buffers
    return (
        batch_norm.running_mean is not None
        and batch_norm.running_var is not None
        and (not counts or batch_norm.num_batches_tracked is not None)
    )


def _below(root: str, name: str) -> str:
    return name[len(root) + 1 :] if root else name


def _passed_by(plan: Plan) -> list[nn.Module]:
    """The modules of an island, the root first, but those that the generated forward calls."""
    island = plan.island
    done = set(itertools.chain(plan.pools, plan.upsamplings, plan.linear_relus))
    done |= set(plan.linear_relus.values()) | set(itertools.chain(*map(plan.nodes, plan.fused)))
    called: set[nn.Module] = set()
    passed = set(island.entered.values())
    for node in island.graph.nodes:
        if node.op == "call_module":
            module = island.module.get_submodule(str(node.target))
            # Of the reference form: what it makes of the reference is held.
            is_held = island.reference is not None and type(module) in LINEAR_MODULES
            (passed if node in done or is_held else called).add(module)
    inside = {inner for module in called - passed for inner in module.modules()} - passed
    return [module for module in island.module.modules() if module not in inside]


def _written(old: Tensor | None, new: Tensor | None) -> Tensor | None:
    """The new values, in the old memory where that fits."""
    if old is None or new is None:
        return new
    same = (old.shape, old.dtype, old.device, old.stride()) == (
        *(new.shape, new.dtype, new.device, new.stride()),
    )
    if not same or old.data_ptr() == new.data_ptr():
        return new
    return old.copy_(new)


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _wait_for(tensors: Iterable[Tensor | None]) -> None:
    """Waits until the tensors are written: every stream may read them."""
    for device in {tensor.device for tensor in tensors if tensor is not None and tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


@torch.compiler.assume_constant_result
def _is_ready(key: int, is_grad_enabled: bool) -> bool:
    """:meth:`Fused.is_ready`, asked once while a call is compiled."""
    with torch.set_grad_enabled(is_grad_enabled):
        return _registry[key].is_ready_to_compile()


# ---- The subclass -------------------------------------------------------------------------------


class FusedModule:
    """What a fused module does differently; a base before the module's own class."""

    _spamm_fused: Fused | None = None
    _spamm_original: type[nn.Module]

    def train(self: Any, mode: bool = True) -> Any:
        """As of the module's class; back in eval mode, weights are folded anew."""
        was_training = self.training
        result = super().train(mode)  # type: ignore[misc]
        fused = self._spamm_fused
        if not mode and fused is not None and was_training:
            fused.renew()
        return result

    def _apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = super()._apply(*args, **kwargs)  # type: ignore[misc]
        if self._spamm_fused is not None:
            self._spamm_fused.renew()
        return result

    def load_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        """As of the module's class; then weights are folded anew."""
        result = super().load_state_dict(*args, **kwargs)  # type: ignore[misc]
        if self._spamm_fused is not None:
            self._spamm_fused.renew()
        return result

    __prepare_scriptable__ = _SpAMM.__prepare_scriptable__

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        new = _new(type(self))
        memo[id(self)] = new
        new.__setstate__(copy.deepcopy(_state(self), memo))
        if new._spamm_fused is not None:
            new._spamm_fused._proof.find_again()
        return new

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        state = dict(_state(self))
        fused = state.pop("_spamm_fused", None)
        recipe = None if fused is None else (fused.recipe, fused.reference, fused.signature.form)
        return _new, (self._spamm_original,), (state, recipe), None, None, _unpickle


def _new(kind: Any) -> Any:
    return kind.__new__(kind)


def _state(module: nn.Module) -> Any:
    """What a module's class gives to those who copy or pickle it: its attributes, or fewer."""
    made: Any = object.__reduce_ex__(module, 4)
    return made[2]


def _unpickle(module: nn.Module, state: tuple[dict[str, Any], Any]) -> None:
    from .conversion import fuse_again  # which builds on this file

    attributes, recipe = state
    module.__setstate__(attributes)
    if recipe is not None:
        fuse_again(module, *recipe)


@functools.cache
def fused_class(original: Any) -> Any:
    """The subclass that a module of this class gets."""

    @functools.wraps(original.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        fused = self._spamm_fused
        # A replica of nn.DataParallel shares what its original carries, on another device.
        if fused is not None and fused.root is self:
            if not self.training:
                traced = fused.signature.bound(args, kwargs)
                if traced is not None and fused.serves(traced):
                    return fused.run(traced)
            if not torch.compiler.is_compiling():
                fused.forget_what_may_change()
        if fused is not None and fused.on_other_call is not None:
            fused.on_other_call(args, kwargs)
        return original.forward(self, *args, **kwargs)

    attributes = {
        "forward": forward,
        "_spamm_original": original,
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
    }
    return type(original.__name__, (FusedModule, original), attributes)


def attach(fused: Fused) -> None:
    """Gives a module its generated forward."""
    module = fused.root
    module.__class__ = _fused_class_of(module)
    module.__dict__["_spamm_fused"] = fused
    fused.prove_again()  # the convolutions may be of another class since it was made


def _fused_class_of(module: nn.Module) -> Any:
    kind: Any = type(module)
    return fused_class(kind)


def detach(module: nn.Module) -> None:
    """Undoes :func:`attach`."""
    kind: Any = type(module)
    module.__class__ = kind._spamm_original
    del module.__dict__["_spamm_fused"]


def fused_of(module: nn.Module) -> Fused | None:
    """What :func:`attach` gave a module, if it did."""
    return module.__dict__.get("_spamm_fused")
