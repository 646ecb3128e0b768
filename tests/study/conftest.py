"""What the tests of the benchmarks share."""

import pytest
from bench_checks import tables_of


@pytest.fixture(scope="module")
def tables(folder):
    """What a run wrote to ``folder``, which is the module's own fixture."""
    return tables_of(folder / "small.json")
