"""The forms in which models are called and answer: defaults, keywords, results of any class."""

import collections
import copy
import pickle
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from small_models import Made, is_served, pictures, source_of, trained
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from spamm_torch import SpAMMConfig, convert_, refresh_, revert_
from spamm_torch.networks.compare import difference, other_form
from spamm_torch.networks.install import fused_of

EXACT = {"conv": SpAMMConfig(tau=0.0)}


class Registered(dict):
    pass


pytree.register_pytree_node(
    Registered,
    lambda value: (list(value.values()), list(value)),
    lambda values, names: Registered(zip(names, values, strict=True)),
)


class Unknown(dict):
    pass


@dataclass
class Plain:
    x: torch.Tensor
    name: str = "plain"


@dataclass
class Doubling:
    x: torch.Tensor

    def __post_init__(self):
        self.x = self.x * 2


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


def defaulted(x):
    found = collections.defaultdict(list)
    found["x"] = x
    return found


ANSWERS = {
    "registered": (lambda x: Registered(x=x), True),
    "unknown": (lambda x: Unknown(x=x), False),
    "defaultdict": (defaulted, True),
    "OrderedDict": (lambda x: collections.OrderedDict(x=x, y=[x]), True),
    "dataclass": (lambda x: Plain(x, "mine"), True),
    "dataclass with more": (Doubling, False),
    "namedtuple": (lambda x: Pair(x, x), True),
    "inside others": (lambda x: {"a": [Registered(x=Plain(x))], "b": (Pair(x, x), 3, None)}, True),
}


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("with_example", [True, False])
@torch.no_grad()
def test_results_keep_their_classes(name, with_example):
    answer, is_fused = ANSWERS[name]
    torch.manual_seed(0)
    layers = {"conv": nn.Conv2d(8, 32, 3), "norm": nn.BatchNorm2d(32)}
    model = trained(Made(lambda m, x: answer(F.relu(m.norm(m.conv(x)))), **layers))
    x = pictures(channels=8)
    expected = model(x)
    report = convert_(model, overrides=EXACT, **({"example_input": x} if with_example else {}))
    assert is_served(model, x) == is_fused
    assert is_fused or any(f"a {type(expected).__name__} is made" in n for n in report.notes)
    found = model(x)
    assert difference(expected, found) is None
    assert type(found) is type(expected)
    if name == "defaultdict":
        assert found.default_factory is list
    if is_fused:
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        assert difference(expected, compiled(x)) is None


@pytest.mark.parametrize(
    ("one", "other", "problem"),
    [
        (Registered(x=torch.ones(1)), {"x": torch.ones(1)}, "a dict where it was a Registered"),
        ({"x": torch.ones(1)}, {"y": torch.ones(1)}, "another structure"),
        ([torch.ones(1)], [torch.ones(1), torch.ones(1)], "another structure"),
        (torch.ones(1), torch.ones(2), "(2,) torch.float32 where it was (1,)"),
        (Plain(torch.ones(1)), Plain(torch.ones(1).double()), "torch.float64"),
        (Plain(None), Plain(torch.ones(1)), "a Tensor where it was a NoneType"),
    ],
)
def test_other_forms_are_no_rounding(one, other, problem):
    assert problem in other_form(one, other)
    assert problem in difference(one, other)


@pytest.mark.parametrize(
    ("one", "other"), [(Plain(torch.ones(1)), Plain(torch.zeros(1))), ((1, 2.0), (1, 2.5))]
)
def test_other_numbers_are_a_difference(one, other):
    assert other_form(one, other) is None
    assert "differs by" in difference(one, other)


# ---- Arguments ----------------------------------------------------------------------------------


