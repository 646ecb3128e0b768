"""Runs every CUDA kernel once at small, odd sizes: the program to put under compute-sanitizer.

    SPAMM_TORCH_TILE=small compute-sanitizer --tool memcheck .venv/bin/python scripts/sanitize.py

Run it once for each tile, small and large (by themselves small sizes take the small ones), and on
Hopper both with SPAMM_TORCH_FORCE_SM80=1 and without. Products, convolutions, pools and networks
are those that the fuzzer draws, of every type, block and layout; the calls of tests/late_cases.py
are of every op and larger.
"""

import itertools
import os
import sys
from unittest import mock

import common  # noqa: F401  # isort: skip  finds models and the library

import torch

import fuzz
import spamm_torch
from common.console import exit_code
from common.options import choose_device, make_parser
from models.files import UserError

from late_cases import FAMILIES  # isort: skip  after fuzz, which says where it lies

DEVICE = "cuda"
# The number of cases of each family of the fuzzer; and of those drawn where a kernel is forced.
CASES = {"dense": 300, "sparse": 300, "convolution": 400, "pool": 300, "network": 20}
FORCED_CASES = {"convolution": 200}


def drawn(cases=None):
    """The first cases of the fuzzer's families, whose answers it holds against its oracle."""
    for family, count in (cases or CASES).items():
        for number in range(count):
            case = fuzz.drawn(0, number, family)
            if said := fuzz.problem(case, DEVICE):
                raise UserError(f"expected the oracle's answer; got {said} ({case})")


def every_op():
    """Searches by one thread block, by many and with norms in two turns, claimed tiles, first
    layers, pools, and norms that are given or passed on.
    """
    for cases_of in FAMILIES.values():
        for case in cases_of(DEVICE):
            case.run()
    for dtype in (torch.float32, torch.float64):
        maps = [torch.rand(of, device=DEVICE, dtype=dtype) for of in ((70, 1100), (1100, 70))]
        spamm_torch.find_tau(*maps, 0.5)
        spamm_torch.find_tau(*maps, max_error=0.1)


def convolution_segments():
    """Steps of a tile shared by clusters of thread blocks, which add up their sums."""
    for number in (2, 4):
        with forced("SPAMM_TORCH_SEGMENTS", number):
            drawn(FORCED_CASES)


def product_segments():
    """Steps of a tile shared by several thread blocks; two of float64 meet in the result."""
    types, sizes = (torch.float16, torch.float32, torch.float64), ((65, 513, 130), (201, 777, 333))
    for dtype, number, (m, k, n) in itertools.product(types, (2, 8), sizes):
        a, b = (torch.randn(*of, device=DEVICE).to(dtype) for of in ((m, k), (k, n)))
        with forced("SPAMM_TORCH_SEGMENTS", number):
            for left, tau in itertools.product((a, a.mT.contiguous().mT), (0.0, 64.0 * 64.0)):
                found = spamm_torch.mm(left, b, tau=tau)
                spamm_torch.addmm(found, left, b, tau=tau, beta=0.5, alpha=2, out=found)
            for case in FAMILIES["symmetric products of float64"](DEVICE):
                case.run()


def nothing_skipped():
    """Runs of pixels in clusters that share weights or pixels, past every edge of a tile."""
    for tile in ("128x96w", "128x192p", "128x256w", "64x384w", "64x192p"):
        with forced("SPAMM_TORCH_UNSKIPPED", tile):
            drawn(FORCED_CASES)


def wide_float32():
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


def forced(variable, value):
    """Sets an environment variable for a while."""
    return mock.patch.dict(os.environ, {variable: str(value)})


PARTS = (drawn, every_op, convolution_segments, product_segments, nothing_skipped, wide_float32)


def main(arguments=None):
    parser = make_parser(__doc__)
    names = [part.__name__ for part in PARTS]
    said = f"run these alone, in this order: {', '.join(names)} (default: all)"
    parser.add_argument("parts", nargs="*", metavar="PART", choices=[[], *names], help=said)
    chosen = parser.parse_args(arguments).parts or names
    choose_device(DEVICE)
    for name in chosen:
        for allow_tf32 in (False, True) if name == "wide_float32" else (True,):
            torch.backends.cuda.matmul.allow_tf32 = allow_tf32
            globals()[name]()
        torch.cuda.synchronize()
        print(f"finished {name}", flush=True)
    print("every kernel ran" if chosen == names else "these kernels ran")


if __name__ == "__main__":
    sys.exit(exit_code(main))
