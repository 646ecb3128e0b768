"""The names, docs/api.md, the docstrings, and the examples of the docs, which run as they stand."""

import doctest
import importlib.util
import inspect
import operator
import re
import sys
from collections import OrderedDict
from pathlib import Path

import pytest
import scipy.sparse
import torch
from torch import nn
from torch.utils.data import TensorDataset

import from_scipy
import my_resnet
import spamm_torch
from spamm_torch import calibration, networks

ROOT = Path(__file__).parents[2]
API = (ROOT / "docs" / "api.md").read_text()

# ---- Names --------------------------------------------------------------------------------------

NAMES = """
SpAMMConfig SpAMMConv2d SpAMMLinear addmm backend_for bmm build_info calibrate conv2d convert_
distributed error_bound explain find_tau fuse linalg linear mm mm_shards norm_map paths
record_stats refresh_ revert_ row_cuts sparse valid_counts valid_ratio
"""


def test_the_names():
    """Results stay in their modules: nobody makes one; annotations and isinstance name them."""
    assert NAMES.split() == spamm_torch.__all__
    assert len(spamm_torch.__all__) <= 28
    assert all(hasattr(spamm_torch, name) for name in spamm_torch.__all__)
    assert (Path(spamm_torch.__file__).parent / "py.typed").exists()
    names = re.findall(r"^\| (`[^|]+`) \|", API.partition("## All names")[2], re.MULTILINE)
    assert {name.strip("`") for row in names for name in row.split(", ")} == {*spamm_torch.__all__}
    for name in ("CalibrationReport", "CalibrationRow", "LayerStats", "ModelStats", "Outcome"):
        assert getattr(calibration, name).__doc__
    assert networks.ConvertReport.__doc__
    assert not hasattr(spamm_torch, "nothing")


# ---- The contract -------------------------------------------------------------------------------

FUNCTIONS = [
    thing
    for thing in (getattr(spamm_torch, name) for name in spamm_torch.__all__)
    if inspect.isfunction(thing) and thing.__module__ == "spamm_torch.functional"
]
FUNCTIONS += [spamm_torch.distributed.mm, spamm_torch.distributed.exchange_plan]


def test_the_page_has_the_signatures():
    """Each call in a ```text block has the function's parameters, in order, with their defaults."""
    blocks = "".join(re.findall(r"^```text\n(.*?)^```$", API, re.DOTALL | re.MULTILINE))
    calls = re.findall(r"^(\w+)\((.*?)\)$", blocks, re.DOTALL | re.MULTILINE)
    assert len(calls) >= 12
    for name, arguments in calls:
        found = inspect.signature(getattr(spamm_torch, name)).parameters.values()
        written = [argument.strip() for argument in arguments.split(",")]
        expected = [
            p.name if p.default in (p.empty, None) else f"{p.name}={p.default!r}" for p in found
        ]
        assert [argument for argument in written if argument != "*"] == expected, name


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_each_parameter_is_described_and_has_a_type(function):
    _, args, after = inspect.getdoc(function).partition("Args:\n")
    assert args, "no Args"
    described = ", ".join(re.findall(r"^    (\S[^:\n]*):", after, re.MULTILINE)).split(", ")
    signature = inspect.signature(function)
    assert {*described} >= {*signature.parameters}
    assert signature.return_annotation is not signature.empty
    assert all(p.annotation is not p.empty for p in signature.parameters.values())


# ---- Examples -----------------------------------------------------------------------------------


def of_the_reader():
    """The names that pages take from their reader: a network with ResNet's names, pictures."""
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


PAGES = [f"docs/{name}" for name in ("api", "networks", "serving", "calibration", "block_sparse")]
PAGES += [pytest.param("README", marks=pytest.mark.inductor)]


