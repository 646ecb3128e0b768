"""Makes the pages and pictures of results again from their JSON files; measures nothing.

Needs neither the library nor a GPU. Without arguments: all of docs/results, their index, and the
table and the picture of README.md.

    python scripts/plot_results.py docs/results/products.json --add results/mm.json
"""

import sys
from pathlib import Path

from common import REPOSITORY, plots, results
from common.options import add, exit_code, make_parser
from models.files import UserError

_FOLDER = REPOSITORY / "docs" / "results"
_BEGIN, _END = "<!-- figures: begin -->\n", "<!-- figures: end -->"
_PAGES = ("products", "block_sparse", "density_matrix", "vgg13", "networks")
_PRODUCTS = {"kind": "products", "data": "decay", "block": 64}


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


def summary(rows):
    """README's picture, as the bytes of a PNG."""
    skips, whole = [], []
    for precision in ("float32", "float64", "float16"):
        [row] = rows_with(rows, n=8192, ratio=0.05, precision=precision, **_PRODUCTS)
        skips.append((f"product, {precision}, 5% kept", row["speedup"], "torch.mm"))
    plain, skipping, change = served(rows)
    whole.append(("VGG13, float16", plain, "cuDNN, fused"))
    words = f"cuDNN, fused ({change:+.2f} points)"
    skips.append(("VGG13, float16, skipping", skipping, words))
    whole.append(("ResNet-50, float16", resnet(rows)["speedup"], "torch.compile"))
    at = {"network": "resnet50, tf32", "batch": 64, "candidate": "ours-compiled"}
    [row] = rows_with(rows, kind="networks", **at)
    whole.append(("ResNet-50, TF32", row["speedup"], "torch.compile"))
    groups = {
        name: [(bar, speed, f"{factor(speed)} {peer}") for bar, speed, peer in found]
        for name, found in (("skips", skips), ("nothing skipped", whole))
    }
    caption = "Speed over what stands behind the bar, on one H200, N = 8192; longer is faster"
    return plots.bars(groups, caption)


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
        readme, rows = REPOSITORY / "README.md", load(_FOLDER)
        text = with_figures(readme.read_text(), figures(rows))
        results.write_bytes(_FOLDER / "summary.png", summary(rows))
        results.write_bytes(readme, text.encode())


if __name__ == "__main__":
    sys.exit(exit_code(main))
