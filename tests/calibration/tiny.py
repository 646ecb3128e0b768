"""A tiny network and pictures for it, in which skipping is worth something."""

import random
from collections import Counter, OrderedDict
from dataclasses import replace

import torch
from torch import nn

from spamm_torch._timing import Timing

CLASSES = 4
LEVELS = 60.0  # of an answer, for one unit of the output


def tiny_network(seed=0, batch_norm=False):
    """Two convolutions that may skip behind one that may not, in eval mode."""
    torch.manual_seed(seed)
    layers = OrderedDict()
    for name, (inner, outer) in {"a": (3, 32), "b": (32, 32), "c": (32, 64)}.items():
        layers[f"conv_{name}"] = nn.Conv2d(inner, outer, 3, padding=1)
        if batch_norm:
            layers[f"bn_{name}"] = nn.BatchNorm2d(outer)
        layers[f"relu_{name}"] = nn.ReLU()
    layers |= {"pool": nn.AdaptiveAvgPool2d(2), "flatten": nn.Flatten()}
    layers["head"] = nn.Linear(4 * 64, CLASSES)
    model = nn.Sequential(layers)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_var, 0.5, 1.5)
    return model.eval()


def dark_pictures(count=8, seed=0, channels=3, size=16):
    """Pictures that are bright in one corner, each in its own way."""
    generator = torch.Generator().manual_seed(seed)
    fade = torch.linspace(1, 0, size) ** 4
    return torch.rand(count, channels, size, size, generator=generator) * fade * fade[:, None]


def state_of(model):
    """All that must not change, as something that can be compared."""
    modules = [
        (type(module), module.training, list(module.__dict__), dict(module._forward_hooks))
        for module in model.modules()
    ]
    tensors = [(id(t), t._version, t.clone()) for t in model.state_dict(keep_vars=True).values()]
    return modules, tensors, torch.get_rng_state(), random.getstate()


def assert_unchanged(model, before):
    (modules, tensors, *generators), now = before, state_of(model)
    assert now[0] == modules
    for (id_now, version_now, now_tensor), (id_was, version, tensor) in zip(
        now[1], tensors, strict=True
    ):
        assert (id_now, version_now) == (id_was, version)
        assert torch.equal(now_tensor, tensor)
    assert torch.equal(now[2], generators[0])
    assert now[3] == generators[1]


def linear_time(trial):
    """Time in proportion to what is computed; converting alone saves a tenth."""
    return 110.0 if trial.what == "as it was" else 100.0 * trial.valid_ratio


def made_up(time_of):
    """What measures runs of the model: each part takes ``time_of(trial)`` in each of its calls."""

    def measure(runs, _, around):
        found = {}
        for (trials, run), context in zip(runs, around, strict=True):
            calls = Counter({"": 1})
            with context():
                run(lambda name, calls=calls: calls.update([name]))
            for name, trial in trials.items():
                if calls[name]:
                    time = time_of(trial)
                    time = time if isinstance(time, Timing) else Timing(time)
                    found[trial] = replace(time, median=time.median * (calls[name] if name else 1))
        return found

    return measure


class Agreement:
    """An ``evaluate``: the percentage of pictures that the model answers as the given one does.

    Answers are the levels of one output, of each picture from another offset on: the share that
    changes grows with the error.
    """

    def __init__(self, model, loader):
        self._answers, self.calls = {}, 0
        with torch.no_grad():
            for pictures, _ in loader:
                self._answers[id(pictures)] = self.answer(model, pictures)

    def answer(self, model, pictures):
        outputs = model(pictures)[:, 0].double().cpu()
        return (outputs * LEVELS + torch.linspace(0, 1, len(pictures))).floor()

    def __call__(self, model, half):
        self.calls += 1
        found = torch.cat([self.answer(model, pictures) for pictures, _ in half])
        expected = torch.cat([self._answers[id(pictures)] for pictures, _ in half])
        return 100 * (found == expected).double().mean().item(), found
