"""Makes the pages and pictures of results again from their JSON files; measures nothing.

Needs neither the library nor a GPU. Without arguments: all of docs/results, their index, and the
table and the picture of README.md. Left of that picture: speedup of products over cuBLAS by the
share of block products kept. Right: the speedup of VGG13 over cuDNN where at most a point of
accuracy is lost.

    python scripts/plot_results.py docs/results/products.json --add results/mm.json
"""

import sys
from pathlib import Path

from common import REPOSITORY, plots, results
from common.console import exit_code
from common.options import add, make_parser
from models.files import UserError

_FOLDER = REPOSITORY / "docs" / "results"
_BEGIN, _END = "<!-- figures: begin -->\n", "<!-- figures: end -->"
_PAGES = ("products", "block_sparse", "density_matrix", "vgg13", "networks")
_PRODUCTS = {"kind": "products", "data": "decay", "block": 64, "cold": False}
_MOST_LOST = 1.0  # points of accuracy
_SIZE = 15  # of texts


def load(folder):
    """The rows of all pages that hold, each with its "kind"."""
    pages = [results.load(folder / f"{name}.json") for name in _PAGES]
    return [
        row | {"kind": kind}
        for page in pages
        for kind in sorted({kind for run in page["runs"] for kind in run["tables"]})
        for row in results.rows_of(page, kind)
    ]


def rows_with(rows, on_gpu=True, **values):
    """The rows of an H200, or of a CPU, that have these values; UserError: there is none."""

    def is_there(device):
        return device.startswith("NVIDIA H200") if on_gpu else not device.startswith("NVIDIA")

    chosen = [row for row in rows if values.items() <= row.items() and is_there(row["device"])]
    if not chosen:
        raise UserError(f"expected a recorded row with {values}; got none")
    return chosen


def served(rows):
    """(nothing skipped, with SpAMM, points of accuracy) of the whole VGG13 in one CUDA graph."""
    run = "vgg13_converted_h200"
    at = {"kind": "served", "run": run, "mode": "CUDA graph"}
    [plain], [skipping] = (rows_with(rows, network=n, **at) for n in ("nothing skipped", "SpAMM"))
    [quality] = rows_with(rows, kind="served, quality", run=run)
    return plain["speedup"], skipping["speedup"], quality["accuracy"] - quality["dense_accuracy"]


def resnet(rows):
    """The row of ResNet-50 with nothing skipped, in one CUDA graph."""
    at = {"network": "resnet50", "batch": 64, "mode": "CUDA graph", "candidate": "ours"}
    [row] = rows_with(rows, kind="networks", **at)
    return row


def factor(value):
    """As in "0.98x", "1.46x", "6.8x", "33x"."""
    return f"{value:.{(value < 1.95) + (value < 9.95)}f}x"


# ---- Table --------------------------------------------------------------------------------------


def figures(rows):
    """The lines of README's table."""
    lines = []
    for precision, n, on_gpu in (("float16", 8192, 1), ("float32", 8192, 1), ("float32", 4096, 0)):
        at = _PRODUCTS | {"precision": precision, "n": n}
        [[whole], [some], [few]] = (
            rows_with(rows, bool(on_gpu), ratio=ratio, **at) for ratio in (1, 0.3, 0.05)
        )
        device, peer = ("H200", "cuBLAS") if on_gpu else ("two CPU cores", "MKL")
        speeds = f"{factor(some['speedup'])} at 30% valid, {factor(few['speedup'])} at 5%"
        name = f"decay matrices, N = {n}, {precision}, {device}"
        lines.append((name, peer, factor(whole["speedup"]), speeds))
    density = rows_with(rows, kind="density matrix", run="density_569_h200")
    exact = [row for row in density if abs(row["energy_error"]) < 1e-7]
    best = max(exact, key=lambda row: row["over_dense"])
    name = f"[density matrix](docs/density_matrix.md) of {best['problem'].split(',')[0]}, H200"
    error = f"{factor(best['over_dense'])}, energy error {best['energy_error']:.0e}"
    lines.append((name, "cuBLAS in float64", "", error))
    at = {"kind": "block-sparse density", "run": "block_sparse_strips_h200", "waters": 2000}
    [row] = rows_with(rows, **at)
    name = "[block-sparse](docs/block_sparse.md) density matrix of 2,000 waters, H200"
    error = f"{factor(row['over_dense'])}, energy error {abs(row['energy_error']):.0e}"
    lines.append((name, "dense storage, skipping too", "", error))
    plain, skipping, change = served(rows)
    name = "VGG13 on MNIST, batch 128, float16, H200"
    skipping = f"{factor(skipping)}, accuracy {change:+.2f} points"
    lines.append((name, "cuDNN, fused", factor(plain), skipping))
    name = "ResNet-50, batch 64, float16, H200"
    lines.append((name, "torch.compile", factor(resnet(rows)["speedup"]), ""))
    return results.table(
        ("workload", "compared with", "nothing skipped", "with skipping"), lines, left=2
    )


