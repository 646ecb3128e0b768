"""Parts that all scripts share. Knows nothing of the study or of a benchmark.

A script is started as ``python scripts/NAME.py``, so Python looks for modules in scripts/.
Importing this package adds the repository's root behind everything else: models/ is then found, and
so is the library built in place, unless the environment has one installed. It comes before torch,
so that an import which fails or is interrupted ends in one line.
"""

import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]

if str(REPOSITORY) not in sys.path:
    sys.path.append(str(REPOSITORY))


def _said_in_a_line(kind, error, trace):
    """No traceback of a library that is not built, nor of Ctrl-C while modules are loaded."""
    if kind is KeyboardInterrupt:
        print("interrupted: nothing was begun", file=sys.stderr)
    elif kind is ImportError and str(error).startswith("spamm_torch"):
        if {"-h", "--help"} & {*sys.argv}:
            print(sys.modules["__main__"].__doc__)
        print(f"error: {error}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


sys.excepthook = _said_in_a_line  # common.console.exit_code takes over once a script's main runs
