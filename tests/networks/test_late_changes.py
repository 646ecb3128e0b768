"""What users do to a model after it was compiled: it acts in the next call, or is refused.

Only values written where no counter tells need refresh_.
"""

import collections
import random
import threading
import types

import pytest
import torch
from support import one_thread, raises_line  # noqa: F401  the fixture is automatic
from test_changes import ACTS, CALLED, FOLDED, KEEPS, X, network, results
from torch import nn

from spamm_torch import explain, refresh_

CHANGES = FOLDED | KEEPS | ACTS | CALLED
FUSED_STEP = CHANGES.pop("a fused step in eval mode")  # it counts no versions
OPTIONS = {"inner": "eager", "measure": False}
REFUSED = "modules of the classes and methods"


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


def compiled(model):
    model.compile(backend="spamm_torch", options=OPTIONS)
    return model


def assert_close(found, expected):
    tolerance = 0.1 if expected.dtype == torch.bfloat16 else 1e-3
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


# Each is compiled for itself, which takes most of a second.
CASES = [
    pytest.param(name, marks=pytest.mark.thorough if place % 6 else [])
    for place, name in enumerate(CHANGES)
]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_change_acts_or_is_refused(name):
    model, twin = compiled(network("dense")), network("dense")
    model(X)
    assert {row.action for row in explain(model)} == {"dense"}
    calls = []
    for m in (model, twin):
        torch.manual_seed(1)
        instead = CHANGES[name](m)
        calls.append(instead if name in CALLED else m)
    expected = results(calls[1], twin)
    try:
        found = results(calls[0], model)
    except RuntimeError as error:
        assert REFUSED in str(error)  # noqa: PT017
        torch._dynamo.reset()
        found = results(calls[0], model)
    assert_close(found, expected)
    assert_close(results(calls[0], model), expected)


UNSEEN = {
    "through .data": lambda m: m.conv1.weight.data.mul_(2),
    "through numpy": lambda m: m.conv1.weight.detach().numpy().__imul__(2),
    "through DLPack": lambda m: torch.from_dlpack(m.conv1.weight.detach()).mul_(2),
    "by a fused step": FUSED_STEP,
    "through .data of statistics": lambda m: m.body[1].running_var.data.add_(1),
}


@pytest.mark.parametrize("name", UNSEEN)
@torch.no_grad()
def test_values_that_no_counter_tells_need_refresh(name):
    model, twin = compiled(network("packed")), network("packed")
    model(X)
    for m in (model, twin):
        UNSEEN[name](m)
    assert refresh_(model) is model
    assert_close(model(X), twin(X))


class Reads(nn.Module):
    """Values of many kinds, which its forward reads; and what it leaves in some of them."""

    table = types.MappingProxyType({"gain": 1.0})

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv1, self.bn1 = nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)
        self.nested, self.pairs = {"block": {"gain": 1.0}}, collections.OrderedDict(gain=1.0)
        self.queue, self.rows = collections.deque([1.0]), [[1.0]]
        self.inner = types.SimpleNamespace(inner=types.SimpleNamespace(gain=1.0))
        self.local, self.log = threading.local(), []
        self.register_buffer("bank", torch.zeros(2, 8))

    def forward(self, x):
        y = torch.relu(self.bn1(self.conv1(x)))
        y = y * self.nested["block"]["gain"] * self.pairs["gain"] * self.queue[0]
        y = y * self.rows[0][0] * self.inner.inner.gain * getattr(self, "late_gain", 1.0)
        self.log.append("called")
        torch.add(self.bank[0], 1, out=self.bank[0])
        torch._foreach_add_([self.bank], 1)
        return y + self.bank.sum()


READ = {
    "a dict in a dict": lambda m: m.nested["block"].update(gain=3.0),
    "an ordered dict": lambda m: m.pairs.update(gain=3.0),
    "a deque": lambda m: m.queue.__setitem__(0, 3.0),
    "a list in a list": lambda m: m.rows[0].__setitem__(0, 3.0),
    "an object in an object": lambda m: setattr(m.inner.inner, "gain", 3.0),
    "a name that was not there": lambda m: setattr(m, "late_gain", 3.0),
}


@pytest.mark.parametrize("name", READ)
@torch.no_grad()
def test_value_that_is_read_and_effects_of_a_forward_stay(name):
    model, twin = compiled(Reads().eval()), Reads().eval()
    for m in (model, twin):
        m(X)
        READ[name](m)
    assert_close(model(X), twin(X))
    assert_close(model.bank, twin.bank)
    assert model.log == twin.log


class Halves(nn.Module):
    """Its forward writes to its own weight, where no counter tells."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.bn = nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)

    def forward(self, x):
        y = torch.relu(self.bn(self.conv(x)))
        self.conv.weight.data.mul_(0.5)
        return y


@torch.no_grad()
def test_weight_that_the_forward_writes_is_not_folded():
    model, twin = compiled(Halves().eval()), Halves().eval()
    for _ in range(3):
        assert_close(model(X), twin(X))
    assert explain(model)["conv"].action == "left"


@torch.no_grad()
def test_models_of_one_class_keep_their_weights_apart():
    models = [compiled(network("packed")) for _ in range(3)]
    twins = [network("packed") for _ in models]
    for scale, pair in enumerate(zip(models, twins, strict=True), start=1):
        for m in pair:
            m.conv1.weight.mul_(scale)
    order = [0, 1, 2] * 2
    random.Random(0).shuffle(order)
    for place in order:
        assert_close(models[place](X), twins[place](X))


@torch.no_grad()
def test_threads_that_change_weights_are_not_mixed_up():
    models = [compiled(network("packed")) for _ in range(2)]
    models[0](X)
    models[1].conv1.weight.mul_(3)
    expected = [model._compiled_call_impl and network("packed") for model in models]
    expected[1].conv1.weight.mul_(3)
    expected = [model(X) for model in expected]
    wrong = []

    def serve(place):
        with torch.no_grad():
            for _ in range(50):
                if not torch.allclose(models[place](X), expected[place], 1e-3, 1e-3):
                    wrong.append(place)

    threads = [threading.Thread(target=serve, args=(place,)) for place in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
