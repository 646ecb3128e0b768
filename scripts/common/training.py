"""VGG13 on MNIST for benchmarks: trained where no checkpoint has it.

Without options: the plain network of the paper on the 10,000 embedded images, three to four minutes
on two CPU cores, seconds on a GPU.
"""

from dataclasses import fields
from pathlib import Path

from common.options import add, add_device_option, number, positive_integer
from models.data import ROOT_VARIABLE, load_digits
from models.files import require_writable
from models.training import MODELS, TrainConfig, train

DEFAULT_CHECKPOINT = Path("checkpoints/vgg13.pt")
_MAX_WIDTH = 1024  # sixteen times VGG's own: 2.4 GB for the largest layer

_width = number(int, lambda value: 1 <= value <= _MAX_WIDTH, f"an integer from 1 to {_MAX_WIDTH}")
_seed = number(int, lambda value: 0 <= value < 2**63, "an integer from 0 to 2^63 - 1")


def add_training_options(parser):
    """Adds the options, which must be those of a checkpoint that there is."""
    group = parser.add_argument_group("training (of the checkpoint, where there is one)")
    what = "where the trained network is kept"
    add(group, "--checkpoint", what, DEFAULT_CHECKPOINT, type=Path)
    what, said = "folder that holds MNIST/raw", f"${ROOT_VARIABLE}, else the embedded images"
    add(group, "--data", what, None, said, metavar="ROOT", type=Path)

    def option(flag, text, **rest):
        add(group, flag, text, getattr(TrainConfig, flag[2:]), **rest)

    option("--full", "all 70,000 images of MNIST, not the 10,000 of t10k", action="store_true")
    option("--model", "plain, or with batch norm", choices=MODELS)
    option("--epochs", "passes over the training images", type=positive_integer)
    option("--batch", "images a batch", type=positive_integer)
    option("--width", "channels of the first stage", type=_width)
    option("--seed", "decides parameters, split, order and shifts", type=_seed)
    add_device_option(parser)


def train_or_load(options):
    """The trained model that the options ask for, its TrainConfig and Digits."""
    config = TrainConfig(**{of.name: getattr(options, of.name) for of in fields(TrainConfig)})
    require_writable(options.checkpoint.parent)
    digits = load_digits(options.data, config.full)
    print(f"data: {digits.description}")

    def report(message):
        print(f"training {config.model}: {message}", flush=True)

    return train(config, digits, options.checkpoint, options.device, report), config, digits
