"""Cases of whole networks: fused by the backend, converted too, and put back."""

import copy
import functools
import random

import torch
from torch import nn

import spamm_torch

from .space import DTYPES, expect

NETWORK = {"dtype": ("float32", "float64", "float16", "bfloat16"), "layers": (1, 2, 3, 5, 8)}
NETWORK |= {"channels": (8, 16, 33, 64, 72), "images": (1, 2, 5, 64, 65), "size": (4, 7, 8, 12)}
NETWORK |= {"last": (False, True), "seed": tuple(range(10000))}
NETWORK |= {"form": ("plain", "tau", "fresh weights")}


ACTIVATIONS = (nn.Identity, nn.ReLU, nn.ReLU6, nn.Hardswish, nn.SiLU, nn.LeakyReLU, nn.PReLU)
ACTIVATIONS += (functools.partial(nn.LeakyReLU, -0.3),)


class Network(nn.Module):
    """Convolutions with what may follow them, in an order that a seed draws."""

    def __init__(self, inner, channels, layers, size, seed):
        super().__init__()
        rng = random.Random(seed)
        self.steps, self.layers = [], nn.ModuleList()
        for _ in range(layers):
            kernel, groups = rng.choice((1, 3, 3, 5)), rng.choice((1, 1, 1, channels))
            more = {"padding": kernel // 2, "bias": rng.random() < 0.7}
            more["groups"] = groups if inner == channels else 1
            norm = nn.BatchNorm2d(channels) if rng.random() < 0.5 else nn.Identity()
            activation = rng.choice(ACTIVATIONS)()
            self.layers.extend((nn.Conv2d(inner, channels, kernel, **more), norm, activation))
            possible = ["none", "none", "cat"] + ["add"] * (inner == channels)
            possible += ["pool"] * (size >= 2) + ["up"] * (size <= 12)
            self.steps.append(rng.choice(possible))
            size = {"pool": size // 2, "up": 2 * size}.get(self.steps[-1], size)
            inner = 2 * channels if self.steps[-1] == "cat" else channels
        self.pool, self.up = nn.MaxPool2d(2), nn.Upsample(scale_factor=2)
        self.head = nn.Linear(inner, 5)

    def forward(self, x):
        for index, step in enumerate(self.steps):
            conv, norm, activation = self.layers[3 * index : 3 * index + 3]
            y = norm(conv(x))
            if step == "add":
                y = y + x
            y = activation(y)
            if step == "pool":
                y = self.pool(y)
            elif step == "up":
                y = self.up(y)
            elif step == "cat":
                y = torch.cat((y, activation(y)), 1)
            x = y
        return self.head(x.mean((2, 3)))


def network(case, device):
    """A network fused by the backend answers as before, also with layers that skip nothing; and
    revert_ gives back every bit."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    dtype, seed = DTYPES[case["dtype"]], case["seed"]
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Network(3, case["channels"], case["layers"], case["size"], seed).eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.uniform_(-0.5, 0.5, generator=generator)
            module.running_var.uniform_(0.5, 2, generator=generator)
    last = {"memory_format": torch.channels_last if case["last"] else torch.preserve_format}
    x = torch.randn(case["images"], 3, case["size"], case["size"], generator=generator)
    model, x = model.to(device, dtype, **last), x.to(device, dtype, **last)
    twin = copy.deepcopy(model).double()
    keys = list(model.state_dict())
    with torch.no_grad():
        before = model(x)
        if case["form"] == "tau":
            spamm_torch.convert_(model, tau=0.0)
        torch._dynamo.reset()
        options = {"inner": "eager", "measure": False}
        model.compile(backend="spamm_torch", options=options, dynamic=False)
        _expect_close(model(x), twin(x.double()), before, "the fused network")
        if case["form"] == "fresh weights":  # which folded weights must follow
            for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
                parameter.mul_(0.5)
                other.copy_(parameter)
            _expect_close(model(x), twin(x.double()), None, "after its weights changed")
            for parameter in model.parameters():
                parameter.mul_(2)  # exactly what it was, if it is no subnormal
        expect(list(model.state_dict()) == keys, "the keys of the state dict")
        model._compiled_call_impl = None
        spamm_torch.revert_(model)
        again = model(x)
    same = case["form"] == "fresh weights" or torch.equal(again, before)
    expect(same, "revert_ does not give the bits back")


def _expect_close(found, wanted, before, what):
    """As near to the network in float64 as the dense one in its own type, within 8 times."""
    u = {torch.float32: 2.0**-22, torch.float64: 2.0**-46}.get(found.dtype)
    u = u or torch.finfo(found.dtype).eps / 2
    wanted = wanted.double()
    off, size = (found.double() - wanted).norm().item(), wanted.norm().item()
    allowed = 64 * u * (size + 1)
    allowed += 0 if before is None else 8 * (before.double() - wanted).norm().item()
    expect(off <= allowed, f"{what}: off by {off:.3g} of {size:.3g}, allowed {allowed:.3g}")
