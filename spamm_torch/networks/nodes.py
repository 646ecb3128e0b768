"""Tells the activations, adds, pools and upsamplings among the nodes of a traced graph. A node that
does more than its class's ``forward`` (hooks, a forward of its own) is none of these.
"""

import operator
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import fx, nn
from torch.nn import functional as F

_MODULES: dict[type[nn.Module], str] = {nn.ReLU: "relu", nn.ReLU6: "relu6", nn.SiLU: "silu"}
_MODULES |= {nn.Hardswish: "hardswish", nn.LeakyReLU: "leaky_relu"}
_FUNCTIONS: dict[Callable[..., Any], str] = {
    **dict.fromkeys((torch.relu, torch.relu_, F.relu, F.relu_), "relu"),
    **dict.fromkeys((F.leaky_relu, F.leaky_relu_), "leaky_relu"),
    **{F.relu6: "relu6", F.hardswish: "hardswish", F.silu: "silu"},
}
_METHODS = {"relu": "relu", "relu_": "relu"}
_SLOPE = 0.01  # of the leaky ReLU that the ops compute

_ADDS = (operator.add, torch.add, operator.iadd)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def reason_not_plain(module: nn.Module) -> str | None:
    """Names what a call of this module does beside its class's ``forward``; None for nothing."""
    own = module.__dict__
    if any(map(own.__getitem__, _HOOKS)):
        return "has hooks"
    if "forward" in own or "_conv_forward" in own:
        return "has a forward of its own"
    return None


def plain_module(node: fx.Node, root: nn.Module) -> nn.Module | None:
    """The module that a node calls with one argument and that does nothing but forward."""
    if node.op != "call_module" or len(node.args) != 1 or node.kwargs:
        return None
    module = root.get_submodule(str(node.target))
    return module if reason_not_plain(module) is None else None


def is_frozen_batch_norm(module: nn.Module) -> bool:
    """Whether it is a batch norm whose statistics and scales are buffers, as detectors have it."""
    return type(module).__name__ == "FrozenBatchNorm2d" and hasattr(module, "running_var")


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


def operands_of_add(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The two tensors that a node adds; None for other nodes."""
    is_add = (node.op == "call_function" and node.target in _ADDS) or (
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


def is_in_place_add(node: fx.Node) -> bool:
    return node.target is operator.iadd or node.target == "add_"


def find_linear_relus(graph: fx.Graph, root: nn.Module) -> dict[fx.Node, fx.Node]:
    """The calls of linear layers whose only reader is a ReLU, and that ReLU, in order."""
    found = {}
    for node in graph.nodes:
        users = list(node.users)
        module = plain_module(node, root)
        kind = type(module)  # subclasses may compute otherwise
        is_linear = module is not None and kind is nn.Linear and module.bias is not None
        if is_linear and len(users) == 1 and activation_of(users[0], root) == "relu":
            found[node] = users[0]
    return found


_OF_POOL = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")

# Kernel size, stride, padding, dilation, ceil mode.
Pooling: TypeAlias = tuple[Any, Any, Any, Any, bool]
_UPSAMPLINGS = (nn.Upsample, nn.UpsamplingNearest2d)
_OF_UPSAMPLING = ("size", "scale_factor")
_DEFAULTS = {"align_corners": None, "recompute_scale_factor": None, "antialias": False}

# Size, scale factor: one of them None. Values or, of functions, nodes of the graph.
Upsampling: TypeAlias = tuple[Any, Any]


def pooling_of(node: fx.Node, root: nn.Module) -> Pooling | None:
    """The windows of a node that is a max pool and returns no indices; None for other nodes."""
    if node.op == "call_module" and len(node.args) == 1 and not node.kwargs:
        pool: Any = root.get_submodule(str(node.target))
        is_pool = type(pool) is nn.MaxPool2d and not pool.return_indices
        if not is_pool or reason_not_plain(pool) is not None:
            return None
        return (pool.kernel_size, pool.stride, pool.padding, pool.dilation, pool.ceil_mode)
    if node.op == "call_function" and node.target is F.max_pool2d:
        given: dict[str, Any] = dict(zip(_OF_POOL, node.args[1:], strict=False))
        given |= node.kwargs
        if given.pop("return_indices", False) or given.keys() - set(_OF_POOL):
            return None
        kernel = given["kernel_size"]
        stride = given.get("stride")
        rest = (given.get("padding", 0), given.get("dilation", 1), given.get("ceil_mode", False))
        return (kernel, kernel if stride is None else stride, *rest)
    return None


def is_of_pairs(pooling: Pooling) -> bool:
    """Whether windows are 2 x 2 pixels that lie side by side, and what sticks out is dropped."""
    kernel, stride, padding, dilation, ceil_mode = pooling
    edges = [*map(pair_of, (kernel, stride, padding, dilation))]
    return edges == [(2, 2), (2, 2), (0, 0), (1, 1)] and not ceil_mode


def pair_of(value: Any) -> tuple[Any, Any] | None:
    """The value for rows and for columns; None where there are more."""
    if not isinstance(value, (tuple, list)):
        return value, value
    return (value[0], value[1]) if len(value) == 2 else None


def upsampling_of(node: fx.Node, root: nn.Module) -> Upsampling | None:
    """The nearest upsampling that a node computes, if it computes one."""
    if not is_nearest(node, root):
        return None
    if node.op == "call_module":
        upsample: Any = root.get_submodule(str(node.target))
        is_plain = len(node.args) == 1 and not node.kwargs and reason_not_plain(upsample) is None
        if not is_plain or upsample.recompute_scale_factor:
            return None
        return (upsample.size, upsample.scale_factor)
    given: dict[str, Any] = dict(zip(_OF_UPSAMPLING, node.args[1:], strict=False))
    given |= node.kwargs
    is_plain = all(given.get(name, usual) == usual for name, usual in _DEFAULTS.items())
    if not node.args or not is_plain:
        return None
    return (given.get("size"), given.get("scale_factor"))


def is_nearest(node: fx.Node, root: nn.Module) -> bool:
    """Whether a node is torch's nearest upsampling, by whatever factors."""
    if node.op == "call_module":
        module = root.get_submodule(str(node.target))
        return type(module) in _UPSAMPLINGS and module.mode == "nearest"
    if node.op != "call_function" or node.target is not F.interpolate or len(node.args) > 3:
        return False
    return node.kwargs.get("mode", "nearest") == "nearest"


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


_IN_PLACE_NAMES = frozenset(
    name for name in dir(operator) if name.startswith("i") and not name.startswith("is")
) - {"index", "indexOf", "inv", "invert", "itemgetter"}


def _is_pure(module: nn.Module) -> bool:
    return isinstance(module, (nn.Conv2d, nn.Linear)) or is_frozen_batch_norm(module)
