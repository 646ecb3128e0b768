"""--help of every script: without CUDA, and with a word and a default for each option."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench.conv_layers import NAMES

SCRIPTS = sorted((Path(__file__).resolve().parents[2] / "scripts").glob("*.py"))
# Where a default would say nothing.
NO_DEFAULT = ("-h, --help", "--fresh", "--cold")


def help_of(script):
    """What it prints, from a folder of its own, where nothing is imported by chance."""
    run = subprocess.run(
        [sys.executable, str(script), "--help"],
        cwd="/",
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    return run.stdout


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


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_help(script):
    text = help_of(script)
    options = options_in(text)
    assert "-h, --help" in options
    for name, words in options.items():
        assert words, f"{name} has no help"
        if not name.startswith(NO_DEFAULT):
            assert "default" in words, f"{name} names no default: {words}"
    if script.stem == "bench_conv":
        for layer in NAMES:
            assert len(re.findall(rf"(?<![\w-]){layer}(?![\w-])", text)) == 1
