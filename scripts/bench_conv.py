"""conv2d against torch's (cuDNN or oneDNN, channels last) by layer, batch and valid ratio.

Layers: the ten convolutions of VGG13 on 32 x 32 pictures, the 3 x 3 and 1 x 1 convolutions of
ResNet-50 on 224 x 224, and two large ones. The weight's norms are pinned and tau is held, as in
serving. Verifies every case against float64 before it is timed. Writes NAME.md, NAME.json and
NAME.png. If it is interrupted, the same command goes on with the cases that are missing.

    python scripts/bench_conv.py --out docs/results --name conv_h200
"""

import itertools
import sys
from dataclasses import asdict

import torch
import torch.nn.functional as F

import common  # noqa: F401  before the library, which it finds
import spamm_torch
from bench import conv_report
from bench.conv_case import Case
from bench.conv_layers import GROUPS, NAMES
from bench.conv_report import Row
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

RATIOS = (1.0, 0.97, 0.9, 0.75, 0.63, 0.43, 0.3)
DEFAULTS = {  # groups, batches, precisions, rounds
    "cpu": (("vgg13",), (128,), ("float32",), 5),
    "cuda": (tuple(GROUPS), (100, 128), ("float16",), 15),
}
LARGE_BATCHES = (64,)  # of the group of large layers


def extra_memory(call, *tensors):
    """Peak memory of a call above its tensors and its result, over the size of these.

    As asked for: what the allocator hands out may be up to 1 MiB more, by chance.
    """
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    requested = lambda kind: torch.cuda.memory_stats()[f"requested_bytes.all.{kind}"]  # noqa: E731
    before = requested("current")
    result = call()
    peak = requested("peak") - before
    size = lambda tensor: tensor.numel() * tensor.element_size()  # noqa: E731
    return (peak - size(result)) / sum(map(size, (*tensors, result)))


def bench_case(case, layer, batch, precision, data, options, device):
    """A Row for each ratio, as plain data; the dense convolution takes turns with all of them."""
    input, weight = case.input, case.weight
    candidates = {"dense": lambda: F.conv2d(input, weight, **case.shape)}
    found = {}
    chained = device.type == "cuda" and case.block[1:] == (64, 64)
    norm_input = case.norm_pixels.permute(0, 2, 3, 1).contiguous() if chained else None
    for ratio in options.ratios:
        tau, valid = case.threshold(ratio)

        def call(tau=tau, **more):
            return spamm_torch.conv2d(
                input,
                weight,
                **case.shape,
                **case.setting,
                tau=tau,
                norm_weight=case.norm_weight,
                **more,
            )

        error = case.error(call(), tau)
        if not error <= TOLERANCE[precision]:
            raise UserError(
                f"wrong result for {layer.name}, batch {batch}, at ratio {ratio}: expected an "
                f"error of at most {TOLERANCE[precision]}; got {error}"
            )
        memory = extra_memory(call, input, weight) if device.type == "cuda" else None
        found[ratio] = valid, error, memory
        candidates[f"conv2d {ratio}"] = call
        if chained:
            candidates[f"chained {ratio}"] = lambda call=call: call(
                norm_input=norm_input, return_norms=True
            )
    times = interleaved(candidates, device, options.repeats, cold=options.cold)
    dense = times["dense"].median

    def row(ratio):
        valid, error, memory = found[ratio]
        own = times[f"conv2d {ratio}"]
        chained_ms = times[f"chained {ratio}"].median if chained else None
        return Row(
            layer.name,
            batch,
            precision,
            data,
            case.block,
            asked_ratio=ratio,
            valid_ratio=valid,
            dense_ms=dense,
            conv2d_ms=own.median,
            chained_ms=chained_ms,
            spread=own.spread / own.median,
            speedup=dense / own.median,
            speedup_chained=dense / chained_ms if chained else None,
            extra_memory=memory,
            error=error,
        )

    return [asdict(row(ratio)) for ratio in options.ratios]


