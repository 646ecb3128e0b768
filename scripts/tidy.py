"""clang-tidy over the host files of the latest build, which torch's headers make slow one by one.

    python scripts/tidy.py

Files without a common name of their own are read as one, which reads torch's headers once. Where
the compiler refuses that all the same, each half is read by itself. The checks: .clang-tidy.
"""

import itertools
import json
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common import REPOSITORY
from common.console import exit_code
from common.options import make_parser
from models.files import UserError

UNITS = REPOSITORY / "build" / "tidy"
# A definition at the left margin: a type or function by its whole line, a constant by its name.
OWN = re.compile(r"^(?:const(?:expr)? [^({=;]*?(\w+) ?[({=]|((?!namespace|TORCH_)\w.*\{$))", re.M)
USED = re.compile(r"^using (?!at::).*", re.M)


def host_files():
    """The host files of the latest build, each with its folders and definitions."""
    built = max((REPOSITORY / "build").glob("torch-*/spamm_torch.libspamm_torch"), key=_changed)
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


def _changed(path):
    return path.stat().st_mtime


def units(files):
    """Lists of files of one device and the same ``using``, without a common name of their own."""
    found = []
    for file in sorted(files):
        text = Path(file).read_text()
        names = set(OWN.findall(text))
        kind = Path(file).relative_to(REPOSITORY / "csrc").parts[0], *USED.findall(text)
        kind = kind if kind[0] in ("cpu", "cuda") else ()
        for other, members, taken in found:
            if kind == other and not names & taken:
                members.append(file)
                taken |= names
                break
        else:
            found.append((kind, [file], names))
    return [members for _, members, _ in found]


def reports(files, flags):
    """What clang-tidy says of files that are read as one; "" where that is nothing."""
    name = Path(files[0]).relative_to(REPOSITORY / "csrc").as_posix().replace("/", "_")
    unit = UNITS / f"{len(files)}_{name}"
    unit.write_text("".join(f'#include "{file}"\n' for file in files))
    command = ["clang-tidy", "--quiet", f"--config-file={REPOSITORY}/.clang-tidy", str(unit)]
    done = subprocess.run([*command, "--", *flags], capture_output=True, text=True)
    if "clang-diagnostic-error" in done.stdout and len(files) > 1:
        half = len(files) // 2
        return reports(files[:half], flags) + reports(files[half:], flags)
    return done.stdout if done.returncode else ""


def main(arguments=None):
    make_parser(__doc__).parse_args(arguments)
    files = host_files()
    UNITS.mkdir(exist_ok=True)
    chosen = units(files)
    with ThreadPoolExecutor(2) as pool:
        said = "".join(pool.map(lambda unit: reports(unit, files[unit[0]]), chosen))
    print(f"{said}clang-tidy: {len(files)} files in {len(chosen)} units")
    if said:
        raise UserError("expected no report of clang-tidy; got those above")


if __name__ == "__main__":
    sys.exit(exit_code(main))
