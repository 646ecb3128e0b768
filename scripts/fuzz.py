"""Random calls of the library against an oracle in float64, until a time or a number is reached.

    .venv/bin/python scripts/fuzz.py --minutes 5 --device cpu --seed 1

Products, block-sparse products, convolutions, deviations from a reference, max pools and whole
networks, of every type, block and layout, of sizes that fit nothing, of NaN, infinities, subnormal
and huge numbers. A case that fails is made as simple as it can be and added to --failures as a line
of JSON, which `tests/robustness` replays when it is put into its cases.jsonl. The same seed draws
the same cases. On CUDA norm maps are the device's own, held against the oracle's, and decide.

--soak makes the same calls again and again instead, and watches their bits and the memory.
"""

import json
import random
import resource
import sys
import time
from pathlib import Path

import common  # noqa: F401  # isort: skip  before torch, whose import Ctrl-C may stop

import torch

from common import options
from common.console import exit_code
from fuzzing import convolutions, networks, products, space
from models.errors import UserError

FAMILIES = {  # the space that cases are drawn from, the check, and how many of 100 cases
    "dense": (products.DENSE, products.dense, 48.3),
    "sparse": (products.SPARSE, products.sparse, 15),
    "convolution": (convolutions.CONVOLUTION, convolutions.convolution, 16),
    "deviation": (convolutions.DEVIATION, convolutions.deviation, 12),
    "pool": (convolutions.POOL, convolutions.pool, 8.5),
    "network": (networks.NETWORK, networks.network, 0.2),
}


def drawn(seed, number):
    """The case of this number: its family and its settings."""
    rng = random.Random(f"{seed}:{number}")
    family = rng.choices(list(FAMILIES), [share for *_, share in FAMILIES.values()])[0]
    return {"family": family, **space.draw(FAMILIES[family][0], rng)}


def from_json(line):
    """A case as it was drawn: JSON makes lists of its tuples."""
    return {name: space.as_drawn(value) for name, value in json.loads(line).items()}


def problem(case, device):
    """What is wrong with the library's answer, in one line; None where it is right."""
    try:
        FAMILIES[case["family"]][1](case, torch.device(device))
    except Exception as error:
        text = (str(error).splitlines() or [""])[0]
        return f"{type(error).__name__}: {text[:300]}"
    return None


def shrunk(case, device):
    """The simplest case that is found to fail, in any way."""
    settings = FAMILIES[case["family"]][0]
    return space.shrunk(case, settings, lambda other: problem(other, device) is not None)


def fuzz(given):
    """Runs cases until the time is over; UserError where some of them failed."""
    end = time.monotonic() + 60 * given.minutes
    number, failed, kinds = given.first, 0, set()
    try:
        while time.monotonic() < end and number < given.first + given.cases and failed < 100:
            case = drawn(given.seed, number)
            if said := problem(case, given.device):
                failed += 1
                print(f"case {number}: {said}\n  {json.dumps(case)}", flush=True)
                kind = case["family"], case.get("form"), case["dtype"]
                if kind not in kinds:  # one of each is enough
                    case = shrunk(case, given.device)
                    print(f"  {json.dumps(case)}\n  {problem(case, given.device)}", flush=True)
                kinds.add(kind)
                with open(given.failures, "a") as file:
                    file.write(json.dumps(case) + "\n")
            number += 1
    finally:  # after Ctrl-C, too
        ran = f"{number - given.first} cases of seed {given.seed} on {given.device}"
        print(f"{ran}: {failed} failed", flush=True)
    if failed:
        raise UserError(f"expected none of {ran} to fail; {failed} did, see {given.failures}")


def soak(given):
    """The same cases over and over: no bit may change, and memory must not grow."""
    end, rounds, early = time.monotonic() + 60 * given.minutes, 0, 0
    count = min(given.cases, 200)
    cases = [drawn(given.seed, given.first + number) for number in range(count)]
    while time.monotonic() < end or rounds < 6:
        for case in cases:
            if said := problem(case, given.device):
                raise UserError(f"round {rounds}: {said} ({json.dumps(case)})")
        rounds += 1
        if rounds == 3:  # by then every buffer has its size
            early = resident()
    growth = resident() - early
    print(f"{rounds} rounds of {len(cases)} cases: memory grew by {growth / 2**20:.1f} MiB")
    if growth > 64 * 2**20:
        raise UserError(f"expected flat memory; it grew by {growth} bytes in {rounds - 3} rounds")


def resident():
    """Bytes of memory that this process holds."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def main(arguments=None):
    parser = options.make_parser(__doc__)
    add = options.add
    add(
        parser,
        "--minutes",
        "how long",
        1.0,
        type=options.number(float, lambda m: m > 0, "minutes above 0"),
    )
    add(
        parser, "--cases", "at most so many", sys.maxsize, "no limit", type=options.positive_integer
    )
    add(parser, "--seed", "of all cases", 0, type=options.natural_number)
    add(parser, "--first", "number of the first case", 0, type=options.natural_number)
    add(parser, "--failures", "file for cases that fail", Path("failures.jsonl"), type=Path)
    what = "threads of the CPU; many processes may run side by side"
    add(parser, "--threads", what, 1, type=options.positive_integer)
    options.add_device_option(parser)
    parser.add_argument(
        "--soak", action="store_true", help="repeat at most 200 cases, watch the memory"
    )
    given = parser.parse_args(arguments)
    given.device = options.choose_device(given.device)
    torch.set_num_threads(given.threads)
    (soak if given.soak else fuzz)(given)


if __name__ == "__main__":
    sys.exit(exit_code(main))
