"""Functions of matrices by products that skip: purification, inverse root, sign and powers.

Matrices are dense, or block-sparse (``torch.sparse_bsr``, see :mod:`spamm_torch.sparse`), float32
or float64, on any device that multiplies them; without gradients. Common arguments:

* ``max_error``: what each product may lose, as of :func:`spamm_torch.mm`. A tenth of that is
  for dropping blocks where matrices are block-sparse.
* ``block``: edge of the blocks of a dense matrix, 32, 64 or 128; of others it is their own.
* ``size``: the true number of rows of a block-sparse matrix whose last rows are padding, which
  stays zero. None: all.
* ``group``: ranks of ``torch.distributed``, each with some block rows of a block-sparse matrix on a
  device that their backends serve; all call it alike. ``size`` is that of the whole. The result has
  the bits of one process, and each rank gets its block rows of it. None: one process.
* ``callback``: called with the number of each product, from 0, and the residual before it.

In examples, ``fock`` and ``overlap`` are float64, of a chain of 256 sites.

Errors: TypeError for other layouts and dtypes, ValueError for numbers out of range, RuntimeError
for other shapes, and :class:`NotConverged`, a RuntimeError, of iterations without an end.
"""

from typing import TYPE_CHECKING

from .._hints import hints_of
from .density import Density, DensitySolver
from .functions import in_basis, matrix_power, sign
from .inverses import inverse_factor, inverse_sqrt
from .matrices import Iteration, NotConverged, Result, gershgorin
from .purification import purify

__all__ = [
    "Density",
    "DensitySolver",
    "Iteration",
    "NotConverged",
    "Result",
    "gershgorin",
    "in_basis",
    "inverse_factor",
    "inverse_sqrt",
    "matrix_power",
    "purify",
    "sign",
]

if not TYPE_CHECKING:  # else any name would pass
    __getattr__ = hints_of(__name__)
