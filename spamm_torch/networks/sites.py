"""What each convolution of an island may absorb: batch norm, the residual add, the activation.

From the call of a convolution single users are followed, in this order. Whatever is absorbed is
computed in the convolution's own call, in one rounding where the device has a kernel for it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import fx, nn
from torch.nn import functional as F

from .capture import Island, is_frozen_batch_norm
from .leaves import reason_not_plain
from .pool import is_of_pairs, pooling_of
from .shapes import Shapes

_MODULES: dict[type[nn.Module], str] = {
    nn.ReLU: "relu",
    nn.ReLU6: "relu6",
    nn.Hardswish: "hardswish",
    nn.SiLU: "silu",
    nn.LeakyReLU: "leaky_relu",
}
_FUNCTIONS: dict[Callable[..., Any], str] = {
    torch.relu: "relu",
    torch.relu_: "relu",
    F.relu: "relu",
    F.relu_: "relu",
    F.relu6: "relu6",
    F.hardswish: "hardswish",
    F.silu: "silu",
    F.leaky_relu: "leaky_relu",
    F.leaky_relu_: "leaky_relu",
}
_METHODS = {"relu": "relu", "relu_": "relu"}
# Functions that pass their input on unless they are told to train, and where they are told.
_PLACE_OF_TRAINING = {"dropout": 2, "stochastic_depth": 3}
_SLOPE = 0.01  # of the leaky ReLU that the ops compute

_ADDS = (operator.add, torch.add)
_IN_PLACE_ADDS = (operator.iadd,)


@dataclass(eq=False)
class Site:
    """A call of a convolution, and what it absorbs.

    Attributes:
        name: of the convolution in the model; further calls of the same one have "#2" and so on
            behind it.
        conv: the module.
        node: its call; None for a convolution that no island calls, which absorbs nothing.
        batch_norm: the module that is folded into weight and bias, or None.
        residual: what is added, or None. activation: "none", or as the ops name it.
        nodes: the nodes whose work the fused call does, the convolution first.
        absorbed: what was absorbed, in order: "bn", "add", and the activation's name.
        images: of a batch of the example; 0 where none was seen.
        pool: the max pool of 2 x 2 pixels that alone reads what the site computes, where a call
            that skips nothing may compute it, too; or None.
    """

    name: str
    conv: nn.Conv2d
    node: fx.Node | None = None
    batch_norm: nn.Module | None = None
    residual: fx.Node | None = None
    activation: str = "none"
    nodes: list[fx.Node] = field(default_factory=list)
    absorbed: tuple[str, ...] = ()
    images: int = 0
    pool: fx.Node | None = None

    @property
    def last(self) -> fx.Node:
        """The node whose value the fused call returns."""
        return self.nodes[-1]


# Whether the add behind a call of a convolution, by name, adds operands of one shape and dtype.
Alike: TypeAlias = Callable[[str, fx.Node, fx.Node], bool]


def alike_by_shapes(measured: Sequence[Shapes], likely: Sequence[Shapes]) -> Alike:
    """Judges adds by shapes.

    Args:
        measured: shapes of the nodes in calls that were seen. May be empty.
        likely: the same for made-up inputs. They must not disagree: operands may be alike for a
            batch of one alone.
    """
    certain = measured or likely

    def are_alike(_: str, one: fx.Node, other: fx.Node) -> bool:
        if other.op == "get_attr":  # a Parameter, which has no batch
            return False
        return (
            bool(certain)
            and all(one in shapes and shapes.get(other) == shapes[one] for shapes in certain)
            and all(shapes.get(one) == shapes.get(other) for shapes in likely)
        )

    return are_alike


def find_sites(island: Island, are_alike: Alike) -> list[Site]:
    """The sites of an island whose convolutions the ops can compute, in the graph's order.

    An add is absorbed where ``are_alike`` says that nothing is broadcast.
    """
    sites = _calls(island)
    # The last convolution first: an add belongs to the one that runs last of its two.
    finder = _Finder(island, are_alike)
    for site in reversed(sites):
        finder.follow(site)
    return sites


def _calls(island: Island) -> list[Site]:
    sites, counts = [], dict[str, int]()
    for node in island.graph.nodes:
        if node.op != "call_module":
            continue
        conv = island.module.get_submodule(node.target)
        if not isinstance(conv, nn.Conv2d):
            continue
        name = island.full_name(node.target)
        counts[name] = counts.get(name, 0) + 1
        called = name if counts[name] == 1 else f"{name}#{counts[name]}"
        if reason_not_to_call(conv) is None and len(node.args) == 1 and not node.kwargs:
            sites.append(Site(called, conv, node, nodes=[node]))
    return sites


def reason_not_to_call(conv: nn.Conv2d) -> str | None:
    """Why the ops cannot be called in place of this convolution's ``forward``, or None."""
    kind = type(conv)
    if kind.forward is not nn.Conv2d.forward:
        return f"a subclass with a forward of its own, {kind.__name__}"
    if not is_known_convolution(conv):
        return f"a subclass, {kind.__name__}"
    if (reason := reason_not_plain(conv)) is not None:
        return reason
    if not isinstance(conv._parameters.get("weight"), nn.Parameter):
        return "its weight is not a Parameter"
    if nn.parameter.is_lazy(conv.weight):
        return "its weight is not initialised"
    if conv.padding_mode != "zeros" or isinstance(conv.padding, str):
        return f"padding {conv.padding!r} of mode {conv.padding_mode!r} is made by torch"
    return None


