"""What the scripts do when their output goes nowhere."""

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from common import console
from common.console import Steps, make_console
from models.errors import first_line

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"

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
        cwd=SCRIPTS,
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


@pytest.mark.parametrize(
    ("code", "returned", "line"),
    [
        ("open('/none/such')", 1, "error: /none/such: No such file or directory"),
        (
            "(_ for _ in ()).throw(KeyboardInterrupt)",
            130,
            "interrupted: files that are written are whole; the same command makes the others",
        ),
        ("(_ for _ in ()).throw(KeyboardInterrupt('go on so'))", 130, "interrupted: go on so"),
    ],
)
def test_other_ends(code, returned, line):
    assert run(code, subprocess.DEVNULL) == (returned, [line])


# ---- Progress where there is no terminal --------------------------------------------------------


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until it is set: [seconds]."""
    now = [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    return now


def test_messages_are_lines(capsys, clock):
    with Steps(make_console(), "work") as steps:
        steps.at(0, 2)
        clock[0] = 10
        steps.at(1, 2)
        steps.at(2, 2, "done")
    assert capsys.readouterr().out == "work: done\n"


def test_steps_are_told_now_and_then(capsys, clock):
    with Steps(make_console(), "work") as steps:
        steps.at(0, 10)
        for step in range(1, 5):
            clock[0] = 10.0 * step
            steps.at(step, 10, what=f"step {step}")
    assert capsys.readouterr().out.splitlines() == [
        "work: 2 of 10 (step 2)",
        "work: 4 of 10 (step 4)",
    ]


def test_a_bar_on_a_terminal_only_where_something_is_left_to_do():
    from rich.console import Console

    for first, drawn in ((0, True), (125, False)):
        terminal = Console(file=io.StringIO(), force_terminal=True, width=80)
        with Steps(terminal, "training") as steps:
            steps.at(first, 125, "a message")
        shown = terminal.file.getvalue()
        assert ("/125" in shown) == drawn
        assert "training: a message" in shown


@pytest.mark.parametrize(
    ("module", "ends", "line"),
    [
        ("raise KeyboardInterrupt", -signal.SIGINT, "interrupted: nothing was begun"),
        ("raise ImportError('spamm_torch: x')", 1, "error: spamm_torch: x"),
    ],
)
def test_imports_that_end_early_say_one_line(module, ends, line, tmp_path):
    """Ctrl-C while torch is loaded, and a library that is not built."""
    (tmp_path / "torch.py").write_text(module)
    run = subprocess.run(
        [sys.executable, SCRIPTS / "bench.py", "--help"],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert (run.returncode, run.stderr.splitlines()) == (ends, [line])
    assert run.stdout.startswith("Benchmarks: " if ends == 1 else "")


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
