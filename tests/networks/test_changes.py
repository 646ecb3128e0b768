"""Changes of a model after ``convert_``: they act as on the model that was not converted."""

import contextlib
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
            x = x + self.blocks[place](x)
        x = (
            self.pool(self.body(x)) * (self.factor * self.scale)
            + self.shifts[1]
            + self.settings.offset
        )
        x = x if self.extra is None else self.extra(x)
        x = self.head(x.mean((2, 3)) if self.mode == "sum" else x.amax((2, 3)))
        return self.last(F.relu(x))


CONVOLUTIONS = ("conv1", "blocks.0", "blocks.1", "body.0", "body.3")
X = pictures(channels=8, size=8)


def skipping(model, tau):
    convert_(model, overrides=dict.fromkeys(CONVOLUTIONS, SpAMMConfig(tau=tau)))


FORMS = {
    "dense": convert_,
    "packed": convert_,  # on a CPU weights that lie channels last are packed
    "nothing skipped": partial(skipping, tau=0.0),
    "held tau": partial(skipping, tau=1e-30),  # so small that nothing is skipped, either
}


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


# ---- Parts of changes ----------------------------------------------------------------------------


def in_place(m):
    m.conv1.weight.mul_(2)
    m.body[1].running_var.add_(1)


def cast(set_how):
    """A change of values and of their type, where torch converts modules in another way."""

    def apply(m):
        in_place(m)
        set_how(True)
        try:
            m.double()
        finally:
            set_how(False)

    return apply


def memory_elsewhere_and_back(m):
    """The memory of the first is free again when the second is made."""
    weight = m.body[3].weight
    values = random(32, 32, 1, 1).numpy()
    weight.data = torch.zeros(1)
    weight.data = torch.tensor(values)


def from_a_vector(m):
    vector = nn.utils.parameters_to_vector(m.parameters())
    nn.utils.vector_to_parameters(vector * 1.3, m.parameters())


def with_other_weights(m):
    weights = {name: value * 1.2 for name, value in m.named_parameters()}
    return lambda x: functional_call(m, weights, (x,))


def with_other_statistics(m):
    buffers = {"bn1.running_mean": random(32), "body.1.running_var": random(32).exp()}
    return lambda x: functional_call(m, buffers, (x,))


def other_state(m, part=""):
    state = {name: value for name, value in m.state_dict().items() if name.startswith(part)}
    return {
        name: value * 1.3 if value.is_floating_point() else value for name, value in state.items()
    }


def averaged_with_another(m):
    average, other = AveragedModel(m), copy.deepcopy(m)
    other.body[0].weight.mul_(3)
    for each in (m, other):
        average.update_parameters(each)
    return average.eval()


