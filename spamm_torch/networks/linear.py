"""Linear layers with ReLU in generated forwards: one call of cuBLASLt for both.

It is torch's own call, ``torch._addmm_activation``: bias and ReLU are applied by the product's
kernel. It has no gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from .capture import Island
from .sites import activation_of, plain_module

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_PLAIN = (Tensor, nn.Parameter)


def find_linear_relus(island: Island) -> dict[fx.Node, fx.Node]:
    """The calls of linear layers that nothing but a ReLU reads, and that ReLU, in order."""
    found = {}
    for node in island.graph.nodes:
        users = list(node.users)
        is_read_once = len(users) == 1 and _is_linear(island.module, node)
        if is_read_once and activation_of(users[0], island.module) == "relu":
            found[node] = users[0]
    return found


def _is_linear(root: nn.Module, node: fx.Node) -> bool:
    module = plain_module(node, root)
    # Subclasses may compute otherwise.
    return isinstance(module, nn.Linear) and type(module) is nn.Linear and module.bias is not None


def linear_relu(input: Tensor, linear: nn.Linear) -> Tensor:
    """As ``torch.relu(linear(input))``, up to rounding.

    Args:
        input: (..., in_features), of the layer's dtype.
        linear: the layer.
    """
    weight, bias = linear.weight, linear.bias
    if _is_one_call(input, weight, bias):
        return torch._addmm_activation(bias, input, weight.t())
    return torch.relu(F.linear(input, weight, bias))


def _is_one_call(input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    return (
        not torch.compiler.is_compiling()  # compilers choose between products themselves
        and input.is_cuda
        and bias is not None  # as it was when the forward was generated
        and type(weight) in _PLAIN  # a quantised weight, say, computes otherwise
        and type(bias) in _PLAIN
        and input.dim() == 2
        and input.dtype in _DTYPES
        and all(features % 8 == 0 for features in weight.shape)  # else its ReLU loses NaN
        and not (torch.is_grad_enabled() and any(t.requires_grad for t in (input, weight, bias)))
    )
