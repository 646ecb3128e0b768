"""Trains the study's VGG13 on MNIST and keeps it in a checkpoint.

Stop it when you like: the same command resumes from the last checkpoint and ends where it would
have ended. Ctrl-C saves a checkpoint first. Without options: the plain network of the paper on the
10,000 embedded images, three to four minutes on two CPU cores, seconds on a GPU.

With --spamm the trained network is then fine-tuned with skipping on, for one epoch at most, and
kept in a checkpoint of its own. Its channels are put in the order of their norms first, which
changes no answer; its images are centred.

    python scripts/train_vgg13.py --spamm 0.3
"""

import sys
from pathlib import Path

from common.console import exit_code, make_console
from common.options import choose_device, make_parser, positive_integer
from models.files import require_writable
from study.fine_tuning import add_rate_option, chosen_settings, fine_tune_or_load, setting
from study.training_options import add_training_options, train_or_load


def main(arguments=None):
    options = _parse(arguments)
    console = make_console()
    require_writable(options.checkpoint.parent)
    settings = None if options.spamm is None else chosen_settings(options.spamm)
    path = options.spamm_checkpoint or options.checkpoint.with_suffix(".spamm.pt")
    if settings is not None:
        require_writable(path.parent)
    device = choose_device(options.device)
    model, config, digits = train_or_load(options, device, console)
    console.print(f"checkpoint: {options.checkpoint}")
    if settings is not None:
        found = fine_tune_or_load(
            {
                "settings": settings,
                "steps": options.spamm_steps,
                "peak": options.spamm_rate,
            },
            path,
            (model, config, digits),
            device,
            console,
        )
        console.print(found.summary())
        console.print(f"fine-tuned checkpoint: {path}")


def _parse(arguments):
    parser = make_parser(__doc__)
    add_training_options(parser)
    group = parser.add_argument_group("fine-tuning with skipping on")
    group.add_argument(
        "--spamm",
        metavar="SETTING",
        nargs="+",
        type=setting,
        help="the share of block products that a convolution keeps, in (0, 1], or tau=NUMBER: one "
        "for all convolutions but the first, or one for each of these nine (default: no "
        "fine-tuning)",
    )
    group.add_argument(
        "--spamm-checkpoint",
        metavar="FILE",
        type=Path,
        help="where the fine-tuning is kept and resumed from (default: that of the training, with "
        "the suffix .spamm.pt)",
    )
    group.add_argument(
        "--spamm-steps",
        metavar="COUNT",
        type=positive_integer,
        help="steps of the fine-tuning (default, and the most: one epoch)",
    )
    add_rate_option(group)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(exit_code(main))
