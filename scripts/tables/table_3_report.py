"""Table 3 as a page and a picture."""

from common import plots
from common.report_files import table
from tables import paper

TITLE = "against sparse products at equal error"

_NOTES = """\
The paper's decay matrix, float32. For the sparse product (SpGEMM, CSR) entries below TRUN are
dropped, so that the paper's share of nonzeros is left; for SpAMM tau is searched so that the norm
of the error is as large, and no larger. Errors are Frobenius norms of the difference from the whole
product in float64. Converting both operands to CSR is not counted, as in the paper, and stands by
itself. Each speedup is over the fastest SpGEMM that the machine has.

Times are of calls from Python, several in a row, launches included, for both sides alike: a SpGEMM
waits for the device to learn how large its result is, so that it cannot be a CUDA graph. Small
products of ours take the device less time than Python needs to launch them; "in a graph" is what
the device takes, and no speedup is made from it."""

_OF_PAPER = """\
The paper's errors of 46340 are the root of 2^31: a sum of squares beyond an integer's range, it
seems. At N = 8192 its errors and its valid ratios do not belong together; this table's own page has
what is lost at its ratios."""

_PEERS = """\
A SpGEMM forms the product of every two entries that meet; "products" counts them. The default
algorithm of cuSPARSE, ALG1, refuses more than 32 bits can count (2.1e9): where there are more, A is
multiplied in slices of rows, and the results are joined within the time. ALG1 to ALG3 are called
through the C API; ALG3 forms the products in chunks, and is given the largest, up to 20%, that fit.
A SpGEMM of more than two seconds is timed once."""

_AT_PAPERS = """\
"At the paper's" is the error with the paper's valid ratio, against the one that the paper gives."""

_SEVERAL = """\
Two GPUs where there are two: mm with `devices`, operands on the first. For 4 and 8 GPUs nothing is
predicted, for the model of several GPUs is one of float16."""


def conclusion(data):
    """The span of speedups, in the paper's blocks."""
    speedups = [row["speedup"] for _, _, row in _ours(data) if row["speedup"]]
    if not speedups:
        return "No sparse product could be measured."
    peers = sorted({sparse["peer"] for _, sparse, row in _ours(data) if row["speedup"]})
    slower = sum(value < 1 for value in speedups)
    return (
        f"At equal error mm is {min(speedups):.3g} to {max(speedups):.3g} times as fast as the "
        f"sparse product of {' or '.join(peers)}"
        + (f" (slower in {slower} of {len(speedups)} cells)." if slower else ".")
    )


def beside(data):
    """A line for each size, share of nonzeros and block."""
    head = ("N", "nonzero", "block", "valid", "paper", "E sparse", "paper", "E SpAMM", "paper")
    head += ("norm of C", "SpGEMM, ms", "mm, ms", "in a graph")
    head += ("speedup", "2 GPUs", "paper, 1 / 2 / 4 / 8 GPUs")
    lines = []
    for place, sparse, row in _ours(data):
        valid, e_sparse, e_ours, speedups = _papers(place)
        lines.append(
            (
                *(place["n"], f"{sparse['nonzeros']:.2%}", row["block"]),
                *(f"{row['valid_ratio']:.2%}", valid),
                *(f"{sparse['error']:.5g}", e_sparse, f"{row['error']:.5g}", e_ours),
                *(f"{sparse['norm']:.5g}", _ms(sparse["ms"]), _ms(row["ms"])),
                "" if row.get("graph_ms") is None else _ms(row["graph_ms"]),
                *(_times(row["speedup"]), _times(row["speedup_two"]), speedups),
            )
        )
    return [
        *_NOTES.splitlines(),
        "",
        *table(head, lines),
        "",
        *_OF_PAPER.splitlines(),
        "",
        *_SEVERAL.splitlines(),
        *_absent_lines(data),
    ]


def body(data, picture):
    """The page below its header."""
    head = ("N", "nonzero", "TRUN", "products", "peer", "SpGEMM, ms", "conversion, ms")
    head += ("torch.mm, ms",)
    lines = []
    for found in _cells(data):
        for sparse in found["rows"][:1]:
            for name, ms in sparse["peers"].items():
                shown = _ms(ms) if not isinstance(ms, str) else f"not measured: {ms}"
                lines.append(
                    (
                        *(found["place"]["n"], f"{sparse['nonzeros']:.2%}"),
                        *(f"{sparse['trun']:.6g}", _count(sparse.get("products")), name, shown),
                        *(_ms(sparse["conversion_ms"]), _ms(sparse["dense_ms"])),
                    )
                )
    taus = [
        (
            *(place["n"], f"{sparse['nonzeros']:.2%}", row["block"], f"{row['tau']:.6g}"),
            *(_papers(place)[0], _error(row.get("error_at_papers")), _papers(place)[2]),
        )
        for place, sparse, row in _ours(data)
    ]
    of_taus = ("N", "nonzero", "block", "tau", "paper's valid", "at the paper's", "paper")
    return [
        f"![speedup over sparse products by share of nonzeros]({picture})",
        "",
        *beside(data),
        "",
        "## The sparse products",
        "",
        *_about_peers(data),
        *table(head, lines, left=(4,)),
        "",
        "## Thresholds",
        "",
        *_AT_PAPERS.splitlines(),
        "",
        *table(of_taus, taus, left=()),
    ]


