"""Block-sparse matrices: ``torch.sparse_bsr`` with one square block of 32, 64 or 128.

:func:`spamm_torch.mm` and :func:`spamm_torch.addmm` multiply them; here is the rest that purifying
a density matrix and its like need. Matrices are float16, bfloat16, float32 or float64, on a CPU or
CUDA, without gradients. Sizes are multiples of the block: what is smaller is padded with zeros.

    import spamm_torch
    from spamm_torch import sparse

    a = sparse.from_dense(matrix, 64, drop=1e-9)
    c = spamm_torch.mm(a, a, max_error=1e-6)
    x = sparse.add(c, a, alpha=-1, beta=2)

In examples, ``a`` is (512, 512), and decays away from its diagonal.

All functions return new matrices, and work in proportion to the stored blocks. Errors are one line:
TypeError for another layout or dtype, ValueError for blocks, RuntimeError for shapes, devices and
columns that do not ascend in each row, each once. :func:`from_sparse` sorts them.
docs/block_sparse.md has the meaning of products.
"""

from typing import TYPE_CHECKING

from .._hints import hints_of
from ..spatial import spatial_order
from .maps import Plan, plan
from .matrices import (
    add,
    diagonal,
    from_dense,
    from_scipy,
    from_sparse,
    identity,
    inner,
    norm,
    permute,
    submatrix,
    to_dense,
    to_scipy,
    trace,
    transpose,
)
from .products import SparseInfo

__all__ = [
    "Plan",
    "SparseInfo",
    "add",
    "diagonal",
    "from_dense",
    "from_scipy",
    "from_sparse",
    "identity",
    "inner",
    "norm",
    "permute",
    "plan",
    "spatial_order",
    "submatrix",
    "to_dense",
    "to_scipy",
    "trace",
    "transpose",
]

if not TYPE_CHECKING:  # else any name would pass
    __getattr__ = hints_of(__name__)
