"""Changes of a model after it was compiled: each acts in the next call, or is refused.

Only values written where no counter tells need refresh_.
"""

# ruff: noqa: F401  the statements of changes use what is imported
import array
import collections
import contextlib
import copy
import functools
import pickle
import random as of_python
import re
import threading
import types
from typing import ClassVar
from unittest import mock

import numpy as np
import pytest
import torch
from small_models import pictures, trained
from support import one_thread
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from spamm_torch import convert_, explain, refresh_

OPTIONS = {"inner": "eager", "measure": False}
REFUSED = "modules of the classes and methods"
X = pictures(channels=8, size=8)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


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
        self.scale, self.mode, self.shifts = 1.5, "sum", (0.5, 0.25)
        self.order = [0, 1]
        self.settings = types.SimpleNamespace(offset=1.0)
        self.extra = None

    def forward(self, x):
        return self._forward_impl(x)

    def _forward_impl(self, x):
        x = self.relu(self.bn1(self.conv1(x)))
        for place in self.order:
            x = x + self.prelu(self.blocks[place](x))
        x = (
            self.pool(self.body(x)) * (self.factor * self.scale)
            + self.shifts[1]
            + self.settings.offset
        )
        x = x if self.extra is None else self.extra(x)
        x = self.head(x.mean((2, 3)) if self.mode == "sum" else x.amax((2, 3)))
        return self.last(F.relu(x))


def random(*shape):
    return torch.randn(shape) * 0.3


def other(base, forward):
    """A subclass with another forward."""
    return type(f"Other{base.__name__}", (base,), {"forward": forward})


Doubled = other(nn.BatchNorm2d, lambda self, x: 2 * nn.BatchNorm2d.forward(self, x))
Exponent = other(nn.Module, lambda self, weight: weight.exp())
Reversed = other(nn.Sequential, lambda self, x: nn.Sequential(*reversed(self))(x))
Tanh = other(nn.ReLU, lambda self, x: torch.tanh(x))


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
[x.reset_parameters() for x in m.modules() if isinstance(x, (nn.Conv2d, nn.BatchNorm2d))]
m.conv1.weight = nn.Parameter(random(32, 8, 3, 3))
m.conv1._parameters.update(weight=nn.Parameter(random(32, 8, 3, 3)))
m.conv1.bias = nn.Parameter(random(32))
m.blocks[0].bias = None
m.prelu.weight.mul_(-2)
m.prelu.weight = nn.Parameter(random(1))
m.prelu.weight.data = random(32)
m.body[0].weight.copy_(random(32, 32, 3, 3))
torch._foreach_mul_(list(m.parameters()), 1.5)
m.conv1._apply(lambda tensor: tensor * 2)
torch.utils.swap_tensors(m.conv1.weight, nn.Parameter(random(32, 8, 3, 3)))
m.conv1.weight.set_(random(32, 8, 3, 3))
m.conv1.weight.data = random(32, 8, 3, 3); m.body[1].running_mean.data = random(32)
# The memory of the first is free again when the second is made.
values = random(32, 32, 1, 1).numpy(); m.body[3].weight.data = torch.zeros(1);
  m.body[3].weight.data = torch.tensor(values)
from_a_vector(m)
from_a_vector(m); m(X); from_a_vector(m)
in_place(m); m.double()
in_place(m); m.bfloat16()
m.body[0].to(torch.bfloat16).to(torch.float32)
in_place(m); double(m, torch.__future__.set_overwrite_module_params_on_conversion)
in_place(m); double(m, torch.__future__.set_swap_module_params_on_conversion)
m.load_state_dict(scaled(m.state_dict()))
m.load_state_dict(scaled(m.state_dict()), assign=True)
m.load_state_dict(scaled(m.state_dict(), "body."), strict=False)
m.body.load_state_dict(scaled(m.body.state_dict()), assign=True)
parent = nn.ModuleDict({"net": m}); parent.load_state_dict(scaled(parent.state_dict()), assign=True)
average = AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.5)); average.update_parameters(m);
  in_place(m); average.update_parameters(m); m.load_state_dict(average.module.state_dict())
