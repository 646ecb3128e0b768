"""The options that decide which network is trained on what: the same for training and study."""

import argparse
from dataclasses import fields
from pathlib import Path

import torch

from models.data import ROOT_VARIABLE, load_digits
from models.errors import StudyError
from models.training import MODELS, TrainConfig, resolve_config, train
from scripts._console import Steps

DEFAULT_CHECKPOINT = Path("checkpoints/vgg13.pt")
_MAX_WIDTH = 1024  # sixteen times VGG's own: 2.4 GB for the largest layer


def add_training_options(parser):
    """Adds the options; those of TrainConfig that are not given stay out of the parsed namespace,
    so that a checkpoint can speak for them.
    """
    default = TrainConfig()
    group = parser.add_argument_group("training (what a checkpoint holds need not be repeated)")
    group.add_argument(
        "--checkpoint",
        type=Path,
        default=DEFAULT_CHECKPOINT,
        help="where the training is kept and resumed from (default: %(default)s)",
    )
    group.add_argument(
        "--data",
        metavar="ROOT",
        type=Path,
        help=f"folder that holds MNIST/raw (default: ${ROOT_VARIABLE}, else the embedded images)",
    )

    def option(flag, text, **rest):
        value = getattr(default, flag[2:])
        group.add_argument(
            flag, default=argparse.SUPPRESS, help=f"{text} (default: {value})", **rest
        )

    option("--full", "all 70,000 images of MNIST, not the 10,000 of t10k", action="store_true")
    option("--model", "plain, or with batch norm", choices=MODELS)
    option("--epochs", "passes over the training images", type=positive_integer)
    option("--batch", "images a batch", type=positive_integer)
    option("--width", "channels of the first stage", type=_width)
    option("--seed", "decides parameters, split, order and shifts", type=_seed)
    add_device_option(parser)


def add_device_option(parser):
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="auto: cuda where there is one (default: %(default)s)",
    )


def number(kind, fits, expected):
    """A type for argparse: a number of Python's type ``kind`` for which ``fits`` is true.

    Anything else is refused with what was ``expected`` and the text got.
    """

    def parse(text):
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not fits(value):
            raise argparse.ArgumentTypeError(f"expected {expected}; got {text}")
        return value

    return parse


positive_integer = number(int, lambda value: value >= 1, "an integer of 1 or more")
valid_ratio = number(float, lambda value: 0 < value <= 1, "a valid ratio in (0, 1]")
_width = number(int, lambda value: 1 <= value <= _MAX_WIDTH, f"an integer from 1 to {_MAX_WIDTH}")
_seed = number(int, lambda value: 0 <= value < 2**63, "an integer from 0 to 2^63 - 1")


def choose_device(name):
    """The torch.device of an option --device.

    Raises:
        StudyError: cuda where there is none.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise StudyError("expected a CUDA device for --device cuda; torch finds none")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def train_or_load(options, device, console):
    """The trained model that the options ask for, with its TrainConfig and its Digits."""
    names = {field.name for field in fields(TrainConfig)}
    given = {name: value for name, value in vars(options).items() if name in names}
    config = resolve_config(options.checkpoint, given)
    digits = load_digits(options.data, config.full)
    console.print(f"data: {digits.description}")
    with Steps(console, f"training {config.model}") as steps:
        model = train(config, digits, options.checkpoint, device, steps.at)
    return model, config, digits
