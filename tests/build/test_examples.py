"""The code of README.md and of pages in docs runs as it stands."""

import re
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import distributed_mm
from spamm_torch.networks import timing

ROOT = Path(__file__).parents[2]


def of_the_reader():
    """What pages take from their reader: a network with ResNet's names, pictures and what not."""
    block = nn.Sequential(OrderedDict(conv1=nn.Conv2d(32, 32, 3), relu=nn.ReLU()))
    tail = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 4))
    layers = {"conv1": nn.Conv2d(1, 32, 3), "layer1": nn.Sequential(block)}
    layers |= {"layer4": nn.Sequential(nn.Conv2d(32, 32, 3)), "tail": tail}
    images, labels = torch.rand(16, 1, 16, 16), torch.randint(4, (16,))
    return {
        "torch": torch,
        "model": nn.Sequential(OrderedDict(layers)).eval(),
        "images": images,
        "empty": torch.zeros(1, 1, 16, 16),
        "data": TensorDataset(images, labels),
        "loader": [(images, labels)] * 4,
        "mean_iou": lambda model, half: sum(float(model(x).mean()) for x, _ in half),
        "train": nn.Module.train,
    }


PAGES = ["README", *(f"docs/{name}" for name in ("api", "networks", "serving", "calibration"))]


@pytest.mark.parametrize("page", PAGES)
def test_examples_run(page, tmp_path, monkeypatch, capsys):
    """All ```python blocks of a page, in order and in one namespace, print what they say."""
    text = (ROOT / f"{page}.md").read_text()
    blocks = list(re.finditer(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))
    assert blocks, f"{page} has no Python example"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(timing, "_CPU_SECONDS", 0)  # conversions measure each candidate once
    torch.manual_seed(0)
    namespace = {"__name__": "example"} | of_the_reader()
    for block in blocks:
        before = text.count("\n", 0, block.start(1))  # for tracebacks with the page's own line
        exec(compile("\n" * before + block[1], f"{page}.md", "exec"), namespace)
    shown = capsys.readouterr().out.splitlines()
    for said in re.findall(r"^print\(.*\)  # prints: (.+)$", text, re.MULTILINE):
        assert said in shown


def test_the_cpp_page_shows_the_example():
    """`make test` builds and runs that program, which fails where the error exceeds its bound."""
    page = (ROOT / "docs/cpp.md").read_text()
    [code] = re.findall(r"^```cpp\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert code == (ROOT / "examples/cpp/product.cpp").read_text()


def test_the_distributed_example_without_torchrun(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr("sys.argv", ["distributed_mm.py"])
    with pytest.raises(SystemExit, match=r"^error: start it with torchrun"):
        distributed_mm.main()
