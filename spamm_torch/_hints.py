"""Lines that name the way for names that are tried first in vain."""

import sys
from collections.abc import Callable
from typing import NoReturn

BACKEND = 'torch.compile(model, backend="spamm_torch") fuses a network'

_FROM = "sparse.from_sparse takes any sparse tensor of torch, from_scipy one of scipy"
_MM = "spamm_torch.mm takes block-sparse matrices"
_SPARSE = {
    "eye": "sparse.identity(size) is the identity",
    "from_coo": _FROM,
    "from_csr": _FROM,
    "matmul": _MM,
    "mm": _MM,
    "nnz": "len(a.values()) is the number of stored blocks",
    "random": "sparse.from_scipy(scipy.sparse.random_array(shape)) makes one",
    "scale": "a * 0.5 is torch's own",
    "spy": "matplotlib's spy(sparse.to_scipy(a)) draws one",
}
_LINALG = {
    "density_matrix": "linalg.DensitySolver(overlap) makes them",
    "expm": "torch.linalg.matrix_exp of the dense matrix",
    "inv": "with z of linalg.inverse_sqrt(s, max_error=...) it is spamm_torch.mm(z, z, ...)",
    "sp2": "linalg.purify(hamiltonian, electrons, max_error=...) is SP2",
    "sqrtm": "with z of linalg.inverse_sqrt(s, max_error=...) it is spamm_torch.mm(s, z, ...)",
}
_TOP = {
    "benchmark": "scripts/bench.py of the repository times the library",
    "compile": BACKEND,
    "convert": "spamm_torch.convert_(model) works in place",
    "matmul": "spamm_torch.mm of matrices, bmm of batches",
    "show_config": "spamm_torch.build_info() says how it was built",
}
_HINTS = {"spamm_torch": _TOP, "spamm_torch.sparse": _SPARSE, "spamm_torch.linalg": _LINALG}


def hints_of(module: str) -> Callable[[str], NoReturn]:
    """The ``__getattr__`` of a module, which names the way in one line."""

    def missing(name: str) -> NoReturn:
        hint = _HINTS[module].get(name)
        text = f"module {module!r} has no attribute {name!r}" + (f": {hint}" if hint else "")
        raise AttributeError(text, name=name, obj=sys.modules[module])

    return missing
