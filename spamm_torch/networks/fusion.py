"""Finds the convolutions of an FX graph, and what follows each that its own call can compute.

From a convolution single users are followed: batch norm or another affine map of channels by
constants, residual add, activation, max pool. Constant is what is computed of parameters and
buffers alone. Graphs of dynamo, of ``torch.export`` and of ``torch.fx`` are read alike.
"""

import functools
import inspect
import math
import operator
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._prims_common import suggest_memory_format
from torch.nn import functional as F

from .._arguments import ACTIVATIONS

_ops, _aten = torch.ops.spamm_torch, torch.ops.aten

# ---- Nodes by names -----------------------------------------------------------------------------

_NAMES = (
    *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
    *("convolution", "batch_norm", "add", "mul", "dropout", "dropout2d", "max_pool2d"),
    *("alias", "sigmoid", "hardsigmoid", "clamp", "clamp_min", "hardtanh"),
    *("prelu", *ACTIVATIONS),
)
_POOLING = ("kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")


@functools.cache
def _names() -> dict[Any, str]:
    """The names of functions, operators and overloads, in place or not."""
    found: dict[Any, str] = {operator.add: "add", operator.iadd: "add", operator.mul: "mul"}
    found |= {operator.imul: "mul", _ops.conv2d.default: "spamm", _ops.conv2d: "spamm"}
    for name in _NAMES:
        for form in (name, name + "_"):
            for place in (torch, F, torch._C._nn):
                if (function := getattr(place, form, None)) is not None:
                    found[function] = name
            if (packet := getattr(_aten, form, None)) is not None:
                found |= {getattr(packet, which): name for which in packet.overloads()}
    return found


def name_of(node: fx.Node) -> str:
    """The name of the operation that a node calls, if it is one of those known here."""
    if node.op == "call_method":
        name = str(node.target).rstrip("_")
        return name if name in _NAMES else ""
    return _names().get(node.target, "") if node.op == "call_function" else ""


@functools.cache
def _parameters(target: Any, name: str) -> tuple[str, ...]:
    """The names of an operation's arguments, as the functions of torch.nn have them."""
    if target is F.max_pool2d:
        return ("input", *_POOLING)
    if inspect.isfunction(target):
        return tuple(inspect.signature(target).parameters)
    if not isinstance(target, torch._ops.OpOverload):
        packet = _ops.conv2d if name == "spamm" else getattr(_aten, name)
        target = getattr(packet, packet.overloads()[0])
    arguments = [argument.name for argument in target._schema.arguments]
    return tuple("input" if argument == "self" else argument for argument in arguments)


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """The arguments of a known operation by name."""
    return {
        **dict(zip(_parameters(node.target, name_of(node)), node.args, strict=False)),
        **node.kwargs,
    }


def value_of(node: Any) -> Any:
    """The tensor that a node was traced with, or None."""
    if not isinstance(node, fx.Node):
        return None
    value = node.meta.get("val", node.meta.get("example_value"))
    if value is None and node.op == "get_attr":
        value = attribute(node.graph.owning_module, str(node.target))
    return value if isinstance(value, Tensor) else None


def is_plain(value: Tensor) -> bool:
    """Tells whether a tensor is of torch's own classes, and so computes as torch does."""
    return type(value) in (Tensor, nn.Parameter, torch._subclasses.FakeTensor)


def sizes_of(value: Tensor | None) -> tuple[int, ...] | None:
    """The shape, where symbols stand for what they were traced with; None where none is known."""
    if value is None:
        return None
    hints = [size if isinstance(size, int) else size.node.hint for size in value.shape]
    return None if None in hints else tuple(map(int, hints))


def attribute(module: Any, path: str) -> Any:
    """The object at a path such as ``features.0.weight``; None for nothing."""
    for name in path.split("."):
        module = getattr(module, name, None)
    return module


