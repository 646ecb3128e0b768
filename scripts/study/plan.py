"""What the study measures: which layers at which valid ratios, and what the paper reports there."""

from dataclasses import dataclass

from models.vgg13 import CONVOLUTIONS


@dataclass(frozen=True)
class Group:
    """Convolutions that are replaced together, and the valid ratios they are studied at.

    ``start`` is the layer that the evaluation starts from, on cached activations. ``shifted`` moves
    every image at random; speed is measured in the centred case only, being the same.
    """

    title: str
    layers: tuple[str, ...]
    start: str
    ratios: tuple[float, ...]
    shifted: bool = False


@dataclass(frozen=True)
class PaperResult:
    """A row of the paper's Table 5 (Tesla V100, FP32)."""

    accuracy_change: float  # percentage points
    tau: float
    speedup: float  # over the dense im2col GEMM


# (layer, valid ratio) -> what the paper reports.
PAPER = {
    ("conv21", 0.9747): PaperResult(0.0, 0.1, 2.8),
    ("conv21", 0.9684): PaperResult(0.0, 0.05, 2.8),
    ("conv21", 0.8500): PaperResult(-0.1, 2.5, 3.1),
    ("conv21", 0.8290): PaperResult(-0.1, 3.0, 3.2),
    ("conv21", 0.6341): PaperResult(-0.9, 4.5, 3.9),
    ("conv31", 0.9792): PaperResult(0.0, 2.5, 2.6),
    ("conv31", 0.9421): PaperResult(0.0, 3.5, 2.6),
    ("conv31", 0.8744): PaperResult(-0.1, 4.5, 2.7),
    ("conv31", 0.7436): PaperResult(-0.1, 5.5, 3.1),
    ("conv31", 0.4338): PaperResult(-1.1, 7.5, 4.8),
}


def _papers_ratios(layer):
    return tuple(ratio for name, ratio in PAPER if name == layer)


GROUPS = (
    Group("conv21", ("conv21",), "conv21", (*_papers_ratios("conv21"), 0.45, 0.30)),
    Group("conv31", ("conv31",), "conv31", (*_papers_ratios("conv31"), 0.30)),
    Group("conv12 to conv52", CONVOLUTIONS[1:], "conv11", (0.85, 0.70, 0.50, 0.30)),
    Group("conv31, images shifted", ("conv31",), "conv31", (0.7436, 0.4338, 0.30), shifted=True),
)
