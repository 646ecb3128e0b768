"""Finds an island's calls of convolutions, and the batch norm, add and activation each may absorb.

From the call of a convolution single users are followed, in this order. Whatever is absorbed is
computed in the convolution's own call, in one rounding where the device has a kernel for it.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from torch import fx, nn

from .._arguments import dtype_name
from ..nn import SpAMMConv2d
from . import nodes
from .plan import Island, Shapes, Site

# Functions that pass their input on unless an argument says that they train, and its place.
_PLACE_OF_TRAINING = {"dropout": 2, "stochastic_depth": 3}

# Whether the add behind a call of a convolution, by name, adds operands of one shape and dtype.
Alike: TypeAlias = Callable[[str, fx.Node, fx.Node], bool]


def alike_by_shapes(measured: Sequence[Shapes], likely: Sequence[Shapes]) -> Alike:
    """Judges adds by shapes seen and by likely ones: a batch of one alone may look alike."""
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
    """The sites of an island whose convolutions the ops can compute, in the graph's order."""
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


class _Finder:
    """Follows single users of a convolution through the graph."""

    def __init__(self, island: Island, are_alike: Alike) -> None:
        self._root, self._are_alike = island.module, are_alike
        self._order = {node: place for place, node in enumerate(island.graph.nodes)}
        self._writers = [node for node in self._order if nodes.may_write(node, island.module)]
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
        # A node that passes its input on is only worth taking where something behind it was taken.
        while len(site.nodes) > 1 and self._is_identity(site.last):
            self._taken.discard(site.nodes.pop())
        site.pool = self._pool_behind(site)

    def _pool_behind(self, site: Site) -> fx.Node | None:
        if site.activation != "relu" or site.residual is not None:
            return None  # no kernel computes these and a pool
        node = self._next(site)
        if node is None or self._is_written_between(site, node):
            return None
        pooling = nodes.pooling_of(node, self._root)
        return node if pooling is not None and nodes.is_of_pairs(pooling) else None

    def _next(self, site: Site) -> fx.Node | None:
        """The only user of what the site computes so far."""
        users = list(site.last.users)
        return users[0] if len(users) == 1 and users[0].op != "output" else None

    def _module(self, node: fx.Node) -> nn.Module | None:
        return nodes.plain_module(node, self._root)

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
        activation = None if module is None else _activation_of_batch_norm(module)
        if node is None or activation is None or self._is_written_between(site, node):
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
        operands = nodes.operands_of_add(node)
        if operands is None:
            return
        own = site.last
        first, second = operands
        if first is second or own not in operands:
            return
        other = second if first is own else first
        if node.target in (operator.iadd, "add_") and first is not own:
            return  # the other operand is written to, and may be read elsewhere
        if not self._are_alike(site.name, own, other) or self._is_written_between(site, node):
            return
        site.residual = other
        self._take(site, node, "add")

    def _take_activation(self, site: Site) -> None:
        node = self._next(site)
        if node is None or self._is_written_between(site, node):
            return
        activation = nodes.activation_of(node, self._root)
        if activation is not None:
            site.activation = activation
            self._take(site, node, activation)

    def _is_written_between(self, site: Site, end: fx.Node) -> bool:
        """Whether anything else is written to before ``end``, where the fused call would run."""
        own = set(site.nodes)
        start, stop = self._order[site.node], self._order[end]
        return any(start < self._order[node] < stop and node not in own for node in self._writers)


_BATCH_NORMS = (nn.BatchNorm2d, nn.SyncBatchNorm)


def _activation_of_batch_norm(module: nn.Module) -> str | None:
    """The activation that a batch norm applies itself; None where the ops have no such one, and for
    modules that cannot be folded.
    """
    if not nodes.is_frozen_batch_norm(module):
        if not isinstance(module, _BATCH_NORMS) or module.running_mean is None:
            return None
        if type(module) not in _BATCH_NORMS and not hasattr(module, "act"):  # as timm's has
            return None
    for part in ("drop", "act"):
        inner = getattr(module, part, None)
        if isinstance(inner, nn.Module) and nodes.reason_not_plain(inner) is not None:
            return None
    drop = getattr(module, "drop", None)
    if drop is not None and type(drop) is not nn.Identity:
        return None
    act = getattr(module, "act", None)
    if act is None or type(act) is nn.Identity:
        return "none"
    return nodes.activation_of_module(act)


_LEAST_CHANNELS = 32  # the smallest edge of a block


def layer_of(call: str) -> str:
    """The name of the layer in a call's name."""
    return call.partition("#")[0]


def _reason_of_weight(conv: nn.Module) -> str | None:
    weight = conv._parameters.get("weight")
    if not isinstance(weight, nn.Parameter):
        return "its weight is not a Parameter"
    return "its weight is not initialised" if nn.parameter.is_lazy(weight) else None


def reason_not_to_convert(conv: nn.Module) -> str | None:
    """Why this convolution cannot become a :class:`SpAMMConv2d`, or None."""
    kind = type(conv)
    if kind not in (nn.Conv2d, SpAMMConv2d):
        return f"a subclass, {kind.__name__}"
    if (reason := _reason_of_weight(conv)) is not None:
        return reason
    weight: Any = conv.weight
    if not weight.is_floating_point():
        return f"its weight is {dtype_name(weight.dtype)}"
    if "forward" in conv.__dict__ or "_conv_forward" in conv.__dict__:
        return nodes.reason_not_plain(conv)
    return None


def reason_not_to_skip(conv: nn.Conv2d) -> str | None:
    """Why skipping cannot pay in this convolution, or None."""
    inner, outer = conv.in_channels // conv.groups, conv.out_channels // conv.groups
    if conv.groups > 1 and inner == 1:
        return "depthwise: a block would be nearly empty"
    which = "input" if inner < _LEAST_CHANNELS else "output"
    if min(inner, outer) < _LEAST_CHANNELS:
        of = " a group" if conv.groups > 1 else ""
        return f"{min(inner, outer)} {which} channels{of} do not fill a block of 32"
    return None


def reason_not_to_call(conv: nn.Conv2d) -> str | None:
    """Why the ops cannot be called in place of this convolution's ``forward``, or None."""
    kind = type(conv)
    if kind.forward is not nn.Conv2d.forward:
        return f"a subclass with a forward of its own, {kind.__name__}"
    if kind not in (nn.Conv2d, SpAMMConv2d):
        return f"a subclass, {kind.__name__}"
    if (reason := nodes.reason_not_plain(conv)) is not None:
        return reason
    if (reason := _reason_of_weight(conv)) is not None:
        return reason
    if conv.padding_mode != "zeros" or isinstance(conv.padding, str):
        return f"padding {conv.padding!r} of mode {conv.padding_mode!r} is made by torch"
    return None