def _writes(node: fx.Node) -> bool:
    """Tells whether a node may change one of its operands in place."""
    if node.op == "call_method":
        return str(node.target).endswith("_")
    if node.op == "call_module":
        module = attribute(node.graph.owning_module, str(node.target))
        is_unknown = not type(module).__module__.startswith("torch.nn")
        return bool(getattr(module, "inplace", is_unknown))
    if node.op != "call_function":
        return False
    if isinstance(node.target, torch._ops.OpOverload):
        return bool(node.target._schema.is_mutable)
    name = getattr(node.target, "__name__", "")
    in_place = node.kwargs.get("inplace") or any(given is True for given in node.args)
    is_operator = getattr(node.target, "__module__", "") == "_operator" and name[0] == "i"
    is_assignment = name in ("setitem", "delitem") or "out" in node.kwargs
    return bool(in_place or is_operator or is_assignment or name.endswith("_"))


_RANDOM = re.compile("rand|dropout|bernoulli|normal|multinomial|poisson")


def values_written(graph: fx.Graph) -> set[fx.Node]:
    """The nodes to whose values something in the graph may write, through views of them, too."""
    written = {read for node in graph.nodes if _writes(node) for read in node.all_input_nodes}
    for node in reversed(graph.nodes):
        if node in written and len(node.all_input_nodes) == 1:  # what may be a view
            written.update(node.all_input_nodes)
    return written


class Constants:
    """Tells which nodes are computed of ``sources`` alone, which nothing in the graph writes to."""

    def __init__(self, graph: fx.Graph, sources: Iterable[fx.Node]) -> None:
        written = values_written(graph)
        self._known = dict.fromkeys((node for node in sources if node not in written), True)

    def __contains__(self, node: Any) -> bool:
        if not isinstance(node, fx.Node):
            return node is None or isinstance(node, (int, float))
        if node not in self._known:
            reads = node.all_input_nodes
            self._known[node] = (
                node.op in ("call_function", "call_method")
                and bool(reads)
                and not _RANDOM.search(getattr(node.target, "__name__", str(node.target)))
                and not _writes(node)
                and all(read in self for read in reads)
            )
        return self._known[node]


# ---- Sites --------------------------------------------------------------------------------------


@dataclass(eq=False)
class Site:
    """A call of a convolution, and the nodes behind it that its own call may compute.

    Attributes:
        name: of the layer, or of what it is called in.
        node, input, weight, bias: the convolution and its operands. geometry: stride, padding,
            dilation, groups.
        setting: the further arguments of the op ``conv2d``, where a SpAMM layer calls it.
        scales: the maps of channels behind it, in order, as batch norms: (mean, variance, factor,
            summand, eps), None for what one does not have.
        nodes: the convolution and what is computed with it, in order. ``folded``: how many of them
            are computed by other weights.
        residual, activation, slope, pool: as of the ops; ``pool`` is a node, ``slope`` a node or a
            number.
        is_last: whether its result has channels last in memory. packs: whether a weight may be
            replaced by a copy in the layout of oneDNN.
        reason: why it stays as it is; empty if it need not.
    """

    name: str
    node: fx.Node
    input: Any = None
    weight: Any = None
    bias: Any = None
    geometry: tuple[Any, ...] = ()
    setting: dict[str, Any] = field(default_factory=dict)
    scales: list[tuple[Any, ...]] = field(default_factory=list)
    nodes: list[fx.Node] = field(default_factory=list)
    folded: int = 1
    residual: fx.Node | None = None
    activation: str = "none"
    slope: fx.Node | float = 0.01
    pool: fx.Node | None = None
    absorbed: tuple[str, ...] = ()
    is_last: bool = False
    packs: bool = False
    reason: str = ""

    @property
    def last(self) -> fx.Node:
        """The node whose value the fused call computes."""
        return self.nodes[-1]

    @property
    def skips(self) -> bool:
        """Tells whether a SpAMM layer calls it, by its own setting."""
        return bool(self.setting)


def find_sites(graph: fx.Graph, constants: Constants) -> list[Site]:
    """The convolutions of a graph, in its order."""
    sites = [site for node in graph.nodes if (site := _site_of(node, constants)) is not None]
    # The last convolution first: an add belongs to the one that runs last of its two.
    finder = _Finder(graph, constants)
    for site in reversed(sites):
        if not site.reason:
            finder.follow(site)
    return sites


