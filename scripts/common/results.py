"""Results: rows of figures in a JSON file, and the page and the picture that are made of them.

A file is a page: {"title", "headline", "notes", "brief", "runs"}; "brief" names runs of which the
page has one line, and the JSON file the tables. A run is what one command measured:
{"name", "said", "header", "tables"}. A table is a list of rows, dicts with the same keys, under
its kind; KINDS says how a page shows a kind. In the file a table is {"columns", "rows"}, one row a
line. Kinds that no script measures any more are in the file alone.

A measurement that is made again supersedes the old one: `add` takes rows away that have the key of
a new one, on the same device. What they were is in the history of the file.
"""

import datetime
import importlib.util
import itertools
import json
import os
import re
import shlex
import statistics
import textwrap
from pathlib import Path
from typing import NamedTuple

from models.files import UserError, write_atomically

_WIDTH = 120  # of text
_MOVES = 0.03  # of a figure: what add() tells
_APART = ("device", "date", "command")  # of a header: said first
# Formats of numbers by parts of their column's name; the first that fits.
_FORMATS = {
    "^tau|trun": "{:.7g}",
    "difference": "{:+.2%}",
    "change": "{:+.2f}",
    "^speedup|^over|^paper(_[s24]|$)": "{:.3g}x",
    "ratio|share|valid|below": "{:.2%}",
}


def text(value, column=""):
    """A value of a column as tables and pictures show it."""
    if value is None:
        return ""
    if isinstance(value, list):
        return "x".join(map(text, value))
    found = [of for part, of in _FORMATS.items() if re.search(part, column)]
    if isinstance(value, float) and found:
        return re.sub(r"\.?0*%", "%", found[0].format(value))
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
    return str(value)


# ---- Kinds of tables ----------------------------------------------------------------------------


class Picture(NamedTuple):
    """Lines of ``drawn`` by ``x``, one for each value of ``line``, a panel for each of ``panel``.

    ``prefer`` names columns of which some values are drawn, or the last one where there are none of
    these. ``title`` is for who has not read the page.
    """

    x: str
    drawn: str
    line: str
    title: str
    panel: str = ""
    prefer: dict | None = None


class Kind:
    """A kind of table: the columns that tell rows apart, and those that are shown; without a title
    they are shown nowhere.

    A table has a line for each value of the key's columns but ``across``, and a column for each
    value of these. A ">" before a value says that it has a column of its own beside them, from the
    first row of a line. ``shown``: on a page of several runs only rows with these values of some
    columns.
    """

    def __init__(self, key, title="", values="", across="", /, *, picture=None, **shown):
        self.key, self.title, self.across = key.split(), title, across.split()
        values = values.split(", ") if values else []
        self.values = [value.lstrip(">") for value in values]
        self.beside = {value[1:] for value in values if value[0] == ">"}
        self.picture, self.shown = picture, shown

    @property
    def figure(self):
        """The column that tells best how fast it was; None where no column is shown."""
        inside = [value for value in self.values if value not in self.beside]
        return "speedup" if "speedup" in inside else next(iter(inside), None)


