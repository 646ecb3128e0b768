"""torch's own functions of the activations that a convolution's epilogue computes."""

from torch.nn import functional as F

ACTIVATIONS = {
    "none": lambda x: x,
    "relu": F.relu,
    "relu6": F.relu6,
    "hardswish": F.hardswish,
    "silu": F.silu,
    "leaky_relu": F.leaky_relu,
}