def _site_of(node: fx.Node, constants: Constants) -> Site | None:
    name = name_of(node)
    if node.op == "call_module":
        module = attribute(node.graph.owning_module, str(node.target))
        if isinstance(module, nn.modules.conv._ConvNd):
            return Site(str(node.target), node, reason=f"a module, {type(module).__name__}")
        return None
    if not (name.startswith("conv") or name == "spamm"):
        return None
    given = arguments_of(node)
    site = Site(_layer_name(node, given.get("weight")), node, nodes=[node])
    site.input, site.weight, site.bias = (given.get(key) for key in ("input", "weight", "bias"))
    value = value_of(node)
    site.is_last = value is not None and suggest_memory_format(value) == torch.channels_last
    site.reason = _reason(site, name, given, constants)
    if not site.reason:
        edges = (given.get("stride", 1), _padding_of(site, given), given.get("dilation", 1))
        site.geometry = (*(list(pair_of(edge)) for edge in edges), given.get("groups", 1))
    if name == "spamm":
        known = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
        site.setting = {key: value for key, value in given.items() if key not in known}
        site.activation = site.setting.pop("activation", "none")
        site.residual = site.setting.pop("residual", None)
        site.slope = site.setting.pop("negative_slope", 0.01)
    return site


def pair_of(value: Any) -> Any:
    """A value for rows and columns; a list may hold one for both."""
    values = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    return values * 2 if len(values) == 1 else values


def _layer_name(node: fx.Node, weight: Any) -> str:
    """The name of the weight, or of the module that calls it, or of the node."""
    if isinstance(weight, fx.Node) and weight.op == "get_attr":
        return str(weight.target).removesuffix("weight").rstrip(".")
    path = [str(path) for path, *_ in node.meta.get("nn_module_stack", {}).values()][-1:]
    words = [word for word in re.findall(r"\w+", "".join(path)) if word != "_modules"]
    return ".".join(words[2:]) or node.name  # behind "L['self']"


def _reason(site: Site, name: str, given: dict[str, Any], constants: Constants) -> str:
    """Tells why a convolution stays as it is, or nothing."""
    if name not in ("conv2d", "convolution", "spamm") or given.get("transposed"):
        return "not a 2-d convolution"
    weight, images = value_of(site.weight), value_of(site.input)
    if site.weight not in constants or site.bias not in constants:
        return "its weight is computed in the call"
    if weight is None or weight.dim() != 4 or (images is not None and images.dim() != 4):
        return "no batch of images"
    if not weight.is_floating_point() or (images is not None and images.dtype != weight.dtype):
        return "its weight is of another type than its input"
    if not is_plain(weight):
        return f"its weight is a {type(weight).__name__}"
    if _padding_of(site, given) is None:
        return f"padding {given['padding']!r} that differs between sides"
    return ""


