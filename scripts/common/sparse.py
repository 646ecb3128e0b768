"""torch's sparse matrices, without its warnings that they are in beta and not checked."""

import contextlib
import warnings


@contextlib.contextmanager
def quiet_sparse():
    """Inside, making a compressed sparse matrix warns of nothing."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse .* tensor support is in beta state")
        warnings.filterwarnings("ignore", "Sparse invariant checks are implicitly disabled")
        yield