@pytest.mark.parametrize("page", PAGES)
def test_examples_run(page, tmp_path, monkeypatch, capsys):
    """All ```python blocks of a page, in order and in one namespace, print what they say. Those
    with `.cuda()` need a GPU, those that import pyscf need that.
    """
    text = (ROOT / f"{page}.md").read_text()
    blocks = list(re.finditer(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))
    assert blocks, f"{page} has no Python example"
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    namespace = {"__name__": "example"} | of_the_reader()
    for block in blocks:
        needs_cuda = ".cuda()" in block[1]
        if needs_cuda and not torch.cuda.is_available():
            continue
        if "from pyscf " in block[1] and importlib.util.find_spec("pyscf") is None:
            continue
        before = text.count("\n", 0, block.start(1))  # for tracebacks with the page's own line
        exec(compile("\n" * before + block[1], f"{page}.md", "exec"), namespace)
        if needs_cuda:  # later blocks have the reader's network as it was
            namespace |= of_the_reader()
    shown = capsys.readouterr().out.splitlines()
    for said in re.findall(r"^print\(.*\)  # prints: (.+)$", text, re.MULTILINE):
        assert said in shown


def of_docstrings():
    """Names that examples of docstrings take from their reader, or their module's docstring."""
    i, j = torch.arange(512), torch.arange(256)
    network = nn.Sequential(OrderedDict([("0", nn.Conv2d(32, 32, 3)), ("1", nn.ReLU())])).eval()
    images = torch.rand(64, 32, 8, 8)
    names = {name: getattr(spamm_torch, name) for name in spamm_torch.__all__}
    for module in (spamm_torch.sparse, spamm_torch.linalg):
        names |= {name: getattr(module, name) for name in module.__all__}
    return names | {
        "torch": torch,
        "scipy": scipy,
        "spamm_torch": spamm_torch,
        "a": 0.9 ** (i[:, None] - i).abs(),
        "overlap": 0.1 ** (j[:, None] - j).abs().double(),
        "fock": torch.diag((-1.0) ** j).double() + 0.5 * ((j[:, None] - j).abs() == 1),
        "model": network,
        "images": images,
        "loader": list(images.split(16)),
        "evaluate": lambda model, half: float(sum(model(x).mean() for x in half)),
    }


WITH_EXAMPLES = """
mm addmm bmm linear conv2d norm_map find_tau error_bound SpAMMConfig convert_ calibrate record_stats
explain fuse linalg.purify linalg.inverse_sqrt linalg.inverse_factor linalg.matrix_power
linalg.DensitySolver sparse.from_dense sparse.from_sparse sparse.from_scipy sparse.add sparse.plan
"""


@pytest.mark.parametrize("name", WITH_EXAMPLES.split())
def test_examples_of_docstrings_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    thing = operator.attrgetter(name)(spamm_torch)
    test = doctest.DocTestParser().get_doctest(thing.__doc__, of_docstrings(), name, None, 0)
    said = []
    doctest.DocTestRunner(verbose=False).run(test, out=said.append)
    assert test.examples
    assert not said, "".join(said)


def headings(page):
    """The anchors of a page, as a browser of the repository makes them."""
    found = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


@pytest.mark.parametrize("page", sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]), ids=str)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text()):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        assert not anchor or anchor in headings(target), link


def test_the_example_of_scipy(capsys):
    from_scipy.main(["--side", "20"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["2", "4", "8", "16", "32", "64"]
    assert all(float(re.search(r"error (\S+),", line)[1]) <= 64e-6 for line in lines)


@pytest.mark.skipif(importlib.util.find_spec("torchvision") is None, reason="no torchvision")
def test_the_example_of_a_network(capsys):
    my_resnet.main(["resnet18", "--eager", "--batch", "1"])
    first, ours, _, *rows, _, _ = capsys.readouterr().out.splitlines()
    assert first.startswith("as it is ")
    assert float(re.search(r"ms, (\S+) from", ours)[1]) <= 1e-5
    assert sum("bn" in row.split() for row in rows) == 20


@pytest.mark.parametrize(
    ("name", "needs"), [("scf_pyscf", "pyscf"), ("density_300k", "tblite"), ("distributed_mm", "")]
)
def test_examples_without_the_program_they_need(monkeypatch, name, needs):
    for module in filter(None, (needs, needs and f"{needs}.interface")):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr("sys.argv", [f"{name}.py"])
    line = rf"expected {needs}, .*; got .*{needs}" if needs else "start it with torchrun"
    with pytest.raises(SystemExit, match=rf"^error: {line}"):
        importlib.import_module(name).main()
