"""Words of the scripts: their help, their output where it goes nowhere, and what is counted."""

import importlib
import io
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from processes import forked, python

import check_budget
import mutate
import sanitize
from bench import CASES
from cases.conv import NAMES
from common import console
from common.console import Steps, exit_code, make_console
from models.files import UserError, first_line

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"

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
    command, options = [sys.executable, "-c", RUN.format(code)], {"cwd": SCRIPTS, "text": True}
    result = subprocess.run(
        command, env=environment, stdout=stdout, stderr=subprocess.PIPE, **options
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


def test_steps_are_told_now_and_then_and_messages_are_lines(capsys, clock):
    with Steps(make_console(), "work") as steps:
        steps.at(0, 10)
        for step in range(1, 5):
            clock[0] = 10.0 * step
            steps.at(step, 10, what=f"step {step}")
        steps.at(10, 10, "done")
    assert capsys.readouterr().out.splitlines() == [
        "work: 2 of 10 (step 2)",
        "work: 4 of 10 (step 4)",
        "work: done",
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
    run = python(SCRIPTS / "bench.py", "--help", PYTHONPATH=str(tmp_path))
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


# ---- Help ---------------------------------------------------------------------------------------


MAINS = [*(script.stem for script in SCRIPTS.glob("*.py")), "density_matrix"]
MAINS += [f"bench {case}" for case in CASES]
# Options whose default would say nothing.
NO_DEFAULT = ("-h, --help", "--fresh", "--cold", "--soak")


def options_in(text):
    """{option as it is shown: its help} of a help page of lines long enough for both."""
    shown = text[text.index("\noptions:") :]
    entries = re.split(r"\n  (?=-)", shown)[1:]
    found = {}
    for entry in entries:
        name, _, words = re.sub(r"\n\n.*", "", entry, flags=re.DOTALL).partition("  ")
        name, line, more = name.partition("\n")
        found[name.strip()] = " ".join(f"{line} {more} {words}".split())
    return found


@pytest.mark.parametrize("name", sorted(MAINS))
def test_help(name, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    script, *case = name.split()
    with pytest.raises(SystemExit) as end:
        importlib.import_module(script).main([*case, "--help"])
    assert end.value.code == 0
    text, errors = capsys.readouterr()
    assert errors == ""
    options = options_in(text)
    assert "-h, --help" in options
    for option, words in options.items():
        assert words, f"{option} has no help"
        if not option.startswith(NO_DEFAULT):
            assert "default" in words, f"{option} names no default: {words}"
    if name == "bench conv":
        for layer in NAMES:
            assert len(re.findall(rf"(?<![\w-]){layer}(?![\w-])", text)) == 1


BAD = {
    "bench mm": [
        (("--device", "foo"), "'foo' (choose from"),
        (("--sizes", "0"), "an integer of 1 or more; got 0"),
        (("--sizes", "64", "x"), "an integer of 1 or more; got x"),
        (("--repeats", "-3"), "an integer of 1 or more; got -3"),
        (("--ratios", "1.5"), "a valid ratio in (0, 1]; got 1.5"),
        (("--ratios", "0.5", "0"), "a valid ratio in (0, 1]; got 0"),
        (("--ratios", "nan"), "a valid ratio in (0, 1]; got nan"),
        (("--ratios", "half"), "a valid ratio in (0, 1]; got half"),
        (("--blocks", "48"), "three of these as in 128x64x128; got '48'"),
        (("--blocks", "128x64"), "got '128x64'"),
        (("--precisions", "int8"), "'int8' (choose from"),
    ],
    "bench block_sparse": [
        (("--waters", "-1"), "an integer of 0 or more; got -1"),
        (("--max-error", "0"), "a number above 0 and below 1; got 0"),
    ],
    "bench conv": [
        (("--block", "64", "48", "64"), "48 (choose from"),
        (("--layers", "conv99"), "'conv99' (choose from"),
    ],
    "bench networks": [
        (("--networks", "vgg99"), "'vgg99' (choose from"),
        (("--candidates", "fast"), "'fast' (choose from"),
        (("--modes", "graph"), "'graph' (choose from"),
    ],
    "bench layers": [(("--layers", "conv99"), "'conv99' (choose from")],
    "bench multi_gpu": [
        (("--parts", "1"), "an integer of 2 or more; got 1"),
        (("--sweep", "x"), "an integer of 1 or more; got x"),
        (("--data", "noise"), "'noise' (choose from"),
        (("--layouts", "Q"), "'Q' (choose from"),
    ],
    "bench vgg13": [
        (("--max-drop", "-1"), "points from 0 to below 100; got -1"),
        (("--evaluations", "5"), "an integer of 6 or more; got 5"),
    ],
    "density_matrix": [
        (("--chain", "5"), "an even integer of 4 or more; got 5"),
        (("--chain", "2"), "an even integer of 4 or more; got 2"),
        (("--gap", "0"), "a number above 0; got 0"),
        (("--gap", "inf"), "a number above 0; got inf"),
        (("--waters", "0"), "an integer of 1 or more; got 0"),
        (("--basis", "sto"), "'sto' (choose from"),
        (("--max-errors", "1e-8", "0"), "a number above 0 and below 1; got 0"),
        (("--max-errors", "nan"), "a number above 0 and below 1; got nan"),
        (("--loose", "1"), "a number above 1; got 1"),
        (("--last", "0"), "an integer from 1 to 12; got 0"),
        (("--last", "13"), "an integer from 1 to 12; got 13"),
        (("--block", "48"), "48 (choose from"),
        (("--device", "tpu"), "'tpu' (choose from"),
        (("--without", "eigh", "torch.mm"), "one of eigh and torch.mm to stay"),
        (("--waters", "2", "--ergo"), "not allowed with argument --waters"),
    ],
    "train_vgg13": [
        (("--epochs", "0"), "an integer of 1 or more; got 0"),
        (("--epochs", "x"), "an integer of 1 or more; got x"),
        (("--batch", "-1"), "an integer of 1 or more; got -1"),
        (("--width", "1000000000"), "an integer from 1 to 1024; got 1000000000"),
        (("--seed", "-1"), "an integer from 0"),
        (("--seed", "99999999999999999999999"), "an integer from 0"),
        (("--model", "vgg16"), "'vgg16' (choose from"),
        *(
            (("--spamm", text), f"got {text}")
            for text in ("0", "1.5", "tau", "tau=-1", "tau=nan", "x=1", "=1", "half")
        ),
    ],
}


@pytest.mark.parametrize(
    ("name", "arguments", "words"), [(name, *bad) for name, of in BAD.items() for bad in of]
)
def test_options_out_of_range(name, arguments, words, tmp_path, monkeypatch, capsys):
    """One line that names the option and says ``words``, exit status 2, and no file."""
    monkeypatch.chdir(tmp_path)
    script, *case = name.split()
    with pytest.raises(SystemExit) as caught:
        importlib.import_module(script).main([*case, *arguments])
    assert caught.value.code == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert arguments[0] in line
    assert words in line
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so_in_one_line(capfd):
    assert exit_code(lambda: sanitize.main([])) == 1
    assert capfd.readouterr().err == "error: expected a CUDA device; torch finds none\n"


def test_help_from_another_folder_without_cuda():
    """A process of its own, where nothing but torch is imported by chance."""
    run = forked(SCRIPTS / "bench.py", "networks", "--help", cwd="/", CUDA_VISIBLE_DEVICES="")
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.startswith("usage: bench.py networks")


# ---- The budget and the mutations ---------------------------------------------------------------


BUDGET = {"lines": {"csrc": {"most": 10, "goal": 5}}, "files": {"all": {"most": 3, "goal": 2}}}


def test_rooms_and_their_budget(tmp_path, monkeypatch):
    """Text is counted, and nothing else; more than a room may have is refused."""
    found = check_budget.check(BUDGET, lambda room: 10, lambda: 3)
    assert found == [
        "csrc             10 of     10, goal 5",
        "files             3 of      3, goal 2",
    ]
    for lines, files, words in ((11, 3, "csrc has 11, at most 10"), (10, 4, "files has 4, at mos")):
        with pytest.raises(UserError, match=words):
            check_budget.check(BUDGET, lambda room, n=lines: n, lambda n=files: n)
    (tmp_path / "a.py").write_text("1\n2\n")
    (tmp_path / "b.json").write_text("1\n")
    monkeypatch.setattr(check_budget, "files", lambda room: sorted(tmp_path.iterdir()))
    assert check_budget.lines("room") == 2


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
    counts = {
        (of.file, of.old): (mutate.ROOT / of.file).read_text().count(of.old) for of in mutate.TABLE
    }
    assert len(mutate.TABLE) > 100
    assert {key: count for key, count in counts.items() if count != 1} == {}
    texts = [text for of in mutate.TABLE if mutate.is_of_library(of) for text in (of.old, of.new)]
    assert [text for text in texts if text.count("(") != text.count(")")] == []  # expressions
