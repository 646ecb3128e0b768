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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as torch_module
from torch.utils._python_dispatch import _get_current_dispatch_mode

from .. import chain
from .._arguments import DTYPES
from ..ordered_batch import in_order
from .channel_groups import Order
from .fold import folded
from .generate import Forward, generate
from .leaves import Band
from .norm_flow import norm_flow
from .plan import Engine, Plan
from .proof import Proof
from .signature import Signature
from .sites import Site

_ops = torch.ops.spamm_torch

ORDER = "_spamm_order_block"  # of a module: its batches are ordered, so many images share a block

# Engine, what was absorbed, and the order of the output channels of each call of a convolution.
Recipe: TypeAlias = dict[str, tuple[Engine, tuple[str, ...], Order | None]]

_registry: weakref.WeakValueDictionary[int, Fused] = weakref.WeakValueDictionary()
_keys = itertools.count()


@dataclass(frozen=True, eq=False)
class Source:
    """Where three operands of a fused call come from: weight, bias and weight norms."""

    conv: nn.Conv2d
    batch_norm: nn.Module | None
    engine: Engine
    output_order: Tensor | None = None
    input_order: Tensor | None = None

    @classmethod
    def of(cls, site: Site, engine: Engine) -> Source:
        return cls(site.conv, site.batch_norm, engine, site.output_order, site.input_order)

    @property
    def makes_tensors(self) -> bool:
        """Whether weight and bias are not the convolution's own memory."""
        orders = (self.output_order, self.input_order)
        return self.batch_norm is not None or any(order is not None for order in orders)

    def operands(self) -> list[Tensor | None]:
        """The operands as they are to be now.

        The op conv2d reads weights on CUDA as channels-last, and would copy others in each call;
        its results have the input's format all the same.
        """
        weight, bias = folded(self.conv, self.batch_norm)
        weight = _in_order(_in_order(weight, 0, self.output_order), 1, self.input_order)
        bias = None if bias is None else _in_order(bias, 0, self.output_order)
        setting = self.engine.setting
        if setting is not None and weight.is_cuda:
            weight = weight.contiguous(memory_format=torch.channels_last)
        norms = None
        if setting is not None:  # where nothing is skipped they tell what meets padding alone
            options = setting.op_arguments()
            blocks = {name: options.get(name) for name in ("block", "pixel_block")}
            norms = _ops.conv2d_weight_norm(weight, self.conv.groups, **blocks)
        return [weight, bias, norms]


def _in_order(tensor: Tensor, dim: int, order: Tensor | None) -> Tensor:
    """The tensor with this order along a dimension, in its own memory format."""
    if order is None:
        return tensor
    return torch.empty_like(tensor).copy_(tensor.index_select(dim, order.to(tensor.device)))


