"""How pages of results show each kind of table: its key, its views and its picture."""

from dataclasses import dataclass, field

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


@dataclass(frozen=True)
class Value:
    """A column's figures as text: format(scale * figure)."""

    column: str
    format: str = "{:.2f}x"
    title: str = ""
    scale: float = 1
    beside: bool = False  # in a view with ``across``: a column of its own, from the first row

    def text(self, row):
        value = None if row is None else row.get(self.column)
        if value is None:
            return ""
        return self.format.format(self.scale * value if self.scale != 1 else value)


@dataclass(frozen=True)
class View:
    """A table of rows: a line for each value of ``index``, a column for each of ``across``."""

    title: str
    index: tuple[str, ...]
    values: tuple[Value, ...]
    across: str | None = None
    shown: dict = field(default_factory=dict)  # on a page of several runs: these values of a column
    texts: int = 1  # columns aligned left


@dataclass(frozen=True)
class Lines:
    """A picture: ``drawn`` by ``x``, a line for each of ``line``, a panel for each of ``panel``.

    ``prefer`` names columns of which one value is drawn: the one given or, without it, the largest.
    """

    x: str
    drawn: str  # on the y axis
    line: tuple[str, ...]
    panel: str | None = None
    prefer: dict = field(default_factory=dict)
    log: str = ""  # "x", "y", "xy": axes by factors
    labels: tuple[str, str] = ("", "")


@dataclass(frozen=True)
class Map:
    """A picture: speedups in cells, blue above 1, red below; otherwise as Lines."""

    row: tuple[str, ...]
    column: str
    drawn: str  # in the cells
    panel: str | None = None
    prefer: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Kind:
    """What tells rows apart, and how they are shown."""

    key: tuple[str, ...]
    views: tuple[View, ...] = ()
    picture: Lines | Map | None = None


def _us(column, title="", beside=False):
    return Value(column, "{:.4g}", title, 1e3, beside)


def _ms(column, title="", beside=False):
    return Value(column, "{:.4g}", title, beside=beside)


def _percent(column, title="", digits=1, beside=False):
    return Value(column, f"{{:.{digits}f}}%", title, 100, beside)


def _error(column, title="", beside=False):
    return Value(column, "{:.1e}", title, beside=beside)


_PRODUCT = ("data", "precision", "block", "n")
_KEPT = "block products kept"
_SQUARE = ("matrix", "n", "precision", "block", "origin")
_STUDIED = ("title", "precision", "ratio")  # and the images

