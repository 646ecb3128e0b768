"""mm against torch.mm (cuBLAS, oneDNN or MKL) by size, valid ratio, dtype and block.

Verifies every case against float64 before it is timed. Writes NAME.md, NAME.json and NAME.png.

    python scripts/bench_mm.py --out docs/results --name mm_h200
"""

import argparse
import functools
import io
import itertools
import shlex
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import spamm_torch
from models.errors import StudyError
from models.files import require_writable
from scripts._console import Steps, exit_code, make_console
from scripts._machine import describe_machine
from scripts._precisions import PRECISIONS, TOLERANCE, use_precision
from scripts._report_files import write_results
from scripts._timing import interleaved
from scripts._training_options import (
    add_device_option,
    choose_device,
    positive_integer,
    valid_ratio,
)

LINES = ("-", "--", ":", "-.")  # by data and block
RATIOS = (1.0, 0.9, 0.5, 0.3, 0.2, 0.1, 0.05)
DEFAULTS = {  # sizes, precisions, rounds
    "cpu": ((2048, 4096), ("float32", "bfloat16"), 7),
    "cuda": ((1024, 2048, 4096, 8192, 16384), tuple(PRECISIONS), 15),
}


@dataclass(frozen=True)
class Row:
    data: str
    precision: str
    block: int | tuple  # an edge for all three, or (m, k, n)
    n: int
    valid_ratio: float
    backend: str
    dense_ms: float
    multiply_ms: float
    mm_ms: float  # norms and multiply, tau held
    spread: float  # of mm_ms, quartile distance over median
    speedup: float  # of mm over dense
    speedup_multiply: float
    share_of_floor: float
    error: float  # relative Frobenius error against float64
    dense_error: float  # that of torch.mm, nothing skipped


@dataclass(frozen=True)
class StageRow:
    data: str
    precision: str
    block: int | tuple
    n: int
    norms_ms: float
    norms_share_of_copy: float  # of the bandwidth of a copy in the same run
    search_ms: float


def operands(data, n, dtype, device):
    """The paper's decay matrix for both operands, or two of N(0, 1)."""
    if data == "decay":
        i = torch.arange(n, device=device, dtype=torch.float32)
        a = (0.1 / ((i[:, None] - i).abs().pow_(0.1).add_(1))).to(dtype)
        return a, a.clone()
    generator = torch.Generator(device).manual_seed(0)
    make = lambda: torch.randn(n, n, device=device, generator=generator).to(dtype)  # noqa: E731
    return make(), make()


