"""What to call in place of names that are tried first and are not there."""

import sys
from collections.abc import Callable
from typing import Any, NoReturn

_SPARSE = {
    "addmm": "spamm_torch.addmm takes block-sparse matrices",
    "dot": "spamm_torch.mm takes block-sparse matrices",
    "drop": "drop= of from_dense, add and spamm_torch.mm leaves out small blocks",
    "eye": "sparse.identity(size) is the identity",
    "from_coo": "sparse.from_sparse takes any sparse tensor of torch, from_scipy one of scipy",
    "from_csr": "sparse.from_sparse takes any sparse tensor of torch, from_scipy one of scipy",
    "from_torch": "sparse.from_sparse takes any sparse tensor of torch, from_dense a dense one",
    "matmul": "spamm_torch.mm takes block-sparse matrices",
    "mm": "spamm_torch.mm takes block-sparse matrices",
    "mul": "a * 2 is torch's own, sparse.inner(a, b) the sum of a[i, j] * b[i, j]",
    "nnz": "len(a.values()) is the number of stored blocks",
    "random": "sparse.from_scipy(scipy.sparse.random_array(shape)) makes one",
    "scale": "a * 0.5 is torch's own",
    "spy": "matplotlib's spy(sparse.to_scipy(a)) draws one",
    "sub": "sparse.add(a, b, beta=-1) is a - b",
}
_LINALG = {
    "density_matrix": "linalg.purify(hamiltonian, electrons, max_error=...) makes one",
    "eigh": "torch.linalg.eigh of the dense matrix",
    "expm": "torch.linalg.matrix_exp of the dense matrix",
    "inv": "with z of linalg.inverse_sqrt(s, max_error=...) it is spamm_torch.mm(z, z, ...)",
    "norm": "sparse.norm(a), or torch.linalg.norm of a dense matrix",
    "sp2": "linalg.purify(hamiltonian, electrons, max_error=...) is SP2",
    "sqrtm": "with z of linalg.inverse_sqrt(s, max_error=...) it is spamm_torch.mm(s, z, ...)",
}
_TOP = {
    "benchmark": "scripts/bench.py of the repository times the library",
    "compile": "spamm_torch.convert_(model), and torch.compile takes it from there",
    "convert": "spamm_torch.convert_(model) works in place",
    "matmul": "spamm_torch.mm of matrices, bmm of batches",
    "show_config": "spamm_torch.build_info() says how it was built",
}
_OF = {"spamm_torch": _TOP, "spamm_torch.sparse": _SPARSE, "spamm_torch.linalg": _LINALG}


def hints_of(module: str) -> Callable[[str], Any]:
    """The ``__getattr__`` of a module, which names the way in one line."""

    def missing(name: str) -> NoReturn:
        hint = _OF[module].get(name)
        text = f"module {module!r} has no attribute {name!r}" + (f": {hint}" if hint else "")
        raise AttributeError(text, name=name, obj=sys.modules[module])

    return missing