m.body[0].weight.add_(torch.einsum("ikxy,ko->oixy", random(32, 2, 3, 3), random(2, 32)))
# Statistics and steps
update_bn(BATCHES, m)
recalibrated(m)
recalibrated(m, by_norms=True)
recalibrated(m, torch.inference_mode)
recalibrated(m.requires_grad_(False), torch.enable_grad)
recalibrated(m, functools.partial(torch.autocast, "cpu", torch.bfloat16))
m.bn1.train()(torch.randn(4, 32, 5, 5) * 3); m.bn1.eval()
m.body.train()(torch.randn(4, 32, 5, 5) * 3); m.body.eval()
[([setattr(x, "training", on) for x in m.modules()], m(X * 3)) for on in (True, False)]
step(m, True)
step(m, False)
m.requires_grad_(False); m.body.requires_grad_(); step(m, False, fused=False)
del m.bn1.running_mean; m.bn1.register_buffer("running_mean", torch.ones(32))
m.bn1.reset_running_stats()
m.bn1.num_batches_tracked = None;
  F.batch_norm(random(2, 32, 4, 4), m.bn1.running_mean, m.bn1.running_var, training=True)
part = nn.Sequential(m.conv1, m.bn1, nn.ReLU()); part.train()(X * 3); part.eval()
# Nothing that a result depends on
m.best = 0.5
m.conv1.alpha = 2; m.conv1.rank = 4
m.names = ["a", "b"]
m.bn1.momentum = None
m.bn1.training = False
m.conv1.stride = tuple([1, 1]); m.conv1.kernel_size = tuple([3, 3])
m.body.name = "body"
m.to(memory_format=torch.channels_last);
  nn.utils.convert_conv2d_weight_memory_format(m, torch.contiguous_format)
[(setattr(m, "epoch", number), m(X)) for number in range(3)]
# As accelerate does it
m._old_forward = m.forward; m.forward = types.MethodType(lambda m, x: m._old_forward(x), m)
gradients_on_and_off(m)
a_hook_that_is_removed(m)
m.share_memory()
m.body.compile(backend="eager")
functional_call(m, scaled(m.named_parameters()), (X,))
m.bn1.register_full_backward_hook(lambda *_: None)
# Settings
m.conv1.padding_mode = "circular"; m.conv1._reversed_padding_repeated_twice = [1, 1, 1, 1]
m.conv1.padding = (2, 2)
m.conv1.padding = "valid"
m.conv1.stride = (2, 2)
m.body[0].dilation = m.body[0].padding = (2, 2)
m.body[0].groups = 4; m.body[0].weight = nn.Parameter(random(32, 8, 3, 3))
m.bn1.eps = 0.5
m.bn1.weight = None
m.bn1.running_mean = torch.ones(32)
m.bn1.running_mean = m.bn1.running_var = None; m.bn1.track_running_stats = False
m.body[2].negative_slope = -0.5
m.body[4].max_val = 0.5
m.relu.inplace = False; m.bn1.weight.mul_(2)
m.pool.kernel_size = m.pool.stride = 4
m.scale = 3
m.mode = "max"
m.shifts = (0.5, 3.0)
m.order = [1]
m.order.append(0)
m.settings = types.SimpleNamespace(offset=3.0)
m.settings.offset = 3.0
# Code
m.body[4].__class__ = nn.SiLU
m.bn1.__class__ = Doubled
m.relu.__class__ = Tanh
m.body.__class__ = Reversed
m.extra = torch.tanh
m.blocks[0].forward = torch.tanh
m.body.forward = torch.tanh
m.conv1._conv_forward = lambda x, *rest: F.conv2d(F.pad(x, (1,) * 4, mode="reflect"), *rest)
m.forward = types.MethodType(lambda m, x: m.head(x.mean((2, 3)).repeat(1, 4)), m)
m._forward_impl = types.MethodType(lambda m, x: x.mean((2, 3)), m)
hook(m.bn1, "register_forward_pre_hook")
hook(m.body[3], prepend=True)
# Layers
m.extra = nn.Tanh()
m.relu = nn.GELU()
m.bn1 = nn.Identity()
m.conv1 = nn.Conv2d(8, 32, 3, padding=1).requires_grad_(False)
m.head = nn.Linear(32, 8).requires_grad_(False)
m._modules.update(conv1=nn.Conv2d(8, 32, 3, padding=1))
m.body[0] = LowRank(m.body[0])
m.bn1.weight.mul_(2); nn.SyncBatchNorm.convert_sync_batchnorm(m)
m.bn1.weight.mul_(2); m.conv1 = nn.utils.fusion.fuse_conv_bn_eval(m.conv1, m.bn1);
  m.bn1 = nn.Identity()