KINDS: dict[str, Kind] = {
    # ---- Products
    "products": Kind(
        (*_PRODUCT, "ratio", "cold"),
        (
            View(
                "Speedup of mm over torch.mm (ms), norms included, by the share of block products "
                "kept:",
                (*_PRODUCT,),
                (_ms("dense_ms", "torch.mm", beside=True), Value("speedup")),
                "ratio",
                {"n": (1024, 8192)},
                texts=2,
            ),
        ),
        Lines(
            *("valid_ratio", "speedup", ("precision", "block"), "data"),
            {"n": 8192, "cold": False, "block": 64},
            "xy",
            (_KEPT, "speedup over torch.mm"),
        ),
    ),
    "norm maps": Kind(
        (*_PRODUCT, "cold"),
        (
            View(
                "Norm maps of both operands, ms (share of a copy's bandwidth), and the search for "
                "tau of a valid ratio of 30%, ms, by N:",
                ("data", "precision", "block"),
                (
                    _ms("norms_ms"),
                    Value("norms_share_of_copy", "({:.0%}),"),
                    _ms("search_ms"),
                ),
                "n",
                texts=2,
            ),
        ),
    ),
    # ---- Convolutions
    "convolutions": Kind(
        ("layer", "batch", "precision", "data", "block", "ratio", "cold"),
        (
            View(
                "Speedup over the dense convolution (us), by the share of block products kept; "
                "after it, where measured, that with input norms from the layer before:",
                ("layer", "batch", "precision", "data"),
                (
                    _us("dense_ms", "dense", beside=True),
                    Value("speedup", "{:.2f}"),
                    Value("speedup_chained", "/ {:.2f}"),
                ),
                "ratio",
                shown={"batch": (64, 128)},
            ),
        ),
        Map(("layer",), "ratio", "speedup", "precision", {"batch": None}),
    ),
    # ---- Networks
    "networks": Kind(
        ("network", "batch", "mode", "candidate"),
        (
            View(
                "Time of a batch in us, and the speed over torch.compile (in a CUDA graph) or over "
                "the dense network (eager):",
                ("network", "batch", "mode"),
                (_us("ms"), Value("speedup", "({:.2f}x)")),
                "candidate",
                shown={"mode": ("CUDA graph",)},
            ),
        ),
        Map(("network", "batch"), "candidate", "speedup", None, {"mode": "CUDA graph"}),
    ),
    "fused layers": Kind(
        ("layer", "batch", "candidate"),
        (
            View(
                "ResNet-50's convolutions with bias, residual and ReLU, us; the floor is what "
                "bytes or operations take on an H200:",
                ("group", "layer", "count", "batch"),
                (Value("floor_us", "{:.4g}", "floor", beside=True), _us("ms")),
                "candidate",
                texts=2,
            ),
        ),
        Map(("layer",), "candidate", "speedup"),
    ),
    # ---- VGG13
    "served": Kind(
        ("model", "mode", "network"),
        (
            View(
                "Time of a batch in us, and the speed over the dense network:",
                ("network",),
                (_us("ms"), Value("speedup", "({:.2f}x)")),
                "mode",
            ),
        ),
    ),
    "served, quality": Kind(
        ("model",),
        (
            View(
                "Accuracy on images that took no part in the choice of thresholds:",
                ("model",),
                (
                    Value("dense_accuracy", "{:.2f}%", "dense"),
                    Value("accuracy", "{:.2f}%", "with SpAMM"),
                    Value("changed", "{:.2f}%", "answers changed"),
                ),
            ),
        ),
    ),
    "served layers": Kind(
        ("model", "layer"),
        (
            View(
                "Layers by themselves, with bias and ReLU:",
                ("layer", "dense"),
                (
                    _percent("ratio", "valid", 0),
                    Value("tau", "{:.3g}"),
                    _us("dense_ms", "dense, us"),
                    _us("spamm_ms", "SpAMM, us"),
                ),
                texts=2,
            ),
        ),
    ),
    "served layers by ratio": Kind(("model", "layer", "ratio")),
    "study": Kind(
        ("images", *_STUDIED, "layout"),
        (
            View(
                "Change of accuracy in points and speed over the dense convolution, by layout; the "
                "paper's speed is over its dense product:",
                _STUDIED,
                (
                    Value("paper_change", "{:+.1f}", "paper: change", beside=True),
                    Value("paper_speedup", "{:.1f}x", "paper: speed", beside=True),
                    Value("accuracy_change", "{:+.2f}"),
                    Value("over_conv", "{:.2f}x"),
                ),
                "layout",
            ),
        ),
        Lines(
            *("over_conv", "accuracy_change", ("layout",), "precision"),
            {"title": "conv12 to conv52", "images": "MNIST in full"},
            "",
            ("speedup over the dense convolution", "change of accuracy, points"),
        ),
    ),
    "study, dense": Kind(
        ("images", "title", "precision"),
        (
            View(
                "The dense layers, ms:",
                ("title", "precision"),
                (
                    Value("dense_accuracy", "{:.2f}%", "accuracy"),
                    _ms("conv_ms", "convolution"),
                    _ms("im2col_gemm_ms", "im2col + GEMM"),
                    _ms("gemm_ms", "GEMM"),
                ),
                texts=2,
            ),
        ),
    ),
    "study, layers": Kind(("images", "title", "precision", "layer", "candidate")),
    "study, two GPUs": Kind(
        ("images", *_STUDIED),
        (
            View(
                "By position on two GPUs, over torch's convolution on one:",
                ("title", "precision", "ratio"),
                (
                    Value("speedup"),
                    Value("paper_2", "{:.1f}x", "paper, two"),
                    Value("paper_4", "{:.1f}x", "paper, four"),
                ),
                None,
            ),
        ),
    ),
    "study, whole network": Kind(
        ("images", *_STUDIED, "candidate"),
        (
            View(
                "The whole network, ms a batch, by the share of block products kept:",
                ("title", "precision", "candidate"),
                (_ms("ms"),),
                "ratio",
                texts=3,
            ),
        ),
    ),
    # ---- Tables 1 to 4
    "thresholds": Kind(
        ("n", "ratio"),
        (
            View(
                "Table 1: tau by valid ratio and N, and the difference from the paper's:",
                ("ratio",),
                (Value("tau", "{:.6f}"), Value("difference", "({:+.2%})")),
                "n",
            ),
        ),
    ),
    "valid products": Kind(("n", "ratio")),
    "speedups": Kind(
        ("precision", "block", "n", "ratio"),
        (
            View(
                "Table 2: speedup over torch.mm by N; after it the paper's over cuBLAS (V100):",
                ("precision", "block", "ratio"),
                (Value("speedup", "{:.2f}"), Value("paper", "/ {:.1f}")),
                "n",
                shown={"block": (64,)},
            ),
        ),
        Map(("n",), "ratio", "speedup", "precision", {"block": 64}),
    ),
    "speedups, two GPUs": Kind(
        ("precision", "n", "ratio", "layout"),
        (
            View(
                "On two GPUs, operands on the first (0) or in shards (S), over torch.mm on one:",
                ("precision", "n", "layout"),
                (Value("speedup", "{:.2f}"),),
                "ratio",
                shown={"precision": ("float16",)},
            ),
        ),
    ),
    "block-sparse products": Kind(("precision", "n", "ratio")),
    "at equal error": Kind(
        ("n", "share", "block"),
        (
            View(
                "Table 3: mm against the fastest sparse product at equal error:",
                ("n", "share", "block"),
                (
                    _percent("valid_ratio", "valid", 2),
                    _percent("paper_valid", "paper's valid", 2),
                    Value("error", "{:.5g}", "error"),
                    Value("paper_error", "{:.5g}", "paper's error"),
                    _ms("ms", "mm, ms"),
                    _ms("graph_ms", "in a graph"),
                    Value("speedup", "{:.4g}x"),
                    Value("speedup_two", "{:.4g}x", "two GPUs"),
                    Value("paper_speedup_1", "{:.4g}x", "paper's speedup"),
                    Value("paper_speedup_2", "{:.4g}x", "on two"),
                ),
            ),
        ),
    ),
    "sparse products": Kind(
        ("n", "share", "peer"),
        (
            View(
                "The sparse products:",
                ("n", "share", "peer"),
                (
                    _ms("ms"),
                    _ms("conversion_ms", "conversion, ms"),
                    _ms("dense_ms", "torch.mm, ms"),
                    Value("products", "{:.2g}"),
                    Value("trun", "{:.6g}", "TRUN"),
                    Value("error", "{:.5g}"),
                ),
                texts=3,
            ),
        ),
    ),
    "squares": Kind(
        (*_SQUARE, "waters", "basis", "tau"),
        (
            View(
                "Table 4: speedup over torch.mm (ms), and the error, by tau:",
                _SQUARE,
                (
                    _ms("dense_ms", "torch.mm", beside=True),
                    Value("speedup"),
                    Value("error", "({:.1e})"),
                ),
                "tau",
                shown={"precision": ("float64",)},
            ),
        ),
    ),
    "the paper's squares": Kind(
        ("number", "tau"),
        (
            View(
                "The paper's errors and its mean speedup over cuBLAS, N = 13,656:",
                ("number",),
                (
                    Value("norm", "{:.5g}", "norm of C", beside=True),
                    Value("error", "{:.2g}"),
                    Value("speedup", "{:.1f}x"),
                ),
                "tau",
            ),
        ),
    ),
    # ---- Density matrix
    "density matrix": Kind(
        ("problem", "method"),
        (
            View(
                "Methods; the energy error is in hartree an atom, the bound that of each step:",
                ("method",),
                (
                    Value("seconds", "{:.3g}"),
                    Value("over_dense", "{:.2g}x", "over torch.mm"),
                    Value("over_eigh", "{:.2g}x", "over eigh"),
                    _error("energy_error", "energy error"),
                    Value("iterations", "{}"),
                    _percent("most_valid", "most valid", 1),
                ),
            ),
        ),
        Lines(
            *("seconds", "distance", ("series",), "problem"),
            {},
            "xy",
            ("seconds", "energy error, hartree an atom"),
        ),
    ),
    "density matrix, iterations": Kind(("problem", "method", "iteration")),
    # ---- Several devices
    "several devices": Kind(
        ("layout", "data", "precision", "n", "ratio"),
        (
            View(
                "Speedup over one device, by where operands lie:",
                ("data", "precision", "n", "ratio"),
                (_ms("one_ms", "one, ms", beside=True), Value("speedup")),
                "layout",
                texts=2,
            ),
        ),
        Lines(
            *("n", "speedup", ("layout",), "ratio"),
            {"precision": "float16", "data": "decay"},
            "x",
            ("N", "speedup over one device"),
        ),
    ),
    "several devices, peers": Kind(
        ("peer", "data", "precision", "n"),
        (
            View(
                "Dense products of other libraries on the same devices, ms:",
                ("data", "precision", "n"),
                (_ms("ms"),),
                "peer",
                texts=2,
            ),
        ),
    ),
    "several devices, overheads": Kind(
        ("layout", "n"),
        (
            View(
                "Until mm returns to Python, us:",
                ("layout", "n"),
                (Value("one_us", "{:.3g}", "one"), Value("all_us", "{:.3g}", "all")),
            ),
        ),
    ),
    "several devices, layers": Kind(
        ("layer", "batch", "ratio"),
        (
            View(
                "Speedup of a batch's convolution over one device, by batch:",
                ("layer", "ratio"),
                (Value("speedup"),),
                "batch",
            ),
        ),
        Map(("layer",), "batch", "speedup", "ratio"),
    ),
    # ---- Calibration
    "calibrated layers": Kind(
        ("case", "name"),
        (
            View(
                "Layers as chosen, us:",
                ("name", "shape", "reason"),
                (
                    _percent("valid_ratio", "valid"),
                    Value("tau", "{:.4g}"),
                    Value("dense_us", "{:.1f}", "dense"),
                    Value("chosen_us", "{:.1f}", "chosen"),
                    _percent("error", "error", 2),
                ),
                texts=3,
            ),
        ),
        Map(("name",), "run", "speedup"),
    ),
    "calibrated": Kind(
        ("case", "form"),
        (
            View(
                "The whole model:",
                ("form",),
                (_us("ms", "us"), Value("speedup", "{:.2f}x", "over compiled")),
            ),
        ),
    ),
    # ---- Reference form
    "canvases": Kind(
        ("canvas", "form"),
        (
            View(
                "Time of a batch in ms, the speed over torch.compile, and how many pixels change:",
                ("canvas",),
                (
                    _ms("ms"),
                    Value("speedup", "({:.2f}x)"),
                    Value("changed", "{}"),
                ),
                "form",
            ),
        ),
        Map(("canvas",), "form", "speedup"),
    ),
    "quality": Kind(
        ("form",),
        (
            View(
                "Quality of the labels:",
                ("form",),
                (Value("mean_iou", "{:.3f}", "mean IoU"), _percent("found", "digits found")),
            ),
        ),
    ),
    # ---- Tiles
    "tiles": Kind(
        ("precision",),
        (
            View(
                "Tiles for each multiprocessor from which on the larger tile is better:",
                ("precision",),
                (
                    Value("best_threshold", "{:.2f}", "from"),
                    Value("best_loss", "{:.3f}", "its loss"),
                    Value("chosen_loss", "{:.3f}", "loss of the choice as it stands"),
                ),
            ),
        ),
    ),
    "tile times": Kind(
        ("precision", "n", "ratio", "tile"),
        (View("Times, ms:", ("precision", "n", "ratio"), (_ms("ms"),), "tile"),),
    ),
    # ---- Finished studies
    "orders of images": Kind(
        ("network", "arrangement", "order"),
        (
            View(
                "Answers changed in percent, and the change of accuracy in points, by arrangement:",
                ("order",),
                (Value("changed", "{:.2f}"), Value("accuracy_change", "/ {:+.2f}")),
                "arrangement",
            ),
        ),
    ),
    "low ratios": Kind(
        ("network", "case", "ratio"),
        (
            View(
                "Change of accuracy in points, with the share of multiplications kept:",
                ("case",),
                (Value("accuracy_change", "{:+.2f}"), _percent("valid", "")),
                "ratio",
            ),
        ),
    ),
    "pixel blocks": Kind(
        ("case", "pixel_block", "ratio"),
        (
            View(
                "Change of accuracy in points by pixel block (images, rows, columns):",
                ("case", "pixel_block"),
                (Value("accuracy_change", "{:+.2f}"),),
                "ratio",
                texts=2,
            ),
        ),
        Lines(
            *("valid_ratio", "accuracy", ("pixel_block",), "case"),
            {},
            "x",
            (_KEPT, "accuracy (%)"),
        ),
    ),
}
