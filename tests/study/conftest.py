"""What the tests of the benchmarks share."""

import json

import pytest


@pytest.fixture(scope="module")
def results(folder):
    """What a run wrote to ``folder``, which is the module's own fixture."""
    return json.loads((folder / "small.json").read_text())
