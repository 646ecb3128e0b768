"""Which products are measured, in which layouts, beside which peers.

A layout says where the operands lie. A peer is another library's dense product of operands that lie
so.
"""

from dataclasses import dataclass

LAYOUTS = {
    "R": "rows of A on each device, the whole of B on each",
    "S": "rows of A and rows of B on each device",
    "0": "A and B on the first device, C too",
    "H": "A and B in pinned host memory, C too",
    "ranks": "as S, one process a device, with torch.distributed",
}
PEERS = {"R": "torch.mm", "S": "symm_mem", "H": "cublasXt", "ranks": "DTensor"}  # of a layout
NEED_CUDA = ("0", "H", "symm_mem", "cublasXt")
_EVERYWHERE = ("R", "S")  # the other layouts: at the largest size, with the first data set
_PRECISION = "float16"
_HOST_PRECISION = "float64"  # cublasXt has none of 16 bits


@dataclass(frozen=True)
class Cell:
    """One product to measure. That of a peer has no ratio, for a peer skips nothing."""

    what: str  # a layout or a peer
    data: str
    precision: str
    n: int
    ratio: float | None = None

    @property
    def name(self):
        words = [self.what, self.data, self.precision, str(self.n)]
        return " ".join(words if self.is_peer else [*words, f"{self.ratio:.0%}"])

    @property
    def is_peer(self):
        return self.ratio is None

    @property
    def product(self):
        """What decides the operands."""
        return self.data, self.precision, self.n


def all_cells(sizes, sweep, data, ratios, layouts, extras):
    """Every cell once, the largest products first; those of one product follow each other.

    Args:
        sizes: of R and S, with every data set. sweep: of R and S at the smallest ratio only.
        data: names of data sets. ratios: valid ratios asked for. layouts: keys of LAYOUTS.
        extras: whether float32 in R and S, and float64 in H, are measured at the largest size but
            one, too.
    """
    slabs = [layout for layout in layouts if layout in _EVERYWHERE]
    cells = []
    for n in sorted(sizes, reverse=True):
        for name in data:
            whole = n == max(sizes) and name == data[0]
            cells += _of_product(layouts if whole else slabs, (name, _PRECISION, n), ratios)
    if extras:
        n = sorted(sizes)[-2:][0]
        cells += _of_product(slabs, (data[0], "float32", n), ratios)
        cells += _of_product(
            [x for x in layouts if x == "H"], (data[0], _HOST_PRECISION, n), ratios
        )
    for n in sorted(set(sweep) - set(sizes), reverse=True):
        cells += [Cell(layout, data[0], _PRECISION, n, min(ratios)) for layout in slabs]
    return cells


def _of_product(layouts, product, ratios):
    peers = [PEERS[layout] for layout in layouts if _has_peer(layout, product)]
    measured = [Cell(layout, *product, ratio) for ratio in ratios for layout in layouts]
    return measured + [Cell(peer, *product) for peer in peers]


def _has_peer(layout, product):
    _, precision, _ = product
    return layout in PEERS and (layout == "H") == (precision == _HOST_PRECISION)
