"""Kept texts, in golden.json: GOLDEN=write writes those of the tests that run."""

import json
import os
from pathlib import Path

_FILE = Path(__file__).with_suffix(".json")


def kept(name):
    """The plain data kept under a name."""
    return json.loads(_FILE.read_text())[name]


def assert_kept(name, found):
    """Holds plain data against what is kept under a name; read the difference before you commit."""
    found = json.loads(json.dumps(found))
    if os.environ.get("GOLDEN") == "write":
        texts = json.loads(_FILE.read_text()) | {name: found}
        _FILE.write_text(json.dumps(dict(sorted(texts.items())), indent=1) + "\n")
    else:
        assert found == kept(name)


def assert_refused(name, namespace):
    """Holds what each kept expression raises, its type and its line, against what is kept; a GPU is
    named as the CPU is.
    """
    found = dict.fromkeys(kept(name), "nothing is raised")
    for call in found:
        try:
            eval(call, namespace)
        except Exception as error:
            line = str(error).replace("cuda:0", "cpu")
            found[call] = f"{type(error).__name__}: {line}"
    assert not [line for line in found.values() if "\n" in line]
    assert_kept(name, found)
