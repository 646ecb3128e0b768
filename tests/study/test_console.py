"""What the scripts do when their output goes nowhere."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

# Through rich, which flushes each line, and through a buffer that is written at the end only.
PRINTS = {
    "rich": "make_console().print('a line')",
    "buffered": "print('a line')",
    "help": "argparse.ArgumentParser().parse_args(['--help'])",
}
RUN = """
import argparse, sys
from common.console import exit_code, make_console
sys.exit(exit_code(lambda: {}))
"""


def run(code, stdout):
    """Exit code and error lines of a script whose main is an expression."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    result = subprocess.run(
        [sys.executable, "-c", RUN.format(code)],
        cwd=REPOSITORY,
        env=environment,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
    )
    return result.returncode, result.stderr.splitlines()


@pytest.mark.parametrize("code", PRINTS.values(), ids=PRINTS)
def test_output_to_a_full_disk(code):
    with open("/dev/full", "w") as full:
        returned, lines = run(code, full)
    assert returned == 1
    assert lines == ["error: standard output: No space left on device"]


@pytest.mark.parametrize("code", [PRINTS["buffered"], PRINTS["help"]], ids=["buffered", "help"])
def test_output_that_nobody_reads(code):
    reader, writer = os.pipe()
    os.close(reader)
    returned, lines = run(code, writer)
    os.close(writer)
    assert returned == 1
    assert lines == ["error: standard output: Broken pipe"]


def test_rich_output_that_nobody_reads():
    """rich ends the program by itself, without a word."""
    reader, writer = os.pipe()
    os.close(reader)
    returned, lines = run(PRINTS["rich"], writer)
    os.close(writer)
    assert returned == 1
    assert len(lines) <= 1


@pytest.mark.parametrize(
    ("code", "returned", "line"),
    [
        ("open('/none/such')", 1, "error: /none/such: No such file or directory"),
        ("(_ for _ in ()).throw(KeyboardInterrupt)", 130, "interrupted"),
    ],
)
def test_other_ends(code, returned, line):
    assert run(code, subprocess.DEVNULL) == (returned, [line])
