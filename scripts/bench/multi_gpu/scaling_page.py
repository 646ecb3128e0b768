"""The part of docs/scaling.md that follows from measurements."""

import json
from dataclasses import dataclass

from bench.multi_gpu import conv_report, model, report
from bench.multi_gpu.rows import Row
from common import REPOSITORY
from common.errors import UserError
from common.report_files import table

RESULTS = REPOSITORY / "docs" / "results" / "multi_gpu_h200.json"
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
HELD = 0.1  # the model holds if no time is missed by more
_PARTS = (4, 8, 16, 64, 256, 1024)
_LINE = (2, 4, 8)  # devices of one host
_FILLED = 32768  # rows a device's share of the matrices has, squared: N = 32768 sqrt(P)


def load(path, usual):
    """The content of a benchmark's JSON file; None where the ``usual`` one is not recorded.

    Raises:
        UserError: the file is another's, or cannot be read.
    """
    try:
        data = json.loads(path.read_text())
        data["rows"], data["parts"], data["header"]
    except FileNotFoundError as error:
        if path == usual:
            return None
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"expected results of bench_multi_gpu or bench_multi_gpu_conv as JSON; got {path}"
        ) from error
    return data


def with_figures(text, block):
    """The page with what is between its two marks replaced.

    Raises:
        UserError: the marks are not there, once each and in order.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in after or END in after:
        raise UserError(f"expected a page with the lines {BEGIN} and {END}; got one without")
    return f"{before}{BEGIN}\n\n{block}\n{END}{after}"


def unmeasured(command):
    """What stands there before anything was measured."""
    return (
        f"Nothing is recorded yet. To measure, on a machine with two GPUs:\n\n```\n{command}\n```\n"
    )


def figures(data, link):
    """What the JSON file of bench_multi_gpu.py says, as Markdown.

    Args:
        data: its content. link: of its page, from docs/.

    Raises:
        UserError: there are no rows that the model could be fitted to.
    """
    rows, parts = [Row(**row) for row in data["rows"]], data["parts"]
    outcome = outcome_of(data)
    lines = [*_measured(data["header"], rows, parts, link), *_check(outcome), *_beyond(outcome)]
    return "\n".join(lines) + "\n"


def convolutions(data, link):
    """What the JSON file of bench_multi_gpu_conv.py says, as Markdown; arguments as of figures."""
    rows = [conv_report.Row(**row) for row in data["rows"]]
    said = conv_report.conclusion(rows, data["parts"])
    return f"\n### Convolutions\n\n{said} By layer and batch: [every number]({link}).\n"


@dataclass(frozen=True)
class Outcome:
    """The model after its fit, and what it was checked with."""

    parts: int
    machine: model.Machine
    checked: list  # of model.Measured, at the largest size
    search: tuple | None  # (n, ms) of a threshold search

    def misses(self):
        """Of each checked cell: the predicted time over the measured one, less 1."""
        return [cell.predicted(self.machine, self.parts) / cell.all_ms - 1 for cell in self.checked]

    def verdict(self):
        """Whether the model holds, in one line."""
        misses = [abs(miss) for miss in self.misses()]
        n, bad = self.checked[0].n, sum(miss > HELD for miss in misses)
        if not bad:
            return (
                f"The model holds: fitted to smaller sizes, it predicts all {len(misses)} times at "
                f"N = {n} within {HELD:.0%}; the largest miss is {max(misses):.1%}."
            )
        return (
            f"The model does not hold: fitted to smaller sizes, it misses {bad} of {len(misses)} "
            f"times at N = {n} by more than {HELD:.0%}, the worst by {max(misses):.1%}."
        )


def outcome_of(data):
    """The Outcome of a JSON file's content.

    Raises:
        UserError: there are no rows that the model could be fitted to.
    """
    try:
        machine, checked = model.check(model.measured(data["rows"]), data["parts"])
    except ValueError as error:
        raise UserError(str(error)) from error
    searches = {row["n"]: row["search_ms"] for row in data["rows"] if row["search_ms"] is not None}
    search = max(searches.items()) if searches else None
    return Outcome(data["parts"], machine, checked, search)


def predictions(outcome):
    """Head and rows of a table: predicted beside measured."""
    head = ("layout", "data", "valid", "measured, ms", "predicted, ms", "miss", "miss, one device")
    cells = []
    for cell, miss in zip(outcome.checked, outcome.misses(), strict=True):
        predicted = f"{cell.predicted(outcome.machine, outcome.parts):.4g}"
        place = (cell.layout, cell.data, f"{cell.valid:.1%}")
        one = outcome.machine.one_ms(cell.n, cell.valid, cell.data) / cell.one_ms - 1
        percents = (f"{round(100 * of, 1) + 0.0:+.1f}%" for of in (miss, one))  # no negative zero
        cells.append((*place, f"{cell.all_ms:.4g}", predicted, *percents))
    return head, cells


def _measured(header, rows, parts, link):
    largest = max(row.n for row in rows)
    shown = [
        row for row in rows if (row.n, row.precision) == (largest, "float16") and row.absent is None
    ]
    ratios = sorted({row.ratio for row in shown})
    speedups, sent = {}, {}
    for row in shown:
        speedups.setdefault((row.layout, row.data), {})[row.ratio] = f"{row.speedup:.2f}x"
        if row.layout == "S":
            sent.setdefault((row.data,), {})[row.ratio] = f"{row.sent:.0%}"
    kept = [f"{ratio:.0%} kept" for ratio in ratios]

    def by_ratio(head, found):
        cells = [(*place, *(of.get(r, "") for r in ratios)) for place, of in found.items()]
        return table((*head, *kept), cells, left=range(len(head)))

    return [
        f"Measured on {parts} devices ({header['device']}), {header['date']}:",
        f"[every number]({link}).",
        "",
        f"Speedup over one device, float16, N = {largest}, norms included, tau held:",
        "",
        *by_ratio(("layout", "data"), speedups),
        "",
        "Bytes of B that travel in layout S, as a share of those without skipping:",
        "",
        *by_ratio(("data",), sent),
        "",
        f"Where {parts} devices beat one at the smallest of these ratios (decay matrices):",
        "",
        *report.break_even_lines(rows),
        "",
    ]


def _check(outcome):
    machine = outcome.machine
    cube = 16384**3
    constants = [
        ("W", f"{machine.bandwidth / 1e9:.2f} TB/s", "norms read operands"),
        *(
            (
                f"gamma(v), times 16384^3, {data}",
                f"{gamma_0 * cube:.3f} + {gamma_1 * cube:.2f} v ms",
                "multiply",
            )
            for data, gamma_0, gamma_1 in machine.gammas
        ),
        ("beta", f"{machine.beta / 1e6:.0f} GB/s", "a device receives"),
        ("plan, R", f"{1e3 * machine.plan_whole:.0f} us", "before the first multiply"),
        ("plan, S", f"{1e3 * machine.plan_shards:.0f} us", "before the first multiply"),
        ("alpha", f"{1e3 * machine.alpha:.1f} us", "a stage"),
        ("launch", f"{1e3 * machine.launch:.0f} us", "one device"),
    ]
    head, cells = predictions(outcome)
    return [
        "### The model against measurements",
        "",
        f"**{outcome.verdict()}**",
        "",
        *table(("constant", "fitted", "of"), constants, left=(0, 1, 2)),
        "",
        *table(head, cells, left=(0, 1)),
        "",
    ]


def _beyond(outcome):
    holds = all(abs(miss) <= HELD for miss in outcome.misses())
    caution = "" if holds else " The model missed above, so these are no better than that."
    return [
        "### Beyond what was measured",
        "",
        f"By the model, not measured.{caution}",
        "",
        *_one_host(outcome),
        *_meshes(outcome),
    ]


def _one_host(outcome):
    """Speedups of the largest measured size on more devices of one host."""
    machine, first = outcome.machine, outcome.checked[0]
    head = ("layout", "data", "valid", *(f"{parts} devices" for parts in _LINE))
    cells = []
    for cell in outcome.checked:
        one = machine.one_ms(cell.n, cell.valid, cell.data)
        speedups = [f"{one / cell.predicted(machine, parts):.2f}x" for parts in _LINE]
        cells.append((cell.layout, cell.data, f"{cell.valid:.1%}", *speedups))
    return [
        f"Speedup in a line of devices of one host, N = {first.n}, the same shares travelling as",
        f"measured on {outcome.parts}:",
        "",
        *table(head, cells, left=(0, 1)),
        "",
    ]


def _meshes(outcome):
    """Meshes that grow with the product: constant memory for each device's share."""
    cells = [cell for cell in outcome.checked if cell.sent is not None]
    first = [cell for cell in cells if cell.data == cells[0].data]
    head = ("devices", "mesh", "N", "valid", "compute, ms", "travel, ms", "efficiency")
    head += ("nothing saved", "tau: replicated, ms", "counted, ms", "GiB a device")
    lines = []
    for parts in _PARTS:
        for cell in sorted(first, key=lambda cell: cell.valid):
            lines.append(_mesh_line(_forecast(outcome, cell, parts), cell))
    return [
        f"Meshes of devices, {first[0].data} matrices, N = {_FILLED} sqrt(devices), 8 devices a",
        "host, 50 GB/s a device between hosts (assumed), the shares that travel as measured in S.",
        "Efficiency is one device's time over devices times theirs; beside it, if all of A and B",
        "travelled. tau: what a search costs if every device searches all products, and if each",
        "counts its own. A decay whose length stays the same while N grows does better.",
        "",
        *table(head, lines, left=()),
    ]


def _forecast(outcome, cell, parts):
    return model.forecast(
        outcome.machine,
        parts,
        n=round(_FILLED * parts**0.5),
        valid=cell.valid,
        data=cell.data,
        sent=cell.sent,
        imbalance=cell.imbalance,
        search=outcome.search,
    )


def _mesh_line(line, cell):
    searched = [line.replicated_ms, line.histogram_ms]
    return (
        *(line.parts, "{} x {}".format(*line.mesh), line.n, f"{cell.valid:.1%}"),
        *(f"{line.compute_ms:.1f}", f"{line.travel_ms:.1f}", f"{line.efficiency:.2f}"),
        f"{line.efficiency_dense:.2f}",
        *("" if ms is None else f"{ms:.1f}" for ms in searched),
        f"{line.memory / 2**30:.0f}",
    )
