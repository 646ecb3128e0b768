"""Trains VGG13 on MNIST and keeps it in a checkpoint.

Stop it when you like: the same command resumes from the last checkpoint and ends where it would
have ended. Ctrl-C saves a checkpoint first. Without options: the plain network of the paper on the
10,000 embedded images, three to four minutes on two CPU cores, seconds on a GPU.

With --spamm the trained network is then fine-tuned with skipping on, for one epoch at most, and
kept in a checkpoint beside, with the suffix .spamm.pt; its images are centred.

    python scripts/train_vgg13.py --spamm 0.3
"""

import sys

import common  # noqa: F401  # isort: skip  before torch, whose import Ctrl-C may stop

import torch
from torch.utils.flop_counter import FlopCounterMode

from common.console import Steps, exit_code, make_console
from common.journal import model_digest
from common.options import add, choose_device, make_parser, valid_ratio
from common.training import add_training_options, train_or_load
from models import training
from models.files import require_writable
from spamm_torch import record_stats


def fine_tune_or_load(ratio, path, trained, device, console):
    """Fine-tunes a trained (model, TrainConfig, Digits), or goes on; says what it comes to."""
    model, config, digits = trained
    settings = {name: {"valid_ratio": ratio} for name in training.SKIPPING}
    tuning = training.FineTuneConfig(settings, model_digest(model), config)
    with Steps(console, "fine-tuning") as shown:
        tuned = training.fine_tune(tuning, model, digits, path, device, shown.at)
    validation = digits.split(config.seed)[1].to(device)

    def percent(network):
        return training.accuracy(network, training.validation_pictures(validation, config.batch))

    first, _ = next(training.validation_pictures(validation, config.batch))
    dense, after = percent(model), percent(tuned)
    untuned = training.with_skipping(model, settings).eval()
    console.print(
        f"validation accuracy {dense:.2f}% dense; with {share_kept(tuned, first):.1%} of the "
        f"multiplications kept {percent(untuned):.2f}% before and "
        f"{after:.2f}% after fine-tuning ({after - dense:+.2f} points)"
    )
    console.print(f"fine-tuned checkpoint: {path}")


@torch.inference_mode()
def share_kept(model, pictures):
    """The share of multiplications that the layers which skip keep, of a batch."""
    with FlopCounterMode(display=False) as counter:
        model(pictures)
    counts = counter.get_flop_counts()
    names = {name: f"{type(model).__name__}.{name}" for name in training.SKIPPING}
    sizes = {name: sum(counts[of].values()) for name, of in names.items()}
    with record_stats(model) as stats:
        model(pictures)
    return sum(stats[name].valid_ratio * size for name, size in sizes.items()) / sum(sizes.values())


def main(arguments=None):
    parser = make_parser(__doc__)
    add_training_options(parser)
    what = "then fine-tune with all convolutions but the first keeping this share of block products"
    add(parser, "--spamm", what, None, "no fine-tuning", metavar="RATIO", type=valid_ratio)
    options = parser.parse_args(arguments)
    console = make_console()
    require_writable(options.checkpoint.parent)
    device = choose_device(options.device)
    trained = train_or_load(options, device, console)
    console.print(f"checkpoint: {options.checkpoint}")
    if options.spamm is not None:
        path = options.checkpoint.with_suffix(".spamm.pt")
        fine_tune_or_load(options.spamm, path, trained, device, console)


if __name__ == "__main__":
    sys.exit(exit_code(main))