del m.body[3:]
m.body.insert(2, nn.Tanh())
m.body.append(nn.Tanh())
m.body.pop(2)
m.body[3] = m.body[0]
m.blocks[0], m.blocks[1] = m.blocks[1], m.blocks[0]; m.blocks[0].weight.mul_(2)
m.body = nn.Sequential(m.body, nn.Tanh())
m.body = copy.deepcopy(m.body); m.body[0].weight.mul_(2)
convert_(m, max_error=0.0)
other = compiled(nn.Sequential(m.conv1, m.bn1, nn.ReLU()).eval()); other(X);
  m.conv1.weight.mul_(2); other(X)
# Weights that are computed
prune.l1_unstructured(m.conv1, "weight", 0.5)
prune.ln_structured(m.body[0], "weight", 0.5, n=2, dim=0)
prune.l1_unstructured(m.conv1, "weight", 0.5); m(X); prune.remove(m.conv1, "weight")
prune.global_unstructured([(x, "weight") for x in m.modules() if isinstance(x, nn.Conv2d)],
  prune.L1Unstructured, amount=0.5)
parametrizations.spectral_norm(m.body[0])
parametrizations.orthogonal(m.body[3])
parametrizations.weight_norm(m.conv1); m.conv1.parametrizations.weight.original0.mul_(2)
nn.utils.weight_norm(m.conv1); m.conv1.weight_g.mul_(2)
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
m.body[0].weight.mul_(2); call = lambda x: m.body(m.conv1(x))
call = copy.deepcopy(m); call.conv1.weight.mul_(2)
call = copy.deepcopy(m); call.body[4].max_val = 0.5
m.body[4].max_val = 0.5; call = copy.deepcopy(m)
hook(m.bn1); call = copy.deepcopy(m)
m.body[4].max_val = 0.5; m.scale = 2; call = pickle.loads(pickle.dumps(m))
""")
HOOKED = ("conv1", "bn1", "relu", "body", "body.4", "blocks.1", "pool", "head", "last", "")
CHANGES += [f"hook(m.get_submodule({path!r}))" for path in HOOKED]


def in_place(m):
    m.conv1.weight.mul_(2)
    m.body[1].running_var.add_(1)


def double(m, set_how):
    """Casts where torch converts modules in another way."""
    set_how(True)
    try:
        m.double()
    finally:
        set_how(False)


def from_a_vector(m):
    vector = nn.utils.parameters_to_vector(m.parameters())
    nn.utils.vector_to_parameters(vector * 1.3, m.parameters())


def scaled(state, part=""):
    """Values by name, times a factor."""
    return {
        name: value * 1.3 if value.is_floating_point() else value
        for name, value in dict(state).items()
        if name.startswith(part)
    }


BATCHES = [pictures(channels=8, size=8, seed=seed) * 3 + 2 for seed in range(3)]


def recalibrated(m, context=contextlib.nullcontext, by_norms=False):
    norms = [layer for layer in m.modules() if isinstance(layer, nn.BatchNorm2d)]
    with context():
        for norm in norms:
            norm.momentum = None
            norm.train()
        for batch in BATCHES:
            m(batch)
        for part in norms if by_norms else [m]:
            part.eval()


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
@torch.no_grad()
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
""")


@pytest.mark.parametrize("statement", UNSEEN)
@torch.no_grad()
def test_values_that_no_counter_tells_need_refresh(statement):
    model, twin = compiled(packed()), packed()
    model(X)
    for m in (model, twin):
        changed(m, statement)
    assert refresh_(model) is model
    assert_close(model(X), twin(X))


class Slots:
    __slots__ = ("gain",)

    def __init__(self):
        self.gain = 1.0


class Mixin:
    def mixed(self, y):
        return y


