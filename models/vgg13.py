"""VGG13 for 32 x 32 pictures of three channels.

The network of Simonyan and Zisserman, "Very Deep Convolutional Networks for Large-Scale Image
Recognition" (2015), column B, as used on small pictures: ten 3x3 convolutions in five stages of
two, a 2x2 max pooling after each, then three linear layers on the 512 channels left.
"""

from collections import OrderedDict

import torch
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

# Output channels of the five stages, in units of the width.
STAGES = (1, 2, 4, 8, 8)
CONVOLUTIONS = tuple(f"conv{stage}{i}" for stage in range(1, 6) for i in (1, 2))


class VGG13(nn.Sequential):
    """A plain chain of named layers: conv11, relu11, conv12, relu12, pool1, conv21, ..., fc3.

    ``batch_norm``: bn11, bn12, ... behind the convolutions. ``width``: channels of the first stage;
    64 is VGG's. Shapes: (N, 3, 32, 32) -> (N, classes).
    """

    def __init__(self, batch_norm=False, width=64, classes=10):
        layers = OrderedDict()
        channels = 3
        for stage, factor in enumerate(STAGES, start=1):
            for i in (1, 2):
                name = f"{stage}{i}"
                layers["conv" + name] = nn.Conv2d(channels, factor * width, 3, padding=1)
                channels = factor * width
                if batch_norm:
                    layers["bn" + name] = nn.BatchNorm2d(channels)
                layers["relu" + name] = nn.ReLU()
            layers[f"pool{stage}"] = nn.MaxPool2d(2)
        layers["flatten"] = nn.Flatten()
        for i in (1, 2):
            layers[f"fc{i}"] = nn.Linear(channels, channels)
            layers[f"relu_fc{i}"] = nn.ReLU()
        layers["fc3"] = nn.Linear(channels, classes)
        super().__init__(layers)
        self.batch_norm, self.width, self.classes = batch_norm, width, classes
        self.apply(_initialise)

    def split(self, name):
        """The chains before and after the layer ``name``, sharing its parameters with this one."""
        names = [child for child, _ in self.named_children()]
        at = names.index(name)
        layers = list(self.children())
        return nn.Sequential(*layers[:at]), nn.Sequential(*layers[at + 1 :])


def _initialise(layer):
    """He initialisation, which ten layers of ReLU need to start learning at all."""
    if isinstance(layer, (nn.Conv2d, nn.Linear)):
        mode = "fan_out" if isinstance(layer, nn.Conv2d) else "fan_in"
        nn.init.kaiming_normal_(layer.weight, mode=mode, nonlinearity="relu")
        nn.init.zeros_(layer.bias)


def fold_batch_norm(model):
    """A plain VGG13, in eval mode, that computes what ``model`` does there, batch norms folded."""
    weight = model.conv11.weight
    folded = VGG13(batch_norm=False, width=model.width, classes=model.classes)
    folded = folded.to(weight.device, weight.dtype, memory_format=torch.channels_last).eval()
    training = model.training
    model.eval()  # the fusion reads running statistics and insists
    for name, layer in folded.named_children():
        source = getattr(model, name)
        if model.batch_norm and isinstance(layer, nn.Conv2d):
            source = fuse_conv_bn_eval(source, getattr(model, name.replace("conv", "bn")))
        layer.load_state_dict(source.state_dict())
    model.train(training)
    return folded