_STEPS = "s_ms, z_ms, zfz_ms, sp2_ms, iterations, stored_x, energy_error"  # of a density matrix
# In the order in which a page draws the first kind that has a picture.
# fmt: off
KINDS: dict[str, Kind] = {
    # ---- Products, convolutions, networks
    "products": Kind("data precision block n ratio",
        "Speedup of mm over torch.mm, norms included, by the share of block products kept:",
        ">dense_ms, speedup", "ratio", n=(8192,),
        picture=Picture("valid_ratio", "speedup", "precision",
                        "Products of N = 8192: speed over torch.mm by the share of block products "
                        "kept, norms included", "data", {"n": (8192,), "block": (64,)})),
    "norm maps": Kind("data precision block n"),
    "convolutions": Kind("layer batch precision data block ratio",
        "Speedup over the dense convolution by share kept / with norms of the layer before:",
        ">dense_ms, speedup, speedup_chained", "ratio", batch=(64, 128),
        precision=("float16", "float32"),
        picture=Picture("ratio", "speedup", "layer",
                        "Layers of VGG13 and ResNet-50, batch 128: speed over the dense ones by "
                        "the share of block products kept", "precision",
                        {"batch": (128,), "data": ("even",),
                         "layer": ("conv12", "conv22", "conv32", "conv42", "res56-3x3",
                                   "res14-3x3", "res14-expand")})),
    "shapes, shares": Kind("op precision kept",
        "Where torch's call takes 15 us and more: the shapes, the median speed over it, and the "
        "shares of shapes below three limits. Of shorter calls: how many, and what 95% of them add "
        "at most:",
        ">shapes, speedup, below 0.6, below 0.8, below 0.95, >short, us over", "kept"),
    "shapes, slowest": Kind("op precision kept shape", "Slowest:", ">torch_ms, speedup", "kept"),
    "shapes": Kind("op precision shape"),
    "networks": Kind("network batch mode candidate",
        "ms of a batch, and the speed over torch.compile (CUDA graph) or the dense one (eager):",
        "ms, speedup", "candidate", mode=("CUDA graph",), batch=(1, 8, 32, 64, 512)),
    "served": Kind("model mode network",
        "Time of a batch, and the speed over the dense network:", "ms, speedup", "mode"),
    "served, quality": Kind("model",
        "Accuracy on images that took no part in the choice of thresholds:",
        "dense_accuracy, accuracy, changed, valid_ratio"),
    "calibrated layers": Kind("case name", "Layers as chosen:",
        "shape, reason, valid_ratio, tau, dense_us, chosen_us, error"),
    # ---- The paper's tables
    "targets": Kind("what", "Each target beside what was measured:", "target, measured, command"),
    "thresholds": Kind("n ratio",
        "Table 1: tau by valid ratio and N, and the difference from the paper's:",
        "tau, difference", "n"),
    "speedups": Kind("precision block n ratio",
        "Table 2: speedup over torch.mm by N / the paper's over cuBLAS (V100):",
        "speedup, paper", "n", block=(64,), precision=("float32", "float16")),
    "at equal error": Kind("n share block",
        "Table 3: mm against the fastest sparse product at equal error:",
        "valid_ratio, paper_valid, error, paper_error, ms, graph_ms, speedup, speedup_2, "
        "speedup_4, paper_speedup_1, paper_speedup_2, paper_speedup_4", block=(64,)),
    "sparse products": Kind("n share peer"),
    "squares": Kind("matrix n precision block origin waters basis tau",
        "Table 4: speedup over torch.mm, and the error, by tau:",
        ">dense_ms, speedup, error", "tau", precision=("float64",), origin=("model",)),
    "the paper's squares": Kind("number tau",
        "The paper's errors and its mean speedup over cuBLAS, N = 13,656:",
        ">norm, error, speedup", "tau"),
    "study": Kind("images title precision ratio layout",
        "Table 5: points of accuracy, speed over the dense convolution (paper: its dense product):",
        ">paper_change, >paper_speedup, accuracy_change, over_conv", "precision layout",
        picture=Picture("over_conv", "accuracy_change", "layout",
                        "VGG13 on MNIST: points of accuracy by the speed of nine convolutions over "
                        "dense ones, by what shares a block", "precision",
                        {"title": ("conv12 to conv52",), "images": ("MNIST in full",)})),
    "study, dense": Kind("images title precision", "The dense layers, ms:",
        "dense_accuracy, conv_ms, im2col_gemm_ms, gemm_ms", title=("conv12 to conv52",)),
    # ---- Several devices
    "several devices": Kind("layout data precision n ratio",
        "Speedup over one device, by where operands lie:",
        ">one_ms, speedup", "layout", n=(8192, 32768, 999999),
        data=("decay", "normal", "water")),
    # ---- Block-sparse matrices, density matrices
    "stored products": Kind("precision n valid",
        "S S of a water cluster, in blocks of 64; valid, stored and products a block row:",
        "stored, products, mm_ms, share_before, tflops, speedup, over_dense, over_entries"),
    "block-sparse density": Kind("n",
        "The density matrix of water clusters; the energy error is in hartree an atom:",
        f">waters, {_STEPS}, over_dense, peak_gb",
        picture=Picture("n", "sp2_ms", "device",
                        "Block-sparse density matrices of waters: ms of SP2 by functions")),
    "density matrix": Kind("problem method",
        "Methods; the energy error is in hartree an atom, the bound that of each step:",
        "seconds, over_dense, over_eigh, over_stored, energy_error, iterations, most_valid",
        picture=Picture("seconds", "distance", "series",
                        "Density matrices: error in hartree an atom by seconds of the iteration",
                        "problem")),
    "density matrix, iterations": Kind("problem method iteration"),
}
# fmt: on


