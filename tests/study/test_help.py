"""--help of every script: a word and a default for each option, without CUDA and from anywhere."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import sanitize
from bench import CASES
from cases.conv import NAMES
from common.console import exit_code

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = {script.stem: script for script in (ROOT / "scripts").glob("*.py")}
SCRIPTS["examples.scattered_digits.demo"] = ROOT / "examples/scattered_digits/demo.py"
SCRIPTS["density_matrix"] = ROOT / "examples/density_matrix.py"
# Where a default would say nothing.
NO_DEFAULT = ("-h, --help", "--fresh", "--cold")


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


@pytest.mark.parametrize("name", [*sorted(SCRIPTS), *(f"bench {case}" for case in CASES)])
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so_in_one_line(capfd):
    assert exit_code(lambda: sanitize.main([])) == 1
    assert capfd.readouterr().err == "error: expected a CUDA device; torch finds none\n"


def test_help_from_another_folder_without_cuda():
    """A process of its own, where nothing is imported by chance."""
    run = subprocess.run(
        [sys.executable, SCRIPTS["bench"], "networks", "--help"],
        cwd="/",
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.startswith("usage: bench.py networks")
