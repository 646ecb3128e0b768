"""Changes of a model after it was compiled: each acts in the next call, or is refused.

Only values written where no counter tells need refresh_.
"""

# ruff: noqa: F401  the statements of changes use what is imported
import copy
import pickle
import re
import threading
import types
from typing import ClassVar
from unittest import mock

import numpy as np
import pytest
import torch
from small_models import pictures, trained
from support import Made
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim.swa_utils import AveragedModel, update_bn

from spamm_torch import convert_, explain, refresh_

OPTIONS = {"inner": "eager", "measure": False}
REFUSED = "modules of the classes and methods"
X = pictures(channels=8, size=8)


def compiled(model):
    model.compile(backend="spamm_torch", options=OPTIONS)
    return model


def assert_close(found, expected):
    tolerance = 0.1 if expected.dtype == torch.bfloat16 else 1e-3
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


class Net(nn.Module):
    """Everything that a convolution absorbs or that stands beside, and settings that are traced."""

    factor = 1.0

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(8, 32, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(32)
        self.relu = nn.ReLU(inplace=True)
        self.blocks = nn.ModuleList(nn.Conv2d(32, 32, 3, padding=1) for _ in range(2))
        self.body = nn.Sequential(
            *(nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.LeakyReLU()),
            *(nn.Conv2d(32, 32, 1), nn.ReLU6()),
        )
        self.prelu, self.pool = nn.PReLU(32), nn.MaxPool2d(2)
        self.head, self.last = nn.Linear(32, 8), nn.Linear(8, 4)
        self.scale, self.order = 1.5, [0, 1]
        self.settings = types.SimpleNamespace(offset=1.0)
        self.extra = None

    def forward(self, x):
        return self._forward_impl(x)

    def _forward_impl(self, x):
        x = self.relu(self.bn1(self.conv1(x)))
        for place in self.order:
            x = x + self.prelu(self.blocks[place](x))
        x = self.pool(self.body(x)) * (self.factor * self.scale) + self.settings.offset
        x = x if self.extra is None else self.extra(x)
        return self.last(F.relu(self.head(x.mean((2, 3)))))


def random(*shape):
    return torch.randn(shape) * 0.3


def other(base, forward):
    """A subclass with another forward."""
    return type(f"Other{base.__name__}", (base,), {"forward": forward})


Exponent = other(nn.Module, lambda self, weight: weight.exp())
Reversed = other(nn.Sequential, lambda self, x: nn.Sequential(*reversed(self))(x))


class LowRank(nn.Module):
    """A convolution with a branch of low rank beside it, as LoRA has it."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down = nn.Conv2d(base.in_channels, 2, 3, padding=1, bias=False)
        self.up = nn.Conv2d(2, base.out_channels, 1, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


# ---- The changes ---------------------------------------------------------------------------------


def statements(text):
    """Lines of Python, each with the lines below it that are indented; without comments."""
    lines = re.split(r"\n(?! )", text.strip())
    return [re.sub(r"\n +", " ", line) for line in lines if not line.startswith("#")]


def changed(m, statement):
    """Changes a model, and returns what is called then: it, or what the statement names so."""
    torch.manual_seed(1)
    scope = globals() | {"m": m, "call": m}
    exec(compile(statement, __file__, "exec"), scope)
    return scope["call"]


CHANGES = statements("""
# Values
m.conv1.weight.mul_(2); m.body[1].running_var.add_(1)
m.conv1.weight = nn.Parameter(random(32, 8, 3, 3))
m.conv1.bias = nn.Parameter(random(32))
m.blocks[0].bias = None
m.prelu.weight.mul_(-2)
torch.utils.swap_tensors(m.conv1.weight, nn.Parameter(random(32, 8, 3, 3)))
m.conv1.weight.set_(random(32, 8, 3, 3))
m.conv1.weight.data = random(32, 8, 3, 3); m.body[1].running_mean.data = random(32)
# The memory of the first is free again when the second is made.
values = random(32, 32, 1, 1).numpy(); m.body[3].weight.data = torch.zeros(1);
  m.body[3].weight.data = torch.tensor(values)
m.conv1.weight.mul_(2); m.body[1].running_var.add_(1); m.double()
m.load_state_dict(scaled(m.state_dict()), assign=True)
# Statistics and steps
update_bn(BATCHES, m)
recalibrated(m)
m.body.train()(torch.randn(4, 32, 5, 5) * 3); m.body.eval()
step(m, True)
del m.bn1.running_mean; m.bn1.register_buffer("running_mean", torch.ones(32))
m.bn1.num_batches_tracked = None;
  F.batch_norm(random(2, 32, 4, 4), m.bn1.running_mean, m.bn1.running_var, training=True)
# Nothing that a result depends on
m.to(memory_format=torch.channels_last);
  nn.utils.convert_conv2d_weight_memory_format(m, torch.contiguous_format)
[(setattr(m, "epoch", number), m(X)) for number in range(3)]
# As accelerate does it
m._old_forward = m.forward; m.forward = types.MethodType(lambda m, x: m._old_forward(x), m)
gradients_on_and_off(m)
a_hook_that_is_removed(m)
m.body.compile(backend="eager")
functional_call(m, scaled(m.named_parameters()), (X,))
# Settings
m.conv1.padding_mode = "circular"; m.conv1._reversed_padding_repeated_twice = [1, 1, 1, 1]
m.body[0].groups = 4; m.body[0].weight = nn.Parameter(random(32, 8, 3, 3))
m.bn1.eps = 0.5
m.bn1.running_mean = torch.ones(32)
m.bn1.running_mean = m.bn1.running_var = None; m.bn1.track_running_stats = False
m.body[4].max_val = 0.5
m.pool.kernel_size = m.pool.stride = 4
m.scale = 3
m.settings.offset = 3.0
# Code
m.extra = torch.tanh
m.body.__class__ = Reversed
m.body[4].__class__ = nn.SiLU
m.conv1._conv_forward = lambda x, *rest: F.conv2d(F.pad(x, (1,) * 4, mode="reflect"), *rest)
m._forward_impl = types.MethodType(lambda m, x: x.mean((2, 3)), m)
hook(m.bn1, "register_forward_pre_hook")
# Layers
m.bn1 = nn.Identity()
m.body[0] = LowRank(m.body[0])
m.bn1.weight.mul_(2); nn.SyncBatchNorm.convert_sync_batchnorm(m)
m.body[3] = m.body[0]
m.blocks[0], m.blocks[1] = m.blocks[1], m.blocks[0]; m.blocks[0].weight.mul_(2)
m.body = copy.deepcopy(m.body); m.body[0].weight.mul_(2)
convert_(m, max_error=0.0)
other = compiled(nn.Sequential(m.conv1, m.bn1, nn.ReLU()).eval()); other(X);
  m.conv1.weight.mul_(2); other(X)
# Weights that are computed
prune.l1_unstructured(m.conv1, "weight", 0.5); m(X); prune.remove(m.conv1, "weight")
parametrizations.weight_norm(m.conv1); m.conv1.parametrizations.weight.original0.mul_(2)
parametrize.register_parametrization(m.conv1, "weight", Exponent()); m(X);
  parametrize.remove_parametrizations(m.conv1, "weight")
# Other calls
weights = scaled(m.named_parameters()); call = lambda x: functional_call(m, weights, (x,))
buffers = {"bn1.running_mean": random(32), "body.1.running_var": random(32).exp()};
  call = lambda x: functional_call(m, buffers, (x,))
call, other = AveragedModel(m), copy.deepcopy(m); other.body[0].weight.mul_(3);
  call.update_parameters(m); call.update_parameters(other); call.eval()
call = within(m, mock.patch.object, nn.ReLU, "forward", lambda self, x: torch.tanh(x))
call = within(m, mock.patch.object, Net, "_forward_impl", lambda m, x: x.mean((2, 3)))
call = within(m, mock.patch.object, Net, "factor", 2.0)
call = within(m, nn.modules.module.register_module_forward_hook,
  lambda x, _, result: result * 2 if isinstance(x, nn.ReLU) else None)
m.body[1].weight.mul_(2); call = nn.Sequential(m.conv1, m.bn1, m.relu, m.body[:3])
call = copy.deepcopy(m); call.conv1.weight.mul_(2)
m.body[4].max_val = 0.5; m.scale = 2; call = pickle.loads(pickle.dumps(m))
""")
HOOKED = ("conv1", "bn1", "relu", "body", "blocks.1", "pool", "head", "")
CHANGES += [f"hook(m.get_submodule({path!r}))" for path in HOOKED]


def scaled(state):
    """Values by name, times a factor."""
    values = dict(state).items()
    return {name: x * 1.3 if x.is_floating_point() else x for name, x in values}


BATCHES = [pictures(channels=8, size=8, seed=seed) * 3 + 2 for seed in range(3)]


def recalibrated(m):
    with torch.inference_mode():
        for norm in (layer for layer in m.modules() if isinstance(layer, nn.BatchNorm2d)):
            norm.momentum = None
            norm.train()
        for batch in BATCHES:
            m(batch)
        m.eval()


def step(m, mode, **options):
    with torch.enable_grad():
        m.train(mode)
        optimiser = torch.optim.SGD(m.parameters(), 0.1, **options)
        m(X).square().sum().backward()
        optimiser.step()
        m.zero_grad()
        m.eval()


def gradients_on_and_off(m):
    for wants in (False, True, False):
        m.requires_grad_(wants)
        with torch.enable_grad():
            m(X)


def within(m, make_context, *arguments):
    """A call of the model in a context."""

    def call(x):
        with make_context(*arguments):
            return m(x)

    return call


def hook(part, register="register_forward_hook", **options):
    """Lets a hook double what a part computes or takes."""

    def double(module, args, *results):
        values = results[-1] if results else args
        return (values[0] * 2,) if isinstance(values, tuple) else values * 2

    getattr(part, register)(double, **options)


def a_hook_that_is_removed(m):
    handle = m.bn1.register_forward_hook(lambda *_: torch.zeros(()))
    with pytest.raises((IndexError, RuntimeError)):
        m(X)
    handle.remove()


# ---- The tests ----------------------------------------------------------------------------------


def network(layout=torch.contiguous_format):
    torch.manual_seed(0)
    return trained(Net()).to(memory_format=layout)


def packed():
    """A model whose weights the backend packs, on a CPU."""
    return network(torch.channels_last)


def check(model, twin, statement):
    """A change of both acts in the next call of the compiled model, or is refused."""
    calls = [changed(m, statement) for m in (model, twin)]
    x = X.to(next(iter(twin.parameters())).dtype)
    expected = calls[1](x)
    try:
        found = calls[0](x)
    except RuntimeError as error:
        assert REFUSED in str(error)  # noqa: PT017
        torch._dynamo.reset()
        found = calls[0](x)
    assert_close(found, expected)
    return [call(x) for call in calls]


# Each is compiled for itself, which takes most of a second.
@pytest.mark.parametrize(
    "statement",
    [
        pytest.param(statement, marks=pytest.mark.thorough if place % 6 else [])
        for place, statement in enumerate(CHANGES)
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_change_acts_or_is_refused(statement):
    model, twin = compiled(network()), network()
    model(X)
    assert {row.action for row in explain(model)} == {"dense"}
    assert_close(*check(model, twin, statement))


UNSEEN = statements("""
m.conv1.weight.data.mul_(2)
values = m.conv1.weight.detach().numpy(); values *= 2
torch.from_dlpack(m.conv1.weight.detach()).mul_(2)
step(m, False, fused=True)
m.body[1].running_var.data.add_(1)
m.prelu.weight.data.mul_(-2)
m.bfloat16(); m.conv1.weight.data.mul_(2)
""")


@pytest.mark.parametrize("statement", UNSEEN)
def test_values_that_no_counter_tells_need_refresh(statement):
    model, twin = compiled(packed()), packed()
    model(X)
    for m in (model, twin):
        changed(m, statement)
    assert refresh_(model) is model
    x = X.to(model.conv1.weight.dtype)
    assert_close(model(x), twin(x))


class Mixin:
    def mixed(self, y):
        return y


class Reads(nn.Module, Mixin):
    """Values of several kinds, which its forward reads; and what it leaves in some of them."""

    table: ClassVar = {"gain": 1.0}

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv1, self.bn1, self.relu = nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU()
        self.nested, self.array, self.log = {"block": {"gain": 1.0}}, np.ones(1), []
        self.register_buffer("bank", torch.zeros(2, 8))

    def forward(self, x):
        y = self.relu(self.bn1(self.conv1(x))) * float(self.array[0]) * self.table["gain"]
        y = self.mixed(y * self.nested["block"]["gain"] * getattr(self, "late_gain", 1.0) - 1)
        self.log.append("called")
        torch.add(self.bank[0], 1, out=self.bank[0])
        torch._foreach_add_([self.bank], 1)
        return y + self.bank.sum()


READ = statements("""
m.nested["block"]["gain"] = 3.0
m.late_gain = 3.0
m.array.fill(3.0)
m.conv1._parameters = {**m.conv1._parameters, "weight": m.conv1.weight * 2}
weight = m.conv1.weight * 2; del m.conv1.weight; m.conv1.register_buffer("weight", weight)
Reads.table.update(gain=3.0)
Mixin.mixed = lambda m, y: 3 * y
""")


@pytest.mark.parametrize("statement", READ)
def test_value_that_is_read_and_effects_of_a_forward_stay(statement, monkeypatch):
    monkeypatch.setattr(Reads, "table", {"gain": 1.0})
    monkeypatch.setattr(Mixin, "mixed", Mixin.mixed)
    model, twin = compiled(Reads().eval()), Reads().eval()
    assert_close(model(X), twin(X))
    assert_close(*check(model, twin, statement))
    assert_close(model.bank, twin.bank)
    assert model.log == twin.log


def halves_its_weight(m, x):
    """Writes where no counter tells."""
    y = torch.relu(m.norm(m.conv(x)))
    m.conv.weight.data.mul_(0.5)
    return y


def with_its_own_statistics(m, x):
    """A batch norm that counts no batches."""
    return F.batch_norm(m.conv(x), m.norm.running_mean, m.norm.running_var, training=m.training)


def conv_and_norm(forward=lambda m, x: m.norm(m.conv(x))):
    torch.manual_seed(0)
    return Made(forward, conv=nn.Conv2d(8, 8, 3), norm=nn.BatchNorm2d(8)).eval()


def test_weight_that_the_forward_writes_is_not_folded():
    model, twin = compiled(conv_and_norm(halves_its_weight)), conv_and_norm(halves_its_weight)
    for _ in range(3):
        assert_close(model(X), twin(X))
    assert explain(model)["conv"].action == "left"


@pytest.mark.parametrize("forward", [with_its_own_statistics, None])
def test_statistics_that_nothing_counts_are_not_folded(forward):
    model = conv_and_norm(*filter(None, [forward]))
    model.norm.num_batches_tracked = None
    fast = torch.compile(model, backend="spamm_torch", options={"inner": "eager"})
    fast(X)
    model.train()(5 * X)
    assert_close(fast.eval()(X), model.eval()(X))


def test_threads_that_serve_models_of_one_class_are_not_mixed_up():
    models, twins = [compiled(packed()) for _ in range(2)], [packed() for _ in range(2)]
    models[0](X)
    for m in (models[1], twins[1]):
        m.conv1.weight.mul_(3)
    expected, wrong = [twin(X) for twin in twins], []

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