class Defaults(nn.Module):
    """All arguments have defaults, as in the models of transformers."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(8, 32, 3), nn.BatchNorm2d(32)

    def forward(self, x=None, mask=None, scale=1.0, *, shift=None):
        if x is None:
            raise ValueError("x is missing")
        x = F.relu(self.norm(self.conv(x)))
        x = x if mask is None else x * mask
        return x * scale if shift is None else x * scale + shift


FORMS = {"x": ({"x"}, {}), "mask": ({"x", "mask"}, {}), "shift": ({"x", "shift"}, {"scale": 3.0})}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("is_inner", [False, True])
@torch.no_grad()
def test_the_form_of_the_example_is_fused(name, is_inner):
    tensors, held = FORMS[name]
    x = pictures(channels=8)
    given = {"x": x, "mask": torch.rand(2, 1, 14, 14), "shift": torch.rand(32, 1, 1)}
    given = {key: given[key] for key in given if key in tensors} | held
    torch.manual_seed(0)
    inner = trained(Defaults())
    original = copy.deepcopy(inner)
    model = inner
    if is_inner:

        class Outer(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = inner

            def forward(self, **given):
                return self.inner(**given) if given["x"].sum() else None

        model = Outer().eval()
    overrides = {("inner." if is_inner else "") + "conv": EXACT["conv"]}
    report = convert_(model, overrides=overrides, example_input=given)
    assert report[0].absorbed == ("bn", "relu")
    for each in (
        model,
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)) if not is_inner else refresh_(model),
    ):
        assert is_served(each, **given)
        torch.testing.assert_close(each(**given), original(**given), rtol=1e-4, atol=1e-4)
    others = {**given, "scale": 0.5}
    assert not is_served(model, **others)
    torch.testing.assert_close(model(**others), original(**others), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_without_an_example_the_first_argument_is_the_one():
    model = trained(Defaults())
    report = convert_(model, overrides=EXACT)
    x = pictures(channels=8)
    assert report[0].absorbed == ("bn", "relu")
    assert is_served(model, x)
    assert is_served(model, x=x, scale=1.0)
    assert not is_served(model, x, torch.ones(1))
    assert any("all arguments have defaults" in note for note in report.notes)


# ---- Models of transformers ---------------------------------------------------------------------


def hugging_face(name):
    import transformers  # which takes a while

    small = {"hidden_sizes": [32, 64], "depths": [1, 1], "num_labels": 3}
    if name == "resnet":
        config = transformers.ResNetConfig(embedding_size=32, layer_type="basic", **small)
        return transformers.ResNetForImageClassification(config)
    config = transformers.ConvNextConfig(num_stages=2, **small)
    return transformers.ConvNextModel(config)


@pytest.mark.parametrize(
    ("name", "with_example"),
    [
        ("resnet", True),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in (("resnet", False), ("convnext", True), ("convnext", False))
        ),
    ],
)
@torch.no_grad()
def test_models_of_transformers(name, with_example, measured):
    measured([1.0] * 4, [2.0, 1.0, 1.5, 2.5])
    torch.manual_seed(0)
    model = trained(hugging_face(name))
    original, x = copy.deepcopy(model), pictures(size=32)
    example = {"example_input": {"pixel_values": x}} if with_example else {}
    layer = {"resnet": "resnet.encoder.stages.0.layers.0.layer.0.convolution"}
    layer["convnext"] = "encoder.stages.1.downsampling_layer.1"
    report = convert_(model, overrides={layer[name]: SpAMMConfig(tau=0.0)}, **example)
    absorbed = [row.absorbed for row in report]
    assert absorbed.count(("bn", "relu")) == 3 * (name == "resnet")
    assert absorbed.count(("bn", "add", "relu")) == 2 * (name == "resnet" and with_example)
    for call in (model(x), model(pixel_values=x), model(pixel_values=x, return_dict=None)):
        assert type(call) is type(original(x))
        assert difference(original(x), call) is None
    assert is_served(model, pixel_values=x)
    hidden = {"pixel_values": x, "output_hidden_states": True}
    assert difference(original(**hidden), model(**hidden)) is None
    revert_(model)
    assert difference(original(x), model(x)) is None


# ---- Models that cannot be converted now ---------------------------------------------------------


@pytest.mark.parametrize("kind", ["fused", "leaf", "inside"])
def test_a_script_is_refused_in_one_line(kind):
    model = trained(nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32)))
    convert_(model, overrides={"0": SpAMMConfig(tau=0.0)}, fuse=kind == "fused")
    assert (fused_of(model) is not None) == (kind == "fused")
    line = r"^torch.jit.script takes .*call revert_ first"
    with pytest.raises(RuntimeError, match=line) as error:
        torch.jit.script(nn.Sequential(model) if kind == "inside" else model)
    assert "\n" not in str(error.value)
    torch.jit.script(revert_(model))


def test_vmap_does_not_warn(capfd):
    model = trained(nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32)))
    convert_(model, overrides={"0": SpAMMConfig(tau=0.01)})
    x = pictures(6).unflatten(0, (3, 2))
    with torch.no_grad():
        found = torch.func.vmap(model)(x)
        assert torch.equal(found[0], torch.func.vmap(model)(x[:1])[0])
    assert capfd.readouterr().err == ""


# ---- Containers of modules: each is looked up once, whatever modules are called ------------------


class Block(nn.Module):
    """Layers in a container of any name, behind a convolution that is fused."""

    def __init__(self, container, *keys):
        super().__init__()
        self.stem, self.container = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU()), container
        layers = {key: nn.Conv2d(32, 32, 1) for key in keys}
        setattr(self, container, nn.ModuleDict({"inner": nn.ModuleDict(layers)}))
        self.last = nn.Sequential(nn.Conv2d(32, 32, 1))

    def forward(self, x):
        x = self.stem(x)
        for layer in getattr(self, self.container)["inner"].values():
            x = nn.functional.gelu(layer(x))
        return self.last(x)


def converted(model):
    """The report of a conversion that changes no result."""
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    model.eval()
    with torch.no_grad():
        expected = model(x)
        report = convert_(model)
        assert torch.allclose(model(x), expected, atol=1e-5)
        assert is_served(model, x) == ("no code" not in str(report))
    return report


@pytest.mark.parametrize(
    ("container", "keys"),
    [
        ("self", ("a",)),
        ("layers", ("a-b", "a_b", "0", 'q"')),
        ("_spamm_torch_conv2d", ("spamm_operands", "x")),
        ("torch", ("getattr", "operator")),
    ],
)
def test_modules_of_any_name_are_found(container, keys):
    converted(Block(container, *keys))


def test_what_no_code_can_name_is_left_and_named():
    report = converted(Block("layers", "class", "for"))
    assert "no code can be generated (SyntaxError: " in str(report)


def test_a_container_is_looked_up_once():
    model = Block("layers", "a", "b", "c", "d")
    converted(model)
    source = source_of(model)
    assert source.count("self.layers") == source.count("at_layers.inner") == 1
