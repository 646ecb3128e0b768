"""Table 2 as a page and a picture."""

from common import plots
from common.report_files import table
from tables import paper

TITLE = "speedup over the dense product"
LARGE, REPEATS_OF_LARGE = 16384, 3  # from this size on so many rounds of a timing at most
_PAPERS_BLOCK, _BLOCK = 32, 64
_PAPERS_TYPE = {"float32": "float32", "float16": "float16", "bfloat16": "float16"}

_NOTES = """\
Products of the paper's decay matrices. A cell: the paper's speedup over cuBLAS, ours over torch.mm
(cuBLAS on a GPU; MKL or oneDNN on a CPU) in the paper's blocks of 32, and in this library's of 64,
with the share of the floor below that the latter reaches.
Norms of both operands are included, the search for tau and transfers are not, as in the paper. On
a CPU bfloat16 stands beside the paper's FP16. Each result is compared with float64 and the same
products skipped before it is timed."""

_MEANING = """\
What a speedup means depends on what it is over. The peer is today's dense product: on an H200
cuBLAS multiplies some ten times as fast as on the paper's V100 (FP16), while memory is five times
as fast. Skipping saves multiplications and no reading, so the same share kept saves less time
there, the more so the smaller N. The floor says how much could be had: both operands read once at
the speed of a copy, plus the larger of valid ratio x torch.mm and all three matrices at that
speed."""

_SEVERAL = """\
Speedup over torch.mm on one GPU, as in the paper; blocks of 64. Layout 0: operands and result on
the first GPU, so that all travels within the call; S: operands lie in shards. Figures for 4 and 8
GPUs are not measured: *model* is the speedup on one GPU times what the model of docs/scaling.md
gives for that many in layout S, with the shares that travel counted for each of them."""

_BSR = """\
torch.sparse's product of a block-sparse (BSR) matrix and a dense one, in blocks of 64. A has the
blocks that take part in a valid product, which is all that the format can leave out: "kept" is
their share, against the ratio of all products that SpAMM keeps. Timed eagerly."""

_ABOUT_CODE = "The figures are those of the paper's text; its program was not run again."


def conclusion(data):
    """In how many of the paper's cells ours is the higher speedup."""
    parts = []
    for precision in _types(data):
        for block in (_PAPERS_BLOCK, _BLOCK):
            pairs = [
                (row["speedup"], of_paper)
                for place, row in _ones(data, precision, block)
                if (of_paper := _papers(precision, place["n"], row["ratio"])) is not None
            ]
            if pairs:
                higher = sum(ours > theirs for ours, theirs in pairs)
                parts.append(f"{precision}, block {block}: {higher} of {len(pairs)} cells")
    if not parts:
        return "No cell is of a size and ratio of the paper's."
    return f"Speedup over the dense product above the paper's: {'; '.join(parts)}."


def beside(data):
    """For each type, ratios by sizes: the paper's, ours in blocks of 32 and of 64."""
    lines = [*_NOTES.splitlines(), ""]
    for precision in _types(data):
        sizes = _sizes(data)
        by_block = {
            block: {(at["n"], row["ratio"]): row for at, row in _ones(data, precision, block)}
            for block in (_PAPERS_BLOCK, _BLOCK)
        }
        rows = [
            [f"{ratio:.0%}", *(_cell(precision, n, ratio, by_block) for n in sizes)]
            for ratio in paper.RATIOS
        ]
        lines += [f"{precision}, one device: paper / block 32 / block 64", ""]
        lines += [*table(("ratio", *(f"N = {n}" for n in sizes)), rows), ""]
    lines += [*_MEANING.splitlines(), "", *_below_lines(data), *_absent_lines(data, "one")]
    return [*lines, *_several(data)]


def body(data, picture):
    """The page below its header."""
    return [
        f"![speedups by size and ratio, ours and the paper's]({picture})",
        "",
        *beside(data),
        "## One device: every figure",
        "",
        "Times are medians in ms, all candidates of a size in turns, on a GPU as CUDA graphs; from",
        f"N = {LARGE} on of at most {REPEATS_OF_LARGE} rounds. Errors are relative.",
        f"{_ABOUT_CODE} {_copy_line(data)}",
        "",
        *_every(data),
        "",
        "## A block-sparse peer",
        "",
        *_BSR.splitlines(),
        "",
        *_of_bsr(data),
    ]


