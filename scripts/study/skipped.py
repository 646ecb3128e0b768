"""Where in a picture products are skipped: the share that is valid, by pixel of the output."""

import torch

import spamm_torch
from common import plots
from spamm_torch._info import skip_info
from spamm_torch.calibration.calls import ConvCall, watch

MOST_PANELS = 12
_COLUMNS = 4


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
