"""Table 4 as a page and a picture."""

from pathlib import Path

from common import plots
from common.report_files import table
from tables import paper

TITLE = "matrices of electronic structure theory"
_NAMES = {"overlap": "S", "core_hamiltonian": "H_core", "fock": "F", "density": "D"}
_OF_CLUSTER = {  # what a matrix is of a cluster without ergo's file
    "overlap": "exact",
    "core_hamiltonian": "ergo",
    "fock": "model F",
    "density": "of model F",
}
_SHOWN_TAU = 1e-6  # of the conclusion
_PAPERS_SIZE = 13656

_NOTES = """\
C = A A for matrices of water clusters: overlap S, core Hamiltonian H_core, Fock matrix F, density
matrix D, functions in the order of `spatial_order`. Brackets say where a matrix is from. "ergo" and
files: Hartree-Fock by that program. "exact": the overlap of the cluster's functions, as any program
has it. "model F": extended Hueckel, with a molecule's real F in place of energies of orbitals; its
D is by eigenvectors of that F. Hartree-Fock of the same cluster takes hours, and gives other
numbers.

Errors are Frobenius norms against torch.mm's product in float64 of the same, rounded, matrix:
skipping and rounding together. That of torch.mm itself stands beside them. The paper does not name
its four matrices, nor the order of their functions, which decides how much is skipped. Where it has
an error of 0, there is a small one here, below its bound."""

_SPEEDUPS = """\
Speedups are over torch.mm, norms included, and in brackets over mm at tau = 0: torch.mm is the
library's (cuBLAS, MKL), the second says what skipping alone gains."""


def conclusion(data):
    """Speedups in float64 at the largest size, and whether errors are below their bounds."""
    rows = _rows(data)
    if not rows:
        return "No matrix was measured."
    largest = max(place["n"] for place, _ in rows)
    best = {}
    for place, row in rows:
        if (place["n"], place["precision"], row["tau"]) == (largest, "float64", _SHOWN_TAU):
            name = _NAMES[place["matrix"]]
            best[name] = max(best.get(name, row), row, key=lambda row: row["speedup"])
    said = ", ".join(
        f"{name} {row['speedup']:.3g}x at {row['valid_ratio']:.1%} valid (error {row['error']:.1g})"
        for name, row in best.items()
    )
    return f"N = {largest}, float64, tau = {_SHOWN_TAU:g}, over torch.mm: {said}."


def beside(data):
    """Errors, with the paper's above ours, and speedups."""
    taus = _taus(data)
    shown = [f"{tau:g}" for tau in taus]
    papers = [
        (
            *(f"paper's no. {number}", _PAPERS_SIZE, "", "", f"{norm:.5g}", ""),
            *(f"{errors[tau]:.2g}" if tau in errors else "" for tau in taus),
        )
        for number, (norm, errors) in paper.SQUARES.items()
    ]
    errors = [
        (
            *(*_place(place, block), f"{first['norm']:.5g}", f"{first['dense_error']:.1g}"),
            *(f"{row['error']:.2g}" for row in rows),
        )
        for place, block, first, rows in _lines(data)
    ]
    speedups = [
        (
            *(*_place(place, block), f"{first['dense_ms']:.4g}"),
            *(f"{row['speedup']:.3g} ({row['speedup_unskipped']:.3g})" for row in rows),
        )
        for place, block, first, rows in _lines(data)
    ]
    of_paper = [
        f"{paper.SQUARES_SPEEDUP[tau]}" if tau in paper.SQUARES_SPEEDUP else "" for tau in taus
    ]
    speedups.insert(0, ("paper's mean, 1 GPU", _PAPERS_SIZE, "", 32, "", *of_paper))
    place = ("matrix", "N", "type", "block")
    return [
        *_NOTES.splitlines(),
        "",
        *table((*place, "norm of C", "torch.mm's error", *shown), papers + errors, left=(0, 2)),
        "",
        *_SPEEDUPS.splitlines(),
        "",
        *table((*place, "torch.mm, ms", *shown), speedups, left=(0, 2)),
        *_absent_lines(data),
    ]


def body(data, picture):
    """The page below its header."""
    place = ("matrix", "N", "type", "block")
    shown = [f"{tau:g}" for tau in _taus(data)]
    lines = [
        (
            *_place(place, block),
            *(f"{row['valid_ratio']:.2%}, {row['bound']:.1e}" for row in rows),
        )
        for place, block, _, rows in _lines(data)
    ]
    return [
        f"![speedup by threshold]({picture})",
        "",
        *beside(data),
        "",
        "## Valid ratio, and bound of what skipping loses",
        "",
        *table((*place, *shown), lines, left=(0, 2)),
    ]


def picture(data):
    """Speedups by tau of the largest cluster: a panel for each type, a line for each matrix."""
    rows = _rows(data)
    largest = max((place["n"] for place, _ in rows), default=0)
    at_largest = [(place, row) for place, row in rows if place["n"] == largest]
    precisions = sorted({place["precision"] for place, _ in at_largest}, reverse=True) or [
        "float64"
    ]
    values = [row["speedup"] for _, row in at_largest] or [1.0]
    figure, (axes,) = plots.panels(1, len(precisions), 3.6, sharey=True)
    for axis, precision in zip(axes, precisions, strict=True):
        ends = []
        plots.factor_axis(axis, values)
        for index, (matrix, name) in enumerate(_NAMES.items()):
            best = {}
            for place, row in at_largest:
                if (place["matrix"], place["precision"]) == (matrix, precision):
                    best[row["tau"]] = max(best.get(row["tau"], 0), row["speedup"])
            if best:
                axis.plot(*zip(*sorted(best.items()), strict=True), "-o", color=plots.color(index))
                tau = max(best)
                ends.append((tau, best[tau], name, plots.color(index)))
        axis.set_xscale("log")
        axis.set(title=precision, xlabel="tau")
        plots.name_lines(axis, ends)
    axes[0].set_ylabel("speedup over torch.mm")
    return plots.png(figure, data["header"], f"C = A A, N = {largest}, the better of both blocks")


def _rows(data):
    """(place, row) of what was measured."""
    return [(found["place"], row) for found in data["cells"] for row in found["rows"]]


def _taus(data):
    return sorted({row["tau"] for _, row in _rows(data)})


def _lines(data):
    """(place, block, its first row, its rows by tau) of each matrix, type and block."""
    found = []
    for of_cell in data["cells"]:
        for block in sorted({row["block"] for row in of_cell["rows"]}):
            rows = [row for row in of_cell["rows"] if row["block"] == block]
            rows.sort(key=lambda row: row["tau"])
            found.append((of_cell["place"], block, rows[0], rows))
    return found


def _place(place, block):
    return _title(place), place["n"], place["precision"], block


def _title(place):
    cluster = f"{place['waters']} waters, {place['basis']}"
    return f"{_NAMES[place['matrix']]}, {cluster} ({_origin(place)})"


def _origin(place):
    """What a matrix is: of ergo, of a file of ergo's, exact, or of a model."""
    if place["origin"] == "embedded":
        return "ergo"
    if place["origin"] == "model":
        return _OF_CLUSTER[place["matrix"]]
    return Path(place["origin"]).name


def _absent_lines(data):
    lines = [
        f"- {_title(found['place'])}, {found['place']['precision']}: not measured: "
        f"{found['absent']}"
        for found in data["cells"]
        if found["absent"]
    ]
    return ["", *lines] if lines else []
