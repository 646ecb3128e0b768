"""Compares the lines of text in git, room by room, and the number of files with docs/budget.toml.

It also refuses docstrings and comments that begin with a clause: Whether, Of, What and the like.

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
# A docstring, or the first line of a comment, that begins with a clause.
_CLAUSE = re.compile(
    r'(?:"""|(?:\A|^(?![ \t]*(?://|#)).*\n)[ \t]*(?://|#) )'
    r"(Whether|Of|What|That|How|Which|Where|Who)\b",
    re.MULTILINE,
)
_CODE = {".cu", ".cpp", ".cuh", ".h", ".py"}
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


def check(counts, budget):
    """Lines that say what each room has and may have; UserError: rooms have more."""
    rooms = {room: (count, *budget[room].values()) for room, count in counts.items()}
    over = [f"{room} has {n}, at most {most}" for room, (n, most, _) in rooms.items() if n > most]
    if over:
        raise UserError(f"expected the numbers of docs/budget.toml; got more: {'; '.join(over)}")
    return [f"{room:12} {n:6} of {most:6}, goal {goal}" for room, (n, most, goal) in rooms.items()]


def check_words(paths):
    """Raises a UserError that names docstrings and comments which begin with a clause."""
    found = []
    for path in paths:
        text = path.read_text()
        for match in _CLAUSE.finditer(text):
            line = text.count("\n", 0, match.start(1)) + 1
            found.append(f"{path.relative_to(REPOSITORY)}:{line}: {match[1]}")
    if found:
        raise UserError(
            "expected docstrings and comments that begin with a verb or a noun phrase; got "
            + "; ".join(found)
        )


def main(arguments=None):
    make_parser(__doc__).parse_args(arguments)
    budget = tomllib.loads(_BUDGET.read_text())
    check_words(path for path in files() if path.suffix in _CODE)
    counts = {room: lines(room) for room in budget["lines"]} | {"files": len(files())}
    print("\n".join(check(counts, budget["lines"] | {"files": budget["files"]["all"]})))


if __name__ == "__main__":
    sys.exit(exit_code(main))
