"""Accuracy of the network with convolutions replaced by SpAMM at a given valid ratio."""

from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import nn

import spamm_torch
from models.training import accuracy


@dataclass(frozen=True)
class Accuracy:
    """What one setting does to the network, over all validation batches."""

    percent: float
    valid_ratio: float  # of all block products of all replaced layers and batches
    taus: dict[str, float]  # layer -> mean over the batches


class HeldRatio(nn.Module):
    """A convolution by SpAMM whose threshold is found anew for each batch, to hold a valid ratio.

    It is what the knob ``valid_ratio`` does, in two steps, so that the thresholds and the ratios
    that were reached can be reported.
    """

    def __init__(self, layout, conv, ratio):
        super().__init__()
        self._layout, self._conv, self._ratio = layout, conv, ratio
        self.taus = []
        self.valid = self.total = 0

    def forward(self, x):
        return self._layout.run(self._conv, x, self._choose_tau)

    def _choose_tau(self, norm_a, norm_b):
        tau = spamm_torch.find_tau(norm_a, norm_b, self._ratio)
        self.taus.append(tau)
        self.valid += spamm_torch.valid_counts(norm_a, norm_b, tau).sum()
        self.total += norm_a.numel() * norm_b.shape[1]
        return tau


@torch.inference_mode()
def cached_inputs(model, start, batches, dtype):
    """The inputs of the layer ``start`` for all batches, with the labels: computed once."""
    before, _ = model.split(start)
    return [(before(pictures.to(dtype)), labels) for pictures, labels in batches]


def dense_accuracy(model, group, inputs):
    return accuracy(_chain(model, group.start), inputs)


def spamm_accuracy(model, group, layout, ratio, inputs):
    """Accuracy with the group's convolutions replaced, from cached inputs of its start."""
    network, replaced = with_spamm(model, group, layout, ratio)
    percent = accuracy(network, inputs)
    valid = int(sum(layer.valid for layer in replaced.values()))
    return Accuracy(
        percent=percent,
        valid_ratio=valid / sum(layer.total for layer in replaced.values()),
        taus={name: torch.stack(layer.taus).mean().item() for name, layer in replaced.items()},
    )


def with_spamm(model, group, layout, ratio):
    """The model from the group's start on with its convolutions replaced, and these by name."""
    replaced = {name: HeldRatio(layout, getattr(model, name), ratio) for name in group.layers}
    return _chain(model, group.start, replaced), replaced


def _chain(model, start, replaced=()):
    """The model from the layer ``start`` on, with some layers replaced."""
    layers = OrderedDict(model.named_children())
    for name in list(layers):
        if name == start:
            break
        del layers[name]
    return nn.Sequential(OrderedDict(layers | dict(replaced))).eval()