def picture(data):
    """Speedups by share of nonzeros: sizes as lines, blocks as panels, the paper's dashed."""
    blocks = sorted({row["block"] for _, _, row in _ours(data)}) or [32]
    figure, (axes,) = plots.panels(1, len(blocks), 3.6, sharey=True)
    values = [row["speedup"] for _, _, row in _ours(data) if row["speedup"]]
    values += [of[3][1] for (n, _), of in paper.SPGEMM.items() if n in _sizes(data)]
    for axis, block in zip(axes, blocks, strict=True):
        ends = []
        plots.factor_axis(axis, values or [1.0])
        for index, n in enumerate(_sizes(data)[: plots.MOST_LINES]):
            color = plots.color(index)
            papers = [
                (100 * share, of[3][1]) for (size, share), of in paper.SPGEMM.items() if size == n
            ]
            if papers:
                axis.plot(*zip(*papers, strict=True), "--x", color=color)
            points = [
                (100 * sparse["nonzeros"], row["speedup"])
                for place, sparse, row in _ours(data)
                if (place["n"], row["block"]) == (n, block) and row["speedup"]
            ]
            if points:
                axis.plot(*zip(*points, strict=True), marker="o", color=color)
                ends.append((*points[0], f"N = {n}", color))
        axis.set(title=f"blocks of {block}", xlabel="nonzeros, %", xlim=(0, 75))
        plots.name_lines(axis, ends, size=9)
    axes[0].set_ylabel("speedup over SpGEMM")
    return plots.png(figure, data["header"], "At equal error; dashed: the paper's")


def _ours(data):
    """(place, row of the sparse product, row of ours)."""
    return [
        (found["place"], found["rows"][0], row)
        for found in _cells(data)
        for row in found["rows"][1:]
    ]


def _cells(data):
    """In the paper's order: by size, the most nonzeros first."""
    return sorted(
        data["cells"], key=lambda found: (found["place"]["n"], -found["place"]["nonzeros"])
    )


def _sizes(data):
    return sorted({found["place"]["n"] for found in data["cells"]})


def _papers(place):
    """Valid ratio, errors and speedups, as text; nothing where the paper has no such row."""
    of_paper = paper.SPGEMM.get((place["n"], place["nonzeros"]))
    if of_paper is None:
        return ("",) * 4
    valid, e_sparse, e_ours, speedups = of_paper
    return f"{valid:.2%}", e_sparse, e_ours, " / ".join(map(str, speedups.values()))


def _about_peers(data):
    """What cuSPARSE's names mean, where it was measured."""
    names = {name for found in data["cells"] for row in found["rows"][:1] for name in row["peers"]}
    known = any(name.startswith("cuSPARSE") for name in names)
    return [*_PEERS.splitlines(), ""] if known else []


def _count(value):
    return "" if value is None else f"{value:.2g}"


def _error(value):
    return "" if value is None else f"{value:.5g}"


def _ms(value):
    return "not measured" if value is None else f"{value:.4g}"


def _times(value):
    return "" if value is None else f"{value:.3g}"


def _absent_lines(data):
    """Why a cell, or its sparse product, was not measured; and sizes of the paper's left out."""
    lines = []
    for found in _cells(data):
        at = f"N = {found['place']['n']}, {found['place']['nonzeros']:.2%} nonzero"
        if found["absent"]:
            lines.append(f"- {at}: not measured: {found['absent']}")
        for sparse in found["rows"][:1]:
            lines += [
                f"- {at}, {name}: not measured: {why}"
                for name, why in sparse["peers"].items()
                if isinstance(why, str)
            ]
    left_out = sorted({n for n, _ in paper.SPGEMM} - set(_sizes(data)))
    lines += [
        f"- N = {n}, of the paper's: not asked for; `--sizes {n}` measures it (a CPU needs minutes "
        "for each product)"
        for n in left_out
    ]
    return ["", *lines] if lines else []