class Fused:
    """The generated forward of a module, its operands, and the proof that they are right.

    Attributes:
        recipe: engine, what was absorbed, and the order of output channels of each call of a
            convolution, by names below the module; from these the forward is generated again after
            unpickling.
        reference: the arguments from which the reference form computes deviations; None elsewhere.
        forward: the generated function. operands: its second argument.
        on_other_call: called with the arguments before the module's own forward runs instead.
    """

    on_other_call: Callable[[tuple[Any, ...], Mapping[str, Any]], None] | None = None

    def __init__(self, root: nn.Module, plan: Plan) -> None:
        self.root = root
        self.recipe: Recipe = {
            _below(plan.island.name, site.name): (
                plan.engines[site.name],
                site.absorbed,
                None if site.output_order is None else tuple(site.output_order.tolist()),
            )
            for site in plan.sites
        }
        self.reference = plan.island.reference
        self.forward: Forward
        # Forwards in which norms travel: for batches that fill a block of images, and for others.
        self._forward_with_norms: Forward | None = None
        self._forward_of_few: Forward | None = None
        self._generate(plan)
        self._sources = [Source.of(site, plan.engines[site.name]) for site in plan.fused]
        self._put_back = list(plan.island.put_back.values())
        self._links, self._parents = _links(plan), _parents(plan)
        self.signature = Signature(type(root).forward)
        self.operands: list[Tensor | None] = []
        self._prepare()
        self.renew()

    def _generate(self, plan: Plan) -> None:
        self.forward = generate(plan)
        self._forward_with_norms, self._forward_of_few = (
            generate(plan, flow) if flow.readers else None
            for flow in (norm_flow(plan), norm_flow(plan, of_few=True))
        )

    def _prepare(self) -> None:
        self._proof: Proof | None = None
        self._traced: Proof | None = None  # the last one, also while operands wait to be folded
        self._held: list[tuple[nn.Module, str, Tensor]] = []
        self.key = next(_keys)
        _registry[self.key] = self

    def run(self, args: tuple[Any, ...]) -> Any:
        """The result of the generated forward."""
        forward = self.forward
        if self._passes_norms_on(args):
            fills = chain.fills_norm_block(args[0])
            forward = (self._forward_with_norms if fills else self._forward_of_few) or forward
        return forward(self.root, self.operands, *args)

    def _passes_norms_on(self, args: tuple[Any, ...]) -> bool:
        """Whether there are norms to pass on, and layers that compute them with their output."""
        return (
            self._forward_with_norms is not None
            and not torch.compiler.is_compiling()
            and not torch.is_grad_enabled()
            and args[0].dim() == 4
            and chain.computes_output_norms(args[0].device, args[0].dtype)
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
        # An export that puts fake tensors in the place of Parameters: nothing can be compared.
        return self._proof is not None

    def is_ready(self) -> bool:
        """Whether the plan still fits; operands are folded anew where their tensors changed."""
        proof = self._proof
        if proof is None:
            self.renew()
            proof = self._proof
        if proof is None or not proof.is_in_eval_mode():
            return False
        if not proof.fits() or proof.wants_gradient():
            return False
        return proof.is_current() or self.renew()

    def is_stale(self) -> bool:
        """Whether modules, tensors or hooks are no longer those that were traced."""
        return self._traced is None or not self._traced.fits()

    def spamm_weights(self) -> list[tuple[nn.Conv2d, Tensor | None]]:
        """The convolutions that the op conv2d computes, with their weights as it multiplies them.

        A weight is None before the first call.
        """
        weights = [*self.operands[::3], *(None for _ in self._sources)]
        both = zip(self._sources, weights, strict=False)
        return [(source.conv, weight) for source, weight in both if source.engine.kind == "spamm"]

    def bands(self) -> dict[nn.Module, Band | None]:
        """The valid ratios that convolutions had when they were calibrated."""
        return {source.conv: source.engine.band for source in self._sources}

    # ---- Operands -------------------------------------------------------------------------------

    def _prove(self) -> Proof:
        modules = [m for s in self._sources for m in (s.conv, s.batch_norm) if m is not None]
        return Proof(modules, self._links, self._parents, self.root)

    def prove_again(self) -> None:
        """Takes classes and settings as they are now for those that were traced."""
        if self._proof is not None:
            self._proof = self._traced = self._prove()

    def renew(self) -> bool:
        """Folds weights and biases anew; False where that cannot be done now.

        Operands keep their addresses where shape, dtype and device are the same: captured graphs
        and compiled code read the new values.
        """
        self._proof = None
        proof = self._prove()
        if not proof.is_possible or not all(map(_is_served, self._sources)):
            return False
        if _get_current_dispatch_mode() is not None or _is_capturing():
            return False
        with torch.no_grad(), torch.inference_mode(False):
            found = self._operands_now()
            if len(self.operands) == len(found):
                own = zip(self.operands, found, self._owned(), strict=True)
                found = [_written(old, new) if is_owned else new for old, new, is_owned in own]
        for tensor in found:
            if tensor is not None:
                torch._dynamo.mark_static_address(tensor)
        _wait_for(found)
        self.operands, self._proof, self._held = found, proof, proof.held
        self._traced = proof
        return True

    def _operands_now(self) -> list[Tensor | None]:
        found: list[Tensor | None] = []
        for source in self._sources:
            found += source.operands()
        device = self._sources[0].conv.weight.device
        return [*found, *(places.to(device, copy=True) for places in self._put_back)]

    def _owned(self) -> list[bool]:
        """Which operands have memory of their own; the others are Parameters, not to be written."""
        owned = [
            is_owned
            for source in self._sources
            for is_owned in (source.makes_tensors, source.makes_tensors, True)
        ]
        return owned + [True] * len(self._put_back)

    def __getstate__(self) -> dict[str, Any]:
        # A copy has tensors of its own, and folds them when it is first called.
        nothing: dict[str, Any] = {
            "operands": [],
            "_proof": None,
            "_traced": None,
            "_held": [],
            "key": None,
        }
        return {**self.__dict__, **nothing}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._prepare()


def _is_served(source: Source) -> bool:
    weight = source.conv.weight
    return weight.device.type in ("cpu", "cuda", "meta") and weight.dtype in DTYPES


def _below(root: str, name: str) -> str:
    return name[len(root) + 1 :] if root else name


def _links(plan: Plan) -> list[tuple[nn.Module, str, nn.Module]]:
    """(parent, name, child) of every module that the generated forward passes by."""
    island, passed = plan.island, dict(plan.island.entered)
    nodes: Iterable[fx.Node] = itertools.chain(
        *(plan.pools, plan.upsamplings, plan.linear_relus, plan.linear_relus.values()),
        *map(plan.nodes, plan.fused),
    )
    if island.reference is not None:  # what it makes of the reference was computed by all of them
        nodes = island.graph.nodes
    for node in nodes:
        if node.op == "call_module":
            name = str(node.target)
            passed[name] = island.module.get_submodule(name)
    links = []
    for name, child in passed.items():
        parent, _, own = name.rpartition(".")
        links.append((island.module.get_submodule(parent), own, child))
    return links


def _parents(plan: Plan) -> list[nn.Module]:
    """The modules that hold one that the traced forward called."""
    island = plan.island
    names = [str(node.target) for node in island.graph.nodes if node.op == "call_module"]
    parents = {name.rpartition(".")[0] for name in (*names, *island.entered)}
    return [island.module.get_submodule(parent) for parent in sorted(parents)]


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
        return _registry[key].is_ready()


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
        if not mode and fused is not None and (was_training or not fused.is_ready()):
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

    def _load_from_state_dict(self: Any, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)  # type: ignore[misc]
        if self._spamm_fused is not None:
            self._spamm_fused._proof = None  # the modules inside are loaded after this one

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        new = _new(type(self))
        memo[id(self)] = new
        new.__setstate__(copy.deepcopy(_state(self), memo))
        return new

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        state = dict(_state(self))
        fused = state.pop("_spamm_fused", None)
        recipe = None if fused is None else (fused.recipe, fused.reference)
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
        if fused is not None and fused.root is self and not self.training:
            traced = fused.signature.bound(args, kwargs)
            if traced is not None and fused.serves(traced):
                block = self.__dict__.get(ORDER)
                if block is not None and traced[0].dim() == 4:
                    return in_order(lambda *ordered: fused.run(ordered), block, *traced)
                return fused.run(traced)
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
