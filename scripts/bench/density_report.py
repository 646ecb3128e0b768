"""What density_matrix.py found, as tables, a page and a picture. Needs neither torch nor a GPU."""

import math

from common import plots
from common.report_files import page, table

DENSE, UNSKIPPED, EIGH = "torch.mm", "nothing skipped", "eigh"
CONSTANT, SCHEDULED, FLOAT32 = "constant", "scheduled", "float32 first"
_LADDERS = (SCHEDULED, FLOAT32)
_LINES = (CONSTANT, *_LADDERS)
_GOAL = 1e-7  # hartree an atom, which the conclusion speaks of
_FLOOR = 1e-15  # errors below it are rounding, and drawn there
_DIGITS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")

_NOTES = """\
Seconds are medians of the whole iteration, norms and the choice of each step included. The energy
error is that of 2 tr(X F) against the sum over eigenvalues, or against torch.mm's iteration where
no eigenvalues were computed (eigh). Not a projector: the Frobenius norm of X^2 - X. Valid: the
share of block products that were computed, in the first iteration, the most, and in the last."""


def exponent(number):
    """A number as in "1e-8" or "3.2e-6"."""
    mantissa, _, power = f"{number:.1e}".partition("e")
    return f"{mantissa.removesuffix('.0')}e{int(power)}"


def name_of(method):
    """As a table calls it: "constant 1e-8", "float32 1e-5, last four float64 1e-8"."""
    series, error = method["series"], method["max_error"]
    if error is None:
        return series
    if series == CONSTANT:
        return f"constant {exponent(error)}"
    few = method["last_iterations"]
    few = _DIGITS[few] if few < len(_DIGITS) else few
    first = exponent(method["first_max_error"])
    if series == SCHEDULED:
        return f"{first}, last {few} {exponent(error)}"
    return f"float32 {first}, last {few} float64 {exponent(error)}"


# ---- Tables -------------------------------------------------------------------------------------


def summary_table(data):
    """Head and rows: a method a row."""
    seconds = {m["series"]: m["seconds"] for m in data["methods"] if m["max_error"] is None}
    peers = [peer for peer in (DENSE, EIGH) if peer in seconds]
    head = ("method", "seconds", *(f"over {peer}" for peer in peers), "energy error an atom")
    head += ("not a projector", "electrons off", "iterations", "valid %, first / most / last")
    rows = [
        (
            name_of(m),
            f"{m['seconds']:.3g}",
            *(_factor(seconds[peer] / m["seconds"]) for peer in peers),
            *(f"{m[error]:.1e}" for error in ("energy_error", "idempotency", "electron_error")),
            *_of_iterations(m["iterations"]),
        )
        for m in data["methods"]
    ]
    return head, rows


def _factor(value):
    return f"{value:.0f}x" if value >= 99.5 else f"{value:.2g}x"


def _percent(ratio):
    return f"{100 * ratio:.2g}" if ratio < 0.995 else "100"


def _of_iterations(iterations):
    if not iterations:
        return "", ""
    last = sum(one["last"] for one in iterations)
    count = str(len(iterations)) + (f", last {last}" if last < len(iterations) else "")
    valid = [one["valid_ratio"] for one in iterations]
    return count, " / ".join(_percent(ratio) for ratio in (valid[0], max(valid), valid[-1]))


def shown_in_detail(data):
    """The methods whose iterations are told one by one: each series' tightest, torch.mm first."""
    tightest = {}
    for method in data["methods"]:
        if method["series"] in (DENSE, *_LINES):
            best = tightest.setdefault(method["series"], method)
            if method["max_error"] is not None and method["max_error"] < best["max_error"]:
                tightest[method["series"]] = method
    return list(tightest.values())


def iteration_table(data):
    """Head and rows: an iteration a row. Step and idempotency are those of the last method."""
    methods = shown_in_detail(data)
    head = ["iteration", "step", "tr(X - X^2)"]
    for method in methods:
        head += [f"{name_of(method)}: ms"] + ["valid %"] * (method["series"] != DENSE)
    rows = []
    for index in range(max(len(method["iterations"]) for method in methods)):
        steps = [method["iterations"][index : index + 1] for method in methods]
        row = [index + 1]
        row += [f(one) for one in steps[-1] for f in (_step, _idempotency)] or ["", ""]
        for method, step in zip(methods, steps, strict=True):
            row += [f"{one['ms']:.3g}" for one in step] or [""]
            if method["series"] != DENSE:
                row += [_percent(one["valid_ratio"]) for one in step] or [""]
        rows.append(row)
    return head, rows


