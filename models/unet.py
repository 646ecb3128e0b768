"""U-Net: a label for each pixel of a picture.

The network of Ronneberger, Fischer and Brox, "U-Net: Convolutional Networks for Biomedical Image
Segmentation" (2015), with two changes that are common today: pictures are padded, so that labels
come in the size of the picture, and a batch normalisation follows each convolution.
"""

import torch
from torch import nn


class UNet(nn.Module):
    """Encoder and decoder of ``depth`` levels each, and the bottom between them.

    A level is two 3x3 convolutions. On the way down a 2x2 max pooling halves the sides and the
    next level doubles the channels: 64, 128, 256, 512, 1024 with the default. On the way up an
    up-convolution doubles the sides and halves the channels, and the level sees its output beside
    that of the encoder's level of the same size.

    The paper's up-convolution is "an upsampling of the feature map followed by a 2x2 convolution".
    Here it is nearest upsampling and a 3x3 convolution, which unlike a 2x2 one can be centred
    (Odena, Dumoulin and Olah, "Deconvolution and Checkerboard Artifacts", 2016). All layers with
    weights but the last are then plain 3x3 convolutions with batch norm and ReLU. Norms of blocks
    pass through nearest upsampling, where each is repeated, and through the concatenation.

    ``width``: channels of the first level. ``depth``: number of poolings; 4 is the paper's.

    Shapes: (N, in_channels, H, W) -> (N, classes, H, W), multiples of 2**depth.
    """

    def __init__(self, in_channels=3, classes=11, width=64, depth=4):
        super().__init__()
        widths = [width << level for level in range(depth + 1)]
        inputs = [in_channels, *widths[:-1]]
        self.encoder = nn.ModuleList(
            _level(before, after) for before, after in zip(inputs[:-1], widths[:-1], strict=True)
        )
        self.pool = nn.MaxPool2d(2)
        self.bottom = _level(inputs[-1], widths[-1])
        rising = widths[-2::-1]
        self.up = nn.ModuleList(
            nn.Sequential(nn.Upsample(scale_factor=2), *_convolution(2 * width, width))
            for width in rising
        )
        self.decoder = nn.ModuleList(_level(2 * width, width) for width in rising)
        self.head = nn.Conv2d(width, classes, 1)
        self.apply(_initialise)

    def forward(self, pictures):
        skipped = []
        features = pictures
        for level in self.encoder:
            features = level(features)
            skipped.append(features)
            features = self.pool(features)
        features = self.bottom(features)
        for up, level in zip(self.up, self.decoder, strict=True):
            features = level(torch.cat((skipped.pop(), up(features)), 1))
        return self.head(features)


def _level(in_channels, out_channels):
    """Two convolutions, as a chain."""
    return nn.Sequential(
        *_convolution(in_channels, out_channels), *_convolution(out_channels, out_channels)
    )


def _convolution(in_channels, out_channels):
    """3x3 with batch norm and ReLU. A bias would be undone by the batch norm."""
    return (
        nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(inplace=True),
    )


def _initialise(layer):
    """He initialisation, as the paper asks for."""
    if isinstance(layer, nn.Conv2d):
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)