def with_figures(text, lines):
    """README with the table between its marks; UserError: it has none."""
    before, begin, rest = text.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise UserError(f"expected a page with the lines {_BEGIN.strip()} and {_END}; got none")
    return before + begin + "\n".join(lines) + "\n" + end + after


# ---- Picture ------------------------------------------------------------------------------------


def picture(rows):
    """The PNG as bytes."""
    figure, [[left, right]] = plots.panels(1, 2, 5.4, width=12)
    products = rows_with(rows, n=8192, **_PRODUCTS)
    _draw_products(left, products)
    _draw_networks(right, rows)
    for axis in (left, right):
        axis.tick_params(labelsize=_SIZE)
        axis.xaxis.label.set_size(_SIZE)
    return plots.png(figure, products[0], device_size=_SIZE - 3)


def _draw_products(axis, rows):
    """Decay matrices of one size, a line for each type."""
    curves = {}
    for precision in ("float32", "float64", "float16"):
        chosen = rows_with(rows, precision=precision)
        curve = [(100 * row["valid_ratio"], row["speedup"]) for row in chosen]
        curves[precision] = sorted(curve, reverse=True)
    kept, speedups = zip(*(point for curve in curves.values() for point in curve), strict=True)
    plots.ratio_axis(axis, min(kept))
    plots.factor_axis(axis, speedups)
    for precision, curve in curves.items():
        axis.plot(*zip(*curve, strict=True), "o-", color=plots.color(precision), lw=3, ms=8)
        words = f"  {precision}: {factor(curve[-1][1])}"
        style = {"color": plots.color(precision), "fontsize": _SIZE, "fontweight": "bold"}
        axis.text(*curve[-1], words, va="center", **style)
    title = "Decay matrices, N = 8192:\nspeedup over cuBLAS (higher is faster)"
    axis.set_title(title, fontsize=_SIZE)


def _draw_networks(axis, rows):
    """VGG13's convolutions but the first by type, that network as served, and ResNet-50."""
    bars = []
    for precision in ("float32", "float16"):
        at = {"title": "conv12 to conv52", "layout": "by position", "precision": precision}
        found = rows_with(rows, kind="study", **at)
        near = [row for row in found if row["accuracy_change"] >= -_MOST_LOST]
        best = max(near, key=lambda r: r["over_conv"])
        name = f"VGG13's\nconvolutions,\n{precision}, {best['valid_ratio']:.0%} kept"
        bars.append((name, best["over_conv"], f" ({best['accuracy_change']:+.2f})", precision))
    _, speedup, change = served(rows)
    bars.append(("VGG13 as\nserved, float16", speedup, f" ({change:+.2f})", "float16"))
    name = "ResNet-50,\nfloat16, nothing\nskipped"
    bars.append((name, resnet(rows)["speedup"], "", "float16"))
    for place, (_, length, lost, precision) in enumerate(bars):
        color = plots.color(precision)
        axis.barh(place, length, color=color, height=0.6)
        style = {"fontsize": _SIZE, "fontweight": "bold", "color": color}
        axis.text(length, place, f" {factor(length)}{lost}", va="center", **style)
    axis.set_yticks(range(len(bars)), [name for name, *_ in bars])
    axis.invert_yaxis()
    axis.set_xlim(0, 1.6 * max(length for _, length, *_ in bars))
    axis.set_xticks([1, 2, 3, 4], ["1x", "2x", "3x", "4x"])
    axis.axvline(1, color="black", linewidth=1)
    axis.set_xlabel("speedup (longer is faster)")
    title = "VGG13 over cuDNN (accuracy),\nResNet-50 over torch.compile"
    axis.set_title(title, fontsize=_SIZE)


def write_summary(folder, readme):
    """Writes the picture beside the JSON files of a folder, and README's table; UserError: it has
    no place for it.
    """
    rows = load(folder)
    text = with_figures(readme.read_text(), figures(rows))
    results.write_bytes(folder / "summary.png", picture(rows))
    results.write_bytes(readme, text.encode())


# ---- The command --------------------------------------------------------------------------------


def main(arguments=None):
    parser = make_parser(__doc__)
    what = "JSON files of results (default: all of docs/results)"
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help=what)
    what = (
        "a JSON file that a script wrote: its runs join the page first, where they supersede rows "
        "of the same measurement; those that moved by more than 3% are named"
    )
    add(parser, "--add", what, None, "none", metavar="FILE", type=Path)
    options = parser.parse_args(arguments)
    if options.add is not None and len(options.files) != 1:
        raise UserError(f"expected one page for --add; got {len(options.files)}")
    found = {path: results.load(path) for path in options.files or sorted(_FOLDER.glob("*.json"))}
    for path, page in found.items():
        for run in results.load(options.add)["runs"] if options.add else ():
            for line in results.add(page, run):
                print(f"moved: {line}")
        results.write(path, page)
        print(f"{path.stem}: {page['headline']}")
    if not options.files:
        index = results.index({path.stem: page for path, page in found.items()})
        results.write_bytes(_FOLDER / "README.md", index.encode())
        write_summary(_FOLDER, REPOSITORY / "README.md")


if __name__ == "__main__":
    sys.exit(exit_code(main))