# ---- Files --------------------------------------------------------------------------------------


def run_header(machine, script, arguments, folder="scripts"):
    """The header of every result: the machine, as from describe_machine, the date, and the
    command, in which absolute paths, which belong to one machine, are recorded by their last part.
    """
    said = [Path(word).name if Path(word).is_absolute() else word for word in arguments]
    forced = {k: v for k, v in sorted(os.environ.items()) if k.startswith("SPAMM_TORCH_")}
    return machine | {
        "forced": " ".join(f"{name}={value}" for name, value in forced.items()),
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["python", f"{folder}/{script}", *said]),
    }


def load(path):
    """The page in a JSON file; UserError: it cannot be read, or is no page of results."""
    try:
        page = json.loads(path.read_text())
        for run in page["runs"]:
            run["tables"] = {
                kind: [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
                for kind, table in run["tables"].items()
            }
        _markdown(page, path.stem)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"expected a page of results as JSON; got something else in {path}"
        ) from error
    return page


def rows_of(page, kind):
    """The rows of a kind, of all runs, each with its run's device and name."""
    return [
        row | {"device": run["header"]["device"], "run": run["name"]}
        for run in page["runs"]
        for row in run["tables"].get(kind, ())
    ]


def write(path, page):
    """Writes a page: the JSON file, the Markdown and, where there is one, the picture beside it.
    Returns the paths written; UserError: one cannot be.
    """
    contents = {".json": _as_json(page).encode(), ".md": _markdown(page, path.stem).encode()}
    if shown := _shown(page):
        from common import plots

        contents[".png"] = plots.draw(*shown, page["runs"][0]["header"]["device"])
    for suffix, content in contents.items():
        write_bytes(path.with_suffix(suffix), content)
    return [path.with_suffix(suffix) for suffix in contents]


def write_bytes(path, content):
    """Writes a file in full or not at all."""
    write_atomically(path, lambda file: file.write(content))


def _as_json(page):
    """One row a line, so that a change of figures is a change of lines."""
    runs = []
    for run in page["runs"]:
        tables = ",\n".join(
            f"  {json.dumps(kind)}: {_table_as_json(rows)}" for kind, rows in run["tables"].items()
        )
        head = ",\n".join(
            f" {json.dumps(key)}: {json.dumps(run[key])}" for key in ("name", "said", "header")
        )
        runs.append(f"{{{head[1:]},\n" + ' "tables": {\n' + f"{tables}}}}}")
    head = ",\n".join(f"{json.dumps(k)}: {json.dumps(page[k])}" for k in page if k != "runs")
    return f"{{{head},\n" + '"runs": [\n' + ",\n".join(runs) + "]}\n"


def _table_as_json(rows):
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = ",\n   ".join(json.dumps([row.get(name) for name in columns]) for row in rows)
    return f'{{"columns": {json.dumps(columns)},\n   "rows": [\n   {lines}]}}'


def _machine(run):
    """The device, and how many of it; None where that is not said."""
    return run["header"]["device"], run["header"].get("parts")


def add(page, run):
    """Puts a run into a page, in the place of one of its name, and takes away what it supersedes.
    Returns a line for each row that is more than 3% from the one it supersedes.
    """
    moved = []
    for kind, rows in run["tables"].items():
        measured = {_key(kind, row): row for row in rows if not row.get("absent")}
        for tables in (old["tables"] for old in page["runs"] if _machine(old) == _machine(run)):
            old_rows = tables.pop(kind, [])
            if rest := [row for row in old_rows if _key(kind, row) not in measured]:
                tables[kind] = rest
            figure = KINDS[kind].figure
            for row in old_rows:
                before, now = (of.get(figure) for of in (row, measured.get(_key(kind, row), {})))
                if isinstance(before, str) or isinstance(now, str):
                    continue  # a reason, say
                if before and now and abs(now / before - 1) > _MOVES:
                    at = " ".join(text(row.get(name), name) for name in KINDS[kind].key)
                    moved.append(f"{kind}: {at}: {figure} {before:.4g} -> {now:.4g}")
    page["runs"] = [old for old in page["runs"] if old["name"] != run["name"]] + [run]
    return moved


