"""What bench_networks.py --layers found, as a page and a picture."""

from bench.networks.layers import LAYERS, MODEL_BATCH, MUST_REACH
from bench.networks.rows import LayerRow
from common import plots
from common.report_files import page, table

_NOTES = """\
Convolution, bias and, where the network has them, the residual's sum and ReLU. Times are medians in
us, all candidates in turns in one process; a group's is the sum over its layers, each as often as
the network has it. Floor: what the bytes or the operations take, whichever is more, at 4.0 TB/s and
690 TFLOPS, which one H200 sustains. Goal: what the group is meant to reach there at batch 64.
Error: relative, against float64; the largest of the candidates."""


def report(data, name):
    """The page, the picture and the conclusion."""
    header, candidates = data["header"], data["candidates"]
    rows = [LayerRow(**row) for row in data["rows"]]
    batches = list(dict.fromkeys(row.batch for row in rows))
    modelled = data["modelled"]
    said = conclusion(rows, batches, modelled)
    body = [f"![time by group of layers]({name}.png)", "", *_NOTES.splitlines(), ""]
    body += table(("candidate", "what it is"), candidates.items(), left=(0, 1))
    for batch in batches:
        of_batch = [row for row in rows if row.batch == batch]
        body += ["", f"## Batch {batch}", "", *_groups(of_batch, candidates, modelled)]
        body += ["", *_layers(of_batch, candidates, modelled)]
    picture = _picture(header, rows, batches, candidates)
    return (
        page("ResNet-50's convolutions, fused, nothing skipped", said, header, body),
        picture,
        said,
    )


def conclusion(rows, batches, modelled):
    """Ours, its goal and its peers over all layers measured, in one line."""
    batch = MODEL_BATCH if MODEL_BATCH in batches else max(batches)
    groups = _by_group([row for row in rows if row.batch == batch])
    total = {name: sum(_sum_us(of, name) for of in groups.values()) for name in next(iter(rows)).ms}
    others = ", ".join(f"{us:.4g} us {name}" for name, us in total.items() if name != "ours")
    text = f"ResNet-50's convolutions fused, batch {batch}: {total['ours']:.4g} us ours, {others}"
    if not (modelled and batch == MODEL_BATCH):
        return text + "."
    reached = [name for name, of in groups.items() if _sum_us(of, "ours") <= _goal(name, of)]
    goal = sum(_goal(name, of) for name, of in groups.items())
    floor = sum(_floor(of) for of in groups.values())
    return (
        f"{text}; goal {goal:.4g} us (reached by {len(reached)} of {len(groups)} groups), floor "
        f"{floor:.4g} us."
    )


def _by_group(rows):
    """{group: its rows}, in the network's order of groups."""
    groups = {name: [] for name in MUST_REACH}
    for row in rows:
        groups[LAYERS[row.layer].group].append(row)
    return {name: of for name, of in groups.items() if of}


def _sum_us(rows, candidate):
    return sum(1e3 * row.ms[candidate] * LAYERS[row.layer].count for row in rows)


def _floor(rows):
    layers = ((LAYERS[row.layer], row.batch) for row in rows)
    return sum(layer.floor_us(batch) * layer.count for layer, batch in layers)


def _goal(group, rows):
    """The group's goal; of the part of it that was measured, the floor's share."""
    whole = [layer for layer in LAYERS.values() if layer.group == group]
    floor = sum(layer.floor_us(MODEL_BATCH) * layer.count for layer in whole)
    return MUST_REACH[group] * _floor(rows) / floor


def _groups(rows, candidates, modelled):
    lines = []
    groups = _by_group(rows)
    for name, of in groups.items():
        count = sum(LAYERS[row.layer].count for row in of)
        lines.append([name, count, *(_sum_us(of, c) for c in candidates)])
        lines[-1] += [_floor(of), _goal(name, of)] if modelled else []
    lines.append(["sum", *map(sum, zip(*(line[1:] for line in lines), strict=True))])
    with_goals = modelled and rows[0].batch == MODEL_BATCH
    head = ["layers", "n", *candidates, *(["floor", "goal"] if modelled else [])]
    if modelled and not with_goals:
        head, lines = head[:-1], [line[:-1] for line in lines]
    cells = [(name, count, *(f"{us:.4g}" for us in times)) for name, count, *times in lines]
    return table(head, cells)


def _layers(rows, candidates, modelled):
    head = ["layer", "group", "n", *candidates, *(["floor"] if modelled else []), "error"]
    lines = []
    for row in rows:
        layer = LAYERS[row.layer]
        times = [f"{1e3 * row.ms[name]:.4g}" for name in candidates]
        floor = [f"{layer.floor_us(row.batch):.4g}"] if modelled else []
        error = f"{max(row.error.values()):.1e}"
        lines.append((layer.name, layer.group, layer.count, *times, *floor, error))
    return table(head, lines, left=(0, 1))


def _picture(header, rows, batches, candidates):
    """Maps of group by candidate, coloured by the speed over the compiled layer."""
    figure, axes = plots.panels(1, len(batches), 4.5, sharey=True)
    names = [name for name in candidates if name != "compiled"]
    for axis, batch in zip(axes[0], batches, strict=True):
        groups = _by_group([row for row in rows if row.batch == batch])
        speeds = [
            [_sum_us(of, "compiled") / _sum_us(of, name) for name in names]
            for of in groups.values()
        ]
        plots.speedup_map(axis, speeds)
        axis.set_xticks(range(len(names)), names)
        axis.set_yticks(range(len(groups)), groups)
        axis.set(title=f"batch {batch}, over compiled")
    return plots.png(figure, header, "ResNet-50's convolutions, fused (blue: faster)")
