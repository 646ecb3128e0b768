"""vmap of the library's ops: one call for each element, without the warning of torch's fallback."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

_NAMESPACE = "spamm_torch"
_library = torch.library.Library(_NAMESPACE, "FRAGMENT")


def _register_all() -> None:
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, own = name.partition("::")
        if namespace != _NAMESPACE or "." in own:
            continue
        op = getattr(getattr(torch.ops, _NAMESPACE), own).default
        if op._schema.returns and not op._schema.is_mutable:
            _register(own, op)


def _register(name: str, op: Any) -> None:
    from torch._functorch.autograd_function import custom_function_call_vmap_helper
    from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

    def call(args: Any, kwargs: Any) -> Any:
        return op(*args, **kwargs)

    def each(info: Any, in_dims: Any, *given: Any) -> Any:
        values, structure = pytree.tree_flatten(given)
        dims = pytree.tree_leaves(in_dims)
        results = []
        for index in range(info.batch_size):
            own = [
                value if dim is None else value.select(dim, index)
                for value, dim in zip(values, dims, strict=True)
            ]
            results.append(call(*pytree.tree_unflatten(own, structure)))
        stacked = pytree.tree_map(_stacked, *results)
        return stacked, pytree.tree_map(lambda x: 0 if isinstance(x, Tensor) else None, stacked)

    def rule(_: Any, *args: Any, **kwargs: Any) -> Any:
        interpreter: Any = retrieve_current_functorch_interpreter()
        return custom_function_call_vmap_helper(interpreter, each, call, args, kwargs)

    _library.impl(name, rule, "FuncTorchBatched", with_keyset=True)


def _stacked(*parts: Any) -> Any:
    return torch.stack(parts) if isinstance(parts[0], Tensor) else parts[0]


_register_all()
