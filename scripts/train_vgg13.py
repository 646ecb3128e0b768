"""Trains VGG13 on MNIST and keeps it in a checkpoint.

Stop it when you like: the same command resumes from the last checkpoint and ends where it would
have ended. Ctrl-C saves a checkpoint first. Without options: the plain network of the paper on the
10,000 embedded images, three to four minutes on two CPU cores, seconds on a GPU.
"""

import sys

import common  # noqa: F401  # isort: skip  before torch, whose import Ctrl-C may stop

from common.console import exit_code, make_console
from common.options import choose_device, make_parser
from common.training import add_training_options, train_or_load
from models.files import require_writable


def main(arguments=None):
    parser = make_parser(__doc__)
    add_training_options(parser)
    options = parser.parse_args(arguments)
    console = make_console()
    require_writable(options.checkpoint.parent)
    train_or_load(options, choose_device(options.device), console)
    console.print(f"checkpoint: {options.checkpoint}")


if __name__ == "__main__":
    sys.exit(exit_code(main))
