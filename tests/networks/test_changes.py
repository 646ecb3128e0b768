"""What users do to a model after ``convert_``: it acts as on the model that was not converted."""

import copy
import pickle
import types
from functools import cache, partial
from unittest import mock

import pytest
import torch
from small_models import OfFunction, is_served, pictures, trained
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim.swa_utils import AveragedModel, update_bn

from spamm_torch import SpAMMConfig, convert_, refresh_


class Net(nn.Module):
    """Everything that a generated forward absorbs or passes by, and settings that it was traced
    with.
    """

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
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Linear(32, 4)
        self.scale, self.mode, self.shifts = 1.5, "sum", (0.5, 0.25)
        self.order = [0, 1]
        self.settings = types.SimpleNamespace(offset=1.0)
        self.extra = None

    def forward(self, x):
        return self._forward_impl(x)

    def _forward_impl(self, x):
        x = self.relu(self.bn1(self.conv1(x)))
        for place in self.order:
            x = x + self.blocks[place](x)
        x = (
            self.pool(self.body(x)) * (self.factor * self.scale)
            + self.shifts[1]
            + self.settings.offset
        )
        x = x if self.extra is None else self.extra(x)
        return self.head(x.mean((2, 3)) if self.mode == "sum" else x.amax((2, 3)))


CONVOLUTIONS = ("conv1", "blocks.0", "blocks.1", "body.0", "body.3")
X = pictures(channels=8, size=8)


def skipping(model, tau):
    convert_(model, overrides=dict.fromkeys(CONVOLUTIONS, SpAMMConfig(tau=tau)))


FORMS = {
    "dense": convert_,
    "nothing skipped": partial(skipping, tau=0.0),
    "held tau": partial(skipping, tau=1e-30),  # so small that nothing is skipped, either
    "reference": partial(convert_, reference=torch.zeros(1, 8, 8, 8)),
}

# Changes of results, after which operands are folded anew, or the model's own forward runs; changes
# that leave results as they were; and those that return what is to be called instead.
FOLDED, ACTS, KEEPS, CALLED = {}, {}, {}, set()


def folded_anew(function):
    FOLDED[function.__name__] = function
    return function


def change(function):
    ACTS[function.__name__] = function
    return function


def called(function):
    CALLED.add(function)
    return change(function)


def harmless(function):
    KEEPS[function.__name__] = function
    return function


def random(*shape):
    return torch.randn(shape) * 0.3


class Doubled(nn.BatchNorm2d):
    def forward(self, x):
        return 2 * super().forward(x)


class Tanh(nn.ReLU):
    def forward(self, x):
        return torch.tanh(x)


class Reversed(nn.Sequential):
    def forward(self, x):
        for layer in reversed(self):
            x = layer(x)
        return x


