"""What a forward does beside its result it goes on doing, and convert_ does none of it."""

import copy
import random
import types
from dataclasses import dataclass

import pytest
import torch
from small_models import is_served, pictures, trained
from torch import nn
from torch.nn import functional as F

from spamm_torch import SpAMMConfig, convert_
from spamm_torch import _timing as timing
from spamm_torch._state import Snapshot
from spamm_torch.networks.install import fused_of

EXACT = SpAMMConfig(tau=0.0)
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


@pytest.fixture(autouse=True)
def fused_is_fastest(monkeypatch):
    """Forms of the model run as where they are timed; their times are the same each time."""

    def times_of(*args, **options):
        found = timing.times_of(*args, **options)
        return list(map(timing.Timing, (2.0, 1.0, 3.0, 4.0)))[: len(found)]

    monkeypatch.setattr("spamm_torch.networks.engines.times_of", times_of)


HOW = pytest.mark.parametrize("options", [{}, {"example_input"}, {"example_input", "dry_run"}])


def convert(model, options):
    given = {"example_input": pictures(channels=8), "dry_run": True}
    return convert_(
        model,
        overrides={"re:.*first": EXACT, "re:.*last": EXACT},
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


def assert_same(found, expected):
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
    if "dry_run" not in options:
        assert_same(after_calls(model, inner), expected)
    [note] = [note for note in report.notes if f"({kind.__name__})" in note]
    assert "test_effects.py, line " in note


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


def test_effects_that_a_trace_does_not_see_are_seen_in_a_call():
    model = trained(HidesFromTraces())
    report = convert(model, {"example_input"})
    assert fused_of(model) is None
    assert model.calls == 0
    assert any("not fused: a call changes" in note for note in report.notes)
