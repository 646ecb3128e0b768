"""Trains the study's VGG13 on MNIST and keeps it in a checkpoint.

Kill it when you like: the same command resumes from the last checkpoint and ends where it would
have ended. Without options: the plain network of the paper on the 10,000 embedded images, three to
four minutes on two CPU cores, seconds on a GPU.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from models.files import require_writable
from scripts._console import exit_code, make_console
from scripts._training_options import add_training_options, choose_device, train_or_load


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_training_options(parser)
    options = parser.parse_args(arguments)
    console = make_console()
    require_writable(options.checkpoint.parent)
    train_or_load(options, choose_device(options.device), console)
    console.print(f"checkpoint: {options.checkpoint}")


if __name__ == "__main__":
    sys.exit(exit_code(main))
