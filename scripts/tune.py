"""Finds from how large a product on the multiply's larger tile pays, on the chip at hand.

csrc/cuda/tiles.h holds one number for each large tile: how many 128 x 128 tiles of C there must be
for each multiprocessor. This script times both tiles, and the choice as it stands, over sizes and
valid ratios. It gives the number that loses least against the better tile of each case, and what
the choice as it stands loses. It changes nothing itself.

    python scripts/tune.py --out results
"""

import argparse
import functools
import json
import math
import os
import subprocess
import sys

import common  # noqa: F401  # isort: skip  before torch, whose import Ctrl-C may stop

import torch

import spamm_torch
from common import options as cli
from common import results
from common.console import exit_code, make_console
from common.machine import PRECISIONS, describe_machine, use_precision
from common.operands import operands
from common.timing import interleaved, medians
from models.errors import UserError
from models.files import require_writable

TILES = ("small", "large")
RATIOS = (1.0, 0.3, 0.05)
SIZES = (512, 768, 1024, 1280, 1536, 2048, 2560, 3072, 4096)


def tiles_each(size, multiprocessors):
    """128 x 128 tiles of a size x size product, for each multiprocessor."""
    return math.ceil(size / 128) ** 2 / multiprocessors


def mean_loss(cases, tile_of):
    """Geometric mean over the cases of (time of the tile chosen) / (time of the better tile)."""
    factors = [case["ms"][tile_of(case)] / min(case["ms"][t] for t in TILES) for case in cases]
    return math.exp(sum(map(math.log, factors)) / len(factors))


def best_threshold(cases):
    """(tiles for each multiprocessor from which on the larger tile is better, its loss)."""

    def loss_from(threshold):
        return mean_loss(cases, lambda case: TILES[case["tiles_each"] >= threshold])

    candidates = [*sorted({case["tiles_each"] for case in cases}), math.inf]
    best = min(candidates, key=loss_from)
    return best, loss_from(best)


@torch.inference_mode()
def time_in_this_process(options):
    """Milliseconds of the multiply by precision, size and ratio, with the tile it may take."""
    device = torch.device("cuda")
    times = {}
    for precision in options.precisions:
        dtype = use_precision(precision)
        for size in options.sizes:
            a, b = operands("decay", size, dtype, device)
            norms = spamm_torch.norm_map(a), spamm_torch.norm_map(b)
            multiply = functools.partial(torch.ops.spamm_torch.multiply, a, b, *norms)
            taus = {ratio: spamm_torch.find_tau(*norms, ratio) for ratio in RATIOS}
            calls = {
                f"{precision} {size} {ratio}": functools.partial(multiply, tau, (64, 64, 64))
                for ratio, tau in taus.items()
            }
            times |= medians(interleaved(calls, device, options.repeats))
    return times


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
        raise UserError(f"timing the {tile} tile failed: {last}")
    return json.loads(run.stdout)


def study(by_tile, options, multiprocessors):
    """Tables of the best threshold and the losses of each precision, and of all times.

    Args:
        by_tile: {tile or "chosen": times as of :func:`time_in_this_process`}.
    """
    found = {"tiles": [], "tile times": []}
    for precision in options.precisions:
        cases = []
        for size in options.sizes:
            for ratio in RATIOS:
                ms = {tile: of[f"{precision} {size} {ratio}"] for tile, of in by_tile.items()}
                cases.append({"tiles_each": tiles_each(size, multiprocessors), "ms": ms})
                place = {"precision": precision, "n": size, "ratio": ratio}
                found["tile times"] += [place | {"tile": tile, "ms": ms[tile]} for tile in ms]
        best, loss = best_threshold(cases)
        found["tiles"].append(
            {
                "precision": precision,
                "best_threshold": best,
                "best_loss": loss,
                "chosen_loss": mean_loss(cases, lambda case: "chosen"),
            }
        )
    return found


def parse(arguments):
    parser = cli.make_parser(__doc__)
    cli.add_sizes_option(parser, SIZES)
    cli.add_choices(parser, "--precisions", "number formats", list(PRECISIONS), PRECISIONS)
    cli.add_repeats_option(parser, 7)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    cli.add_folder_option(parser, "the results")
    return parser.parse_args(arguments)


def main(arguments=None):
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    device = cli.require_cuda()
    if options.worker:
        print(json.dumps(time_in_this_process(options)))
        return
    console = make_console()
    require_writable(options.out)
    by_tile = {}
    for tile in (*TILES, "chosen"):
        by_tile[tile] = times_of(tile, options)
        console.print(f"timed: {tile}")
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    found = study(by_tile, options, multiprocessors)
    lost = ", ".join(f"{row['precision']} {row['chosen_loss'] - 1:.1%}" for row in found["tiles"])
    run = {
        "name": "tune",
        "said": f"Time lost to the better of both tiles by the choice as it stands: {lost}.",
        "header": results.run_header(describe_machine(device), "tune.py", arguments),
        "tables": found,
    }
    notes = "Loss is a mean factor of time against the better tile, 1 at best."
    results.finish(options.out / "tune", "Tiles of the multiply", run, console, notes)


if __name__ == "__main__":
    sys.exit(exit_code(main))
