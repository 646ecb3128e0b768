"""A tiny network and pictures for it, in which skipping is worth something."""

import contextlib
import random
from collections import OrderedDict

import torch
from torch import nn

from spamm_torch import convert_

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
    """All that must not change, as something that can be compared; and the tensors' values."""
    modules = [
        (type(module), module.training, list(module.__dict__), dict(module._forward_hooks))
        for module in model.modules()
    ]
    tensors = model.state_dict(keep_vars=True).values()
    places = [(id(t), t._version, t.data_ptr(), t.dtype) for t in tensors]
    generators = torch.get_rng_state().tolist(), random.getstate()
    return (modules, places, generators), [t.clone() for t in tensors]


@contextlib.contextmanager
def unchanged(model):
    """Whatever the block does, and however it ends, the model and generators stay as they are."""
    before, values = state_of(model)
    try:
        yield
    finally:
        after, found = state_of(model)
        assert after == before
        assert all(map(torch.equal, found, values))


def from_file(report, folder, model):
    """The rows of a conversion by a report's settings file."""
    report.save(folder / "net.json")
    return convert_(model, folder / "net.json")


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
        return 100 * (found == expected).double().mean().item()
