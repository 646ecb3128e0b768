"""Lines that name the way for names that are tried first in vain."""

import sys
from collections.abc import Callable
from typing import NoReturn

BACKEND = 'torch.compile(model, backend="spamm_torch") fuses a network'

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
    "inv": "with z of linalg.inverse_sqrt(s, max_error=...) it is spamm_torch.mm(z, z, ...)",
    "norm": "sparse.norm(a), or torch.linalg.norm of a dense matrix",
    "sp2": "linalg.purify(hamiltonian, electrons, max_error=...) is SP2",
    "sqrtm": "with z of linalg.inverse_sqrt(s, max_error=...) it is spamm_torch.mm(s, z, ...)",
}
_TOP = {
    **dict.fromkeys(("show", "show_config"), "spamm_torch.build_info() says how it was built"),
    "Conv2d": "spamm_torch.SpAMMConv2d is torch's with a knob",
    "Linear": "spamm_torch.SpAMMLinear is torch's with a knob",
    "benchmark": "scripts/bench.py of the repository times the library",
    "compile": BACKEND,
    "convert": "spamm_torch.convert_(model) works in place",
    "matmul": "spamm_torch.mm of matrices, bmm of batches",
}
_HINTS = {"spamm_torch": _TOP, "spamm_torch.sparse": _SPARSE, "spamm_torch.linalg": _LINALG}


def hints_of(module: str) -> Callable[[str], NoReturn]:
    """The ``__getattr__`` of a module, which names the way in one line."""

    def missing(name: str) -> NoReturn:
        hint = _HINTS[module].get(name)
        text = f"module {module!r} has no attribute {name!r}" + (f": {hint}" if hint else "")
        raise AttributeError(text, name=name, obj=sys.modules[module])

    return missing