def _padding_of(site: Site, given: dict[str, Any]) -> Any:
    """The padding, in numbers where it is a word; None where sides differ."""
    padding = given.get("padding", 0)
    if padding == "valid" or not isinstance(padding, str):
        return 0 if padding == "valid" else padding
    edges = zip(pair_of(given.get("dilation", 1)), value_of(site.weight).shape[2:], strict=True)
    both = [d * (k - 1) for d, k in edges]
    return None if any(total % 2 for total in both) else [total // 2 for total in both]


class _Finder:
    """Follows single users of a convolution through the graph."""

    def __init__(self, graph: fx.Graph, constants: Constants) -> None:
        self._constants = constants
        self._order = {node: place for place, node in enumerate(graph.nodes)}
        self._writers = [node for node in graph.nodes if _writes(node)]
        self._taken: set[fx.Node] = set()

    def follow(self, site: Site) -> None:
        """Takes what follows the site, as far as its call can compute it."""
        if site.activation != "none" or site.residual is not None:
            return
        while self._take_scale(site):
            pass
        self._take_add(site)
        self._take_activation(site)
        self._taken.update(site.nodes)
        if site.activation == "relu" and site.residual is None and not site.skips:
            node = self._next(site)
            if node is not None and name_of(node) == "max_pool2d":
                is_of_pairs = windows_of(node) == [[2, 2], [2, 2], [0, 0], [1, 1]]
                is_whole = not arguments_of(node).get("ceil_mode")
                site.pool = node if is_of_pairs and is_whole else None

    def _next(self, site: Site) -> fx.Node | None:
        """The only user of what the site computes so far, if it can be computed with it."""
        users = list(site.last.users)
        if len(users) != 1 or users[0].op == "output" or users[0] in self._taken:
            return None
        return None if self._is_written_between(site, users[0]) else users[0]

    def _is_written_between(self, site: Site, end: fx.Node) -> bool:
        """Tells whether anything else is written to before the fused call would run."""
        start, stop = self._order[site.node], self._order[end]
        own = {*site.nodes, end}
        return any(start < self._order[node] < stop and node not in own for node in self._writers)

    def _take(self, site: Site, node: fx.Node, what: str) -> None:
        site.nodes.append(node)
        site.absorbed += (what,)

    def _take_scale(self, site: Site) -> bool:
        """Takes a batch norm, or a product or sum with a constant of each channel."""
        node = self._next(site)
        kind = None if node is None else _SCALES.get(name_of(node))
        if node is None or kind is None:
            return False
        if kind == "bn":
            given = arguments_of(node)
            operands = [given.get(key) for key in _BATCH_NORM]
            has_statistics = not given.get("training") and operands[0] is not None
            is_taken = has_statistics and given["input"] is site.last
        else:
            given, other = {}, _other_operand(node, site.last)
            operands = [None, None, *((other, None) if kind == "scale" else (None, other))]
            is_taken = other is not None and self._is_of_channels(site, other)
        if not is_taken or not all(operand in self._constants for operand in operands):
            return False
        site.scales.append((*operands, given.get("eps", 1e-5)))
        self._take(site, node, kind)
        site.folded = len(site.nodes)
        return True

    def _is_of_channels(self, site: Site, other: Any) -> bool:
        """Tells whether a constant is a number, or one of each channel that keeps the type."""
        if not isinstance(other, fx.Node):
            return not isinstance(other, bool)
        value, weight = value_of(other), value_of(site.weight)
        if value is None or value.dtype != weight.dtype:
            return False
        shape = (1,) * (4 - value.dim()) + tuple(value.shape)
        return len(shape) == 4 and math.prod(shape) == shape[1] and shape[1] in (1, weight.shape[0])

    def _take_add(self, site: Site) -> None:
        node = self._next(site)
        if node is None or name_of(node) != "add":
            return
        other, own = _other_operand(node, site.last), value_of(site.last)
        value = value_of(other)
        if other is None or own is None or value is None or other in self._constants:
            return
        if (own.shape, own.dtype, own.device) != (value.shape, value.dtype, value.device):
            return
        if _writes(node) and node.args[0] is not site.last:
            return  # the other operand is written to, and may be read elsewhere
        site.residual = other
        self._take(site, node, "add")

    def _take_activation(self, site: Site) -> None:
        node = self._next(site)
        if node is None:
            self._take_gate(site)
        elif (activation := activation_of(node)) is not None:
            slope = _slope_of(node)
            if slope in self._constants and _fits(slope, value_of(site.weight)):
                site.activation, site.slope = activation, slope
                self._take(site, node, "prelu" if name_of(node) == "prelu" else activation)

    def _take_gate(self, site: Site) -> None:
        """Takes x * sigmoid(x), which is SiLU, and x * hardsigmoid(x), which is hardswish."""
        for gate in site.last.users:
            others = [user for user in site.last.users if user is not gate]
            name = {"sigmoid": "silu", "hardsigmoid": "hardswish"}.get(name_of(gate))
            if name and len(others) == 1 and name_of(others[0]) == "mul":
                product = others[0]
                is_own = set(product.all_input_nodes) == {site.last, gate} and list(gate.users) == [
                    product
                ]
                if is_own and not _writes(gate) and not self._is_written_between(site, product):
                    site.activation = name
                    site.nodes.append(gate)
                    self._take(site, product, name)
                    return


def _slope_of(node: fx.Node) -> Any:
    """The slope of a leaky ReLU or PReLU: a number or a node."""
    given = arguments_of(node)
    return given.get("weight", given.get("negative_slope", 0.01))


def _fits(slope: Any, weight: Tensor) -> bool:
    """Tells whether the ops take such a slope: a number, or one or one of each channel."""
    value = value_of(slope)
    if value is None or value.dim() > 1 or value.dtype != weight.dtype:
        return not isinstance(slope, fx.Node)
    return is_plain(value) and value.numel() in (1, weight.shape[0])


_SCALES = {"batch_norm": "bn", "mul": "scale", "add": "shift"}
_BATCH_NORM = ("running_mean", "running_var", "weight", "bias")


def _other_operand(node: fx.Node, own: fx.Node) -> Any:
    """The operand beside ``own`` of a sum or product; None where there is no such one."""
    if len(node.args) != 2 or set(node.kwargs) - {"alpha"} or node.kwargs.get("alpha", 1) != 1:
        return None
    first, second = node.args
    if first is second:
        return None
    return second if first is own else first if second is own else None


def erase_identities(graph: fx.Graph) -> None:
    """Takes away what returns its first argument: dropout in eval mode, aliases."""
    for node in graph.nodes:
        name = name_of(node)
        if name in ("alias", "dropout", "dropout2d"):
            given = arguments_of(node)
            if not given.get("training", given.get("train", name != "alias")):
                node.replace_all_uses_with(given["input"])
                graph.erase_node(node)


def windows_of(node: fx.Node) -> list[list[Any]] | None:
    """Kernel, stride, padding and dilation of a max pool, each a pair; None with indices."""
    given = arguments_of(node)
    kernel = given["kernel_size"]
    edges = (
        kernel,
        given.get("stride") or kernel,
        given.get("padding", 0),
        given.get("dilation", 1),
    )
    return None if given.get("return_indices") else [list(pair_of(edge)) for edge in edges]


def activation_of(node: fx.Node) -> str | None:
    """The name of the activation that a node computes, if the ops compute it. PReLU is a leaky ReLU
    with a tensor of slopes."""
    name = name_of(node)
    if name in ACTIVATIONS or name == "prelu":
        return "leaky_relu" if name == "prelu" else name
    if name not in ("hardtanh", "clamp", "clamp_min"):
        return None
    given = arguments_of(node)
    least = given.get("min_val", given.get("min", -1.0))
    most = given.get("max_val", given.get("max", 1.0 if name == "hardtanh" else None))
    if isinstance(least, fx.Node) or isinstance(most, fx.Node) or least != 0:
        return None
    return "relu" if most is None else "relu6" if most == 6 else None


# ---- Modules as functions -----------------------------------------------------------------------

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Functions(fx.Transformer):
    """Puts functions of tensors in the place of torch's own layers that a graph calls. Unlike a
    tracer of modules it changes no class, which other threads may use."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        to_bool = self.tracer.to_bool

        def pass_over_checks(value: fx.Proxy) -> bool:
            """Answers checks of a number of dimensions; other values have no truth in a trace."""
            node, compared = value.node, value.node.args[:1]
            if node.target is not operator.ne or getattr(compared[0], "target", "") != "dim":
                return to_bool(value)
            for unused in (node, *node.all_input_nodes):
                self.new_graph.erase_node(unused)
            return False

        self.tracer.to_bool = pass_over_checks

    def run_node(self, n: fx.Node) -> Any:
        """As of the base, and notes what is known of the value."""
        value = super().run_node(n)
        if isinstance(value, fx.Proxy):
            value.node.meta = {**n.meta, **value.node.meta}
        return value

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Calls what the layer computes, unless hooks or a forward of its own do more."""
        module: Any = self.fetch_attr(target)
        own, before = vars(module), len(self.new_graph.nodes)
        does_more = any(own[name] for name in _HOOKS) or {"forward", "_conv_forward"} & own.keys()
        counts = isinstance(module, nn.modules.batchnorm._NormBase) and module.training
        is_torchs = type(module).__module__.startswith("torch.nn.modules.")
        if is_torchs and not (does_more or counts or module._modules):
            try:
                return module.forward(*args, **kwargs)
            except Exception:  # whatever a layer does with what has no value yet
                for node in reversed(list(self.new_graph.nodes)[before:]):
                    self.new_graph.erase_node(node)
        return super().call_module(target, args, kwargs)