def _step(iteration):
    return f"{iteration['step']}, {iteration['precision']} {exponent(iteration['max_error'])}"


def _idempotency(iteration):
    return f"{iteration['idempotency']:.1e}"


# ---- Page and picture ---------------------------------------------------------------------------


def report(data, name, with_picture=True):
    """The page, the picture (None where it is not wanted) and the conclusion."""
    link = f"{name}.png" if with_picture else None
    return _markdown(data, link), picture(data) if with_picture else None, conclusion(data)


def conclusion(data):
    """What the rows say in one line: the fastest method that is accurate enough."""
    ours = [m for m in data["methods"] if m["series"] in (UNSKIPPED, *_LINES)]
    enough = [m for m in ours if abs(m["energy_error"]) <= _GOAL]
    best = min(enough, key=lambda m: m["seconds"]) if enough else ours[0]
    text = (
        f"{data['problem']}: {name_of(best)}: energy error "
        f"{abs(best['energy_error']):.1e} hartree an atom in {best['seconds']:.3g} s"
    )
    peers = {m["series"]: m for m in data["methods"] if m["series"] in (DENSE, EIGH)}
    for series, peer in peers.items():
        text += f", {_factor(peer['seconds'] / best['seconds'])} as fast as {series}"
    return text + "."


def _markdown(data, link):
    head, rows = summary_table(data)
    shown = [f"![energy error against time, and valid ratio by iteration]({link})", ""]
    body = [
        *(shown if link else []),
        *_NOTES.splitlines(),
        "",
        *table(head, rows),
        "",
        "## Iterations",
        "",
        *table(*iteration_table(data)),
    ]
    return page("The density matrix by purification", conclusion(data), data["header"], body)


def picture(data):
    """Energy error against time for all methods; valid ratio by iteration for the tightest."""
    figure, ((errors, valid),) = plots.panels(1, 2, 4.0)
    _draw_errors(errors, data["methods"])
    _draw_valid(valid, data)
    return plots.png(figure, data["header"], data["problem"])


def _draw_errors(axis, methods):
    height = lambda m: max(abs(m["energy_error"]), _FLOOR)  # noqa: E731
    for index, series in enumerate(_LINES):
        line = sorted((m for m in methods if m["series"] == series), key=height)
        if line:
            points = [(m["seconds"], height(m)) for m in line]
            axis.plot(
                *zip(*points, strict=True), marker="o", color=plots.color(index), label=series
            )
    for series, mark in ((DENSE, "s"), (UNSKIPPED, "^"), (EIGH, "D")):
        for m in methods:
            if m["series"] == series:
                axis.plot(m["seconds"], height(m), mark, color="grey", label=series)
    axis.set_xscale("log")
    axis.set_yscale("log")
    ticks = _ticks(min(m["seconds"] for m in methods), max(m["seconds"] for m in methods))
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.set_xticks([], minor=True)
    axis.set_xlabel("seconds")
    axis.set_ylabel("energy error, hartree an atom")
    axis.set_title("Energy error against time")
    axis.grid(alpha=0.25)
    axis.legend(fontsize=8, loc="best")


def _ticks(low, high):
    """1, 2 and 5 times powers of ten around the values; of a wide range only the powers."""
    factors = (1, 2, 5) if high < 100 * low else (1,)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [factor * 10.0**power for power in powers for factor in factors]
    return [tick for tick in ticks if low / 2 <= tick <= 2 * high]


def _draw_valid(axis, data):
    methods = [m for m in shown_in_detail(data) if m["series"] in _LINES]
    ends = []
    for method in methods:
        index = _LINES.index(method["series"])
        percent = [100 * one["valid_ratio"] for one in method["iterations"]]
        steps = range(1, len(percent) + 1)
        dashes = "--" if method["series"] == FLOAT32 else "-"
        axis.plot(steps, percent, dashes, marker=".", color=plots.color(index))
        ends.append((steps[-1], percent[-1], method["series"], plots.color(index)))
    axis.set_ylim(bottom=0)
    axis.set_xlabel("iteration")
    axis.set_ylabel("block products computed, %")
    budgets = {exponent(method["max_error"]) for method in methods}
    axis.set_title(f"What is computed (last budget {', '.join(sorted(budgets))})")
    axis.grid(alpha=0.25)
    plots.name_lines(axis, ends, size=8)
