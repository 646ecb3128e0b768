"""Kinds of tables on pages of results: what tells their rows apart, their views and pictures.

A value of a view is "column", "column|format" or "column|format|title"; a ">" before it says that
it has a column of its own, from the first row of a line, in a view with columns ``across``. Formats
are Python's (".4g", ".1%", "({:.2f}x)"); "us" shows milliseconds as microseconds; without one,
times and numbers have four digits, and factors are "1.23x".
"""

from typing import NamedTuple

_SHARES = ("ratio", "share")  # columns that are shown in percent


def text(value, column=None):
    """A value of a column as tables and pictures show it."""
    if value is None:
        return ""
    if column in _SHARES:
        return f"{100 * value:.4g}%"
    if isinstance(value, list):
        return "x".join(map(text, value))
    return f"{value:.6g}" if isinstance(value, float) else str(value)


class Value:
    """A column's figures as text; ``of``: as this module says."""

    def __init__(self, of):
        self.column, self._format, title, *_ = [*of.lstrip(">").split("|"), "", ""]
        self.title = title or self.column
        self.beside = of.startswith(">")
        if not self._format:
            is_factor = self.column.startswith(("speedup", "over_", "paper_"))
            self._format = "{:.2f}x" if is_factor else ".4g"

    def text(self, row):
        value = None if row is None else row.get(self.column)
        if value is None:
            return ""
        if self._format == "us":
            return f"{1e3 * value:.4g}"
        return self._format.format(value) if "{" in self._format else format(value, self._format)


class Picture(NamedTuple):
    """``drawn`` by ``x``, a line for each of ``line``, a panel for each value of ``panel``.

    ``prefer`` names columns of which one value is drawn: the one given or, where it is None or
    missing, the largest; a tuple of values has all of them drawn. ``title`` and ``caption`` are for
    who has not read the page. With ``labels``, of both axes, it has lines. Without it is a map:
    speedups in cells, blue above 1 and red below, a row for each of ``line``, a column for each
    value of ``x``; or, without ``x``, bars: of each value of the first column of ``line`` those of
    the least and the largest of the second, the best of its rows. ``least``: where the y axis ends.
    """

    x: str | None
    drawn: str  # on the y axis, or in the cells
    line: str  # columns
    panel: str | None = None
    prefer: dict = {}  # noqa: RUF012  nothing writes to it
    log: str = ""  # "x", "y", "xy": axes by factors
    labels: tuple[str, ...] = ()
    title: str = ""
    caption: str = ""
    least: float | None = None


class Kind:
    """A kind of table: what tells rows apart, and how they are shown; without a title they are
    shown nowhere.

    A table has a line for each value of the columns ``index``, a column for each of ``across``.

    ``shown``: on a page of several runs only rows with these values of some columns.
    """

    def __init__(self, key, title="", index="", values="", across="", /, *, picture=None, **shown):
        self.key, self.title = key.split(), title
        self.index, self.across = index.split(), across.split()
        self.values = [Value(value) for value in values.split("; ")] if values else []
        self.picture, self.shown = picture, shown


