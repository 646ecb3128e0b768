"""The forms in which models are called and answer, and what a forward does beside its result."""

import collections
import copy
import pickle
import random
import types
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from small_models import (
    Made,
    assert_same,
    compiled,
    converted_alike,
    is_served,
    pictures,
    rows,
    source_of,
    trained,
)
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from spamm_torch import SpAMMConfig, _timing, convert_, refresh_, revert_
from spamm_torch._state import Snapshot
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
        assert difference(expected, compiled(model, x)[0]) is None


@pytest.mark.parametrize(
    ("one", "other", "form"),
    [
        (Registered(x=torch.ones(1)), {"x": torch.ones(1)}, "a dict where it was a Registered"),
        ({"x": torch.ones(1)}, {"y": torch.ones(1)}, "another structure"),
        ([torch.ones(1)], [torch.ones(1), torch.ones(1)], "another structure"),
        (torch.ones(1), torch.ones(2), "(2,) torch.float32 where it was (1,)"),
        (Plain(torch.ones(1)), Plain(torch.ones(1).double()), "torch.float64"),
        (Plain(None), Plain(torch.ones(1)), "a Tensor where it was a NoneType"),
        (Plain(torch.ones(1)), Plain(torch.zeros(1)), None),
        ((1, 2.0), (1, 2.5), None),
    ],
)
def test_other_forms_and_other_numbers_are_differences(one, other, form):
    found = other_form(one, other)
    assert found is None if form is None else form in found
    assert (form or "differs by") in difference(one, other)


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
    converted_alike(Block(container, *keys).eval(), pictures(size=8))


def test_what_no_code_can_name_is_left_and_named():
    model = Block("layers", "class", "for").eval()
    original = copy.deepcopy(model)
    assert "no code can be generated (SyntaxError: " in str(convert_(model))
    assert not is_served(model, pictures(size=8))
    assert_same(model, original, pictures(size=8))


def test_a_container_is_looked_up_once():
    model = Block("layers", "a", "b", "c", "d").eval()
    converted_alike(model, pictures(size=8))
    source = source_of(model)
    assert source.count("self.layers") == source.count("at_layers.inner") == 1


# ---- What a forward does beside its result it goes on doing, and convert_ does none of it --------

CALLS = 0
SEEN = []


class Net(nn.Module):
    """Two convolutions, and something beside them in the middle."""

    count = 0

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(8, 32, 3, padding=1), nn.BatchNorm2d(32)
        self.last = nn.Conv2d(32, 32, 3, padding=1)
        self.set_up()

    def set_up(self):
        pass

    def forward(self, x):
        x = F.relu(self.norm(self.first(x)))
        return self.last(x) * self.beside(x)

    def beside(self, x):
        return 1


KINDS = []


def effect(state, set_up=lambda m: None):
    """A kind of network, by what it does beside: how it is set up, and the state that changes."""

    def add(beside):
        own = {"set_up": set_up, "beside": beside, "state": state}
        KINDS.append(type(beside.__name__, (Net,), own))
        return KINDS[-1]

    return add


def in_buffer(m):
    m.register_buffer("calls", torch.zeros(()))


def of_scale(m):
    m.scale = nn.Parameter(torch.full((32, 1, 1), 3.0))


@effect(lambda m: m.calls.item(), in_buffer)
def CountsInBuffer(self, x):
    self.calls += 1
    return self.calls


@effect(lambda m: m.calls.item(), in_buffer)
def AveragesInBuffer(self, x):
    self.calls.view(1)[0].mul_(0.9).add_(x.mean())
    return 1


@effect(lambda m: m.calls.item(), in_buffer)
def SetsBuffer(self, x):
    self.calls = self.calls + x.mean()
    return 1


@effect(lambda m: m.scale.sum().item(), of_scale)
def ClampsWeight(self, x):
    self.scale.data.clamp_(max=1.0)
    return self.scale


@effect(lambda m: m.scale.sum().item(), of_scale)
def SetsData(self, x):
    self.scale.data = torch.ones_like(x[0, :, :1, :1])
    return self.scale


@effect(lambda m: dict(m.kept), lambda m: setattr(m, "kept", {"calls": 0}))
def StoresEntry(self, x):
    self.kept["calls"] += 1
    return self.kept["calls"]


@effect(lambda m: copy.deepcopy(m.kept), lambda m: setattr(m, "kept", [[0], [0]]))
def StoresInListOfLists(self, x):
    self.kept[1][0] += 1
    return self.kept[1][0]


@effect(lambda m: m.kept[0].sum().item(), lambda m: setattr(m, "kept", [torch.zeros(())]))
def KeepsFeatures(self, x):
    self.kept[0] = x
    return 1


@effect(lambda m: m.latest, lambda m: setattr(m, "latest", 0.0))
def SetsAttribute(self, x):
    self.latest = float(x.mean())
    return 1


@effect(lambda m: len(m.seen), lambda m: setattr(m, "seen", []))
def AppendsToList(self, x):
    self.seen.append(x)
    return 1


@dataclass
class Tracker:
    calls: int = 0

    def update(self):
        self.calls += 1
        return self.calls


@dataclass(slots=True)
class Slots:
    calls: int = 0

    update = Tracker.update


@effect(lambda m: m.helper.calls, lambda m: setattr(m, "helper", Tracker()))
def CountsInHelper(self, x):
    return self.helper.update()


@effect(lambda m: m.helper.calls, lambda m: setattr(m, "helper", Slots()))
def CountsInSlots(self, x):
    return self.helper.update()


