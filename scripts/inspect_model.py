"""Draws what VGG13 skips, layer by layer, over one of its input pictures.

Each panel is a convolution: the picture in grey, and on it, by the position of the layer's output,
the share of block products that the layer computes. Without options: the checkpoint of
train_vgg13.py (trained first, where there is none) with the settings that calibrate_vgg13.py wrote;
the picture goes to results/inspect_DEVICE.png.
"""

import sys
from pathlib import Path

import common  # noqa: F401  before the library, which it finds
import spamm_torch
from common.console import exit_code, make_console
from common.machine import describe_machine
from common.options import (
    add_folder_option,
    choose_device,
    make_parser,
    natural_number,
    positive_integer,
    valid_ratio,
)
from common.results import write_bytes
from models.errors import UserError, first_line
from models.files import require_writable
from models.training import validation_pictures
from study.skipped import chosen_layers, draw, valid_shares
from study.training_options import add_training_options, train_or_load


def main(arguments=None):
    options = _parse(arguments)
    console = make_console()
    device = choose_device(options.device)
    require_writable(options.out)
    require_writable(options.checkpoint.parent)
    if options.picture >= options.images:
        raise UserError(
            f"expected --picture below --images, {options.images}; got {options.picture}"
        )
    settings = options.settings or options.out / f"calibrated_{device.type}.json"
    if options.ratio is None and not settings.is_file():
        raise UserError(
            f"expected a settings file; got none at {settings}: calibrate_vgg13.py writes one, or "
            "give --ratio"
        )
    model, config, digits = train_or_load(options, device, console)
    _, validation = digits.split(config.seed)
    if options.picture >= len(validation):
        raise UserError(
            f"expected --picture below {len(validation)}, the pictures there are; got "
            f"{options.picture}"
        )
    pictures, _ = next(validation_pictures(validation.to(device), options.images))
    shown = _convert(model, options.ratio, settings)
    shares = valid_shares(model, pictures, options.picture)
    if not shares:
        raise UserError(f"expected settings that skip something; got {shown}, where no layer does")
    title = f"VGG13, {shown}: share of the products computed"
    picture = pictures[options.picture, 0].cpu()
    path = options.out / f"inspect_{device.type}.png"
    write_bytes(path, draw(picture, shares, describe_machine(device), title))
    for name in chosen_layers(shares):
        console.print(f"{name}: {shares[name].mean():.1%} computed")
    console.print(f"wrote {path}")


def _convert(model, ratio, settings):
    """Installs a valid ratio, or a settings file where that is None; returns its name."""
    if ratio is not None:
        spamm_torch.convert_(model, spamm_torch.SpAMMConfig(valid_ratio=ratio))
        return f"{ratio:.0%} asked of every layer"
    try:
        spamm_torch.convert_(model, settings)
    except ValueError as error:
        raise UserError(first_line(error)) from error
    return settings.name


def _parse(arguments):
    parser = make_parser(__doc__)
    add_training_options(parser)
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--settings",
        metavar="FILE",
        type=Path,
        help="settings of calibrate or convert_ (default: calibrated_DEVICE.json in --out)",
    )
    what.add_argument(
        "--ratio",
        type=valid_ratio,
        help="instead, this valid ratio for every layer (default: by the settings)",
    )
    parser.add_argument(
        "--picture",
        metavar="NUMBER",
        type=natural_number,
        default=0,
        help="which picture of the first validation batch (default: %(default)s)",
    )
    parser.add_argument(
        "--images",
        metavar="COUNT",
        type=positive_integer,
        default=64,
        help="pictures a batch; those of one block are skipped together (default: %(default)s)",
    )
    add_folder_option(parser, "the picture")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(exit_code(main))