class Reads(nn.Module, Mixin):
    """Values of many kinds, which its forward reads; and what it leaves in some of them."""

    table: ClassVar = {"gain": 1.0}

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv1, self.bn1, self.relu = nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU()
        self.nested, self.pairs = {"block": {"gain": 1.0}}, collections.OrderedDict(gain=1.0)
        self.counts = collections.defaultdict(float, gain=1.0)
        self.queue, self.rows = collections.deque([1.0]), [[1.0]]
        self.inner = types.SimpleNamespace(inner=types.SimpleNamespace(gain=1.0))
        self.slots, self.array, self.numbers = Slots(), np.ones(1), array.array("d", [1.0])
        self.leaky, self.log = functools.partial(F.leaky_relu, negative_slope=0.5), []
        self.gain, self.gains = torch.tensor(1.0), [torch.tensor(1.0)]
        self.register_buffer("bank", torch.zeros(2, 8))

    def forward(self, x):
        y = self.relu(self.bn1(self.conv1(x)))
        y = y * self.nested["block"]["gain"] * self.pairs["gain"] * self.queue[0]
        y = y * self.rows[0][0] * self.inner.inner.gain * getattr(self, "late_gain", 1.0)
        y = y * float(self.array[0]) * self.numbers[0] * self.slots.gain * self.table["gain"]
        y = self.leaky(self.mixed(y * self.gain * self.gains[0] * self.counts["gain"] - 1))
        self.log.append("called")
        torch.add(self.bank[0], 1, out=self.bank[0])
        torch._foreach_add_([self.bank], 1)
        return y + self.bank.sum()


READ = statements("""
m.nested["block"]["gain"] = 3.0
m.pairs["gain"] = 3.0
m.counts["gain"] = 3.0
m.queue[0] = 3.0
m.rows[0][0] = 3.0
m.inner.inner.gain = 3.0
m.slots.gain = 3.0
m.late_gain = 3.0
m.array.fill(3.0)
m.numbers[0] = 3.0
m.gain.mul_(3)
m.gains[0] = torch.tensor(3.0)
m.leaky.keywords.update(negative_slope=2.0)
m.conv1._parameters = {**m.conv1._parameters, "weight": m.conv1.weight * 2}
weight = m.conv1.weight * 2; del m.conv1.weight; m.conv1.register_buffer("weight", weight)
Reads.table.update(gain=3.0)
Mixin.mixed = lambda m, y: 3 * y
""")


@pytest.mark.parametrize("statement", READ)
@torch.no_grad()
def test_value_that_is_read_and_effects_of_a_forward_stay(statement, monkeypatch):
    monkeypatch.setattr(Reads, "table", {"gain": 1.0})
    monkeypatch.setattr(Mixin, "mixed", Mixin.mixed)
    model, twin = compiled(Reads().eval()), Reads().eval()
    assert_close(model(X), twin(X))
    assert_close(*check(model, twin, statement))
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


class OwnStatistics(nn.Module):
    """A batch norm that counts no batches."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("var", torch.ones(8))

    def forward(self, x):
        return F.batch_norm(self.conv(x), self.mean, self.var, None, None, self.training)


def norm_without_a_counter():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    model[1].num_batches_tracked = None
    return model


@torch.no_grad()
@pytest.mark.parametrize("make", [OwnStatistics, norm_without_a_counter])
def test_statistics_that_nothing_counts_are_not_folded(make):
    model, x = make().eval(), torch.randn(4, 3, 6, 6)
    fast = torch.compile(model, backend="spamm_torch", options={"inner": "eager"})
    fast(x)
    model.train()(5 * x)
    assert_close(fast.eval()(x), model.eval()(x))


@torch.no_grad()
def test_models_of_one_class_keep_their_weights_apart():
    models = [compiled(packed()) for _ in range(3)]
    twins = [packed() for _ in models]
    for scale, pair in enumerate(zip(models, twins, strict=True), start=1):
        for m in pair:
            m.conv1.weight.mul_(scale)
    order = [0, 1, 2] * 2
    of_python.Random(0).shuffle(order)
    for place in order:
        assert_close(models[place](X), twins[place](X))


@torch.no_grad()
def test_threads_that_change_weights_are_not_mixed_up():
    models = [compiled(packed()) for _ in range(2)]
    models[0](X)
    models[1].conv1.weight.mul_(3)
    expected = [model._compiled_call_impl and packed() for model in models]
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