def picture(data):
    """Speedups as maps: types beside each other, ours above the paper's."""
    types, sizes = _types(data), _sizes(data)
    rows = [("blocks of 32", 32), ("blocks of 64", 64), ("the paper's", None)]
    figure, axes = plots.panels(
        len(rows), len(types), 1.2 + len(rows) * (0.7 + 0.27 * len(sizes)), sharex=True
    )
    for line, (name, block) in zip(axes, rows, strict=True):
        for axis, precision in zip(line, types, strict=True):
            found = {(at["n"], row["ratio"]): row for at, row in _ones(data, precision, block)}

            def value(n, ratio, precision=precision, block=block, found=found):
                if block is None:
                    return _papers(precision, n, ratio)
                row = found.get((n, ratio))
                return row and row["speedup"]

            plots.speedup_map(axis, [[value(n, ratio) for ratio in paper.RATIOS] for n in sizes])
            axis.set_title(f"{_PAPERS_TYPE[precision] if block is None else precision}, {name}")
            axis.set_yticks(range(len(sizes)), [f"N = {n}" for n in sizes])
            axis.set_xticks(range(len(paper.RATIOS)), [f"{ratio:.0%}" for ratio in paper.RATIOS])
    return plots.png(figure, data["header"], "Speedup over the dense product (blue: faster)")


# ---- Parts --------------------------------------------------------------------------------------


def _found(data, kind):
    return [found for found in data["cells"] if found["place"]["kind"] == kind]


def _ones(data, precision, block):
    """(place, row) of one device."""
    return [
        (found["place"], row)
        for found in _found(data, "one")
        if (found["place"]["precision"], found["place"]["block"]) == (precision, block)
        for row in found["rows"]
    ]


def _types(data):
    """Those of the paper's cells: the ones in its block."""
    places = [found["place"] for found in _found(data, "one")]
    return list(dict.fromkeys(at["precision"] for at in places if at["block"] == _PAPERS_BLOCK))


def _sizes(data):
    return sorted({found["place"]["n"] for found in _found(data, "one")})


def _papers(precision, n, ratio):
    return paper.SPEEDUP.get((_PAPERS_TYPE[precision], n, ratio))


def _cell(precision, n, ratio, by_block):
    rows = [of.get((n, ratio)) for of in by_block.values()]
    shown = [_papers(precision, n, ratio), *(row and row["speedup"] for row in rows)]
    text = " / ".join("-" if value is None else _times(value) for value in shown)
    return f"{text} ({rows[-1]['share_of_floor']:.0%})" if rows[-1] else text


def _below_lines(data):
    """The paper's cells whose speedup ours does not exceed, and what the floor allows there."""
    lines = []
    for precision in _types(data):
        best = {}
        for block in (_PAPERS_BLOCK, _BLOCK):
            for place, row in _ones(data, precision, block):
                at = place["n"], row["ratio"]
                best[at] = max(best.get(at, row), row, key=lambda row: row["speedup"])
        for (n, ratio), row in best.items():
            of_paper = _papers(precision, n, ratio)
            if of_paper is not None and row["speedup"] <= of_paper:
                floor = row["speedup"] / row["share_of_floor"]
                lines.append(
                    f"- {precision}, N = {n}, {ratio:.0%}: {_times(row['speedup'])} here, "
                    f"{of_paper} in the paper; at the floor it would be {_times(floor)} "
                    f"(torch.mm {row['dense_ms']:.4g} ms, mm {row['mm_ms']:.4g} ms)"
                )
    if not lines:
        return []
    return [
        "The paper's cells whose speedup the better of both blocks does not exceed:",
        "",
        *lines,
        "",
    ]


def _times(value):
    return f"{value:.1f}" if value >= 9.95 else f"{value:.2f}"