def is_known_convolution(conv: nn.Module) -> bool:
    """Whether it is exactly ``nn.Conv2d`` or :class:`SpAMMConv2d`."""
    from ..nn import SpAMMConv2d

    return type(conv) in (nn.Conv2d, SpAMMConv2d)


class _Finder:
    """Follows single users of a convolution through the graph."""

    def __init__(self, island: Island, are_alike: Alike) -> None:
        self._root, self._are_alike = island.module, are_alike
        self._has_reference = island.reference is not None
        self._order = {node: place for place, node in enumerate(island.graph.nodes)}
        self._taken: set[fx.Node] = set()

    def follow(self, site: Site) -> None:
        own = getattr(site.conv, "activation", None) or "none"
        if own != "none":  # a SpAMMConv2d that was given an activation
            site.activation = own
            return
        self._pass_over_identities(site)
        self._take_batch_norm(site)
        if site.activation == "none":
            self._pass_over_identities(site)
            self._take_add(site)
            self._take_activation(site)
        self._taken.update(site.nodes)
        # What passes its input on is only worth taking where something behind it was taken.
        while len(site.nodes) > 1 and self._is_identity(site.last):
            self._taken.discard(site.nodes.pop())
        if not self._has_reference:
            site.pool = self._pool_behind(site)

    def _pool_behind(self, site: Site) -> fx.Node | None:
        if site.activation != "relu" or site.residual is not None:
            return None  # no kernel computes these and a pool
        node = self._next(site)
        if node is None or self._is_written_between(site, node):
            return None
        pooling = pooling_of(node, self._root)
        return node if pooling is not None and is_of_pairs(pooling) else None

    def _next(self, site: Site) -> fx.Node | None:
        """The only user of what the site computes so far."""
        users = list(site.last.users)
        return users[0] if len(users) == 1 and users[0].op != "output" else None

    def _module(self, node: fx.Node) -> nn.Module | None:
        return plain_module(node, self._root)

    def _take(self, site: Site, node: fx.Node, what: str) -> None:
        site.nodes.append(node)
        site.absorbed += (what,)

    def _pass_over_identities(self, site: Site) -> None:
        while (node := self._next(site)) is not None and self._is_identity(node):
            site.nodes.append(node)

    def _is_identity(self, node: fx.Node) -> bool:
        """Whether a node returns its first argument in eval mode."""
        kinds = (nn.Identity, nn.Dropout, nn.Dropout2d)
        if type(self._module(node)) in kinds:
            return True
        name = getattr(node.target, "__name__", "")
        if node.op != "call_function" or name not in _PLACE_OF_TRAINING:
            return False
        place = _PLACE_OF_TRAINING[name]
        given = node.args[place] if place < len(node.args) else node.kwargs.get("training")
        return given is False

    def _take_batch_norm(self, site: Site) -> None:
        node = self._next(site)
        module = None if node is None else self._module(node)
        if node is None or module is None or not _can_fold(module):
            return
        if self._is_written_between(site, node):
            return
        activation = _activation_of_batch_norm(module)
        if activation is None:
            return
        site.batch_norm = module
        self._take(site, node, "bn")
        if activation != "none":
            site.activation = activation
            site.absorbed += (activation,)

    def _take_add(self, site: Site) -> None:
        node = self._next(site)
        if node is None or node in self._taken:
            return
        operands = operands_of_add(node)
        if operands is None:
            return
        own = site.last
        first, second = operands
        if first is second or own not in operands:
            return
        other = second if first is own else first
        if _is_in_place_add(node) and first is not own:
            return  # the other operand is written to, and may be read elsewhere
        if not self._are_alike(site.name, own, other) or self._is_written_between(site, node):
            return
        site.residual = other
        self._take(site, node, "add")

    def _take_activation(self, site: Site) -> None:
        node = self._next(site)
        if node is None or self._is_written_between(site, node):
            return
        activation = activation_of(node, self._root)
        if activation is not None:
            site.activation = activation
            self._take(site, node, activation)

    def _is_written_between(self, site: Site, end: fx.Node) -> bool:
        """Whether anything else is changed in place while the site's nodes run.

        The fused call runs where its last node ran, and must still find its operands as they were.
        """
        own = set(site.nodes)
        start, stop = self._order[site.node], self._order[end]
        return any(
            start < self._order[node] < stop and node not in own and may_write(node, self._root)
            for node in self._order
        )


def plain_module(node: fx.Node, root: nn.Module) -> nn.Module | None:
    """The module that a node calls with one argument and that does nothing but forward."""
    if node.op != "call_module" or len(node.args) != 1 or node.kwargs:
        return None
    module = root.get_submodule(str(node.target))
    return module if reason_not_plain(module) is None else None


