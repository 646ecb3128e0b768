"""mm against torch.mm (cuBLAS, oneDNN or MKL) by size, valid ratio, dtype and block.

Verifies every case against float64 before it is timed. Writes NAME.md, NAME.json and NAME.png. If
it is interrupted, the same command goes on with the cases that are missing.

    python scripts/bench_mm.py --out docs/results --name mm_h200
"""

import argparse
import functools
import itertools
import sys
from dataclasses import asdict

import torch

import common  # noqa: F401  before the library, which it finds
import spamm_torch
from bench import mm_report
from bench.mm_report import Row, StageRow
from bench.operands import operands
from common.console import Steps, exit_code, make_console
from common.errors import UserError
from common.files import require_writable
from common.journal import Journal, run_settings
from common.machine import describe_machine
from common.options import (
    add_device_option,
    add_output_options,
    add_timing_options,
    choose_device,
    make_parser,
    positive_integer,
    show,
)
from common.precisions import PRECISIONS, TOLERANCE, use_precision
from common.report_files import finish, run_header
from common.timing import interleaved

RATIOS = (1.0, 0.9, 0.5, 0.3, 0.2, 0.1, 0.05)
DEFAULTS = {  # sizes, precisions, rounds
    "cpu": ((2048, 4096), ("float32", "bfloat16"), 7),
    "cuda": ((1024, 2048, 4096, 8192, 16384), tuple(PRECISIONS), 15),
}


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
    """All ratios of one case; the dense product takes turns with all of them.

    Returns:
        {"rows": a Row for each ratio, "stage": the StageRow}, as plain data.
    """
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
            raise UserError(
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
    return {"rows": [asdict(row(ratio)) for ratio in ratios], "stage": asdict(stage)}


def block_edges(text):
    """An edge, or (m, k, n)."""
    edges = tuple(int(edge) if edge.isdecimal() else 0 for edge in text.split("x"))
    if len(edges) not in (1, 3) or not set(edges) <= {32, 64, 128}:
        raise argparse.ArgumentTypeError(
            f"expected 32, 64 or 128, or three of these as in 128x64x128; got {text!r}"
        )
    return edges if len(edges) == 3 else edges[0]


def parse(arguments):
    parser = make_parser(__doc__)
    add_device_option(parser)
    on_cpu, on_cuda = DEFAULTS["cpu"], DEFAULTS["cuda"]
    parser.add_argument(
        "--sizes",
        metavar="N",
        type=positive_integer,
        nargs="+",
        help=f"edges of the square matrices (default: {show(on_cuda[0])}; "
        f"on the CPU {show(on_cpu[0])})",
    )
    parser.add_argument(
        "--precisions",
        nargs="+",
        choices=PRECISIONS,
        help=f"number formats (default: all; on the CPU {show(on_cpu[1])})",
    )
    parser.add_argument(
        "--blocks",
        metavar="BLOCK",
        type=block_edges,
        nargs="+",
        default=[64],
        help="edges of the blocks: 32, 64, 128, or three of these as in 128x64x128 (default: 64)",
    )
    parser.add_argument(
        "--data",
        nargs="+",
        default=["decay"],
        choices=("decay", "normal"),
        help="decay: the paper's decay matrix; normal: random ones of N(0, 1) (default: decay)",
    )
    add_timing_options(parser, RATIOS, {device: of[2] for device, of in DEFAULTS.items()})
    add_output_options(parser, "mm")
    options = parser.parse_args(arguments)
    options.device = choose_device(options.device)
    sizes, precisions, repeats = DEFAULTS[options.device.type]
    options.sizes = options.sizes or sizes
    options.precisions = options.precisions or precisions
    options.repeats = options.repeats or repeats
    return options


@torch.inference_mode()
def main(arguments=None):
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    console = make_console()
    device = options.device
    require_writable(options.out)
    header = run_header(describe_machine(device), "bench_mm.py", arguments)
    settings = run_settings(
        header,
        sizes=options.sizes,
        precisions=options.precisions,
        blocks=options.blocks,
        ratios=options.ratios,
        data=options.data,
        repeats=options.repeats,
        cold=options.cold,
    )
    cases = list(itertools.product(options.data, options.precisions, options.blocks, options.sizes))
    with (
        Journal(options.out, options.name, settings, fresh=options.fresh) as journal,
        Steps(console, "mm") as steps,
    ):
        bandwidth = journal.measured(
            "copy bandwidth", lambda: copy_bandwidth(device, options.repeats)
        )
        header["copy bandwidth"] = f"{bandwidth / 1e6:.0f} GB/s"
        header["L2 cache"] = "emptied before each call" if options.cold else "warm"
        names = {case: " ".join(map(str, case)) for case in cases}
        finished = sum(name in journal for name in names.values())
        steps.at(finished, len(cases), journal.resumed(finished, len(cases)))
        found = []
        for done, case in enumerate(cases, start=1):
            new = names[case] not in journal
            found.append(
                journal.measured(
                    names[case],
                    lambda case=case: bench_operands(
                        case, options.ratios, bandwidth, device, options
                    ),
                )
            )
            if new:
                best = ", ".join(
                    f"{r['valid_ratio']:.0%}: {r['speedup']:.2f}x" for r in found[-1]["rows"]
                )
                steps.at(done, len(cases), f"{names[case]}: {best}")
        data = {
            "header": header,
            "rows": [row for case in found for row in case["rows"]],
            "stages": [case["stage"] for case in found],
        }
        finish(mm_report, data, options.out, options.name, journal, console)


if __name__ == "__main__":
    sys.exit(exit_code(main))
