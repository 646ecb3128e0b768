"""Trains VGG13 on MNIST and keeps it in a checkpoint.

Stop it when you like: the same command resumes from the last checkpoint and ends where it would
have ended. Ctrl-C saves a checkpoint first. Without options: the plain network of the paper on the
10,000 embedded images, three to four minutes on two CPU cores, seconds on a GPU.

With --spamm the trained network is then fine-tuned with skipping on, for one epoch at most, and
kept in a checkpoint of its own; its images are centred.

    python scripts/train_vgg13.py --spamm 0.3
"""

import argparse
import math
import sys
from pathlib import Path

import common  # noqa: F401  # isort: skip  before torch, whose import Ctrl-C may stop

import torch
from torch.utils.flop_counter import FlopCounterMode

from common.console import Steps, exit_code, make_console
from common.journal import model_digest
from common.options import add, add_numbers, choose_device, make_parser, number
from common.training import add_training_options, train_or_load
from models.files import UserError, require_writable
from models.training import (
    PEAK_LEARNING_RATE,
    SKIPPING,
    FineTuneConfig,
    accuracy,
    fine_tune,
    validation_pictures,
    with_skipping,
)
from spamm_torch import record_stats


def setting(text):
    """A type for argparse: what a convolution skips, "0.3" (valid ratio) or "tau=1.5"."""
    name, is_tau, value = text.rpartition("=")
    try:
        value = float(value)
    except ValueError:
        value = math.nan
    if (is_tau and name == "tau" and 0 <= value < math.inf) or (not is_tau and 0 < value <= 1):
        return {name or "valid_ratio": value}
    raise argparse.ArgumentTypeError(
        f"expected a valid ratio in (0, 1], or tau=NUMBER of 0 or more; got {text}"
    )


def chosen_settings(given):
    """{convolution: setting} of all that skip; UserError: neither one setting nor one for each."""
    if len(given) not in (1, len(SKIPPING)):
        raise UserError(
            f"expected one --spamm setting, or {len(SKIPPING)} for {', '.join(SKIPPING)}; got "
            f"{len(given)}"
        )
    each = given * len(SKIPPING) if len(given) == 1 else given
    return dict(zip(SKIPPING, each, strict=True))


def fine_tune_or_load(settings, options, path, trained, device, console):
    """Fine-tunes a trained (model, TrainConfig, Digits), or goes on; says what it comes to."""
    model, config, digits = trained
    training, validation = digits.split(config.seed)
    epoch = max(1, len(training) // config.batch)
    steps = options.spamm_steps
    if steps is not None and steps > epoch:
        raise UserError(f"expected --spamm-steps of at most {epoch}, one epoch; got {steps}")
    of = {"network": model_digest(model), "trained": config, "peak": options.spamm_rate}
    tuning = FineTuneConfig(settings=settings, steps=steps, **of)
    with Steps(console, "fine-tuning") as shown:
        tuned = fine_tune(tuning, model, digits, path, device, shown.at)
    validation = validation.to(device)

    def percent(network):
        return accuracy(network, validation_pictures(validation, config.batch))

    first, _ = next(validation_pictures(validation, config.batch))
    dense, after = percent(model), percent(tuned)
    console.print(
        f"validation accuracy {dense:.2f}% dense; with {share_kept(tuned, first):.1%} of the "
        f"multiplications kept {percent(with_skipping(model, settings).eval()):.2f}% before and "
        f"{after:.2f}% after fine-tuning ({after - dense:+.2f} points)"
    )
    console.print(f"fine-tuned checkpoint: {path}")


@torch.inference_mode()
def share_kept(model, pictures):
    """The share of multiplications that the layers which skip keep, of a batch."""
    with FlopCounterMode(display=False) as counter:  # its hooks keep generated forwards away
        model(pictures)
    counts = counter.get_flop_counts()
    sizes = {name: sum(counts[f"{type(model).__name__}.{name}"].values()) for name in SKIPPING}
    with record_stats(model) as stats:
        model(pictures)
    return sum(stats[name].valid_ratio * size for name, size in sizes.items()) / sum(sizes.values())


def _parse(arguments):
    parser = make_parser(__doc__)
    add_training_options(parser)
    group = parser.add_argument_group("fine-tuning with skipping on")
    what = (
        "the share of block products that a convolution keeps, in (0, 1], or tau=NUMBER: one for "
        "all convolutions but the first, or one for each of these nine"
    )
    add(group, "--spamm", what, None, "no fine-tuning", metavar="SETTING", nargs="+", type=setting)
    what = "where the fine-tuning is kept and resumed from"
    said = "that of the training, with the suffix .spamm.pt"
    add(group, "--spamm-checkpoint", what, None, said, metavar="FILE", type=Path)
    what = "steps of the fine-tuning, one epoch at most"
    add_numbers(group, "--spamm-steps", what, None, "COUNT", nargs=None, said="one epoch")
    rate = number(float, lambda value: 0 < value < 1, "a number between 0 and 1")
    what = "highest learning rate of the fine-tuning"
    add(group, "--spamm-rate", what, PEAK_LEARNING_RATE, metavar="NUMBER", type=rate)
    return parser.parse_args(arguments)


def main(arguments=None):
    options = _parse(arguments)
    console = make_console()
    require_writable(options.checkpoint.parent)
    settings = None if options.spamm is None else chosen_settings(options.spamm)
    path = options.spamm_checkpoint or options.checkpoint.with_suffix(".spamm.pt")
    if settings is not None:
        require_writable(path.parent)
    device = choose_device(options.device)
    trained = train_or_load(options, device, console)
    console.print(f"checkpoint: {options.checkpoint}")
    if settings is not None:
        fine_tune_or_load(settings, options, path, trained, device, console)


if __name__ == "__main__":
    sys.exit(exit_code(main))
