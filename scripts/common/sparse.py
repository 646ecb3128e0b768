"""torch's sparse matrices, without its warning that they are in beta."""

import contextlib
import warnings


@contextlib.contextmanager
def quiet_sparse():
    """Inside, making a compressed sparse matrix warns of nothing."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse .* tensor support is in beta state")
        yield
