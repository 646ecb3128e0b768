"""clang-tidy over the host files of the latest build, in the units in which it compiled them.

    python scripts/tidy.py

The checks: .clang-tidy.
"""

import itertools
import json
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from common import REPOSITORY
from common.console import exit_code
from common.options import make_parser
from models.files import UserError


def host_files():
    """The host files of the latest build, each with its flags."""
    built = max(
        (REPOSITORY / "build").glob("torch-*/spamm_torch.libspamm_torch"),
        key=lambda path: path.stat().st_mtime,
    )
    ninja = [sys.executable, "-m", "ninja", "-C", str(built), "--quiet", "-t", "compdb", "host"]
    found = {}
    for entry in json.loads(subprocess.run(ninja, capture_output=True, check=True).stdout):
        flags, words = [], shlex.split(entry["command"])
        for word, after in itertools.pairwise(words):
            if word in ("-isystem", "-include"):
                flags += [word, after]
            elif word.startswith(("-I", "-D", "-std")):
                flags.append(word)
        if entry["file"].endswith(".cpp"):
            found[entry["file"]] = flags
    return found


def report(file, flags):
    """Runs clang-tidy over a file and those that it includes; "" where that is nothing."""
    command = ["clang-tidy", "--quiet", f"--config-file={REPOSITORY}/.clang-tidy", file]
    done = subprocess.run([*command, "--", *flags], capture_output=True, text=True)
    return done.stdout if done.returncode else ""


def main(arguments=None):
    make_parser(__doc__).parse_args(arguments)
    files = host_files()
    with ThreadPoolExecutor(2) as pool:
        said = "".join(pool.map(report, files, files.values()))
    print(f"{said}clang-tidy: {len(files)} units")
    if said:
        raise UserError("expected no report of clang-tidy; got those above")


if __name__ == "__main__":
    sys.exit(exit_code(main))
