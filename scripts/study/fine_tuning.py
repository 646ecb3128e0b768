"""Fine-tuning VGG13 with skipping on: its options, and what it comes to."""

import argparse
import math
from dataclasses import dataclass

import torch

from common.console import Steps
from common.journal import model_digest
from common.options import number
from models.errors import UserError
from models.finetuning import (
    PEAK_LEARNING_RATE,
    SKIPPING,
    FineTuneConfig,
    fine_tune,
    with_skipping,
)
from models.training import accuracy, validation_pictures
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


def add_rate_option(parser):
    parser.add_argument(
        "--spamm-rate",
        metavar="NUMBER",
        type=number(float, lambda value: 0 < value < 1, "a number between 0 and 1"),
        default=PEAK_LEARNING_RATE,
        help="highest learning rate of the fine-tuning (default: %(default)s)",
    )


def chosen_settings(given):
    """{convolution: setting} of all that skip.

    Raises:
        UserError: neither one setting nor one for each.
    """
    if len(given) not in (1, len(SKIPPING)):
        raise UserError(
            f"expected one --spamm setting, or {len(SKIPPING)} for {', '.join(SKIPPING)}; got "
            f"{len(given)}"
        )
    each = given * len(SKIPPING) if len(given) == 1 else given
    return dict(zip(SKIPPING, each, strict=True))


@dataclass(frozen=True)
class Tuned:
    """A fine-tuned network and what it comes to, in percent on the validation images.

    Attributes:
        model: with skipping on. valid: share of all multiplications in block products that it
            keeps, of the convolutions that skip.
        dense: accuracy of the network before, nothing skipped. before, after: with skipping.
    """

    model: torch.nn.Module
    valid: float
    dense: float
    before: float
    after: float

    def summary(self):
        return (
            f"validation accuracy {self.dense:.2f}% dense; with {self.valid:.1%} of the "
            f"multiplications kept {self.before:.2f}% before and {self.after:.2f}% after "
            f"fine-tuning ({self.after - self.dense:+.2f} points)"
        )


def fine_tune_or_load(options, path, trained, device, console):
    """Fine-tunes a trained network, or goes on with it.

    Args:
        options: "settings", "steps" and "peak" of a FineTuneConfig.
        path: of the checkpoint.
        trained: model, TrainConfig and Digits, as train_or_load gives them.

    Returns:
        :class:`Tuned`.

    Raises:
        UserError: more steps than an epoch has; a checkpoint of another fine-tuning.
    """
    model, config, digits = trained
    training, validation = digits.split(config.seed)
    epoch = max(1, len(training) // config.batch)
    steps, settings = options["steps"], options["settings"]
    if steps is not None and steps > epoch:
        raise UserError(f"expected --spamm-steps of at most {epoch}, one epoch; got {steps}")
    tuning = FineTuneConfig(network=model_digest(model), trained=config, **options)
    with Steps(console, "fine-tuning") as shown:
        tuned = fine_tune(tuning, model, digits, path, device, shown.at)
    validation = validation.to(device)

    def percent(network):
        return accuracy(network, validation_pictures(validation, config.batch))

    first, _ = next(validation_pictures(validation, config.batch))
    return Tuned(
        model=tuned,
        valid=share_kept(tuned, first),
        dense=percent(model),
        before=percent(with_skipping(model, settings).eval()),
        after=percent(tuned),
    )


@torch.inference_mode()
def share_kept(model, pictures):
    """The share of multiplications that the layers which skip keep, of a batch."""
    sizes = _multiplications(model, pictures)
    with record_stats(model) as stats:
        model(pictures)
    kept = sum(stats[name].valid_ratio * size for name, size in sizes.items())
    return kept / sum(sizes.values())


def _multiplications(model, pictures):
    """Of the layers that skip, by name. Their hooks are gone before anything is recorded: with
    hooks a converted model takes its own forward.
    """
    sizes = {}

    def count(name):
        def after(layer, _, output):
            sizes[name] = layer.weight[0].numel() * output.numel()

        return after

    handles = [getattr(model, name).register_forward_hook(count(name)) for name in SKIPPING]
    try:
        model(pictures)
    finally:
        for handle in handles:
            handle.remove()
    return sizes