_STEPS = (  # of a block-sparse density matrix
    "s_ms|.3g|S; z_ms|.3g|S^(-1/2); zfz_ms|.3g|F in it; sp2_ms|.4g|SP2; iterations|{}; "
    "stored_x|.0f|stored a block row; energy_error|.1e|energy error"
)
# In the order in which a page draws the first kind that has a picture.
# fmt: off
KINDS: dict[str, Kind] = {
    # ---- Products and convolutions
    "products": Kind("data precision block n ratio cold",
        "Speedup of mm over torch.mm (ms), norms included, by the share of block products kept:",
        "data precision block n", ">dense_ms||torch.mm; speedup", "ratio", n=(8192,),
        picture=Picture("valid_ratio", "speedup", "precision", "data",
                        {"n": 8192, "cold": False, "block": 64}, "xy",
                        ("block products kept", "speed over torch.mm"),
                        "Products of N = 8192 that skip, by kind of matrix",
                        "speed over torch.mm (cuBLAS), norms included; higher is faster")),
    "norm maps": Kind("data precision block n cold",
        "Norm maps of both operands, ms (share of a copy's rate), and a search for 30% valid, ms:",
        "data precision block", "norms_ms; norms_share_of_copy|({:.0%}),; search_ms", "n",
        data=("decay",), block=(64,)),
    "convolutions": Kind("layer batch precision data block ratio cold",
        "Speedup over the dense convolution (us) by share kept / with norms of the layer before:",
        "layer batch precision data",
        ">dense_ms|us|dense; speedup|.2f; speedup_chained|/ {:.2f}", "ratio", batch=(64, 128),
        picture=Picture("ratio", "speedup", "layer", "precision", {"batch": None}, "", (),
                        "Convolutions that skip, batch 128",
                        "numbers: speed over cuDNN's dense convolution, norms included, by the "
                        "share of block products kept; blue is faster. conv: layers of VGG13 on "
                        "32 x 32; res: of ResNet-50, by size of their input")),
    "shapes, shares": Kind("op precision kept",
        "Median over torch's call, and the share of shapes below three limits, by what is kept:",
        "op precision shapes",
        "speedup; below 0.6|{:.0%}; below 0.8|/ {:.0%}; below 0.95|/ {:.0%}", "kept"),
    "shapes, slowest": Kind("op precision kept shape",
        "The slowest, with torch's time in us:",
        "op precision kept shape", "torch_ms|us|torch; speedup"),
    "shapes": Kind("op precision shape"),
    # ---- Networks
    "networks": Kind("network batch mode candidate",
        "us of a batch, and the speed over torch.compile (CUDA graph) or the dense one (eager):",
        "network batch mode", "ms|us; speedup|({:.2f}x)", "candidate",
        mode=("CUDA graph",), batch=(1, 8, 64, 512),
        picture=Picture(None, "speedup", "network batch", None,
                        {"mode": "CUDA graph", "candidate": ("ours", "ours-compiled")}, "", (),
                        "Networks with nothing skipped, smallest and largest batch",
                        "speed over torch.compile, float16, in one CUDA graph; longer is faster")),
    "fused layers": Kind("layer batch candidate",
        "ResNet-50's convolutions fused, us; floor: what bytes or operations take on an H200:",
        "group layer count batch", ">floor_us||floor; ms|us", "candidate"),
    "served": Kind("model mode network",
        "Time of a batch in us, and the speed over the dense network:",
        "network", "ms|us; speedup|({:.2f}x)", "mode"),
    "served, quality": Kind("model",
        "Accuracy on images that took no part in the choice of thresholds:",
        "model", "dense_accuracy|{:.2f}%|dense; accuracy|{:.2f}%|with SpAMM; "
        "changed|{:.2f}%|answers changed; valid_ratio|.1%|valid"),
    "served layers": Kind("model layer", "Layers by themselves, with bias and ReLU:",
        "layer dense",
        "ratio|.0%|valid; tau|.3g; dense_ms|us|dense, us; spamm_ms|us|SpAMM, us"),
    "served layers by ratio": Kind("model layer ratio"),
    "calibrated layers": Kind("case name", "Layers as chosen, us:",
        "name shape reason",
        "valid_ratio|.1%|valid; tau; dense_us|.1f|dense; chosen_us|.1f|chosen; error|.2%"),
    "calibrated": Kind("case form", "The whole model:",
        "form", "ms|us|us; speedup||over compiled"),
    # ---- The paper's tables
    "thresholds": Kind("n ratio",
        "Table 1: tau by valid ratio and N, and the difference from the paper's:",
        "ratio", "tau|.6f; difference|({:+.2%})", "n"),
    "valid products": Kind("n ratio"),
    "speedups": Kind("precision block n ratio",
        "Table 2: speedup over torch.mm by N; after it the paper's over cuBLAS (V100):",
        "precision block ratio", "speedup|.2f; paper|/ {:.1f}", "n", block=(64,),
        precision=("float32", "float16", "float64")),
    "speedups, several GPUs": Kind("gpus precision n ratio layout",
        "On several GPUs, operands on the first (0) or in shards (S), over torch.mm on one:",
        "gpus precision n layout", "speedup|.2f", "ratio",
        precision=("float16",), n=(8192, 16384, 32768)),
    "block-sparse products": Kind("precision n ratio"),
    "at equal error": Kind("n share block",
        "Table 3: mm against the fastest sparse product at equal error:",
        "n share block",
        "valid_ratio|.2%|valid; paper_valid|.2%|paper's valid; error|.5g; "
        "paper_error|.5g|paper's error; ms||mm, ms; graph_ms||in a graph; speedup|{:.4g}x; "
        "speedup_2|{:.4g}x|two GPUs; speedup_4|{:.4g}x|four GPUs; "
        "paper_speedup_1|{:.4g}x|paper's speedup; paper_speedup_2|{:.4g}x|on two; "
        "paper_speedup_4|{:.4g}x|on four", block=(64,)),
    "sparse products": Kind("n share peer", "The sparse products:",
        "n share peer",
        "ms; conversion_ms||conversion, ms; dense_ms||torch.mm, ms; products|.2g; trun|.6g|TRUN; "
        "error|.5g", n=(8192,)),
    "squares": Kind("matrix n precision block origin waters basis tau",
        "Table 4: speedup over torch.mm (ms), and the error, by tau:",
        "matrix n precision block origin", ">dense_ms||torch.mm; speedup; error|({:.1e})", "tau",
        precision=("float64",), origin=("model",)),
    "the paper's squares": Kind("number tau",
        "The paper's errors and its mean speedup over cuBLAS, N = 13,656:",
        "number", ">norm|.5g|norm of C; error|.2g; speedup|{:.1f}x", "tau"),
    "study": Kind("images title precision ratio layout",
        "Table 5: points of accuracy, speed over the dense convolution (paper: its dense product):",
        "title ratio",
        ">paper_change|+.1f|paper: change; >paper_speedup|{:.1f}x|paper: speed; "
        "accuracy_change|+.2f; over_conv", "precision layout",
        picture=Picture("over_conv", "accuracy_change", "layout", "precision",
                        {"title": "conv12 to conv52", "images": "MNIST in full"}, "",
                        ("speed over cuDNN's convolutions", "change of accuracy, points"),
                        "VGG13 on MNIST: nine convolutions that skip, by what shares a block",
                        "right is faster, up is more accurate; a block is 64 images at one pixel "
                        "(by position), 8 x 8 pixels of one image, or 32 columns of the im2col "
                        "matrix (paper)",
                        -12.0)),
    "study, dense": Kind("images title precision", "The dense layers, ms:",
        "title precision",
        "dense_accuracy|{:.2f}%|accuracy; conv_ms||convolution; im2col_gemm_ms||im2col + GEMM; "
        "gemm_ms||GEMM", title=("conv12 to conv52",)),
    "study, layers": Kind("images title precision layer candidate"),
    "study, several GPUs": Kind("gpus images title precision ratio",
        "By position on several GPUs, over torch's convolution on one:",
        "title ratio", "speedup; >paper_2|{:.1f}x|paper, two; >paper_4|{:.1f}x|paper, four",
        "precision gpus", title=("conv31",)),
    "study, whole network": Kind("images title precision ratio candidate",
        "The whole network, ms a batch, by the share of block products kept:",
        "title precision candidate", "ms", "ratio"),
    # ---- Several devices
    "several devices": Kind("layout data precision n ratio",
        "Speedup over one device, by where operands lie:",
        "data precision n ratio", ">one_ms||one, ms; speedup", "layout",
        data=("decay", "water")),
    "several devices, peers": Kind("peer data precision n",
        "Dense products of other libraries on the same devices, ms:",
        "data precision n", "ms", "peer", data=("decay",)),
    "several devices, overheads": Kind("layout n", "Until mm returns to Python, us:",
        "layout n", "one_us|.3g|one; all_us|.3g|all"),
    "several devices, layers": Kind("layer batch ratio",
        "Speedup of a batch's convolution over one device, by valid ratio and batch:",
        "layer", "speedup", "ratio batch"),
    # ---- Block-sparse matrices
    "stored products": Kind("precision n valid",
        "S S of a water cluster, in blocks of 64, ms; valid and stored a block row:",
        "n precision valid",
        "stored|.0f; products|.0f|valid products; mm_ms||mm; "
        "share_before|{:.0%}|norms' and plan's share; "
        "tflops|.3g|TFLOP/s of multiply; speedup|{:.2g}x|over expanded pairs; "
        "over_dense|{:.2g}x|over dense storage; over_entries|{:.3g}x|over entries in CSR"),
    "block-sparse density": Kind("n",
        "The density matrix of water clusters, ms; the energy error is in hartree an atom:",
        "waters n", f"{_STEPS}; over_dense|{{:.2g}}x|over dense storage; peak_gb|.3g|GB"),
    "block-sparse density, ranks": Kind("n",
        "The density matrix of water clusters whose block rows lie on several GPUs, ms:",
        "waters n", f"{_STEPS}; peak_gb|.3g|GB of the first"),
    "block-sparse growth": Kind("quantity of functions",
        picture=Picture("functions", "value", "of", "quantity", {}, "xy", ("functions", ""),
                        "Block-sparse density matrices of water clusters",
                        "by the number of basis functions N; lower is better")),
    # ---- Density matrices, finished studies
    "density matrix": Kind("problem method",
        "Methods; the energy error is in hartree an atom, the bound that of each step:",
        "method",
        "seconds|.3g; over_dense|{:.2g}x|over torch.mm; over_eigh|{:.2g}x|over eigh; "
        "over_stored|{:.2g}x|over dense storage; energy_error|.1e|energy error; iterations|{}; "
        "most_valid|.1%|most valid",
        picture=Picture("seconds", "distance", "series", "problem", {}, "xy",
                        ("seconds", "energy error, hartree an atom"),
                        "Density matrices of water clusters, by method",
                        "time of the whole iteration; left is faster, down is more accurate")),
    "density matrix, iterations": Kind("problem method iteration"),
    "orders of images": Kind("network arrangement order",
        "Answers changed in percent, and the change of accuracy in points, by arrangement:",
        "order", "changed|.2f; accuracy_change|/ {:+.2f}", "arrangement"),
    "low ratios": Kind("network case ratio",
        "Change of accuracy in points, with the share of multiplications kept:",
        "case", "accuracy_change|+.2f; valid|.1%", "ratio"),
    "pixel blocks": Kind("case pixel_block ratio",
        "Change of accuracy in points by pixel block (images, rows, columns):",
        "case pixel_block", "accuracy_change|+.2f", "ratio"),
}
# fmt: on