def relative_error(product, a, b, norm_a, norm_b, tau, block):
    """Error of the block rows at a third and at the end, against float64 with the same skips."""
    m, k, n = (block,) * 3 if isinstance(block, int) else block
    rows = norm_a.shape[0]
    error = norm = 0.0
    for i in {rows // 3, rows - 1}:
        valid = ~(norm_a[i][:, None] * norm_b < tau)
        mask = valid.repeat_interleave(k, 0).repeat_interleave(n, 1)
        kept = b.double() * mask[: b.shape[0], : b.shape[1]]
        part = slice(i * m, (i + 1) * m)
        expected = a[part].double() @ kept
        error += (product[part].double() - expected).square().sum().item()
        norm += expected.square().sum().item()
    return (error / norm) ** 0.5 if norm else error**0.5


def copy_bandwidth(device, repeats):
    """Bytes read plus written in a millisecond by a large elementwise kernel.

    A plain copy would become a memcpy node of the CUDA graph, which runs at two thirds of that.
    """
    elements = (1 << 28) if device.type == "cuda" else (1 << 26)
    source = torch.ones(elements, device=device)
    target = torch.empty_like(source)
    timing = interleaved({"copy": lambda: torch.abs(source, out=target)}, device, repeats)["copy"]
    return 8 * elements / timing.median


def bench_operands(case, ratios, bandwidth, device, options):
    """All ratios of one case; the dense product takes turns with all of them."""
    data, precision, block, n = case
    dtype = use_precision(precision)
    a, b = operands(data, n, dtype, device)
    norm_maps = functools.partial(torch.ops.spamm_torch.norm_maps, a, b, block)
    norm_a, norm_b = norm_maps()
    taus = {}
    errors = {}
    candidates = {
        "dense": lambda: torch.mm(a, b),
        "norms": norm_maps,
        "search": lambda: spamm_torch.find_tau(norm_a, norm_b, 0.3),
    }
    for ratio in ratios:
        tau = torch.zeros_like(norm_a[0, 0])
        if ratio < 1:
            tau = spamm_torch.find_tau(norm_a, norm_b, ratio)
        product = spamm_torch.mm(a, b, tau=tau, block=block)
        errors[ratio] = relative_error(product, a, b, norm_a, norm_b, tau, block)
        if not errors[ratio] <= TOLERANCE[precision]:
            raise StudyError(
                f"wrong result for {case} at ratio {ratio}: expected an error of at most "
                f"{TOLERANCE[precision]}; got {errors[ratio]}"
            )
        taus[ratio] = tau
        candidates[f"mm {ratio}"] = lambda tau=tau: spamm_torch.mm(a, b, tau=tau, block=block)
        candidates[f"multiply {ratio}"] = lambda tau=tau: torch.ops.spamm_torch.multiply(
            a, b, norm_a, norm_b, tau, block
        )
    dense_error = relative_error(torch.mm(a, b), a, b, norm_a, norm_b, 0, block)
    times = interleaved(candidates, device, options.repeats, cold=options.cold)
    dense = times["dense"].median
    operand_ms = 2 * n * n * a.element_size() / bandwidth
    backend = spamm_torch.backend_for(device, dtype, block)

    def row(ratio):
        valid = spamm_torch.valid_ratio(norm_a, norm_b, taus[ratio]).item()
        mm, multiply = times[f"mm {ratio}"], times[f"multiply {ratio}"]
        floor = operand_ms + max(valid * dense, 1.5 * operand_ms)
        return Row(
            *case,
            valid_ratio=valid,
            backend=backend,
            dense_ms=dense,
            multiply_ms=multiply.median,
            mm_ms=mm.median,
            spread=mm.spread / mm.median,
            speedup=dense / mm.median,
            speedup_multiply=dense / multiply.median,
            share_of_floor=floor / mm.median,
            error=errors[ratio],
            dense_error=dense_error,
        )

    norms = times["norms"].median
    stage = StageRow(*case, norms, operand_ms / norms, times["search"].median)
    return [row(ratio) for ratio in ratios], stage


def markdown(header, rows, stages, picture):
    lines = ["# mm against torch.mm", "", "| | |", "| --- | --- |"]
    lines += [f"| {key} | {value} |" for key, value in header.items()]
    lines += [
        "",
        "Times are medians in ms, all candidates in turns. mm includes the norm maps of both",
        "operands; tau is held. Speedups are over torch.mm. Floor: the operands read once at copy",
        "bandwidth, plus the larger of valid ratio x torch.mm and all three matrices at copy",
        "bandwidth. Errors are relative, in the Frobenius norm, against float64; that of torch.mm",
        "with nothing skipped.",
        "",
        f"![speedup and share of the floor]({picture})",
        "",
        "| data | type | block | N | valid | torch.mm | multiply | mm | speedup | multiply alone | "
        "x valid | of floor | spread | error | of torch.mm |",
        "| --- | --- " + "| ---: " * 13 + "|",
    ]
    for r in rows:
        lines.append(
            f"| {r.data} | {r.precision} | {r.block} | {r.n} | {r.valid_ratio:.1%} | "
            f"{r.dense_ms:.4g} | {r.multiply_ms:.4g} | {r.mm_ms:.4g} | {r.speedup:.2f} | "
            f"{r.speedup_multiply:.2f} | {r.speedup * r.valid_ratio:.2f} | "
            f"{r.share_of_floor:.0%} | {r.spread:.0%} | {r.error:.1e} | "
            f"{r.dense_error:.1e} |"
        )
    lines += [
        "",
        "x valid is speedup times valid ratio: 1 would be no overhead at all.",
        "",
        "## Norm maps (both operands) and exact threshold search",
        "",
        "| data | type | block | N | norms | of copy bandwidth | search |",
        "| --- | --- " + "| ---: " * 5 + "|",
    ]
    for s in stages:
        lines.append(
            f"| {s.data} | {s.precision} | {s.block} | {s.n} | {s.norms_ms:.4g} | "
            f"{s.norms_share_of_copy:.0%} | {s.search_ms:.4g} |"
        )
    return "\n".join(lines) + "\n"


def distinct(values):
    return list(dict.fromkeys(values))


def picture(header, rows):
    """A column of panels for each type: speedup above, the roofline (share of the floor) below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    precisions = distinct(row.precision for row in rows)
    sizes = sorted({row.n for row in rows})
    kinds = distinct((row.data, row.block) for row in rows)
    figure, axes = pyplot.subplots(
        2,
        len(precisions),
        figsize=(1.5 + 4.2 * len(precisions), 7.5),
        layout="constrained",
        squeeze=False,
        sharex=True,
    )
    for (above, below), precision in zip(axes.T, precisions, strict=True):
        for n, (kind, style) in itertools.product(
            sizes, zip(kinds, itertools.cycle(LINES), strict=False)
        ):
            curve = [
                r for r in rows if (r.precision, r.n, (r.data, r.block)) == (precision, n, kind)
            ]
            curve.sort(key=lambda r: r.valid_ratio)
            ratios = [100 * r.valid_ratio for r in curve]
            label = f"N={n}, {kind[0]}, block {kind[1]}"
            line = {"marker": ".", "color": f"C{sizes.index(n)}", "linestyle": style}
            above.loglog(ratios, [r.speedup for r in curve], label=label, **line)
            below.semilogx(ratios, [100 * r.share_of_floor for r in curve], **line)
        above.set(title=precision)
        below.set(xlabel="valid ratio (%)", ylim=(0, None))
        for panel in (above, below):
            panel.axhline(100 if panel is below else 1, color="grey", linewidth=0.8)
            panel.grid(alpha=0.3)
    axes[0, 0].set(ylabel="speedup over torch.mm, norms included")
    axes[1, 0].set(ylabel="share of the floor (%)")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside right center", fontsize=7)
    figure.suptitle(header["device"])
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()


def block_edges(text):
    """An edge, or (m, k, n)."""
    edges = tuple(int(edge) if edge.isdecimal() else 0 for edge in text.split("x"))
    if len(edges) not in (1, 3) or not set(edges) <= {32, 64, 128}:
        raise argparse.ArgumentTypeError(
            f"expected 32, 64 or 128, or three of these as in 128x64x128; got {text!r}"
        )
    return edges if len(edges) == 3 else edges[0]


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_device_option(parser)
    parser.add_argument("--sizes", type=positive_integer, nargs="+")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS)
    parser.add_argument(
        "--blocks", type=block_edges, nargs="+", default=[64], help="an edge, or three: 128x64x128"
    )
    parser.add_argument("--ratios", type=valid_ratio, nargs="+", default=RATIOS)
    parser.add_argument("--data", nargs="+", default=["decay"], choices=("decay", "normal"))
    parser.add_argument("--repeats", type=positive_integer)
    parser.add_argument("--cold", action="store_true", help="empty the L2 cache before each call")
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--name", default="mm")
    options = parser.parse_args(arguments)
    options.device = choose_device(options.device)
    sizes, precisions, repeats = DEFAULTS[options.device.type]
    options.sizes = options.sizes or sizes
    options.precisions = options.precisions or precisions
    options.repeats = options.repeats or repeats
    return options


@torch.inference_mode()
def main(arguments=None):
    options = parse(arguments)
    console = make_console()
    device = options.device
    require_writable(options.out)
    command = f"python {shlex.join(['scripts/bench_mm.py', *(arguments or sys.argv[1:])])}"
    header = describe_machine(device) | {"command": f"`{command}`"}
    bandwidth = copy_bandwidth(device, options.repeats)
    header["copy bandwidth"] = f"{bandwidth / 1e6:.0f} GB/s"
    header["L2 cache"] = "emptied before each call" if options.cold else "warm"
    cases = list(itertools.product(options.data, options.precisions, options.blocks, options.sizes))
    rows, stages = [], []
    with Steps(console, "mm") as steps:
        for done, case in enumerate(cases):
            of_case, stage = bench_operands(case, options.ratios, bandwidth, device, options)
            rows += of_case
            stages.append(stage)
            best = ", ".join(f"{r.valid_ratio:.0%}: {r.speedup:.2f}x" for r in of_case)
            steps.at(done + 1, len(cases), f"{' '.join(map(str, case))}: {best}")
    results = {
        "header": header,
        "rows": [asdict(row) for row in rows],
        "stages": [asdict(stage) for stage in stages],
    }
    paths = write_results(
        options.out,
        options.name,
        data=results,
        markdown=markdown(header, rows, stages, f"{options.name}.png"),
        picture=picture(header, rows),
    )
    for path in paths:
        console.print(f"wrote {path}")


if __name__ == "__main__":
    sys.exit(exit_code(main))