@effect(lambda m: m.helper.calls, lambda m: setattr(m, "helper", types.SimpleNamespace(calls=0)))
def CountsInNamespace(self, x):
    self.helper.calls += 1
    return 1


@effect(lambda m: CALLS)
def CountsInGlobal(self, x):
    global CALLS
    CALLS += 1
    return 1


@effect(lambda m: len(SEEN))
def AppendsToGlobal(self, x):
    SEEN.append(1)
    return 1


@effect(lambda m: Net.count)
def CountsInClass(self, x):
    Net.count += 1
    return 1


def counting(m):
    count = 0

    def update():
        nonlocal count
        count += 1
        return count

    m.update, m.read = update, lambda: count


@effect(lambda m: m.read(), counting)
def CountsInClosure(self, x):
    return self.update()


@effect(lambda m: random.getstate())
def DrawsOnTheHost(self, x):
    return 1 + random.random()


@effect(lambda m: torch.get_rng_state().tolist())
def DrawsByTorch(self, x):
    return 1 + torch.rand(()).item()


@pytest.fixture
def fused_is_fastest(monkeypatch):
    """Forms of the model run as where they are timed; their times are the same each time."""

    def times_of(*args, **options):
        found = _timing.times_of(*args, **options)
        return list(map(_timing.Timing, (2.0, 1.0, 3.0, 4.0)))[: len(found)]

    monkeypatch.setattr("spamm_torch.networks.engines.times_of", times_of)


HOW = pytest.mark.parametrize("options", [{}, {"example_input"}, {"example_input", "dry_run"}])


def convert(model, options):
    given = {"example_input": pictures(channels=8), "dry_run": True}
    return convert_(
        model,
        overrides=dict.fromkeys(("re:.*first", "re:.*last"), EXACT["conv"]),
        **{name: given[name] for name in options},
    )


@torch.no_grad()
def after_calls(model, inner):
    """The results of three calls from the same start, and the state after each."""
    x, found = pictures(channels=8), []
    before = Snapshot(model)
    torch.manual_seed(0)
    random.seed(0)
    for _ in range(3):
        result = model(x)
        found.append((result.clone(), inner.state()))
    before.restore()
    return found


def assert_same_calls(found, expected):
    for (result, state), (own, own_state) in zip(found, expected, strict=True):
        torch.testing.assert_close(result, own, rtol=1e-4, atol=1e-4)
        assert (
            state == pytest.approx(own_state, rel=1e-3)
            if type(state) is float
            else (state == own_state)
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_inner", [False, True])
@HOW
@pytest.mark.usefixtures("fused_is_fastest")
def test_effects_stay_and_conversion_has_none(kind, is_inner, options):
    inner = trained(kind())
    model = nn.Sequential(inner, nn.Conv2d(32, 32, 1), nn.ReLU()).eval() if is_inner else inner
    expected = after_calls(model, inner)
    values = {name: value.clone() for name, value in model.state_dict().items()}
    state = inner.state()
    report = convert(model, options)
    assert inner.state() == state
    for name, value in model.state_dict().items():
        assert torch.equal(value, values[name])
    assert fused_of(inner) is None
    assert not is_inner or rows(report)["1"][1] == ("relu",)  # what stands behind it is fused
    if "dry_run" not in options:
        assert_same_calls(after_calls(model, inner), expected)
    [note] = [note for note in report.notes if f"({kind.__name__})" in note]
    assert "test_call_forms.py, line " in note


# ---- What has no effect -------------------------------------------------------------------------


class ReadsTensors(Net):
    def set_up(self):
        self.scale = nn.Parameter(torch.rand(32, 1, 1) + 1)
        self.register_buffer("shift", torch.rand(32, 1, 1))
        self.register_buffer("factor", torch.full((), 2.0))

    def beside(self, x):
        assert len(self.shift) == self.shift.shape[0] == 32
        return (x * self.scale + self.shift[: x.shape[1]] * self.factor) * self.factor.item()


class Flag(Net):
    def set_up(self):
        self.register_buffer("flag", torch.zeros((), dtype=torch.bool))

    def beside(self, x):
        return 2 if self.flag else 1


class Noise(Net):
    def beside(self, x):
        return torch.rand_like(x)


@pytest.mark.parametrize(("kind", "is_fused"), [(ReadsTensors, True), (Flag, False), (Noise, True)])
@HOW
@pytest.mark.usefixtures("fused_is_fastest")
@torch.no_grad()
def test_what_reads_tensors_follows_them(kind, is_fused, options):
    torch.manual_seed(0)
    model = trained(kind())
    original, x = copy.deepcopy(model), pictures(channels=8)
    report = convert(model, options)
    if "dry_run" not in options:
        assert is_served(model, x) == is_fused
    if kind is Flag:
        assert any("2 if self.flag else 1" in note for note in report.notes)
    changed = {
        name: value + 1 if name in ("shift", "factor", "flag") else value
        for name, value in original.state_dict().items()
    }
    for state in (original.state_dict(), changed):
        for each in (model, original):
            each.load_state_dict(state)
        results = []
        for each in (model, original):
            torch.manual_seed(1)
            results.append(each(x))
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


class HidesFromTraces(Net):
    """A trace sees no tensors."""

    def set_up(self):
        self.calls = 0

    def beside(self, x):
        if isinstance(x, torch.Tensor):
            self.calls += 1
        return 1


def test_effects_that_a_trace_does_not_see_are_seen_in_a_call(fused_is_fastest):
    model = trained(HidesFromTraces())
    report = convert(model, {"example_input"})
    assert fused_of(model) is None
    assert model.calls == 0
    assert any("not fused: a call changes" in note for note in report.notes)