def a_moving_average_copied_into_it(m):
    average = AveragedModel(m, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    average.update_parameters(m)
    in_place(m)
    average.update_parameters(m)
    m.load_state_dict(average.module.state_dict())


def recalibrated(m, context=contextlib.nullcontext, by_norms=False):
    norms = [layer for layer in m.modules() if isinstance(layer, nn.BatchNorm2d)]
    with context():
        for norm in norms:
            norm.momentum = None
            norm.train()
        for seed in range(3):
            m(pictures(channels=8, size=8, seed=seed) * 3 + 2)
        for part in norms if by_norms else [m]:
            part.eval()


def trained_by_itself(part):
    part.train()(torch.randn(4, 32, 5, 5) * 3)
    part.eval()


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


def gradients_on_and_off(m):
    for wants in (False, True, False):
        m.requires_grad_(wants)
        with torch.enable_grad():
            m(X)


def patched(of, name, value):
    """A call while an attribute of a class is another."""

    def change(m):
        def call(x):
            with mock.patch.object(of, name, value):
                return m(x)

        return call

    return change


def with_layers_in_another_order(m):
    m.blocks[0], m.blocks[1] = m.blocks[1], m.blocks[0]
    m.blocks[0].weight.mul_(2)


def pruned(layer, kind=prune.L1Unstructured, **options):
    kind.apply(layer, "weight", amount=0.5, **options)


def weight_norm_by_a_hook(m):
    with pytest.warns(FutureWarning):
        nn.utils.weight_norm(m.conv1)
    m.conv1.weight_g.mul_(2)


def hooked(path, register="register_forward_hook", **options):
    """A change that has a hook double what a part computes or takes."""

    def hook(module, args, *results):
        values = results[-1] if results else args
        return (values[0] * 2,) if isinstance(values, tuple) else values * 2

    return lambda m: getattr(m.get_submodule(path), register)(hook, **options)


def a_hook_that_is_removed(m):
    handle = m.bn1.register_forward_hook(lambda *_: torch.zeros(()))
    with pytest.raises((IndexError, RuntimeError)):
        m(X)
    handle.remove()


def with_a_hook_of_all_modules(m):
    def call(x):
        hook = nn.modules.module.register_module_forward_hook(
            lambda layer, _, result: result * 2 if isinstance(layer, nn.ReLU) else None
        )
        with hook:
            return m(x)

    return call


def a_layer_of_two_models(m):
    other = nn.Sequential(m.conv1, m.bn1, nn.ReLU()).eval()
    convert_(other)
    other(X)
    m.conv1.weight.mul_(2)
    other(X)


def setter(path, **values):
    """A change that sets attributes of a part."""

    def apply(m):
        for name, value in values.items():
            setattr(m.get_submodule(path), name, value)

    return apply


def settings(*changes):
    """{a name: a change} of pairs of a part's path and its attributes."""
    return {
        f"{path or 'root'} { {n: getattr(v, '__name__', v) for n, v in values.items()} }": setter(
            path, **values
        )
        for path, values in changes
    }


# ---- The changes ---------------------------------------------------------------------------------

# After these, operands are folded anew.
FOLDED = {
    "values in place": in_place,
    "initialised": lambda m: [
        layer.reset_parameters()
        for layer in m.modules()
        if isinstance(layer, (nn.Conv2d, nn.BatchNorm2d))
    ],
    "another parameter": lambda m: setattr(m.conv1, "weight", nn.Parameter(random(32, 8, 3, 3))),
    "a parameter in the register": lambda m: m.conv1._parameters.update(
        weight=nn.Parameter(random(32, 8, 3, 3))
    ),
    "a bias where there was none": lambda m: setattr(m.conv1, "bias", nn.Parameter(random(32))),
    "no bias": lambda m: setattr(m.blocks[0], "bias", None),
    "values copied": lambda m: m.body[0].weight.copy_(random(32, 32, 3, 3)),
    "values of many at once": lambda m: torch._foreach_mul_(list(m.parameters()), 1.5),
    "a function applied to a part": lambda m: m.conv1._apply(lambda tensor: tensor * 2),
    "swapped": lambda m: torch.utils.swap_tensors(
        m.conv1.weight, nn.Parameter(random(32, 8, 3, 3))
    ),
    "set to other memory": lambda m: m.conv1.weight.set_(random(32, 8, 3, 3)),
    "memory elsewhere": lambda m: (
        setattr(m.conv1.weight, "data", random(32, 8, 3, 3)),
        setattr(m.body[1].running_mean, "data", random(32)),
    ),
    "memory elsewhere and back": memory_elsewhere_and_back,
    "from a vector": from_a_vector,
    "from a vector twice": lambda m: (from_a_vector(m), m(X), from_a_vector(m)),
    "cast": cast(lambda _: None),
    "cast to half of it": lambda m: (in_place(m), m.bfloat16()),
    "a part cast and back": lambda m: m.body[0].to(torch.bfloat16).to(torch.float32),
    "cast to new parameters": cast(torch.__future__.set_overwrite_module_params_on_conversion),
    "cast by swapping": cast(torch.__future__.set_swap_module_params_on_conversion),
    "loaded": lambda m: m.load_state_dict(other_state(m)),
    "loaded by assignment": lambda m: m.load_state_dict(other_state(m), assign=True),
    "loaded in part": lambda m: m.load_state_dict(other_state(m, "body."), strict=False),
    "a part loaded": lambda m: m.body.load_state_dict(other_state(m.body), assign=True),
    "loaded by a parent": lambda m: (parent := nn.ModuleDict({"net": m})).load_state_dict(
        other_state(parent), assign=True
    ),
    "a moving average copied into it": a_moving_average_copied_into_it,
    "statistics updated": lambda m: update_bn(
        [pictures(channels=8, size=8, seed=seed) * 3 + 2 for seed in range(3)], m
    ),
    "statistics recalibrated": recalibrated,
    "statistics recalibrated and norms put back": lambda m: recalibrated(m, by_norms=True),
    "statistics recalibrated in inference mode": lambda m: recalibrated(m, torch.inference_mode),
    "statistics recalibrated of a frozen model": lambda m: recalibrated(
        m.requires_grad_(False), torch.enable_grad
    ),
    "statistics recalibrated under autocast": lambda m: recalibrated(
        m, partial(torch.autocast, "cpu", torch.bfloat16)
    ),
    "a batch norm trained by itself": lambda m: trained_by_itself(m.bn1),
    "a part trained by itself": lambda m: trained_by_itself(m.body),
    "modes set as attributes": modes_set_as_attributes,
    "a step": lambda m: step(m, True),
    "a step in eval mode": lambda m: step(m, False),
    "a fused step in eval mode": lambda m: step(m, False, fused=True),
    "a step of a part": lambda m: (
        *(m.requires_grad_(False), m.body.requires_grad_()),
        step(m, False, fused=False),
    ),
    "a branch of low rank folded into it": lambda m: m.body[0].weight.add_(
        torch.einsum("ikxy,ko->oixy", random(32, 2, 3, 3), random(2, 32))
    ),
}
# These leave results as they were.
KEEPS = settings(
    *(("", {"best": 0.5}), ("conv1", {"alpha": 2, "rank": 4}), ("", {"names": ["a", "b"]})),
    *(("bn1", {"momentum": None}), ("bn1", {"training": False})),
    ("conv1", {"stride": tuple([1, 1]), "kernel_size": tuple([3, 3])}),
    ("body", {"name": "body"}),
) | {
    "channels last": lambda m: (
        m.to(memory_format=torch.channels_last),
        nn.utils.convert_conv2d_weight_memory_format(m, torch.contiguous_format),
    ),
    "marked again and again": lambda m: [(setattr(m, "epoch", n), m(X)) for n in range(3)],
    "wrapped in place": lambda m: (  # as accelerate does it
        setattr(m, "_old_forward", m.forward),
        setattr(m, "forward", types.MethodType(lambda self, x: self._old_forward(x), m)),
    ),
    "gradients on and off": gradients_on_and_off,
    "a hook that is removed": a_hook_that_is_removed,
    "shared memory": lambda m: m.share_memory(),
    "compiled in place": lambda m: m.body.compile(backend="eager"),
    "other weights for an earlier call": lambda m: with_other_weights(m)(X),
    "a backward hook": lambda m: m.bn1.register_full_backward_hook(lambda *_: None),
}
# After these, the model's own forward runs.
ACTS = settings(
    ("conv1", {"padding_mode": "circular", "_reversed_padding_repeated_twice": [1, 1, 1, 1]}),
    *(("conv1", {"padding": (2, 2)}), ("conv1", {"padding": "valid"})),
    *(("conv1", {"stride": (2, 2)}), ("body.0", {"dilation": (2, 2), "padding": (2, 2)})),
    *(("bn1", {"eps": 0.5}), ("bn1", {"weight": None}), ("bn1", {"running_mean": torch.ones(32)})),
    ("bn1", {"running_mean": None, "running_var": None, "track_running_stats": False}),
    *(("body.2", {"negative_slope": 0.5}), ("body.4", {"max_val": 0.5})),
    *(("body.4", {"__class__": nn.SiLU}), ("bn1", {"__class__": Doubled})),
    *(("relu", {"__class__": Tanh}), ("body", {"__class__": Reversed})),
    *(("pool", {"kernel_size": 4, "stride": 4}), ("", {"scale": 3}), ("", {"mode": "max"})),
    *(("", {"shifts": (0.5, 3.0)}), ("", {"extra": torch.tanh}), ("", {"extra": nn.Tanh()})),
    *(("", {"order": [1]}), ("", {"settings": types.SimpleNamespace(offset=3.0)})),
    *(("", {"relu": nn.GELU()}), ("", {"bn1": nn.Identity()})),
    ("", {"conv1": nn.Conv2d(8, 32, 3, padding=1).requires_grad_(False)}),
    ("", {"head": nn.Linear(32, 8).requires_grad_(False)}),
    *(("blocks.0", {"forward": torch.tanh}), ("body", {"forward": torch.tanh})),
) | {
    "groups": lambda m: (
        setattr(m.body[0], "groups", 4),
        setattr(m.body[0], "weight", nn.Parameter(random(32, 8, 3, 3))),
    ),
    "out of place": lambda m: (setattr(m.relu, "inplace", False), m.bn1.weight.mul_(2)),
    "a setting of an object": lambda m: setattr(m.settings, "offset", 3.0),
    "a list that is extended": lambda m: m.order.append(0),
    "a way to convolve of its own": lambda m: setattr(
        m.conv1,
        "_conv_forward",
        lambda x, *operands: F.conv2d(F.pad(x, (1, 1, 1, 1), mode="reflect"), *operands),
    ),
    "a forward of its own": lambda m: setattr(
        m, "forward", types.MethodType(lambda m, x: m.head(x.mean((2, 3)).repeat(1, 4)), m)
    ),
    "a method of its own": lambda m: setattr(
        m, "_forward_impl", types.MethodType(lambda self, x: x.mean((2, 3)), m)
    ),
    "a buffer registered anew": lambda m: (
        delattr(m.bn1, "running_mean"),
        m.bn1.register_buffer("running_mean", torch.ones(32)),
    ),
    "statistics reset": lambda m: m.bn1.reset_running_stats(),
    "statistics of which no counter tells": lambda m: (
        setattr(m.bn1, "num_batches_tracked", None),
        F.batch_norm(random(2, 32, 4, 4), m.bn1.running_mean, m.bn1.running_var, training=True),
    ),
    "another layer among the children": lambda m: m._modules.update(
        conv1=nn.Conv2d(8, 32, 3, padding=1)
    ),
    "a branch of low rank": lambda m: m.body.__setitem__(0, LowRank(m.body[0])),
    "a batch norm for several processes": lambda m: (
        m.bn1.weight.mul_(2),
        nn.SyncBatchNorm.convert_sync_batchnorm(m),
    ),
    "batch norm folded by torch": lambda m: (
        m.bn1.weight.mul_(2),
        setattr(m, "conv1", nn.utils.fusion.fuse_conv_bn_eval(m.conv1, m.bn1)),
        setattr(m, "bn1", nn.Identity()),
    ),
    "layers deleted": lambda m: m.body.__delitem__(slice(3, None)),
    "a layer inserted": lambda m: m.body.insert(2, nn.Tanh()),
    "a layer appended": lambda m: m.body.append(nn.Tanh()),
    "a layer popped": lambda m: m.body.pop(2),
    "a layer called twice": lambda m: m.body.__setitem__(3, m.body[0]),
    "layers in another order": with_layers_in_another_order,
    "a child wrapped": lambda m: setattr(m, "body", nn.Sequential(m.body, nn.Tanh())),
    "pruned in part": lambda m: pruned(m.conv1),
    "pruned by channels": lambda m: pruned(m.body[0], prune.LnStructured, n=2, dim=0),
    "pruned for good": lambda m: (pruned(m.conv1), m(X), prune.remove(m.conv1, "weight")),
    "pruned globally": lambda m: prune.global_unstructured(
        [(layer, "weight") for layer in m.modules() if isinstance(layer, nn.Conv2d)],
        prune.L1Unstructured,
        amount=0.5,
    ),
    "spectral norm": lambda m: parametrizations.spectral_norm(m.body[0]),
    "orthogonal": lambda m: parametrizations.orthogonal(m.body[3]),
    "weight norm": lambda m: (
        parametrizations.weight_norm(m.conv1),
        m.conv1.parametrizations.weight.original0.mul_(2),
    ),
    "weight norm by a hook": weight_norm_by_a_hook,
    "parametrized and back": lambda m: (
        parametrize.register_parametrization(m.conv1, "weight", OfFunction(torch.exp)),
        m(X),
        parametrize.remove_parametrizations(m.conv1, "weight"),
    ),
    **{
        f"a hook of {path or 'the root'}": hooked(path)
        for path in (
            "conv1",
            "bn1",
            "relu",
            "body",
            "body.4",
            "blocks.1",
            "pool",
            "head",
            "last",
            "",
        )
    },
    "a hook before bn1": hooked("bn1", "register_forward_pre_hook"),
    "a hook before other hooks": hooked("body.3", prepend=True),
    "a copy of a part": lambda m: (
        setattr(m, "body", copy.deepcopy(m.body)),
        m.body[0].weight.mul_(2),
    ),
    "a layer of two models": a_layer_of_two_models,
    "a layer trained in another model": lambda m: (
        other := nn.Sequential(m.conv1, m.bn1, nn.ReLU()),
        *(other.train()(X * 3), other.eval()),
    ),
}
# These return what is called in the model's place.
CALLED = {
    "other weights for a call": with_other_weights,
    "other statistics for a call": with_other_statistics,
    "averaged with another": averaged_with_another,
    "a class that is patched": patched(nn.ReLU, "forward", lambda self, x: torch.tanh(x)),
    "a class of users that is patched": patched(
        Net, "_forward_impl", lambda self, x: x.mean((2, 3))
    ),
    "a setting of a class": patched(Net, "factor", 2.0),
    "a slice": lambda m: (
        m.body[1].weight.mul_(2),
        nn.Sequential(m.conv1, m.bn1, m.relu, m.body[:3]),
    )[1],
    "a part called by itself": lambda m: (m.body[0].weight.mul_(2), lambda x: m.body(m.conv1(x)))[
        1
    ],
    "a hook of all modules": with_a_hook_of_all_modules,
    "a copy": lambda m: (twin := copy.deepcopy(m), twin.conv1.weight.mul_(2))[0],
    "a copy with another setting": lambda m: (
        twin := copy.deepcopy(m),
        setattr(twin.body[4], "max_val", 0.5),
    )[0],
    "a copy of a changed model": lambda m: (setattr(m.body[4], "max_val", 0.5), copy.deepcopy(m))[
        1
    ],
    "a copy of a hooked model": lambda m: (hooked("bn1")(m), copy.deepcopy(m))[1],
    "a pickle of a changed model": lambda m: (
        setattr(m.body[4], "max_val", 0.5),
        setattr(m, "scale", 2),
        pickle.loads(pickle.dumps(m)),
    )[2],
}


# ---- The tests ----------------------------------------------------------------------------------


def network(form):
    torch.manual_seed(0)
    layout = torch.channels_last if form == "packed" else torch.contiguous_format
    return trained(Net()).to(memory_format=layout)


@cache
def converted(form):
    model = network(form)
    FORMS[form](model)
    return model


def results(call, m):
    return call(X.to(m.head.weight.dtype))


def assert_same(found, expected):
    tolerance = 0.1 if expected.dtype == torch.bfloat16 else 1e-3
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


CASES = [(name, form) for name in FOLDED for form in FORMS if form != "packed"]
CASES += [(name, "packed") for name in ("values in place", "loaded", "cast", "a step")]
CASES += [
    pytest.param(name, form, marks=[] if form == "dense" else pytest.mark.thorough)
    for name in (*ACTS, *KEEPS, *CALLED)
    for form in FORMS
    if form != "packed"
]


@pytest.mark.parametrize(("name", "form"), CASES)
@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_what_is_changed_acts(name, form):
    change = (FOLDED | ACTS | KEEPS | CALLED)[name]
    twin = network(form)
    if form == "dense":
        convert_(model := network(form))
    else:  # a conversion takes longer than all the rest
        model = copy.deepcopy(converted(form))
    assert is_served(model, X)
    before, calls = model(X), []
    for m in (model, twin):
        torch.manual_seed(1)
        instead = change(m)
        calls.append(instead if name in CALLED else m)
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
