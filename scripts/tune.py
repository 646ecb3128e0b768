"""Finds from how large a product on the multiply's larger tile pays, on the chip at hand.

csrc/cuda/heuristics.h holds one number for each kernel: how many 128 x 128 tiles of C there must be
for each multiprocessor. This script times both tiles, and the choice as it stands, over sizes and
valid ratios. It gives the number that loses least against the better tile of each case, and what
the choice as it stands loses. It changes nothing itself.

    python scripts/tune.py --out results
"""

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import spamm_torch
from models.errors import StudyError
from models.files import require_writable
from scripts._console import exit_code, make_console
from scripts._machine import describe_machine
from scripts._precisions import PRECISIONS, use_precision
from scripts._report_files import write_results
from scripts._timing import interleaved
from scripts._training_options import choose_device, positive_integer
from scripts.bench_mm import operands

TILES = ("small", "large")
SIZES = (512, 768, 1024, 1280, 1536, 2048, 2560, 3072, 4096)
RATIOS = (1.0, 0.3, 0.05)


def tiles_each(size, multiprocessors):
    """128 x 128 tiles of a size x size product, for each multiprocessor."""
    return math.ceil(size / 128) ** 2 / multiprocessors


def mean_loss(cases, tile_of):
    """Geometric mean over the cases of (time of the tile taken) / (time of the better tile)."""
    factors = [case["ms"][tile_of(case)] / min(case["ms"][t] for t in TILES) for case in cases]
    return math.exp(sum(map(math.log, factors)) / len(factors))


def best_threshold(cases):
    """(tiles for each multiprocessor from which the larger tile should be taken, its loss)."""

    def loss_from(threshold):
        return mean_loss(cases, lambda case: TILES[case["tiles_each"] >= threshold])

    candidates = [*sorted({case["tiles_each"] for case in cases}), math.inf]
    best = min(candidates, key=loss_from)
    return best, loss_from(best)


@torch.inference_mode()
def time_in_this_process(precisions, sizes, repeats):
    """Milliseconds of the multiply by precision, size and ratio, with the tile it may take."""
    device = torch.device("cuda")
    times = {}
    for precision in precisions:
        dtype = use_precision(precision)
        for size in sizes:
            a, b = operands("decay", size, dtype, device)
            norms = spamm_torch.norm_map(a), spamm_torch.norm_map(b)
            calls = {ratio: multiply_call(a, b, norms, ratio) for ratio in RATIOS}
            for ratio, timing in interleaved(calls, device, repeats).items():
                times[f"{precision} {size} {ratio}"] = timing.median
    return times


def multiply_call(a, b, norms, ratio):
    tau = spamm_torch.find_tau(*norms, ratio)
    return lambda: torch.ops.spamm_torch.multiply(a, b, *norms, tau, (64, 64, 64))


def times_of(tile, options):
    """As :func:`time_in_this_process`, in a new one: a process reads once which tile to take."""
    command = [sys.executable, __file__, "--worker", "--repeats", str(options.repeats)]
    command += ["--precisions", *options.precisions, "--sizes", *map(str, options.sizes)]
    environment = {k: v for k, v in os.environ.items() if k != "SPAMM_TORCH_TILE"}
    if tile in TILES:
        environment["SPAMM_TORCH_TILE"] = tile
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if run.returncode:
        last = (run.stderr.strip().splitlines() or ["no message"])[-1]
        raise StudyError(f"timing the {tile} tile failed: {last}")
    return json.loads(run.stdout)


def study(by_tile, options, multiprocessors):
    """For each precision its cases, the best threshold and the losses.

    Args:
        by_tile: {tile or "chosen": times as of :func:`time_in_this_process`}.
    """
    results = {}
    for precision in options.precisions:
        cases = [
            {
                "size": size,
                "valid_ratio": ratio,
                "tiles_each": tiles_each(size, multiprocessors),
                "ms": {
                    tile: times[f"{precision} {size} {ratio}"] for tile, times in by_tile.items()
                },
            }
            for size in options.sizes
            for ratio in RATIOS
        ]
        best, best_loss = best_threshold(cases)
        results[precision] = {
            "best_threshold": best,
            "best_loss": best_loss,
            "chosen_loss": mean_loss(cases, lambda case: "chosen"),
            "cases": cases,
        }
    return results


def markdown(header, results):
    lines = ["# Tiles of the multiply", "", "| | |", "| --- | --- |"]
    lines += [f"| {name} | {value} |" for name, value in header.items()]
    lines += ["", *__doc__.splitlines()[2:6], "", "Loss is a mean factor of time, 1 at best.", ""]
    lines += [
        "| type | tiles for each multiprocessor | its loss | loss of the choice as it stands |"
    ]
    lines += ["| --- | ---: | ---: | ---: |"]
    for precision, found in results.items():
        lines.append(
            f"| {precision} | {found['best_threshold']:.2f} | {found['best_loss']:.3f} | "
            f"{found['chosen_loss']:.3f} |"
        )
    lines += ["", "| type | N | valid | small, ms | large, ms | as chosen, ms |"]
    lines += ["| --- | ---: | ---: | ---: | ---: | ---: |"]
    for precision, found in results.items():
        for case in found["cases"]:
            times = " | ".join(f"{case['ms'][t]:.4f}" for t in (*TILES, "chosen"))
            lines.append(f"| {precision} | {case['size']} | {case['valid_ratio']:.0%} | {times} |")
    return "\n".join(lines) + "\n"


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", type=positive_integer, nargs="+", default=SIZES)
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--repeats", type=positive_integer, default=7)
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments=None):
    options = parse(arguments)
    device = choose_device("cuda")
    if options.worker:
        print(json.dumps(time_in_this_process(options.precisions, options.sizes, options.repeats)))
        return
    console = make_console()
    require_writable(options.out)
    by_tile = {}
    for tile in (*TILES, "chosen"):
        by_tile[tile] = times_of(tile, options)
        console.print(f"timed: {tile}")
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    command = f"python {shlex.join(['scripts/tune.py', *(arguments or sys.argv[1:])])}"
    header = describe_machine(device) | {"command": f"`{command}`"}
    results = study(by_tile, options, multiprocessors)
    data = {"header": header, "results": results}
    for path in write_results(options.out, "tune", data=data, markdown=markdown(header, results)):
        console.print(f"wrote {path}")


if __name__ == "__main__":
    sys.exit(exit_code(main))
