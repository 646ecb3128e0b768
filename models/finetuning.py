"""Fine-tuning of a trained VGG13 with skipping on: it learns to do without what is skipped.

The forward pass skips, the backward pass is that of the dense layers (spamm_torch's gradients). The
network learns the labels and the dense network's answers. It is a training like any other: it can
be stopped at any time and goes on from its checkpoint.
"""

import copy
from dataclasses import dataclass, field

import torch

from models.data import to_pictures
from models.training import TrainConfig, one_cycle, train
from models.vgg13 import CONVOLUTIONS
from spamm_torch import SpAMMConfig, convert_
from spamm_torch.networks.capture import capture
from spamm_torch.networks.channel_groups import find_groups, put_in_order
from spamm_torch.networks.channel_order import orders_by_norms
from spamm_torch.networks.example import Example
from spamm_torch.networks.sites import find_sites

SKIPPING = CONVOLUTIONS[1:]  # the first one has three input channels
_PIXEL_BLOCK = (64, 1, 1)
STATISTICS = 512  # images for the norms of channels
PEAK_LEARNING_RATE = 3e-4


@dataclass(frozen=True)
class FineTuneConfig:
    """All that decides the result of a fine-tuning, beside the images themselves.

    Attributes:
        settings: of the convolutions but the first, by name: each {"valid_ratio": number} or
            {"tau": number}.
        network: digest of the parameters that it starts from.
        trained: how these were trained; seed and batch are taken from there.
        steps: how many; None: one epoch, which is also the most.
        peak: the highest learning rate.
        temperature: by which answers are softened to be compared with the dense network's.
    """

    settings: dict[str, dict[str, float]]
    network: str
    trained: TrainConfig = field(default_factory=TrainConfig)
    steps: int | None = None
    peak: float = PEAK_LEARNING_RATE
    temperature: float = 4.0

    epochs = 1
    shifted_share = 0.0  # as the images are that the network is to serve

    @property
    def seed(self):
        return self.trained.seed

    @property
    def batch(self):
        return self.trained.batch

    def learning_rate(self, progress):
        """By the share of the steps that are made."""
        return one_cycle(self.peak, progress)


def skip_all(ratio):
    """The settings in which all convolutions but the first keep the same valid ratio."""
    return {name: {"valid_ratio": ratio} for name in SKIPPING}


def with_skipping(model, settings, **options):
    """A copy of a VGG13 whose convolutions skip.

    Args:
        model: it stays as it is.
        settings: of layers by name, as of a FineTuneConfig.
        options: of :func:`spamm_torch.convert_`. By default the network's own forward skips, in
            training too.
    """
    model = copy.deepcopy(model)
    overrides = {
        name: SpAMMConfig(**setting, pixel_block=_PIXEL_BLOCK) for name, setting in settings.items()
    }
    convert_(model, overrides=overrides, **{"fuse": False, **options})
    return model


def in_order(model, pictures):
    """A copy of a VGG13 whose channels are in the order of their norms, which computes the same.

    The order is convert_'s (reorder=True), but in the parameters themselves: so training skips in
    it, too.
    """
    model = copy.deepcopy(model).eval()
    [island] = capture(model).islands
    sites = find_sites(island, lambda *_: False)
    with torch.no_grad():
        _, inputs = Example(pictures).record(model, [])
        found = {site.name: inputs[site.conv][0] for site in sites}
        groups = find_groups(island, sites)
        put_in_order(island, groups, orders_by_norms(groups, set(SKIPPING), found))
        for site in sites:
            site.conv.weight.copy_(_ordered(site.conv.weight, 1, site.input_order))
            rows = [site.conv.weight, site.conv.bias]
            if site.batch_norm is not None:
                norm = site.batch_norm
                rows += [norm.weight, norm.bias, norm.running_mean, norm.running_var]
            for tensor in rows:
                tensor.copy_(_ordered(tensor, 0, site.output_order))
        for places in island.put_back.values():  # one pixel is left of the picture there
            model.fc1.weight.copy_(_ordered(model.fc1.weight, 1, places.argsort()))
    return model


def _ordered(tensor, dim, order):
    return tensor if order is None else tensor.index_select(dim, order.to(tensor.device))


def fine_tune(config, model, digits, path, device, report):
    """Fine-tunes a copy of a trained model, from the checkpoint at ``path`` where there is one.

    Args:
        config: a FineTuneConfig.
        model: the VGG13 to start from, whose digest the configuration has.
        digits, path, device, report: as of :func:`models.training.train`, which says what is
            raised, too.

    Returns:
        The fine-tuned model in eval mode, with skipping on. Its channels are in the order of their
        norms. Its state dict fits the VGG13 that it was made from.
    """
    training, _ = digits.split(config.seed)
    pictures = to_pictures(training.images[:STATISTICS]).to(model.conv11.weight.device)
    start = with_skipping(in_order(model, pictures), config.settings)
    teacher = copy.deepcopy(model).to(device).eval()
    return train(config, digits, path, device, report, start, teacher)
