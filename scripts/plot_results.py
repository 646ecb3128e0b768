"""Makes the pages and pictures of results again from their JSON files; measures nothing.

Needs neither the library nor a GPU. Without arguments: all of docs/results, and their index.

    python scripts/plot_results.py docs/results/products.json --add results/mm.json
"""

import sys
from pathlib import Path

from common import REPOSITORY, results
from common.console import exit_code
from common.options import add, make_parser
from models.files import UserError

_FOLDER = REPOSITORY / "docs" / "results"


def main(arguments=None):
    parser = make_parser(__doc__)
    what = "JSON files of results (default: all of docs/results)"
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help=what)
    what = (
        "a JSON file that a script wrote: its runs join the page first, where they supersede rows "
        "of the same measurement; those that moved by more than 3% are named"
    )
    add(parser, "--add", what, None, "none", metavar="FILE", type=Path)
    options = parser.parse_args(arguments)
    if options.add is not None and len(options.files) != 1:
        raise UserError(f"expected one page for --add; got {len(options.files)}")
    found = {path: results.load(path) for path in options.files or sorted(_FOLDER.glob("*.json"))}
    for path, page in found.items():
        for run in results.load(options.add)["runs"] if options.add else ():
            for line in results.add(page, run):
                print(f"moved: {line}")
        results.write(path, page)
        print(f"{path.stem}: {page['headline']}")
    if not options.files:
        index = results.index({path.stem: page for path, page in found.items()})
        results.write_bytes(_FOLDER / "README.md", index.encode())


if __name__ == "__main__":
    sys.exit(exit_code(main))
