"""Tells the activations, adds, pools and upsamplings among the nodes of a traced graph. A node that
does more than its class's ``forward`` (hooks, a forward of its own) is none of these.
"""

import operator
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import fx, nn
from torch.nn import functional as F

from .._effects import IN_PLACE

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


def constant_when_compiled(function: Any) -> Any:
    """``torch.compiler.assume_constant_result`` without its import of the compiler, which takes
    seconds: that sets this attribute and nothing else."""
    function._dynamo_marked_constant = True
    return function


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


def _settings(node: fx.Node, root: nn.Module) -> Mapping[str, Any]:
    """The arguments of a function, or the attributes of a plain module, by name; or none."""
    if node.op == "call_module":
        module = plain_module(node, root)
        return {} if module is None else vars(module)
    given = node.normalized_arguments(root, normalize_to_only_use_kwargs=True)
    return {} if given is None else given.kwargs


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
    is_known = node.op == "call_function" and node.target in _FUNCTIONS
    given = _settings(node, root) if is_known else {}
    is_plain = bool(given) and given.get("negative_slope", _SLOPE) == _SLOPE
    return _FUNCTIONS[node.target] if is_plain else None


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


def find_linear_relus(graph: fx.Graph, root: nn.Module) -> dict[fx.Node, fx.Node]:
    """The calls of linear layers whose only reader is a ReLU, and that ReLU, in order."""
    found = {}
    for node in graph.nodes:
        users = list(node.users)
        linear: Any = plain_module(node, root)
        is_linear = type(linear) is nn.Linear and linear.bias is not None
        if is_linear and len(users) == 1 and activation_of(users[0], root) == "relu":
            found[node] = users[0]
    return found


# Kernel size, stride, padding, dilation, ceil mode.
Pooling: TypeAlias = tuple[Any, Any, Any, Any, bool]
# Size, scale factor: one of them None. Values or, of functions, nodes of the graph.
Upsampling: TypeAlias = tuple[Any, Any]
_UPSAMPLINGS = (nn.Upsample, nn.UpsamplingNearest2d)


def pooling_of(node: fx.Node, root: nn.Module) -> Pooling | None:
    """The windows of a node that is a max pool and returns no indices; None for other nodes."""
    if node.target is not F.max_pool2d and type(plain_module(node, root)) is not nn.MaxPool2d:
        return None
    given = _settings(node, root)
    if given.get("return_indices", True):
        return None
    kernel, stride = given["kernel_size"], given["stride"]
    rest = (given["padding"], given["dilation"], given["ceil_mode"])
    return (kernel, kernel if stride is None else stride, *rest)


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
    is_function = node.target is F.interpolate
    if not is_function and type(plain_module(node, root)) not in _UPSAMPLINGS:
        return None
    given = _settings(node, root)
    others = map(given.get, ("align_corners", "recompute_scale_factor", "antialias"))
    if given.get("mode") != "nearest" or any(others):
        return None
    return (given["size"], given["scale_factor"])


def may_write(node: fx.Node, root: nn.Module) -> bool:
    """Whether a node may change a tensor in place, by its name and options."""
    if node.op == "call_module":
        module = root.get_submodule(str(node.target))
        known = type(module).__module__.startswith("torch.nn")
        is_pure = isinstance(module, (nn.Conv2d, nn.Linear)) or is_frozen_batch_norm(module)
        return bool(getattr(module, "inplace", False)) if known else not is_pure
    if node.op == "call_method":
        return str(node.target).endswith("_")
    if node.op == "call_function":
        if node.kwargs.get("inplace") or "out" in node.kwargs or any(a is True for a in node.args):
            return True
        return getattr(node.target, "__name__", "").endswith("_") or node.target in IN_PLACE
    return False


def is_written(value: fx.Node, root: nn.Module) -> bool:
    """Whether a node that reads a value may change it."""
    return any(may_write(user, root) for user in value.users)
