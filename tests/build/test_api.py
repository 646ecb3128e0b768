"""docs/api.md names everything that is exported, and the docstrings say all."""

import inspect
import re
from pathlib import Path

import pytest

import spamm_torch

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text()

FUNCTIONS = [
    thing
    for thing in (getattr(spamm_torch, name) for name in spamm_torch.__all__)
    if inspect.isfunction(thing) and thing.__module__ == "spamm_torch.functional"
]
FUNCTIONS += [spamm_torch.distributed.mm, spamm_torch.distributed.exchange_plan]


def name_of(function):
    return function.__name__


def test_the_page_has_every_name():
    names = re.findall(r"^\| (`[^|]+`) \|", PAGE.partition("## All names")[2], re.MULTILINE)
    assert {name.strip("`") for row in names for name in row.split(", ")} == {*spamm_torch.__all__}


def test_the_page_has_the_signatures():
    """Each call in a ```text block has the function's parameters, in order, with their defaults."""
    blocks = "".join(re.findall(r"^```text\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE))
    calls = re.findall(r"^(\w+)\((.*?)\)$", blocks, re.DOTALL | re.MULTILINE)
    assert len(calls) >= 12
    for name, arguments in calls:
        found = inspect.signature(getattr(spamm_torch, name)).parameters.values()
        written = [argument.strip() for argument in arguments.split(",")]
        expected = [
            p.name if p.default in (p.empty, None) else f"{p.name}={p.default!r}" for p in found
        ]
        assert [argument for argument in written if argument != "*"] == expected, name


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


@pytest.mark.parametrize("function", FUNCTIONS, ids=name_of)
def test_each_parameter_has_a_type(function):
    signature = inspect.signature(function)
    assert signature.return_annotation is not signature.empty
    assert all(p.annotation is not p.empty for p in signature.parameters.values())


def test_the_package_says_that_it_is_typed():
    assert (Path(spamm_torch.__file__).parent / "py.typed").exists()
