"""Results as files: the same data for machines and readers, and a picture."""

import datetime
import json
import shlex

from common.files import write_atomically

_FIRST = ("device", "date", "command")  # of a page's table


def run_header(machine, script, arguments, folder="scripts"):
    """What every result opens with.

    Args:
        machine: as from describe_machine.
        script: its file name, as in "bench_mm.py". arguments: its command line.
        folder: of the repository that holds the script.
    """
    return machine | {
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["python", f"{folder}/{script}", *arguments]),
    }


def page(title, conclusion, header, body):
    """A page of results, as Markdown: what they say in one line, where they are from, the rest.

    Args:
        title, conclusion: a line each. header: as from run_header, with more. body: lines.
    """
    ordered = {key: header[key] for key in _FIRST if key in header} | header
    rows = [(key, f"`{value}`" if key == "command" else value) for key, value in ordered.items()]
    lines = [f"# {title}", "", f"**{conclusion}**", "", *table(("", ""), rows, left=(0, 1))]
    return "\n".join([*lines, "", *body]) + "\n"


def table(head, rows, left=(0,)):
    """Lines of a Markdown table; ``left`` columns are aligned left, the others right."""
    rule = ["---" if column in left else "---:" for column in range(len(head))]
    return [_row(head), _row(rule), *map(_row, rows)]


def _row(cells):
    return "| " + " | ".join(map(str, cells)) + " |"


def finish(report, data, folder, name, journal, console):
    """Ends a measurement: writes its results, removes its journal, says what was found and where.

    Args:
        report: the module whose report(data, name) gives page, picture (or None) and conclusion.
        data, folder, name: as of write_results.
        journal: of the groups measured, of no use once the results are written.
    """
    markdown, picture, conclusion = report.report(data, name)
    paths = write_results(folder, name, data=data, markdown=markdown, picture=picture)
    journal.remove()
    console.print(conclusion)
    for path in paths:
        console.print(f"wrote {path}")


def write_results(folder, name, *, data, markdown, picture=None):
    """Writes name.json, name.md and, where there is one, name.png, each in full or not at all.

    Args:
        folder: pathlib.Path.
        data: what json can hold. markdown: str. picture: bytes of a PNG.

    Returns:
        The paths written.

    Raises:
        UserError: a file cannot be written.
    """
    contents = {"json": (json.dumps(data, indent=1) + "\n").encode(), "md": markdown.encode()}
    if picture is not None:
        contents["png"] = picture
    paths = {suffix: folder / f"{name}.{suffix}" for suffix in contents}
    for suffix, content in contents.items():
        write_bytes(paths[suffix], content)
    return list(paths.values())


def write_bytes(path, content):
    """Writes a file in full or not at all."""
    write_atomically(path, lambda file: file.write(content))
