"""Results: rows of figures in a JSON file, and the page and the picture that are made of them.

A file is a page: {"title", "headline", "notes", "brief", "runs"}; "brief" names runs of which the
page has one line, and the JSON file the tables. A run is what one command measured:
{"name", "said", "header", "tables"}. A table is a list of rows, dicts with the same keys, under
its kind; common.tables says how a page shows a kind. In the file a table is {"columns", "rows"},
one row a line.

A measurement that is made again supersedes the old one: `add` marks old rows that have the key of a
new one, on the same device, with the date of the new one. Pages show the rows that hold.
"""

import datetime
import functools
import importlib.util
import json
import os
import shlex
import statistics
import textwrap
from pathlib import Path

from common.tables import KINDS, text
from models.files import UserError, write_atomically

_MARK = "superseded"  # a column: the date, or None
_WIDTH = 120  # of text
_MOVES = 0.03  # of a figure: what add() tells
_APART = ("device", "date", "command")  # of a header: columns of their own


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


# ---- Files --------------------------------------------------------------------------------------


def load(path):
    """The page in a JSON file; UserError: it cannot be read, or is no page of results."""
    try:
        page = json.loads(path.read_text())
        for run in page["runs"]:
            run["tables"] = {
                kind: [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
                for kind, table in run["tables"].items()
            }
            _check(run)
        _markdown(page, path.stem)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"expected a page of results as JSON; got something else in {path}"
        ) from error
    return page


def _check(run):
    unknown = set(run["tables"]) - set(KINDS)
    if unknown:
        raise KeyError(f"no table is of kind {unknown.pop()}")


def rows_of(page, kind):
    """The rows of a kind that hold, of all runs, each with its run's device and name."""
    return [
        row | {"device": run["header"]["device"], "run": run["name"]}
        for run in page["runs"]
        for row in run["tables"].get(kind, ())
        if not row.get(_MARK)
    ]


def write(path, page):
    """Writes a page: the JSON file, the Markdown and, where there is one, the picture beside it.
    Returns the paths written; UserError: one cannot be.
    """
    contents = {".json": _as_json(page).encode(), ".md": _markdown(page, path.stem).encode()}
    if shown := _shown(page):
        from common import plots

        picture, rows = shown
        header = page["runs"][0]["header"]
        contents[".png"] = plots.draw(picture, rows, page["title"], header)
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
    """Puts a run into a page, in the place of one of its name, and marks what it supersedes.
    Returns a line for each row that is more than 3% from the one it supersedes.
    """
    _check(run)
    moved = []
    for kind, rows in run["tables"].items():
        measured = {_key(kind, row): row for row in rows if not row.get("absent")}
        for old in page["runs"]:
            if _machine(old) == _machine(run):
                for row in old["tables"].get(kind, ()):
                    if (now := measured.get(_key(kind, row))) and not row.get(_MARK):
                        moved += _moved(kind, row, now)
                        row[_MARK] = run["header"]["date"]
    page["runs"] = [old for old in page["runs"] if old["name"] != run["name"]] + [run]
    return moved


def _moved(kind, row, again):
    """A line about a row that was measured again, if its figure moved."""
    if not KINDS[kind].values:
        return []
    column = _figure(kind).column
    before, now = row.get(column), again.get(column)
    if not before or not now or abs(now / before - 1) <= _MOVES:
        return []
    at = " ".join(text(row.get(name), name) for name in KINDS[kind].key)
    return [f"{kind}: {at}: {column} {before:.4g} -> {now:.4g}"]


def _figure(kind):
    """The column that tells best how fast it was."""
    values = KINDS[kind].values
    return next((x for x in values if x.column == "speedup"), values[0])


def _key(kind, row):
    return tuple(str(row.get(name)) for name in KINDS[kind].key)


def finish(path, title, run, console=None, notes=""):
    """Ends a measurement: shows its tables, writes them as a page of one run, says where. ``path``:
    of the page's files, without suffix. ``console``: None where rich is not installed. ``notes``:
    what a reader of the tables must know.
    """
    _check(run)
    say = functools.partial(console.print, soft_wrap=True, markup=False) if console else print
    for kind, rows in run["tables"].items():
        head, cells, left = _cells(KINDS[kind], rows)
        for line in [KINDS[kind].title, *table(head, cells, left)] if cells else ():
            say(line)
    say(run["said"])
    if not _can_draw():
        say("no picture: matplotlib is not installed")
    page = {"title": title, "headline": run["said"], "notes": notes, "runs": [run]}
    for written in write(path.with_name(path.name + ".json"), page):
        say(f"wrote {written}")


# ---- In words -----------------------------------------------------------------------------------