class LowRank(nn.Module):
    """A convolution with a branch of low rank beside it, as LoRA has it."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down = nn.Conv2d(base.in_channels, 2, 3, padding=1, bias=False)
        self.up = nn.Conv2d(2, base.out_channels, 1, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


# ---- Tensors ------------------------------------------------------------------------------------


@folded_anew
def values_in_place(m):
    m.conv1.weight.mul_(2)
    m.body[1].running_var.add_(1)


@folded_anew
def initialised(m):
    for layer in m.modules():
        if isinstance(layer, (nn.Conv2d, nn.BatchNorm2d)):
            layer.reset_parameters()


@folded_anew
def a_parameter_in_the_register(m):
    m.conv1._parameters["weight"] = nn.Parameter(random(32, 8, 3, 3))


@folded_anew
def memory_elsewhere(m):
    m.conv1.weight.data = random(32, 8, 3, 3)
    m.body[1].running_mean.data = random(32)


@folded_anew
def memory_elsewhere_and_back(m):
    """The memory of the first is free again when the second is made."""
    weight = m.body[3].weight
    values = random(32, 32, 1, 1).numpy()
    weight.data = torch.zeros(1)
    weight.data = torch.tensor(values)


@folded_anew
def from_a_vector(m):
    vector = nn.utils.parameters_to_vector(m.parameters())
    nn.utils.vector_to_parameters(vector * 1.3, m.parameters())


@folded_anew
def from_a_vector_twice(m):
    from_a_vector(m)
    m(X)
    from_a_vector(m)


@folded_anew
def cast(m):
    values_in_place(m)
    m.double()


@folded_anew
def cast_to_half_of_it(m):
    values_in_place(m)
    m.bfloat16()


@folded_anew
def cast_to_new_parameters(m):
    values_in_place(m)
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        m.double()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


@folded_anew
def cast_by_swapping(m):
    values_in_place(m)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        m.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


@harmless
def channels_last(m):
    m.to(memory_format=torch.channels_last)
    nn.utils.convert_conv2d_weight_memory_format(m, torch.contiguous_format)


@called
def other_weights_for_a_call(m):
    weights = {name: value * 1.2 for name, value in m.named_parameters()}
    return lambda x: functional_call(m, weights, (x,))


@called
def other_statistics_for_a_call(m):
    buffers = {"bn1.running_mean": random(32), "body.1.running_var": random(32).exp()}
    return lambda x: functional_call(m, buffers, (x,))


@harmless
def marked_again_and_again(m):
    for epoch in range(3):
        m.epoch = epoch
        m(X)


@harmless
def wrapped_in_place(m):
    """As accelerate does it."""
    m._old_forward = m.forward
    m.forward = types.MethodType(lambda self, x: self._old_forward(x), m)


# ---- State dicts, averages, training ------------------------------------------------------------


def other_state(m, part=""):
    state = {name: value for name, value in m.state_dict().items() if name.startswith(part)}
    return {
        name: value * 1.3 if value.is_floating_point() else value for name, value in state.items()
    }


@folded_anew
def loaded_by_a_parent(m):
    parent = nn.ModuleDict({"net": m})
    parent.load_state_dict(other_state(parent), assign=True)


@called
def averaged_with_another(m):
    average = AveragedModel(m)
    other = copy.deepcopy(m)
    other.body[0].weight.mul_(3)
    average.update_parameters(m)
    average.update_parameters(other)
    return average.eval()


@folded_anew
def a_moving_average_copied_into_it(m):
    average = AveragedModel(m, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    average.update_parameters(m)
    values_in_place(m)
    average.update_parameters(m)
    m.load_state_dict(average.module.state_dict())


def recalibrated(m, end):
    norms = [layer for layer in m.modules() if isinstance(layer, nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = None
        norm.train()
    for seed in range(3):
        m(pictures(channels=8, size=8, seed=seed) * 3 + 2)
    end(m, norms)


@folded_anew
def statistics_recalibrated_in_inference_mode(m):
    with torch.inference_mode():
        recalibrated(m, lambda m, norms: m.eval())


@folded_anew
def statistics_recalibrated_of_a_frozen_model(m):
    m.requires_grad_(False)
    with torch.enable_grad():
        recalibrated(m, lambda m, norms: m.eval())


@folded_anew
def statistics_recalibrated_under_autocast(m):
    with torch.autocast("cpu", torch.bfloat16):
        recalibrated(m, lambda m, norms: m.eval())


@folded_anew
def a_batch_norm_trained_by_itself(m):
    m.bn1.train()(torch.randn(4, 32, 5, 5) * 3)
    m.bn1.eval()


@folded_anew
def a_part_trained_by_itself(m):
    m.body.train()(torch.randn(4, 32, 5, 5) * 3)
    m.body.eval()


@folded_anew
def modes_set_as_attributes(m):
    for training in (True, False):
        for layer in m.modules():
            layer.training = training
        m(X * 3)


def step(m, mode, **options):
    with torch.enable_grad():
        m.train(mode)
        optimiser = torch.optim.SGD(m.parameters(), 0.1, **options)
        m(X).square().sum().backward()
        optimiser.step()
        m.zero_grad()
        m.eval()


@folded_anew
def a_step_of_a_part(m):
    m.requires_grad_(False)
    m.body.requires_grad_()
    step(m, False, fused=False)


@harmless
def gradients_on_and_off(m):
    for wants in (False, True, False):
        m.requires_grad_(wants)
        with torch.enable_grad():
            m(X)


# ---- Settings -----------------------------------------------------------------------------------


def setter(path, **values):
    """A change that sets attributes of a part."""

    def apply(m):
        for name, value in values.items():
            setattr(m.get_submodule(path), name, value)

    shown = {name: getattr(value, "__name__", value) for name, value in values.items()}
    apply.__name__ = f"{path or 'root'} {shown}"
    return apply


for _made in (
    setter("conv1", padding_mode="circular", _reversed_padding_repeated_twice=[1, 1, 1, 1]),
    setter("conv1", padding=(2, 2)),
    setter("conv1", padding="valid"),
    setter("conv1", stride=(2, 2)),
    setter("body.0", dilation=(2, 2), padding=(2, 2)),
    setter("bn1", eps=0.5),
    setter("bn1", weight=None),
    setter("bn1", running_mean=torch.ones(32)),
    setter("bn1", running_mean=None, running_var=None, track_running_stats=False),
    setter("body.2", negative_slope=0.5),
    setter("body.4", max_val=0.5),
    setter("body.4", __class__=nn.SiLU),
    setter("bn1", __class__=Doubled),
    setter("relu", __class__=Tanh),
    setter("body", __class__=Reversed),
    setter("pool", kernel_size=4, stride=4),
    setter("", scale=3),
    setter("", mode="max"),
    setter("", shifts=(0.5, 3.0)),
    setter("", extra=torch.tanh),
    setter("", extra=nn.Tanh()),
    setter("", order=[1]),
    setter("", settings=types.SimpleNamespace(offset=3.0)),
    setter("", relu=nn.GELU()),
    setter("", bn1=nn.Identity()),
    setter("", conv1=nn.Conv2d(8, 32, 3, padding=1).requires_grad_(False)),
    setter("", head=nn.Linear(32, 4).requires_grad_(False)),
    setter("blocks.0", forward=torch.tanh),
    setter("body", forward=torch.tanh),
):
    change(_made)
for _made in (
    setter("", best=0.5),
    setter("conv1", alpha=2, rank=4),
    setter("", names=["a", "b"]),
    setter("bn1", momentum=None),
    setter("bn1", training=False),
    setter("conv1", stride=tuple([1, 1]), kernel_size=tuple([3, 3])),
    setter("body", name="body"),
):
    harmless(_made)


@change
def groups(m):
    m.body[0].groups = 4
    m.body[0].weight = nn.Parameter(random(32, 8, 3, 3))


@change
def out_of_place(m):
    m.relu.inplace = False
    m.bn1.weight.mul_(2)


@change
def a_setting_of_an_object(m):
    m.settings.offset = 3.0


@change
def a_way_to_convolve_of_its_own(m):
    def convolve(self, x, weight, bias):
        return F.conv2d(F.pad(x, (1, 1, 1, 1), mode="reflect"), weight, bias)

    m.conv1._conv_forward = types.MethodType(convolve, m.conv1)


@change
def a_forward_of_its_own(m):
    m.forward = types.MethodType(lambda self, x: self.head(x.mean((2, 3)).repeat(1, 4)), m)


@change
def a_method_of_its_own(m):
    m._forward_impl = types.MethodType(lambda self, x: x.mean((2, 3)), m)


@called
def a_class_that_is_patched(m):
    def call(x):
        with mock.patch.object(nn.ReLU, "forward", lambda self, x: torch.tanh(x)):
            return m(x)

    return call


@called
def a_class_of_users_that_is_patched(m):
    def call(x):
        with mock.patch.object(Net, "_forward_impl", lambda self, x: x.mean((2, 3))):
            return m(x)

    return call


@called
def a_setting_of_a_class(m):
    def call(x):
        with mock.patch.object(Net, "factor", 2.0):
            return m(x)

    return call


@change
def a_buffer_registered_anew(m):
    del m.bn1.running_mean
    m.bn1.register_buffer("running_mean", torch.ones(32))


# ---- Layers -------------------------------------------------------------------------------------


@change
def another_layer_among_the_children(m):
    m._modules["conv1"] = nn.Conv2d(8, 32, 3, padding=1)


@change
def a_branch_of_low_rank(m):
    m.body[0] = LowRank(m.body[0])


@folded_anew
def a_branch_of_low_rank_folded_into_it(m):
    m.body[0].weight += torch.einsum("ikxy,ko->oixy", random(32, 2, 3, 3), random(2, 32))


@change
def a_batch_norm_for_several_processes(m):
    m.bn1.weight.mul_(2)
    nn.SyncBatchNorm.convert_sync_batchnorm(m)


@change
def batch_norm_folded_by_torch(m):
    m.bn1.weight.mul_(2)
    m.conv1 = nn.utils.fusion.fuse_conv_bn_eval(m.conv1, m.bn1)
    m.bn1 = nn.Identity()


@change
def layers_deleted(m):
    del m.body[3:]


@change
def a_layer_called_twice(m):
    m.body[3] = m.body[0]


@change
def layers_in_another_order(m):
    m.blocks[0], m.blocks[1] = m.blocks[1], m.blocks[0]
    m.blocks[0].weight.mul_(2)


@called
def a_slice(m):
    m.body[1].weight.mul_(2)
    return nn.Sequential(m.conv1, m.bn1, m.relu, m.body[:3])


@called
def a_part_called_by_itself(m):
    m.body[0].weight.mul_(2)
    return lambda x: m.body(m.conv1(x))


@change
def a_child_wrapped(m):
    m.body = nn.Sequential(m.body, nn.Tanh())


def pruned(layer, kind=prune.L1Unstructured, **options):
    kind.apply(layer, "weight", amount=0.5, **options)


@change
def pruned_for_good(m):
    pruned(m.conv1)
    m(X)
    prune.remove(m.conv1, "weight")


@change
def pruned_globally(m):
    layers = [(layer, "weight") for layer in m.modules() if isinstance(layer, nn.Conv2d)]
    prune.global_unstructured(layers, prune.L1Unstructured, amount=0.5)


@change
def weight_norm(m):
    parametrizations.weight_norm(m.conv1)
    m.conv1.parametrizations.weight.original0.mul_(2)


@change
def weight_norm_by_a_hook(m):
    with pytest.warns(FutureWarning):
        nn.utils.weight_norm(m.conv1)
    m.conv1.weight_g.mul_(2)


@change
def parametrized_and_back(m):
    parametrize.register_parametrization(m.conv1, "weight", OfFunction(torch.exp))
    m(X)
    parametrize.remove_parametrizations(m.conv1, "weight")


# ---- Hooks --------------------------------------------------------------------------------------


def hooked(path, register="register_forward_hook", **options):
    """A change that has a hook double what a part computes or takes."""

    def hook(module, args, *results):
        values = results[-1] if results else args
        return (values[0] * 2,) if isinstance(values, tuple) else values * 2

    def apply(m):
        getattr(m.get_submodule(path), register)(hook, **options)

    apply.__name__ = f"{register} {path or 'root'} {options or ''}"
    return apply


for _made in (
    *map(hooked, ("conv1", "bn1", "relu", "body", "body.4", "blocks.1", "pool", "head", "")),
    hooked("bn1", "register_forward_pre_hook"),
    hooked("body.3", prepend=True),
):
    change(_made)


@harmless
def a_hook_that_is_removed(m):
    handle = m.bn1.register_forward_hook(lambda *_: torch.zeros(()))
    with pytest.raises((IndexError, RuntimeError)):
        m(X)
    handle.remove()


@called
def a_hook_of_all_modules(m):
    def call(x):
        hook = nn.modules.module.register_module_forward_hook(
            lambda layer, _, result: result * 2 if isinstance(layer, nn.ReLU) else None
        )
        with hook:
            return m(x)

    return call


# ---- Copies, and layers of several models -------------------------------------------------------


@called
def a_copy(m):
    twin = copy.deepcopy(m)
    twin.conv1.weight.mul_(2)
    return twin


@called
def a_copy_with_another_setting(m):
    twin = copy.deepcopy(m)
    twin.body[4].max_val = 0.5
    return twin


@called
def a_copy_of_a_changed_model(m):
    m.body[4].max_val = 0.5
    return copy.deepcopy(m)


@called
def a_copy_of_a_hooked_model(m):
    hooked("bn1")(m)
    return copy.deepcopy(m)


@called
def a_pickle_of_a_changed_model(m):
    m.body[4].max_val = 0.5
    m.scale = 2
    return pickle.loads(pickle.dumps(m))


@change
def a_copy_of_a_part(m):
    m.body = copy.deepcopy(m.body)
    m.body[0].weight.mul_(2)


@change
def a_layer_of_two_models(m):
    other = nn.Sequential(m.conv1, m.bn1, nn.ReLU()).eval()
    convert_(other)
    other(X)
    m.conv1.weight.mul_(2)
    other(X)


@change
def a_layer_trained_in_another_model(m):
    other = nn.Sequential(m.conv1, m.bn1, nn.ReLU())
    other.train()(X * 3)
    other.eval()


# ---- In one line --------------------------------------------------------------------------------

FOLDED |= {
    "another parameter": lambda m: setattr(m.conv1, "weight", nn.Parameter(random(32, 8, 3, 3))),
    "a bias where there was none": lambda m: setattr(m.conv1, "bias", nn.Parameter(random(32))),
    "no bias": lambda m: setattr(m.blocks[0], "bias", None),
    "values copied": lambda m: m.body[0].weight.copy_(random(32, 32, 3, 3)),
    "values of many at once": lambda m: torch._foreach_mul_(list(m.parameters()), 1.5),
    "a function applied to a part": lambda m: m.conv1._apply(lambda tensor: tensor * 2),
    "a part cast and back": lambda m: m.body[0].to(torch.bfloat16).to(torch.float32),
    "swapped": lambda m: torch.utils.swap_tensors(
        m.conv1.weight, nn.Parameter(random(32, 8, 3, 3))
    ),
    "set to other memory": lambda m: m.conv1.weight.set_(random(32, 8, 3, 3)),
    "loaded": lambda m: m.load_state_dict(other_state(m)),
    "loaded by assignment": lambda m: m.load_state_dict(other_state(m), assign=True),
    "loaded in part": lambda m: m.load_state_dict(other_state(m, "body."), strict=False),
    "a part loaded": lambda m: m.body.load_state_dict(other_state(m.body), assign=True),
    "statistics updated": lambda m: update_bn(
        [pictures(channels=8, size=8, seed=seed) * 3 + 2 for seed in range(3)], m
    ),
    "statistics recalibrated": lambda m: recalibrated(m, lambda m, norms: m.eval()),
    "statistics recalibrated and norms put back": lambda m: recalibrated(
        m, lambda m, norms: [norm.eval() for norm in norms]
    ),
    "a step": lambda m: step(m, True),
    "a step in eval mode": lambda m: step(m, False),
    "a fused step in eval mode": lambda m: step(m, False, fused=True),
}
KEEPS |= {
    "shared memory": lambda m: m.share_memory(),
    "compiled in place": lambda m: m.body.compile(backend="eager"),
    "other weights for an earlier call": lambda m: other_weights_for_a_call(m)(X),
    "a backward hook": lambda m: m.bn1.register_full_backward_hook(lambda *_: None),
}
ACTS |= {
    "a list that is extended": lambda m: m.order.append(0),
    "statistics reset": lambda m: m.bn1.reset_running_stats(),
    "a layer inserted": lambda m: m.body.insert(2, nn.Tanh()),
    "a layer appended": lambda m: m.body.append(nn.Tanh()),
    "a layer popped": lambda m: m.body.pop(2),
    "pruned in part": lambda m: pruned(m.conv1),
    "pruned by channels": lambda m: pruned(m.body[0], prune.LnStructured, n=2, dim=0),
    "spectral norm": lambda m: parametrizations.spectral_norm(m.body[0]),
    "orthogonal": lambda m: parametrizations.orthogonal(m.body[3]),
}


# ---- The tests ----------------------------------------------------------------------------------


def network():
    torch.manual_seed(0)
    return trained(Net())


@cache
def converted(form):
    model = network()
    FORMS[form](model)
    return model


def results(call, m):
    return call(X.to(m.head.weight.dtype))


def assert_same(found, expected):
    tolerance = 0.1 if expected.dtype == torch.bfloat16 else 1e-3
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", [*FOLDED, *ACTS, *KEEPS])
@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_what_is_changed_acts(name, form):
    change = (FOLDED | ACTS | KEEPS)[name]
    twin = network()
    if form == "dense":
        convert_(model := network())
    else:  # a conversion takes longer than all the rest
        model = copy.deepcopy(converted(form))
    assert is_served(model, X)
    before, calls = model(X), []
    for m in (model, twin):
        torch.manual_seed(1)
        instead = change(m)
        calls.append(instead if change in CALLED else m)
    call, expected = calls[0], results(calls[1], twin)
    for _ in range(2):
        assert_same(results(call, model), expected)
    is_kept = before.shape == expected.shape and torch.allclose(before.to(expected), expected)
    assert is_kept == (name in KEEPS)
    if name in FOLDED or name in KEEPS:
        assert is_served(model, X.to(model.head.weight.dtype))
    try:
        refresh_(model)
    except RuntimeError as error:  # something else changed a class
        assert "(undo that first)" in str(error)  # noqa: PT017
    assert_same(results(call, model), expected)
