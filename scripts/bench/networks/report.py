"""What bench_networks.py found, as a page and a picture."""

from bench.networks import layers_report
from bench.networks.goals import GOALS
from bench.networks.rows import NetworkRow
from common import plots
from common.report_files import page, table

_NOTES = """\
Times are medians in us for one batch, all candidates in turns in one process; compilation,
conversion and first calls are not in them. In brackets: how many times as fast as "compiled" in the
same run, or, launched by Python, as "dense". Weights are drawn from a seed, pictures are noise, and
batch norms know its statistics. Error: of the output, relative, against float32's."""
_MODES = {  # as measured -> as a heading
    "CUDA graph": "In one CUDA graph: what the device needs",
    "eager": "Launched by Python, by the clock",
}
_SHOWN_BATCH = 64  # in the conclusion, where it was measured


def report(data, name):
    """The page, the picture (None where nothing was measured) and the conclusion."""
    if "layers" in data:
        return layers_report.report(data, name)
    header = data["header"]
    cells = _cells(NetworkRow(**row) for row in data["rows"])
    modes = [mode for mode in _MODES if any(_measured(rows, mode) for rows in cells.values())]
    picture = _picture(header, cells, modes) if modes else None
    said = conclusion(cells, modes)
    body = [] if picture is None else [f"![speed by network and batch]({name}.png)", ""]
    body += [*_NOTES.splitlines(), "", *_candidates(data["candidates"])]
    body += _goals(cells, data["device_type"])
    for mode in modes:
        body += ["", f"## {_MODES[mode]}", "", *_times(cells, data["candidates"], mode)]
    body += [*_conversions(cells), *_not_measured(cells)]
    return page("Whole networks, nothing skipped", said, header, body), picture, said


def _cells(rows):
    """{(network, batch): {candidate: row}}."""
    cells = {}
    for row in rows:
        cells.setdefault((row.network, row.batch), {})[row.candidate] = row
    return cells


def _measured(rows, mode):
    """{candidate: ms} of a cell."""
    return {
        name: row.ms[mode] for name, row in rows.items() if row.ms is not None and mode in row.ms
    }


def _peer(mode):
    """What a mode's ratios are to."""
    return "compiled" if mode == "CUDA graph" else "dense"


def conclusion(cells, modes):
    """What converting brings, in one line."""
    of_all = [row.absent is not None for rows in cells.values() for row in rows.values()]
    missing = f"; {sum(of_all)} of {len(of_all)} candidates absent" if any(of_all) else ""
    found = {}
    for mode in modes[:1]:
        for (network, batch), rows in cells.items():
            times = _measured(rows, mode)
            ours = [times[name] for name in ("ours", "ours-compiled") if name in times]
            if ours and _peer(mode) in times:
                found.setdefault(network, {})[batch] = times[_peer(mode)] / min(ours)
    if not found:
        return f"No converted network was measured beside its peer{missing}."
    shown = []
    for network, of in found.items():
        batch = _SHOWN_BATCH if _SHOWN_BATCH in of else max(of)
        shown.append(f"{network} {of[batch]:.2f}x (batch {batch})")
    peer = {"compiled": "torch.compile, in one CUDA graph", "dense": "the dense network, eager"}
    return (
        "Networks converted with nothing skipped, by themselves or compiled, whichever is faster, "
        f"over {peer[_peer(modes[0])]}: {', '.join(shown)}{missing}."
    )


def _candidates(candidates):
    return table(("candidate", "what it is"), candidates.items(), left=(0, 1))


def _goals(cells, device_type):
    """Each goal, how many of its cells meet it, and the one that is furthest from it."""
    lines = []
    for goal in GOALS[device_type]:
        ratios = {}
        for (network, batch), rows in cells.items():
            if goal.networks is not None and network not in goal.networks:
                continue
            if goal.batches is not None and batch not in goal.batches:
                continue
            times = _measured(rows, goal.mode)
            ours = [times[name] for name in goal.ours if name in times]
            if ours and goal.peer in times:
                ratios[f"{network}, batch {batch}"] = times[goal.peer] / min(ours)
        if ratios:
            met = sum(ratio >= goal.least for ratio in ratios.values())
            worst = min(ratios, key=ratios.get)
            least = f"{ratios[worst]:.2f}x ({worst})"
            lines.append(
                (goal.title, goal.mode, f"{goal.least:g}x", f"{met} of {len(ratios)}", least)
            )
    if not lines:
        return []
    head = ("goal", "mode", "at least", "met", "least found")
    return ["", "## Goals", "", *table(head, lines, left=(0, 1))]


def _times(cells, candidates, mode):
    lines = []
    for (network, batch), rows in cells.items():
        times = _measured(rows, mode)
        shown = [_time(times.get(name), times.get(_peer(mode))) for name in candidates]
        lines.append((network, batch, *shown))
    return table(("network", "batch", *candidates), lines)


def _time(ms, peer):
    if ms is None:
        return ""
    return f"{1e3 * ms:.4g}" + ("" if peer is None else f" ({peer / ms:.2f}x)")


def _conversions(cells):
    """What convert_ made of the layers, and how far results are from float32's."""
    lines = []
    for (network, batch), rows in cells.items():
        for name, row in rows.items():
            if row.actions is not None:
                actions = ", ".join(f"{count} {action}" for action, count in row.actions.items())
                lines.append((network, batch, name, actions, f"{row.error:.1e}"))
    if not lines:
        return []
    head = ("network", "batch", "candidate", "layers", "error")
    return ["", "## Conversions", "", *table(head, lines, left=(0, 2, 3))]


def _not_measured(cells):
    lines = [
        (f"{network}, batch {batch}, {name}", row.absent.replace("|", "/"))
        for (network, batch), rows in cells.items()
        for name, row in rows.items()
        if row.absent is not None
    ]
    return ["", "## Not measured", "", *table(("what", "why"), lines, left=(0, 1))] if lines else []


def _picture(header, cells, modes):
    """For each mode a map of cells by candidate, coloured by the ratio to its peer."""
    shown = {cell: rows for cell, rows in cells.items() if _measured(rows, modes[0])}
    names = list(dict.fromkeys(name for rows in shown.values() for name in rows))
    figure, axes = plots.panels(1, len(modes), 2 + 0.25 * len(shown), sharey=True)
    for axis, mode in zip(axes[0], modes, strict=True):
        speeds = []
        for rows in shown.values():
            times = _measured(rows, mode)
            peer = times.get(_peer(mode))
            speeds.append([peer / times[n] if peer and n in times else None for n in names])
        plots.speedup_map(axis, speeds)
        axis.set_xticks(range(len(names)), names, rotation=40, ha="right")
        axis.set(title=f"{mode}, over {_peer(mode)}")
        axis.set_yticks(range(len(shown)), [f"{network}, batch {b}" for network, b in shown])
    return plots.png(figure, header, "Whole networks, nothing skipped (blue: faster)")
