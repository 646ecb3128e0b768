"""docs/api.md is what the docstrings say, and the docstrings say all."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import spamm_torch

ROOT = Path(__file__).parents[2]

# Every function that takes the three knobs.
KNOBBED = [getattr(spamm_torch, name) for name in ("mm", "addmm", "bmm", "linear", "conv2d")]

FUNCTIONS = [
    thing
    for thing in (getattr(spamm_torch, name) for name in spamm_torch.__all__)
    if inspect.isfunction(thing) and thing.__module__ == "spamm_torch.functional"
]
FUNCTIONS += [spamm_torch.distributed.mm, spamm_torch.distributed.exchange_plan]


def name_of(function):
    return function.__name__


def test_the_page_is_up_to_date():
    script = ROOT / "scripts" / "make_api_page.py"
    run = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("function", FUNCTIONS, ids=name_of)
def test_each_parameter_is_described(function):
    doc = inspect.getdoc(function)
    _, args, after = doc.partition("Args:\n")
    assert args, "no Args"
    described = {
        name.strip()
        for line in after.splitlines()
        if line.startswith("    ") and not line.startswith("     ") and ":" in line
        for name in line.partition(":")[0].split(",")
    }
    assert described >= set(inspect.signature(function).parameters)
    assert "Raises:\n" in after
    assert "see the module's head" not in doc


@pytest.mark.parametrize("function", KNOBBED, ids=name_of)
@pytest.mark.parametrize("knob", ["tau", "valid_ratio", "max_error", "return_info"])
def test_a_knob_is_described_alike_everywhere(function, knob):
    def paragraph(doc):
        start = doc.index(f"\n    {knob}: ")
        lines = doc[start + 1 :].splitlines()
        more = [line for line in lines[1:] if not line.startswith("        ")]
        return "\n".join(lines[: lines.index(more[0], 1)])

    expected = paragraph(inspect.getdoc(spamm_torch.mm))
    found = paragraph(inspect.getdoc(function))
    if knob == "return_info":  # what is returned otherwise, and the cost, differ
        assert "return a pair" in found
        assert "SkipInfo" in found
    else:
        assert found == expected


@pytest.mark.parametrize("function", FUNCTIONS, ids=name_of)
def test_each_parameter_has_a_type(function):
    signature = inspect.signature(function)
    assert signature.return_annotation is not signature.empty
    assert all(p.annotation is not p.empty for p in signature.parameters.values())


def test_the_package_says_that_it_is_typed():
    assert (Path(spamm_torch.__file__).parent / "py.typed").exists()
