"""The README's Python code runs as it stands."""

import re
from pathlib import Path

import pytest
import torch

README = Path(__file__).parents[2] / "README.md"


def test_readme_examples_run(tmp_path, monkeypatch, capsys):
    """All ```python blocks in order, in one namespace, from an empty folder; their figures hold."""
    text = README.read_text()
    blocks = list(re.finditer(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))
    assert blocks, "README.md has no Python example"
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    namespace = {"__name__": "readme"}
    for block in blocks:
        before = text.count("\n", 0, block.start(1))  # so that a traceback names README's own line
        exec(compile("\n" * before + block[1], README, "exec"), namespace)
    promised = re.search(r"# about ([\d.]+)$", text, re.MULTILINE)
    found = re.search(r"^relative error (\S+)$", capsys.readouterr().out, re.MULTILINE)
    assert float(found[1]) == pytest.approx(float(promised[1]), rel=0.2)