def said_of(found):
    """A line for the terminal about the {kind: rows} of a cell: its first table, or why not."""
    kind, rows = next(iter(found.items()))
    if rows[0].get("absent"):
        return f"not measured: {rows[0]['absent']}"
    names, shown = _differing(kind, rows), _figure(kind)
    at = (" ".join(text(row.get(name), name) for name in names) for row in rows)
    return ", ".join(f"{place}: {shown.text(row)}" for place, row in zip(at, rows, strict=True))


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
    """The page of what was found, a table of each kind for all runs that the page shows, and the
    runs.
    """
    lines = [f"# {page['title']}", "", *_wrapped(page["notes"])]
    if _shown(page) is not None:
        lines += [f"![{page['title']}]({name}.png)", ""]
    brief, shown = page.get("brief", ()), {}
    for run in page["runs"]:
        if run["name"] not in brief:
            lines.append(_finding(run))
            for kind, rows in run["tables"].items():
                shown.setdefault(kind, {})[run["name"]] = rows
    if brief:
        lines += ["", f"Of these runs [{name}.json]({name}.json) has the tables:", ""]
        lines += [_finding(run) for run in page["runs"] if run["name"] in brief]
    for kind, of_runs in shown.items():
        lines += _of_table(KINDS[kind], of_runs, brief=len(page["runs"]) > 1)
    runs = [
        (run["name"], header["device"], header["date"], f"`{header['command']}`", _about(header))
        for run in page["runs"]
        for header in (run["header"],)
    ]
    lines += ["", "## Runs", "", *table(("run", *_APART, "with"), runs, left=5)]
    return "\n".join(lines) + "\n"


def _finding(run):
    return f"- {run['name']}: {run['said']}"


def _about(header):
    """Versions and circumstances."""
    return "; ".join(
        f"{key} {text(value)}"
        for key, value in header.items()
        if key not in _APART and value not in (None, "", False) and not isinstance(value, dict)
    )


def _wrapped(words):
    """Lines of a text, each paragraph filled, and an empty one; none of no text."""
    paragraphs = [textwrap.wrap(part, _WIDTH, break_on_hyphens=False) for part in words.split("\n")]
    return [*[line for lines in paragraphs for line in lines or [""]], ""] if words else []


def _of_table(kind, of_runs, brief):
    """Lines of a table of {run: rows}, which names runs if several; ``brief``: on such a page."""
    rows = [row | {"run": run} for run, of in of_runs.items() for row in of]
    holding = [row for row in rows if not row.get(_MARK)]
    chosen = []
    for run in of_runs:
        of_run = [row for row in holding if row["run"] == run]
        for name, values in kind.shown.items() if brief else ():
            of_run = [row for row in of_run if row[name] in values] or of_run
        chosen += of_run
    head, cells, left = _cells(kind, chosen)
    lines = [kind.title, "", *table(head, cells, left)] if cells else []
    if dates := sorted({row[_MARK] for row in rows if row.get(_MARK)}):
        said = f"{len(rows) - len(holding)} of {len(rows)} rows are not shown: superseded on "
        lines += ["", f"{said}{', '.join(dates)} by a later run."]
    by_reason = {}
    for row in holding:
        if row.get("absent"):
            place = " ".join(text(row[key], key) for key in kind.key if row.get(key) is not None)
            by_reason.setdefault(row["absent"], []).append(place)
    absent = [f"- Not measured: {'; '.join(names)}: {why}." for why, names in by_reason.items()]
    return ["", *lines, *([""] * bool(lines and absent)), *absent] if lines or absent else []


def _cells(kind, rows):
    """Head and rows of a table, as text, and how many columns say where a row belongs."""
    rows = [row for row in rows if kind.title and not row.get("absent")]
    index = [name for name in kind.index if any(row.get(name) is not None for row in rows)]
    if len({row.get("run") for row in rows}) > 1:
        index = ["run", *index]
    lines = {}
    for row in rows:
        place = tuple(text(row.get(name), name) for name in index)
        column = " ".join(text(row[name], name) for name in kind.across)
        lines.setdefault(place, {})[column] = row
    values = [x for x in kind.values if any(row.get(x.column) is not None for row in rows)]
    apart = [x for x in values if x.beside or not kind.across]
    inside = [x for x in values if x not in apart]
    across = _in_order(kind, rows) if inside else []
    head = (*index, *(x.title for x in apart), *across)
    cells = [
        (
            *at,
            *(x.text(next(iter(line.values()))) for x in apart),
            *(" ".join(filter(None, (x.text(line.get(c)) for x in inside))) for c in across),
        )
        for at, line in lines.items()
    ]
    return head, cells, len(index)


def _in_order(kind, rows):
    """The columns across, by their numbers where they have one: as the first two rows go."""
    found = {tuple(row[name] for name in kind.across): None for row in rows}
    numbers = [key[0] for key in found if len(key) == 1 and isinstance(key[0], (int, float))]
    if len(numbers) == len(found) > 1:
        found = sorted(found, reverse=numbers[0] > numbers[1])
    return [" ".join(map(text, key, kind.across)) for key in found]


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
        rows = [row for row in rows if picture and row.get(picture.drawn) is not None]
        if rows:
            return picture, rows
    return None
