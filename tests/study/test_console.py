"""Words of the scripts: their help, their output where it goes nowhere, and what is counted."""

import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from golden import assert_kept, kept

import check_budget
import mutate
from bench import CASES
from cases.conv import NAMES
from common.measuring import TOLERANCE
from common.options import exit_code
from models.files import UserError, first_line

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"

PRINTS, FLUSHES = "print('a line')", "print('a line', flush=True)"
HELP = "argparse.ArgumentParser().parse_args(['--help'])"
RUN = """
import argparse, sys
from common.options import exit_code
sys.exit(exit_code(lambda: {}))
"""
FULL, UNREAD = "standard output: No space left on device", "standard output: Broken pipe"
INTERRUPTED = "(_ for _ in ()).throw(KeyboardInterrupt)"


@pytest.mark.parametrize(
    ("code", "where", "returned", "line"),
    [
        *((code, "/dev/full", 1, f"error: {FULL}") for code in (FLUSHES, PRINTS, HELP)),
        *((code, None, 1, f"error: {UNREAD}") for code in (PRINTS, HELP)),
        ("open('/none/such')", "/dev/null", 1, "error: /none/such: No such file or directory"),
        (INTERRUPTED, "/dev/null", 130, "interrupted: files that are written are whole"),
    ],
)
def test_ends(code, where, returned, line):
    """The exit code and the one line of a script whose main is an expression; None: nobody reads
    what it prints.
    """
    if where is None:
        reader, writer = os.pipe()
        os.close(reader)
    else:
        writer = os.open(where, os.O_WRONLY)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    command, given = [sys.executable, "-c", RUN.format(code)], {"cwd": SCRIPTS, "text": True}
    found = subprocess.run(command, env=environment, stdout=writer, stderr=subprocess.PIPE, **given)
    os.close(writer)
    assert (found.returncode, found.stderr.splitlines()) == (returned, [line])


def test_an_exception_is_said_in_a_line():
    for message, said in (
        ("\n  one  \n", "one"),
        ("it raised:\n\nCompileError: no header\nmore", "it raised: CompileError: no header"),
        ("it failed:", "it failed:"),
        ("", "ValueError"),
    ):
        assert first_line(ValueError(message)) == said


MAINS = [*(script.stem for script in SCRIPTS.glob("*.py")), "density_matrix"]
MAINS += [f"bench {case}" for case in CASES]


@pytest.mark.parametrize("name", sorted(MAINS))
def test_help(name, monkeypatch, capsys):
    """Each option has a text, which names its default."""
    monkeypatch.setenv("COLUMNS", "200")
    script, *case = name.split()
    with pytest.raises(SystemExit) as end:
        importlib.import_module(script).main([*case, "--help"])
    text, errors = capsys.readouterr()
    assert (end.value.code, errors) == (0, "")
    options = re.split(r"\n  (?=-)", text[text.index("\noptions:") :])[1:]
    assert any(option.startswith("-h, --help") for option in options)
    for option in options:
        _, _, words = re.sub(r"\n\n.*", "", option, flags=re.DOTALL).partition("  ")
        assert words.strip() or "\n" in option, f"{option} has no help"
        if not option.startswith("-h"):
            assert "default" in option, f"{option} names no default"
    if name == "bench conv":
        for layer in NAMES:
            assert len(re.findall(rf"(?<![\w-]){layer}(?![\w-])", text)) == 1


def test_what_is_refused(tmp_path, monkeypatch, capsys):
    """Each command that the golden file has says one line and writes no file. Its exit status is 2
    where an option by itself is wrong, else 1. Here is no GPU, and no result is right.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for precision in TOLERANCE:
        monkeypatch.setitem(TOLERANCE, precision, -1.0)
    lines = dict.fromkeys(kept("refused"))
    for command in lines:
        script, *given = shlex.split(command)
        main = importlib.import_module(script).main
        try:
            code = exit_code(lambda main=main, given=given: main(given))
        except SystemExit as end:
            code = end.code
        *usage, line = capsys.readouterr().err.splitlines()
        assert code == (2 if usage else 1), command
        line = line.partition("error: ")[2]
        # Python's versions say choices apart, and machines errors.
        lines[command] = re.split(r" \(choose|, tau |: expected an error", line)[0]
    assert_kept("refused", lines)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_rooms_and_their_budget():
    """More than a room may have is refused; scripts and files are counted by the way."""
    budget = {"csrc": {"most": 10, "goal": 5}}
    assert check_budget.check({"csrc": 10}, budget) == ["csrc             10 of     10, goal 5"]
    with pytest.raises(UserError, match="csrc has 11, at most 10"):
        check_budget.check({"csrc": 11}, budget)
    assert 1000 < check_budget.lines("scripts") < 10_000
    assert 100 < len(check_budget.files()) < 1000


@pytest.mark.parametrize("line", ['"' * 3 + "What is left.", "# Of each", "    // Whether it is"])
def test_docstrings_and_comments_begin_with_a_verb_or_a_noun(tmp_path, monkeypatch, line):
    path = tmp_path / "a.py"
    path.write_text(f"# Tells whether\n# What is left goes on here.\n\n{line}\n")
    monkeypatch.setattr(check_budget, "REPOSITORY", tmp_path)
    with pytest.raises(UserError, match=r"got a\.py:4: \w*$"):
        check_budget.check_words([path])
    path.write_text("# Tells whether\n# What is left goes on here.\n")
    check_budget.check_words([path])


def test_every_text_that_is_broken_stands_once_in_its_file():
    assert len(mutate.TABLE) > 100
    for of in mutate.TABLE:  # a folder stands for a file where none inside has the text
        path = mutate.ROOT / of.file
        assert path.is_file(), of
        assert path.read_text().count(of.old) == 1, of
        if mutate.is_of_library(of):  # both are expressions
            assert all(text.count("(") == text.count(")") for text in (of.old, of.new)), of
