"""What scripts say of an exception."""

import pytest

from models.errors import first_line


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("one\ntwo", "one"),
        ("\n  one  \n", "one"),
        (
            "backend='inductor' raised:\n\nCppCompileError: no header\nmore",
            "backend='inductor' raised: CppCompileError: no header",
        ),
        ("it failed:", "it failed:"),
        ("", "ValueError"),
    ],
)
def test_an_exception_is_said_in_a_line(message, said):
    assert first_line(ValueError(message)) == said
