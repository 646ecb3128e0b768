"""Parts that the tests of the benchmarks share."""

import pytest
from study_tools import tables_of
from support import one_thread  # noqa: F401  the fixture is automatic


@pytest.fixture(scope="module")
def tables(folder):
    """The tables that a run wrote to ``folder``, which is the module's own fixture."""
    return tables_of(folder / "small.json")
