"""Reports of all tables, by number, and the page that joins them. Needs neither torch nor a GPU."""

import json
import re

from common.errors import UserError
from common.report_files import page, table, write_bytes
from tables import (
    table_1_report,
    table_2_report,
    table_3_report,
    table_4_report,
    table_5_report,
)

REPORTS = {
    1: table_1_report,
    2: table_2_report,
    3: table_3_report,
    4: table_4_report,
    5: table_5_report,
}

JOINED = "tables.md"
_FILE = re.compile(r"table_[1-5]_.+(?<!\.partial)\.json")
_COMMAND = "python scripts/reproduce.py all"


def report(data, name):
    """Page, picture and conclusion of one table's data."""
    of_table = REPORTS[data["table"]]
    title = f"Table {data['table']}: {of_table.TITLE}"
    said = of_table.conclusion(data)
    body = of_table.body(data, f"{name}.png")
    return page(title, said, data["header"], body), of_table.picture(data), said


def is_sound(data, name):
    """Whether data are of a table: whether its page can be made of them.

    Args:
        data: what a JSON file holds. name: of the file, without suffix.
    """
    try:
        joined({name: data})
        REPORTS[data["table"]].body(data, f"{name}.png")
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return False
    return True


def load(folder):
    """The data of all tables in a folder: {file's name without suffix: data}, by number.

    Raises:
        UserError: a file cannot be read, or is not one of these.
    """
    found = {}
    for path in sorted(folder.glob("table_*.json")):
        if not _FILE.fullmatch(path.name):
            continue
        try:
            data = json.loads(path.read_text())
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from error
        except ValueError:
            data = None
        if not is_sound(data, path.stem):
            raise UserError(
                f"expected a table's results as JSON; got something else in {path}: remove it, or "
                "name another folder with --out"
            )
        found[path.stem] = data
    return found


def joined(found):
    """The page that joins tables: the paper's figures beside ours, where and when.

    Args:
        found: as from load.
    """
    lines = [
        "# The paper's tables",
        "",
        "Each table of the paper beside what this library measures; its own page has every figure.",
        f"`{_COMMAND}` measures them all, `make tables` builds the library first. The paper's",
        "figures are from a Tesla V100 with CUDA 10.",
        "",
    ]
    for name, data in found.items():
        of_table, header = REPORTS[data["table"]], data["header"]
        about = {
            key: header[key] for key in ("device", "torch", "libraries", "spamm_torch", "date")
        }
        about["command"] = f"`{header['command']}`"
        lines += [
            f"## Table {data['table']}: {of_table.TITLE} ({data['name']})",
            "",
            f"**{of_table.conclusion(data)}** [Every figure]({name}.md).",
            "",
            *table(tuple(about), [tuple(about.values())], left=range(len(about))),
            "",
            *of_table.beside(data),
            "",
        ]
    return "\n".join(lines).rstrip() + "\n"


def write_joined(folder):
    """Writes the joined page of the tables in a folder, and gives its path; None without tables."""
    found = load(folder)
    if not found:
        return None
    path = folder / JOINED
    write_bytes(path, joined(found).encode())
    return path