def parse(arguments):
    parser = make_parser(__doc__)
    add_device_option(parser)
    on_cpu, on_cuda = DEFAULTS["cpu"], DEFAULTS["cuda"]
    parser.add_argument(
        "--groups",
        nargs="+",
        choices=GROUPS,
        help=f"of layers (default: all; on the CPU {show(on_cpu[0])})",
    )
    parser.add_argument(
        "--layers",
        metavar="LAYER",
        nargs="+",
        choices=NAMES,
        help=f"some of the groups' layers only (default: all). They are: {', '.join(NAMES)}",
    )
    parser.add_argument(
        "--batches",
        metavar="IMAGES",
        type=positive_integer,
        nargs="+",
        help=f"images a batch (default: {show(on_cuda[1])}; on the CPU {show(on_cpu[1])}; "
        f"large layers {show(LARGE_BATCHES)})",
    )
    parser.add_argument(
        "--precisions",
        nargs="+",
        choices=PRECISIONS,
        help=f"number formats (default: {show(on_cuda[2])}; on the CPU {show(on_cpu[2])})",
    )
    parser.add_argument(
        "--data",
        nargs="+",
        default=["even"],
        choices=("even", "centred"),
        help="inputs: even in size at random, or falling off from the middle (default: even)",
    )
    parser.add_argument(
        "--block",
        type=int,
        nargs=3,
        choices=(32, 64, 128),
        default=[64, 64, 64],
        metavar=("M", "K", "N"),
        help="edges of the blocks, each 32, 64 or 128 (default: 64 64 64)",
    )
    add_timing_options(parser, RATIOS, {device: of[3] for device, of in DEFAULTS.items()})
    add_output_options(parser, "conv")
    options = parser.parse_args(arguments)
    options.device = choose_device(options.device)
    groups, batches, precisions, repeats = DEFAULTS[options.device.type]
    options.groups = options.groups or groups
    options.large_batches = options.batches or LARGE_BATCHES
    options.batches = options.batches or batches
    options.precisions = options.precisions or precisions
    options.repeats = options.repeats or repeats
    if not list(cases_of(options)):
        raise UserError(
            f"expected layers of --groups {' '.join(options.groups)}; got "
            f"{' '.join(options.layers)}"
        )
    return options


def cases_of(options):
    """(layer, batch, precision, data) in the order of the tables."""
    for group in options.groups:
        layers = [x for x in GROUPS[group] if options.layers is None or x.name in options.layers]
        batches = options.large_batches if group == "large" else options.batches
        yield from itertools.product(layers, batches, options.precisions, options.data)


def best_of(rows):
    """A line for the terminal."""
    return ", ".join(
        f"{row['valid_ratio']:.0%}: {row['speedup']:.2f}x"
        + (f" ({row['speedup_chained']:.2f}x)" if row["speedup_chained"] else "")
        for row in rows
    )


@torch.inference_mode()
def main(arguments=None):
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    console = make_console()
    device = options.device
    require_writable(options.out)
    torch.backends.cudnn.benchmark = True
    header = run_header(describe_machine(device), "bench_conv.py", arguments)
    header["block"] = " x ".join(map(str, options.block))
    if device.type == "cuda":
        header["L2 cache"] = "emptied before each call" if options.cold else "warm"
    cases = {
        f"{layer.name} {batch} {precision} {data}": (layer, batch, precision, data)
        for layer, batch, precision, data in cases_of(options)
    }
    settings = run_settings(
        header,
        cases=list(cases),
        block=options.block,
        ratios=options.ratios,
        repeats=options.repeats,
        cold=options.cold,
    )
    with (
        Journal(options.out, options.name, settings, fresh=options.fresh) as journal,
        Steps(console, "conv") as steps,
    ):
        finished = sum(name in journal for name in cases)
        steps.at(finished, len(cases), journal.resumed(finished, len(cases)))
        rows = []
        for done, (name, (layer, batch, precision, data)) in enumerate(cases.items(), start=1):

            def measure(layer=layer, batch=batch, precision=precision, data=data):
                dtype = use_precision(precision)
                case = Case(layer, batch, dtype, data, tuple(options.block), device)
                return bench_case(case, layer, batch, precision, data, options, device)

            new = name not in journal
            of_case = journal.measured(name, measure)
            rows += of_case
            if new:
                steps.at(done, len(cases), f"{name}: {best_of(of_case)}")
        results = {"header": header, "rows": rows}
        finish(conv_report, results, options.out, options.name, journal, console)


if __name__ == "__main__":
    sys.exit(exit_code(main))
