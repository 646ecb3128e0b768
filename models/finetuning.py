"""Fine-tuning of a trained VGG13 with skipping on: it learns to do without what is skipped.

The forward pass skips, the backward pass is that of the dense layers (spamm_torch's gradients). The
network learns the labels and the dense network's answers. It is a training like any other: it can
be stopped at any time and goes on from its checkpoint.
"""

import copy
from dataclasses import dataclass, field

from models.training import TrainConfig, one_cycle, train
from models.vgg13 import CONVOLUTIONS
from spamm_torch import SpAMMConfig, convert_

SKIPPING = CONVOLUTIONS[1:]  # the first one has three input channels
_PIXEL_BLOCK = (64, 1, 1)
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


def with_skipping(model, settings, **options):
    """A copy of a VGG13 whose convolutions skip by these settings, as of a FineTuneConfig.
    ``options``: of :func:`spamm_torch.convert_`; else its own forward skips, in training too.
    """
    model = copy.deepcopy(model)
    overrides = {
        name: SpAMMConfig(**setting, pixel_block=_PIXEL_BLOCK) for name, setting in settings.items()
    }
    convert_(model, overrides=overrides, **{"fuse": False, **options})
    return model


def fine_tune(config, model, digits, path, device, report):
    """Fine-tunes a copy of a trained model, whose digest the FineTuneConfig has; else as
    :func:`models.training.train`. The result is in eval mode, with skipping on.
    """
    start = with_skipping(model, config.settings)
    teacher = copy.deepcopy(model).to(device).eval()
    return train(config, digits, path, device, report, start, teacher)
