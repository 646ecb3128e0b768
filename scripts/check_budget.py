"""Compares the lines of text in git, room by room, and the number of files with docs/budget.toml.

It also refuses, in the rooms that docs/budget.toml names under [prose], some passives, since a
sentence has a subject that acts, and comments that begin with a clause in its place.

    python scripts/check_budget.py
"""

import re
import subprocess
import sys

from common import REPOSITORY
from common.console import exit_code
from common.options import make_parser
from models.files import UserError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # of mypy

_BUDGET = REPOSITORY / "docs" / "budget.toml"
_PROSE = {
    "passives": re.compile(r"\b(is|are|was|were|been?) (asked|told|looked at|wanted)\b(?! apart)"),
    "clauses": re.compile(
        r"(\"{3}|#|//) ?(What|Who) (?!.*\?)|[.:] (What|Who) [^?]*$|\bwhat is no\b"
    ),
}
_TEXT = {".cu", ".cpp", ".cuh", ".h", ".py", ".md", ".txt", ".toml", ".sh", ".in", ".cmake"}


def files(room="."):
    """Paths of the files in git, in a folder of the repository."""
    command = ["git", "ls-files", "-z", "--", room]
    found = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    paths = (REPOSITORY / name for name in found.stdout.split("\0") if name)
    return [path for path in paths if path.is_file()]


def lines(room):
    """Lines of text in a room."""
    text = (path for path in files(room) if path.suffix in _TEXT)
    return sum(path.read_bytes().count(b"\n") for path in text)


def check(budget, count_lines=lines, count_files=lambda: len(files())):
    """Lines that say what each room has and may have; UserError: rooms have more."""
    counts = {room: (count_lines(room), of) for room, of in budget["lines"].items()}
    counts["files"] = count_files(), budget["files"]["all"]
    over = [
        f"{room} has {count}, at most {of['most']}"
        for room, (count, of) in counts.items()
        if count > of["most"]
    ]
    if over:
        raise UserError(f"expected the numbers of docs/budget.toml; got more: {'; '.join(over)}")
    return [
        f"{room:12} {count:6} of {of['most']:6}, goal {of['goal']}"
        for room, (count, of) in counts.items()
    ]


def prose(kind, rooms):
    """Raises a UserError that names the lines of some rooms with passives or clauses."""
    found = [
        f"{path.relative_to(REPOSITORY)}:{number}: {match[0]}"
        for room in rooms
        for path in files(room)
        if path.suffix in (".py", ".md")
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if (match := _PROSE[kind].search(line))
    ]
    if found:
        raise UserError(f"expected sentences that say who does a thing; got {'; '.join(found)}")


def main(arguments=None):
    make_parser(__doc__).parse_args(arguments)
    budget = tomllib.loads(_BUDGET.read_text())
    print("\n".join(check(budget)))
    for kind, rooms in budget["prose"].items():
        prose(kind, rooms)


if __name__ == "__main__":
    sys.exit(exit_code(main))
