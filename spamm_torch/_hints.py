"""Lines that name the way for names and arguments that left, or are tried first in vain."""

import functools
import sys
from collections.abc import Callable
from typing import NoReturn, ParamSpec, TypeVar

_NO_REFERENCE = "calibrate(model, loader, evaluate, max_drop) finds what such pictures may skip"
_ORDER = "docs/serving.md orders a batch by centres of mass with torch.argsort"

_BACKEND = 'torch.compile(model, backend="spamm_torch") fuses a network'

_MM = "spamm_torch.mm takes block-sparse matrices"
_FROM = "sparse.from_sparse takes any sparse tensor of torch, "

_SPARSE = {
    **dict.fromkeys(("dot", "matmul", "mm"), _MM),
    **dict.fromkeys(("from_coo", "from_csr"), f"{_FROM}from_scipy one of scipy"),
    "addmm": "spamm_torch.addmm takes block-sparse matrices",
    "drop": "drop= of from_dense, add and spamm_torch.mm leaves out small blocks",
    "eye": "sparse.identity(size) is the identity",
    "from_torch": f"{_FROM}from_dense a dense one",
    "mul": "a * 2 is torch's own, sparse.inner(a, b) the sum of a[i, j] * b[i, j]",
    "nnz": "len(a.values()) is the number of stored blocks",
    "random": "sparse.from_scipy(scipy.sparse.random_array(shape)) makes one",
    "scale": "a * 0.5 is torch's own",
    "spy": "matplotlib's spy(sparse.to_scipy(a)) draws one",
    "sub": "sparse.add(a, b, beta=-1) is a - b",
}
_LINALG = {
    **dict.fromkeys(("expm", "matrix_exp"), "torch.linalg.matrix_exp of the dense matrix"),
    "cholesky": "linalg.inverse_factor(s, max_error=...) is a Z with Z^T S Z = 1",
    "density_matrix": "linalg.DensitySolver(overlap) makes them",
    "eigh": "torch.linalg.eigh of the dense matrix",
    "error_estimate": "error_bound of return_info, or a line of torch in docs/error_bound.md",
    "inv": "with z of linalg.inverse_sqrt(s, max_error=...) it is spamm_torch.mm(z, z, ...)",
    "norm": "sparse.norm(a), or torch.linalg.norm of a dense matrix",
    "sp2": "linalg.purify(hamiltonian, electrons, max_error=...) is SP2",
    "sqrtm": "with z of linalg.inverse_sqrt(s, max_error=...) it is spamm_torch.mm(s, z, ...)",
}
_PATHS = ("cmake_prefix_path", "include_path", "library_path")
_TOP = {
    **dict.fromkeys(("OrderedBatch", "likeness_order", "order_batch"), _ORDER),
    **dict.fromkeys(("show", "show_config"), "spamm_torch.build_info() says how it was built"),
    **{name: f"spamm_torch.paths.{name}() is it" for name in _PATHS},
    "Conv2d": "spamm_torch.SpAMMConv2d is torch's with a knob",
    "Linear": "spamm_torch.SpAMMLinear is torch's with a knob",
    "SkipInfo": "spamm_torch.functional.SkipInfo is its class",
    "benchmark": "scripts/bench.py of the repository times the library",
    "compile": _BACKEND,
    "convert": "spamm_torch.convert_(model) works in place",
    "matmul": "spamm_torch.mm of matrices, bmm of batches",
    "spatial_order": "spamm_torch.sparse.spatial_order(positions) is it",
}
# By the module of a name, and by the function of an argument.
HINTS: dict[str, dict[str, str]] = {
    "spamm_torch": _TOP,
    "spamm_torch.sparse": _SPARSE,
    "spamm_torch.linalg": _LINALG,
    "DensitySolver": {"groups": "order=sparse.spatial_order(positions, groups)"},
    "calibrate": {"reference": _NO_REFERENCE},
    "conv2d": {"devices": "torch.nn.DataParallel, or mm(devices=) of its im2col matrix"},
    "convert_": {
        "dry_run": "revert_(model) undoes it, bit for bit",
        "example_input": f"{_BACKEND}, by times of its first call",
        "fuse": f"it swaps layers alone; {_BACKEND}",
        "progress": "it swaps layers alone, at once",
        "reference": _NO_REFERENCE,
    },
    "purify": {
        "error": "max_error= is judged by norm(X H - H X) over the gap",
        "most_iterations": "it takes as many as any gap needs",
    },
}

P = ParamSpec("P")
T = TypeVar("T")


def with_hints(function: Callable[P, T]) -> Callable[P, T]:
    """The function, which raises TypeError with a hint for an argument that left."""
    of = function.__qualname__.removesuffix(".__init__")
    hints = HINTS[of]

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        for name, hint in hints.items():
            if name in kwargs:
                raise TypeError(f"{of} takes no {name} any more: {hint}")
        return function(*args, **kwargs)

    return call


def hints_of(module: str) -> Callable[[str], NoReturn]:
    """The ``__getattr__`` of a module, which names the way in one line."""

    def missing(name: str) -> NoReturn:
        hint = HINTS[module].get(name)
        text = f"module {module!r} has no attribute {name!r}" + (f": {hint}" if hint else "")
        raise AttributeError(text, name=name, obj=sys.modules[module])

    return missing
