"""Rules of the ops for torch.func.vmap and for ``torch.utils.flop_counter.FlopCounterMode``.

Its formulas count the dense product, two operations for each multiply and add: the device alone
knows how much of it is skipped. ``SkipInfo.valid_ratio`` tells the share that was computed. Norm
maps and thresholds count nothing, as torch counts nothing but products.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import register_flop_formula

_ops = torch.ops.spamm_torch
_Shape = Sequence[int]


@register_flop_formula([_ops.spamm, _ops.spamm_with_norms, _ops.spamm_into, _ops.multiply])
def _product(a: _Shape, b: _Shape, *args: Any, **kwargs: Any) -> int:
    return 2 * math.prod(a) * b[-1]


def _convolution(weight: _Shape, output: _Shape) -> int:
    return 2 * math.prod(output) * math.prod(weight[1:])


@register_flop_formula([_ops.conv2d, _ops.dense_conv2d, _ops.conv2d_with_norms])
def _conv2d(*args: Any, out_shape: Any, **given: Any) -> int:
    """Counts those of the output, which norms may follow."""
    output = out_shape[0] if isinstance(out_shape[0], Sequence) else out_shape
    return _convolution(given["weight"] if "weight" in given else args[1], output)


@register_flop_formula(_ops.conv2d_max_pool)
def _conv2d_max_pool(
    input: _Shape, weight: _Shape, bias: Any = None, *args: Any, **given: Any
) -> int:
    names = ("stride", "padding", "dilation", "groups")
    geometry = {name: given[name] for name in names if name in given}
    image, kernel = (torch.empty(shape, device="meta") for shape in (input, weight))
    output = torch.nn.functional.conv2d(image, kernel, None, *args[:4], **geometry)
    return _convolution(weight, output.shape)


# ---- vmap: one call for each element, without the warning of torch's fallback --------------------


_library = torch.library.Library("spamm_torch", "FRAGMENT")


def _register(name: str, op: Any) -> None:
    from torch._functorch.autograd_function import custom_function_call_vmap_helper
    from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

    def each(info: Any, in_dims: Any, *given: Any) -> Any:
        values, structure = pytree.tree_flatten(given)
        dims = pytree.tree_leaves(in_dims)
        results = []
        for index in range(info.batch_size):
            own = [
                value if dim is None else value.select(dim, index)
                for value, dim in zip(values, dims, strict=True)
            ]
            args, kwargs = pytree.tree_unflatten(own, structure)
            results.append(op(*args, **kwargs))
        stacked = pytree.tree_map(
            lambda *x: torch.stack(x) if isinstance(x[0], Tensor) else x[0], *results
        )
        return stacked, pytree.tree_map(lambda x: 0 if isinstance(x, Tensor) else None, stacked)

    def rule(_: Any, *args: Any, **kwargs: Any) -> Any:
        interpreter: Any = retrieve_current_functorch_interpreter()
        call = lambda args, kwargs: op(*args, **kwargs)  # noqa: E731
        return custom_function_call_vmap_helper(interpreter, each, call, args, kwargs)

    _library.impl(name, rule, "FuncTorchBatched", with_keyset=True)


for _name in torch._C._dispatch_get_all_op_names():
    _namespace, _, _own = _name.partition("::")
    if _namespace == "spamm_torch" and "." not in _own:
        _op = getattr(_ops, _own).default
        if _op._schema.returns and not _op._schema.is_mutable:
            _register(_own, _op)