def activation_of(node: fx.Node, root: nn.Module) -> str | None:
    """The name of the activation that a node computes, if the ops compute it."""
    if node.op == "call_module":
        module = plain_module(node, root)
        return None if module is None else activation_of_module(module)
    if node.op == "call_method":
        known = len(node.args) == 1 and not node.kwargs
        return _METHODS.get(str(node.target)) if known else None
    if node.op != "call_function" or node.target not in _FUNCTIONS:
        return None
    name = _FUNCTIONS[node.target]
    options = dict(node.kwargs)
    options.pop("inplace", None)
    options.pop("input", None)
    slope = options.pop("negative_slope", _SLOPE)
    rest = list(node.args[1:])
    if name == "leaky_relu" and rest:
        slope = rest.pop(0)
    plain = not options and all(isinstance(value, bool) for value in rest)
    return name if plain and slope == _SLOPE else None


def activation_of_module(module: nn.Module) -> str | None:
    """The name of what an activation module computes, if the ops compute it."""
    if type(module) is nn.LeakyReLU and module.negative_slope != _SLOPE:
        return None
    if type(module) is nn.ReLU6 and (module.min_val, module.max_val) != (0, 6):
        return None
    return _MODULES.get(type(module))


def _can_fold(module: nn.Module) -> bool:
    if is_frozen_batch_norm(module):
        return True
    is_batch_norm = isinstance(module, (nn.BatchNorm2d, nn.SyncBatchNorm))
    if not is_batch_norm or module.running_mean is None:
        return False
    plain = type(module) in (nn.BatchNorm2d, nn.SyncBatchNorm)
    return plain or hasattr(module, "act")  # timm's batch norm with an activation


def _activation_of_batch_norm(module: nn.Module) -> str | None:
    """The activation that a batch norm applies itself; None where the ops have no such one."""
    for part in ("drop", "act"):
        inner = getattr(module, part, None)
        if isinstance(inner, nn.Module) and reason_not_plain(inner) is not None:
            return None
    drop = getattr(module, "drop", None)
    if drop is not None and type(drop) is not nn.Identity:
        return None
    act = getattr(module, "act", None)
    if act is None or type(act) is nn.Identity:
        return "none"
    return activation_of_module(act)


def operands_of_add(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    is_add = (node.op == "call_function" and node.target in (*_ADDS, *_IN_PLACE_ADDS)) or (
        node.op == "call_method" and node.target in ("add", "add_")
    )
    if not is_add or len(node.args) != 2 or node.kwargs.get("alpha", 1) != 1:
        return None
    if set(node.kwargs) - {"alpha"}:
        return None
    first, second = node.args
    if not isinstance(first, fx.Node) or not isinstance(second, fx.Node):
        return None
    return first, second


def _is_in_place_add(node: fx.Node) -> bool:
    return node.target in _IN_PLACE_ADDS or node.target == "add_"


def may_write(node: fx.Node, root: nn.Module) -> bool:
    """Whether a node may change a tensor in place, by its name and options."""
    if node.op == "call_module":
        module = root.get_submodule(str(node.target))
        known = type(module).__module__.startswith("torch.nn")
        return bool(getattr(module, "inplace", False)) if known else not _is_pure(module)
    if node.op == "call_method":
        return str(node.target).endswith("_")
    if node.op == "call_function":
        if node.kwargs.get("inplace") or "out" in node.kwargs or any(a is True for a in node.args):
            return True
        name = getattr(node.target, "__name__", "")
        is_operator = getattr(node.target, "__module__", "") == "_operator"
        return name.endswith("_") or name == "setitem" or (is_operator and name in _IN_PLACE_NAMES)
    return False


_CONCATENATIONS = (torch.cat, torch.concat, torch.concatenate)


def concatenated(node: fx.Node) -> tuple[Sequence[Any], Any] | None:
    """What a node concatenates, and along which dimension; None for other nodes."""
    if node.op != "call_function" or node.target not in _CONCATENATIONS or not node.args:
        return None
    parts = node.args[0]
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    return (parts, dim) if isinstance(parts, (list, tuple)) else None


def concatenated_channels(node: fx.Node) -> Sequence[Any] | None:
    """The parts of a concatenation of channels; None for other nodes."""
    joined = concatenated(node)
    return joined[0] if joined is not None and joined[1] == 1 else None


def looks_at_shape(node: fx.Node) -> bool:
    """Whether a node asks a value for its shape, dtype or device alone."""
    if node.op == "call_method":
        return node.target in ("size", "dim")
    looks = node.op == "call_function" and node.target is getattr
    return looks and node.args[1] in ("shape", "dtype", "device", "ndim")


_IN_PLACE_NAMES = frozenset(
    name for name in dir(operator) if name.startswith("i") and not name.startswith("is")
) - {"index", "indexOf", "inv", "invert", "itemgetter"}


def _is_pure(module: nn.Module) -> bool:
    return isinstance(module, (nn.Conv2d, nn.Linear)) or is_frozen_batch_norm(module)