def _key(kind, row):
    return tuple(str(row.get(name)) for name in KINDS[kind].key)


def finish(path, title, run, notes=""):
    """Ends a measurement: shows its tables, writes them as a page of one run, says where. ``path``:
    of the page's files, without suffix. ``notes``: what a reader of the tables must know.
    """
    for kind, rows in run["tables"].items():
        head, cells, left = _cells(KINDS[kind], rows)
        for line in [KINDS[kind].title, *table(head, cells, left)] if cells else ():
            print(line)
    print(run["said"])
    if not _can_draw():
        print("no picture: matplotlib is not installed")
    page = {"title": title, "headline": run["said"], "notes": notes, "runs": [run]}
    for written in write(path.with_name(path.name + ".json"), page):
        print(f"wrote {written}")


# ---- In words -----------------------------------------------------------------------------------


def said(tables):
    """Speedups of the first table that has some, by the last column that tells its rows apart."""
    absent = sum(bool(row.get("absent")) for rows in tables.values() for row in rows)
    missing = f"; {absent} rows without figures" if absent else ""
    for kind, rows in tables.items():
        rows = [row for row in rows if row.get("speedup") not in (None, 1)]  # 1: the peer itself
        groups, by = {}, [*KINDS[kind].key, *_differing(kind, rows)][-1]
        for row in rows:
            groups.setdefault(text(row.get(by), by), []).append(row["speedup"])
        found = (
            f"{name} {min(of):.2f}x to {max(of):.2f}x (median {statistics.median(of):.2f}x)"
            for name, of in groups.items()
        )
        if groups:
            return f"Speedup by {by}, least to most: {', '.join(found)}{missing}."
    return f"Nothing was measured beside its peer{missing}."


def _differing(kind, rows):
    """The columns that tell these rows apart."""
    return [name for name in KINDS[kind].key if len({str(row.get(name)) for row in rows}) > 1]


# ---- Pages --------------------------------------------------------------------------------------


def _markdown(page, name):
    """The page of what was found: the runs, and a table of each kind for all that it shows."""
    lines = [f"# {page['title']}", "", *_wrapped(page["notes"])]
    if _shown(page) is not None:
        lines += [f"![{page['title']}]({name}.png)", ""]
    brief, shown = page.get("brief", ()), {}
    for run in page["runs"]:
        if run["name"] not in brief:
            lines.append(_of_run(run))
            for kind, rows in run["tables"].items():
                shown.setdefault(kind, {})[run["name"]] = rows
    if brief:
        lines += ["", f"Of these runs [{name}.json]({name}.json) has the tables:", ""]
        lines += [_of_run(run) for run in page["runs"] if run["name"] in brief]
    for kind, of_runs in shown.items():
        if kind in KINDS:
            lines += _of_table(KINDS[kind], of_runs, brief=len(page["runs"]) > 1)
    return "\n".join(lines) + "\n"


def _of_run(run):
    """The line of a run: what it found; where, when and how it was measured."""
    header = run["header"]
    more = "; ".join(
        f"{key} {text(value)}"
        for key, value in header.items()
        if key not in _APART and value not in (None, "", False) and not isinstance(value, dict)
    )
    how = f"{header['device']}, {header['date']}, `{header['command']}`"
    return f"- **{run['name']}**: {run['said']} ({how}; {more})"


def _wrapped(words):
    """Lines of a text, each paragraph filled, and an empty one; none of no text."""
    paragraphs = [textwrap.wrap(part, _WIDTH, break_on_hyphens=False) for part in words.split("\n")]
    return [*[line for lines in paragraphs for line in lines or [""]], ""] if words else []


