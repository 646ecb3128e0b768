"""Random calls of the library against an oracle in float64, until a time or a number is reached.

    .venv/bin/python scripts/fuzz.py --minutes 5 --device cpu --seed 1

Products, block-sparse products, functions of matrices, convolutions and max pools, of every type,
block and layout, of sizes that fit nothing, of NaN, infinities, subnormal and huge numbers. A case
that fails is made as simple as it can be and added to --failures as a line of JSON, which
`tests/robustness` replays when it is put into its cases.jsonl. The same seed draws the same cases.
On CUDA norm maps are the device's own, held against the oracle's, and decide.

Several may run side by side, each with a seed of its own.
"""

import json
import os
import random
import sys
import time
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the oracle's, beside other processes

import common  # noqa: F401  # isort: skip  finds models and the library

import torch

from common import options
from common.options import exit_code
from fuzzing import convolutions, functions, products, space
from models.files import UserError

FAMILIES = {  # the space that cases are drawn from, the check, and how many of 100 cases
    "dense": (products.DENSE, products.dense, 48.9),
    "sparse": (products.SPARSE, products.sparse, 15),
    "function": (functions.FUNCTION, functions.function, 10),
    "convolution": (convolutions.CONVOLUTION, convolutions.convolution, 17.2),
    "pool": (convolutions.POOL, convolutions.pool, 8.9),
}


def drawn(seed, number, family=None):
    """The case of this number: its family, where none is given, and its settings."""
    rng = random.Random(f"{seed}:{number}")
    family = family or rng.choices(list(FAMILIES), [share for *_, share in FAMILIES.values()])[0]
    return {"family": family, **space.draw(FAMILIES[family][0], rng)}


def from_json(line):
    """A case as it was drawn: JSON makes lists of its tuples."""
    return {name: space.as_drawn(value) for name, value in json.loads(line).items()}


def problem(case, device):
    """The fault of the library's answer, in one line; None where it is right."""
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
            case = drawn(given.seed, number, given.family)
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


def main(arguments=None):
    parser = options.make_parser(__doc__)
    add, positive = options.add, options.positive_integer
    minutes = options.number(float, lambda m: m > 0, "minutes above 0")
    add(parser, "--minutes", "how long", 1.0, type=minutes)
    add(parser, "--cases", "at most so many", sys.maxsize, "no limit", type=positive)
    add(parser, "--seed", "of all cases", 0, type=options.natural_number)
    add(parser, "--first", "number of the first case", 0, type=options.natural_number)
    add(parser, "--failures", "file for cases that fail", Path("failures.jsonl"), type=Path)
    add(parser, "--threads", "of the CPU", 1, type=positive)
    add(parser, "--family", "one kind of cases", None, "all", choices=sorted(FAMILIES))
    options.add_device_option(parser)
    given = parser.parse_args(arguments)
    given.device = options.choose_device(given.device)
    torch.set_num_threads(given.threads)
    fuzz(given)


if __name__ == "__main__":
    sys.exit(exit_code(main))
