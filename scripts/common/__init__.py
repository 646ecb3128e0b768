"""Parts that all scripts share. Knows nothing of the study or of a benchmark.

A script is started as ``python scripts/NAME.py``, so Python looks for modules in scripts/.
Importing this package adds the repository's root behind everything else: models/ is then found, and
so is the library built in place, unless the environment has one installed.
"""

import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]

if str(REPOSITORY) not in sys.path:
    sys.path.append(str(REPOSITORY))
