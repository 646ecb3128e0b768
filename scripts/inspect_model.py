"""Draws what VGG13 skips, layer by layer, over one of its input pictures.

Each panel is a convolution: the picture in grey, and on it, by the position of the layer's output,
the share of block products that the layer computes. Without options: the checkpoint of
train_vgg13.py (trained first, where there is none) with the settings that bench.py vgg13 wrote; the
picture goes to results/inspect_DEVICE.png.
"""

import sys
from pathlib import Path

import common  # noqa: F401  # isort: skip  before torch, whose import Ctrl-C may stop

import torch

import spamm_torch
from common import plots
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
from spamm_torch._info import skip_info
from spamm_torch.calibration.calls import ConvCall, watch
from study.training_options import add_training_options, train_or_load

MOST_PANELS = 12
_COLUMNS = 4


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
            f"expected a settings file; got none at {settings}: bench.py vgg13 writes one, or give "
            "--ratio"
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


@torch.no_grad()
def valid_shares(model, pictures, index):
    """What each convolution computes of one picture of a batch.

    Args:
        model: in eval mode, with SpAMM convolutions. pictures: a batch. index: of the picture.

    Returns:
        {layer: (height, width) tensor}: for each pixel of the layer's output the share of block
        products that were valid in the pixel's block, from 0 to 1. A block may hold other pictures.
    """
    shares = {}

    def look(layer, call):
        if isinstance(call, ConvCall):
            shares[layer] = _share(call, index)

    with watch(model, look):
        model(pictures)
    return shares


def _share(call, index):
    maps = call.norm_maps()
    tau = skip_info(maps, call.knobs).tau
    counts = [
        spamm_torch.valid_counts(a, b, tau).sum(0)
        for a, b in zip(maps.norm_a, maps.skip_norm_b, strict=True)
    ]
    by_block = sum(counts) / maps.norm_a.numel()
    images, rows, columns = maps.pixel_block
    height, width = call.dense().shape[-2:]
    by_position = by_block.reshape(-1, -(-height // rows), -(-width // columns))
    by_row = by_position[index // images].repeat_interleave(rows, 0)
    return by_row.repeat_interleave(columns, 1)[:height, :width].cpu()


def chosen_layers(shares):
    """At most MOST_PANELS layers, evenly over the network, the first and the last among them."""
    names = list(shares)
    if len(names) <= MOST_PANELS:
        return names
    step = (len(names) - 1) / (MOST_PANELS - 1)
    return [names[round(step * place)] for place in range(MOST_PANELS)]


def draw(picture, shares, header, title):
    """A panel for each layer: the picture in grey, and on it the share of products computed.

    Args:
        picture: (height, width), from 0 to 1. shares: as from :func:`valid_shares`.
        header: with the device's name. title: of the whole.

    Returns:
        The bytes of a PNG.
    """
    names = chosen_layers(shares)
    rows = -(-len(names) // _COLUMNS)
    figure, axes = plots.panels(rows, min(_COLUMNS, len(names)), 1.1 + 1.8 * rows)
    height, width = picture.shape
    for axis in axes.flat[len(names) :]:
        axis.set_visible(False)
    for axis, name in zip(axes.flat, names, strict=False):
        axis.imshow(picture.numpy(), cmap="gray", vmin=0, vmax=1)
        heat = axis.imshow(
            shares[name].numpy(),
            extent=(-0.5, width - 0.5, height - 0.5, -0.5),
            cmap="viridis",
            vmin=0,
            vmax=1,
            alpha=0.65,
            interpolation="nearest",
        )
        axis.set_title(f"{name}: {shares[name].mean():.0%}")
        axis.set_xticks([])
        axis.set_yticks([])
    figure.colorbar(heat, ax=axes, label="block products computed", shrink=0.8)
    return plots.png(figure, header, title)


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
