"""Runs every CUDA kernel once at small, odd sizes: the program to put under compute-sanitizer.

    SPAMM_TORCH_TILE=small compute-sanitizer --tool memcheck .venv/bin/python scripts/sanitize.py

Run it once for each tile, small and large (by themselves small sizes take the small ones), and on
Hopper both with SPAMM_TORCH_FORCE_SM80=1 and without. Products, convolutions and pools are
those that the fuzzer draws, of every type, block and layout; the calls of tests/late_cases.py are
of every op and larger.
"""

import itertools
import os
import sys
from functools import partial
from unittest import mock

import common  # noqa: F401  # isort: skip  finds models and the library

import torch

import fuzz
import spamm_torch
from common.options import choose_device, exit_code, make_parser
from models.files import UserError

from late_cases import FAMILIES  # isort: skip  after fuzz, which says where it lies

DEVICE = "cuda"
ALL = {"dense": 300, "sparse": 300, "convolution": 400, "pool": 300}
FEW = {"dense": 100, "convolution": 200}
PRODUCTS = [name for name in FAMILIES if "products" in name]
TILES = ("128x96w", "128x192p", "128x256w", "64x384w", "64x192p")


def calls(cases, families=(), variable="NONE", values=("",)):
    """The first cases of the fuzzer's families, whose answers it holds against its oracle; every
    op of families of late_cases; all with each value of a variable of the library.
    """
    for value in values:
        with mock.patch.dict(os.environ, {f"SPAMM_TORCH_{variable}": value}):
            for family, number in ((of, i) for of, count in cases.items() for i in range(count)):
                case = fuzz.drawn(0, number, family)
                if said := fuzz.problem(case, DEVICE):
                    raise UserError(f"expected the oracle's answer; got {said} ({case})")
            for family in families:
                for case in FAMILIES[family](DEVICE):
                    case.run()


def searches():
    """Searches by many thread blocks, with norms in two turns."""
    for dtype in (torch.float32, torch.float64):
        maps = [torch.rand(of, device=DEVICE, dtype=dtype) for of in ((70, 1100), (1100, 70))]
        spamm_torch.find_tau(*maps, 0.5)
        spamm_torch.find_tau(*maps, max_error=0.1)


def wide():
    """Blocks whose entries span many powers of two, more pairs of them than a list keeps."""
    a, b = torch.randn(70, 64 * 40 + 9, device=DEVICE), torch.randn(64 * 40 + 9, 133, device=DEVICE)
    rows, columns = (torch.logspace(-12, 0, of, device=DEVICE) for of in (70, 133))
    along_a, along_b = a.clone(), b.clone()  # no k is large in both
    along_a[:, ::2] *= 2.0**-40
    along_b[1::2] *= 2.0**-40
    for block, tau in itertools.product((32, 64), (0.0, 1e-9)):
        spamm_torch.mm(a * rows[:, None], b * columns, tau=tau, block=block)
        spamm_torch.mm(along_a, along_b, tau=tau, block=block)
        spamm_torch.mm(along_b.mT, along_a.mT, tau=tau, block=block)


PARTS = {
    "plain": partial(calls, ALL, FAMILIES),
    # Steps of a tile shared by several thread blocks, which add up their sums.
    "segments": partial(calls, FEW, PRODUCTS, "SEGMENTS", "248"),
    # Runs of pixels in clusters that share weights or pixels, past every edge of a tile.
    "unskipped": partial(calls, {"convolution": 200}, (), "UNSKIPPED", TILES),
    "searches": searches,
    "wide": wide,
}


def main(arguments=None):
    parser = make_parser(__doc__)
    said = f"run these alone, in this order: {', '.join(PARTS)} (default: all)"
    parser.add_argument("parts", nargs="*", metavar="PART", choices=[[], *PARTS], help=said)
    chosen = parser.parse_args(arguments).parts or [*PARTS]
    choose_device(DEVICE)
    for name in chosen:
        for allow_tf32 in (False, True) if name == "wide" else (True,):
            torch.backends.cuda.matmul.allow_tf32 = allow_tf32
            PARTS[name]()
        torch.cuda.synchronize()
        print(f"finished {name}", flush=True)
    print("every kernel ran" if chosen == [*PARTS] else "these kernels ran")


if __name__ == "__main__":
    sys.exit(exit_code(main))
