#!/usr/bin/env python
"""Writes docs/api.md from the docstrings of everything that spamm_torch exports.

    python scripts/make_api_page.py          writes the page
    python scripts/make_api_page.py --check  fails where the page is not what would be written

A chapter a module, public ones with their own docstring as introduction; within it the order of the
source. Docstrings are in Google's style.
"""

import argparse
import inspect
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "api.md"
SECTIONS = ("Args", "Returns", "Raises", "Attributes")
CHAPTERS = {  # in the page's order; other modules follow
    "functional": "Functions",
    "_plan": "Several devices",
    "distributed": "Several processes",
    "_info": "What a call skipped",
    "spatial": "Orders",
    "nn": "Modules",
    "likeness": "Batches in order of likeness",
    "ordered_batch": "Models that order their batches",
    "batch_sampler": "Batches of a data set",
    "chain": "Chains",
    "fuse": "Serving",
    "convert": "Whole networks",
    "config": "Settings of whole networks",
    "report": "Reports of conversions",
    "calibrate": "Calibration",
    "outcome": "Reports of calibrations",
    "stats": "Statistics of layers",
    "_library": "The library",
}
WIDTH = 88  # of a signature on one line

sys.path.insert(0, str(ROOT))

import spamm_torch  # noqa: E402


def page() -> str:
    exported = [
        getattr(module, name)
        for module in (spamm_torch, spamm_torch.distributed)
        for name in module.__all__
        if not inspect.ismodule(getattr(module, name))
    ]
    modules = {inspect.getmodule(thing): [] for thing in exported}
    for thing in exported:
        modules[inspect.getmodule(thing)].append(thing)
    parts = [
        "# API of spamm_torch",
        "<!-- Written by scripts/make_api_page.py from the docstrings; do not edit. -->",
        markdown(inspect.getdoc(spamm_torch)),
    ]
    for module, things in sorted(modules.items(), key=lambda item: place(item[0])):
        name = module.__name__.rpartition(".")[2]
        parts.append(f"## {CHAPTERS.get(name, name)}")
        parts.append("" if name.startswith("_") else markdown(inspect.getdoc(module)))
        for thing in sorted(things, key=line_of):
            parts += description(thing)
    return "\n\n".join(filter(None, parts)) + "\n"


def place(module) -> tuple[int, str]:
    name = module.__name__.rpartition(".")[2]
    chapters = list(CHAPTERS)
    return chapters.index(name) if name in chapters else len(chapters), name


def line_of(thing) -> int:
    return inspect.getsourcelines(thing)[1]


def public_name(thing) -> str:
    """The name in the package, which a submodule's name may precede."""
    name = thing.__name__
    return name if getattr(spamm_torch, name, None) is thing else f"distributed.{name}"


def description(thing) -> list[str]:
    """The heading, signature and docstring of a function, or of a class and its methods."""
    name = public_name(thing)
    parts = [f"### {name}", signature(name, thing), markdown(inspect.getdoc(thing))]
    if inspect.isclass(thing):
        methods = {}
        for base in reversed(thing.__mro__):
            if base.__module__.startswith("spamm_torch"):
                methods.update(vars(base))
        for method_name, method in methods.items():
            function = getattr(method, "__func__", method)
            if method_name[0] != "_" and inspect.isfunction(function) and function.__doc__:
                parts += [
                    f"#### {name}.{method_name}",
                    signature(f"{name}.{method_name}", getattr(thing, method_name)),
                    markdown(inspect.getdoc(function)),
                ]
    return parts


def signature(name: str, thing) -> str:
    """A call as Python code, one parameter a line where it does not fit one."""
    found = inspect.signature(thing)
    parameters, bare_star = [], False
    for parameter in found.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not bare_star:
            parameters.append("*")
            bare_star = True
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}
        bare_star |= parameter.kind is parameter.VAR_POSITIONAL
        text = stars.get(parameter.kind, "") + parameter.name
        typed = parameter.annotation is not parameter.empty
        if typed:
            text += f": {annotation(parameter.annotation)}"
        if parameter.default is not parameter.empty:
            text += f" = {parameter.default!r}" if typed else f"={parameter.default!r}"
        parameters.append(text)
    result = ""
    if found.return_annotation is not found.empty and not inspect.isclass(thing):
        result = f" -> {annotation(found.return_annotation)}"
    line = f"{name}({', '.join(parameters)}){result}"
    if len(line) > WIDTH:
        line = "\n".join([f"{name}(", *(f"    {text}," for text in parameters), f"){result}"])
    return f"```python\n{line}\n```"


def annotation(value) -> str:
    value = getattr(value, "__forward_arg__", value)
    return value if isinstance(value, str) else inspect.formatannotation(value)


def markdown(doc: str | None) -> str:
    """A docstring as Markdown: sections become lists, roles and double backticks become code."""
    if not doc:
        return ""
    lines, section = [], None
    for line in doc.splitlines():
        heading = re.fullmatch(r"(\w+):", line)
        if heading and heading[1] in SECTIONS:
            section = heading[1]
            lines += [f"**{section}**", ""]
        elif section and line.startswith("    "):
            lines.append(section_line(section, line[4:]))
        else:
            section = section if not line else None
            lines.append(line)
    text = "\n".join(lines)
    text = re.sub(r":(?:func|class|meth|mod):`~?(?:spamm_torch\.)?([^`]+)`", r"`\1`", text)
    return text.replace("``", "`").strip()


def section_line(section: str, line: str) -> str:
    item = re.match(r"([\w., *]+): ", line)
    if section == "Returns" or not item or line.startswith(" "):
        return line if section == "Returns" else f"  {line.strip()}"
    names = ", ".join(f"`{name}`" for name in item[1].split(", "))
    return f"- {names}: {line[item.end() :]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing; fail if out of date (default: write the page)",
    )
    check = parser.parse_args().check
    if not check:
        PAGE.write_text(page())
    elif not PAGE.exists() or PAGE.read_text() != page():
        print(f"{PAGE.relative_to(ROOT)} is out of date; run scripts/make_api_page.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