def _every(data):
    head = ("type", "block", "N", "asked", "valid", "torch.mm", "mm", "speedup", "paper")
    head += ("of floor", "error", "of torch.mm", "kernel")
    lines = []
    for found in _found(data, "one"):
        at = found["place"]
        for row in found["rows"]:
            of_paper = _papers(at["precision"], at["n"], row["ratio"]) if _is_papers(at) else None
            lines.append(
                (
                    *(at["precision"], _block(at["block"]), at["n"], f"{row['ratio']:.0%}"),
                    *(f"{row['valid_ratio']:.1%}", f"{row['dense_ms']:.4g}"),
                    *(f"{row['mm_ms']:.4g}", _times(row["speedup"])),
                    *(of_paper or "", f"{row['share_of_floor']:.0%}", f"{row['error']:.1e}"),
                    *(f"{row['dense_error']:.1e}", row["backend"]),
                )
            )
    return table(head, lines)


def _copy_line(data):
    speeds = [row["copy_bandwidth"] / 1e6 for found in _found(data, "one") for row in found["rows"]]
    if not speeds:
        return ""
    return f"A copy reads and writes {min(speeds):.0f} to {max(speeds):.0f} GB/s in these runs."


def _is_papers(place):
    return place["block"] == _PAPERS_BLOCK


def _block(block):
    return "x".join(map(str, block)) if isinstance(block, list) else block


def _several(data):
    """Two GPUs as measured, more by the model."""
    lines = ["### Several GPUs", "", *_SEVERAL.splitlines(), ""]
    one = {
        (found["place"]["precision"], found["place"]["n"], row["ratio"]): row["speedup"]
        for found in _found(data, "one")
        if found["place"]["block"] == _BLOCK
        for row in found["rows"]
    }
    shown = {}
    for found in _found(data, "two"):
        for row in found["rows"]:
            title = f"2, layout {row['layout']}"
            shown.setdefault(_key(found, row), {})[title] = _times(row["speedup"])
    for found in _found(data, "model"):
        for row in found["rows"]:
            at = _key(found, row)
            if at in one:
                title = f"{row['parts']}, model"
                shown.setdefault(at, {})[title] = _times(one[at] * row["speedup_of_one"])
    if shown:
        titles = sorted({title for of in shown.values() for title in of})
        rows = [
            (
                *(*at[:2], f"{at[2]:.0%}", _times(one[at]) if at in one else ""),
                *(of.get(title, "") for title in titles),
            )
            for at, of in shown.items()
        ]
        lines += [*table(("type", "N", "ratio", "1", *titles), rows), ""]
    return lines + _absent_lines(data, "two") + _absent_lines(data, "model")


def _key(found, row):
    return found["place"]["precision"], found["place"]["n"], row["ratio"]


def _of_bsr(data):
    head = ("type", "N", "asked", "kept", "torch.mm", "BSR", "speedup")
    rows = [
        (
            *(found["place"]["precision"], found["place"]["n"], f"{row['ratio']:.0%}"),
            *(f"{row['kept']:.0%}", f"{row['dense_ms']:.4g}", f"{row['ms']:.4g}"),
            _times(row["speedup"]),
        )
        for found in _found(data, "BSR")
        for row in found["rows"]
    ]
    return [*table(head, rows), "", *_absent_lines(data, "BSR")]


_KINDS = {"one": "one device", "two": "2 GPUs", "model": "4 and 8 GPUs", "BSR": "BSR"}


def _absent_lines(data, kind):
    """Which cells were not measured, and why: a line for each reason."""
    by_reason = {}
    for found in _found(data, kind):
        if found["absent"]:
            at = found["place"]
            block = f", block {_block(at['block'])}" if "block" in at else ""
            name = f"{at['precision']}{block}, N = {at['n']}"
            by_reason.setdefault(found["absent"], []).append(name)
    lines = [
        f"- {_KINDS[kind]}, {'; '.join(names)}: not measured: {reason}"
        for reason, names in by_reason.items()
    ]
    return [*lines, ""] if lines else []