def _of_table(kind, of_runs, brief):
    """Lines of a table of {run: rows}, which names runs if several; ``brief``: on such a page."""
    chosen, by_reason = [], {}
    for run, rows in of_runs.items():
        for name, values in kind.shown.items() if brief else ():
            rows = [row for row in rows if row[name] in values] or rows
        chosen += [row | {"run": run} for row in rows]
    head, cells, left = _cells(kind, chosen)
    lines = [kind.title, "", *table(head, cells, left)] if cells else []
    for row in itertools.chain(*of_runs.values()):
        if row.get("absent"):
            place = " ".join(text(row[key], key) for key in kind.key if row.get(key) is not None)
            by_reason.setdefault(row["absent"], []).append(place)
    absent = [f"- Not measured: {'; '.join(names)}: {why}." for why, names in by_reason.items()]
    return ["", *lines, *([""] * bool(lines and absent)), *absent] if lines or absent else []


def _cells(kind, rows):
    """Head and rows of a table, as text, and how many columns say where a row belongs."""
    rows = [row for row in rows if kind.title and not row.get("absent")]
    has = {name for row in rows for name, value in row.items() if value is not None}
    has -= {key for key in kind.key if all(row.get(key) in (None, False) for row in rows)}
    index = [name for name in ("run", *kind.key) if name in has and name not in kind.across]
    if len({row.get("run") for row in rows}) == 1:
        index = [name for name in index if name != "run"]
    lines = {}
    for row in rows:
        place = tuple(text(row.get(name), name) for name in index)
        lines.setdefault(place, {})[tuple(row[name] for name in kind.across)] = row
    values = [name for name in kind.values if name in has]
    apart = [name for name in values if name in kind.beside or not kind.across]
    inside = [name for name in values if name not in apart]
    across = list(dict.fromkeys(column for line in lines.values() for column in line))
    if len(kind.across) == 1 and all(isinstance(of, (int, float)) for (of,) in across):
        across.sort(reverse=len(across) > 1 and across[0] > across[1])
    across = across if inside else []
    named = [" ".join(map(text, column, kind.across)) for column in across]
    head = (*index, *(name.replace("_", " ") for name in apart), *named)
    cells = [
        (
            *at,
            *(text(next(iter(line.values())).get(x), x) for x in apart),
            *(
                " / ".join(filter(None, (text(line.get(of, {}).get(x), x) for x in inside)))
                for of in across
            ),
        )
        for at, line in lines.items()
    ]
    return head, cells, len(index)


def table(head, rows, left=1):
    """Lines of a Markdown table; the first ``left`` columns are aligned left, the others right."""
    rule = ["---" if column < left else "---:" for column in range(len(head))]
    return [_row(head), _row(rule), *map(_row, rows)]


def _row(cells):
    return "| " + " | ".join(str(cell).replace("|", "/") for cell in cells) + " |"


def index(pages):
    """A page that names all pages: {file's name: page}."""
    lines = [
        "# Results",
        "",
        "What was measured, a page a subject. A page has tables, devices, dates and commands; the",
        "JSON file beside it has every row. `python scripts/plot_results.py` makes pages and this",
        "index of the JSON files; `--add FILE` puts what a script measured into a page first.",
        "Commands are those of today; where a script or an option is gone, they stand as they ran.",
        "",
        *(f"- [{page['title']}]({name}.md): {page['headline']}" for name, page in pages.items()),
    ]
    return "\n".join(lines) + "\n"


# ---- Pictures -----------------------------------------------------------------------------------


def _can_draw():
    return importlib.util.find_spec("matplotlib") is not None


def _shown(page):
    """(picture, rows of the first run's device) of the first kind that is drawn; or None."""
    if not page["runs"] or not _can_draw():
        return None
    device = page["runs"][0]["header"]["device"]
    for kind, of_kind in KINDS.items():
        rows = [row for row in rows_of(page, kind) if row["device"] == device]
        picture = of_kind.picture
        names = (picture.x, picture.drawn) if picture else ("",)
        rows = [row for row in rows if all(row.get(name) is not None for name in names)]
        if rows:
            return picture, rows
    return None
