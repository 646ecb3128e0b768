"""Runs every CUDA kernel once at small, odd sizes: the program to put under compute-sanitizer.

    SPAMM_TORCH_TILE=small compute-sanitizer --tool memcheck .venv/bin/python scripts/sanitize.py

Run it once for each tile, small and large (by themselves small sizes take the small ones), and on
Hopper both with SPAMM_TORCH_FORCE_SM80=1 and without. Products, convolutions, pools and networks
are those that the fuzzer draws, of every type, block and layout; the other parts are what it does
not reach.
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

DEVICE = "cuda"
OPS = torch.ops.spamm_torch
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# The number of cases of each family of the fuzzer; and of those drawn where a kernel is forced.
CASES = {"dense": 300, "sparse": 300, "convolution": 400, "pool": 300, "network": 20}
FORCED_CASES = {"convolution": 200}


def randn(*shape, dtype=torch.float32):
    return torch.randn(*shape, device=DEVICE, dtype=torch.float64).to(dtype)


def drawn(cases=None):
    """The first cases of the fuzzer's families, whose answers it holds against its oracle."""
    for family, count in (cases or CASES).items():
        for number in range(count):
            case = fuzz.drawn(0, number, family)
            if said := fuzz.problem(case, DEVICE):
                raise UserError(f"expected the oracle's answer; got {said} ({case})")


def convolution_segments():
    """Steps of a tile shared by clusters of thread blocks, which add up their sums."""
    for number in (2, 4):
        with forced("SPAMM_TORCH_SEGMENTS", number):
            drawn(FORCED_CASES)


def nothing_skipped():
    """Runs of pixels in clusters that share weights or pixels, past every edge of a tile."""
    for tile in ("128x96w", "128x192p", "128x256w", "64x384w", "64x192p"):
        with forced("SPAMM_TORCH_UNSKIPPED", tile):
            drawn(FORCED_CASES)


def wide_float32():
    """Blocks whose entries span many powers of two, more pairs of them than a list keeps."""
    a, b = randn(70, 64 * 40 + 9), randn(64 * 40 + 9, 133)
    rows, columns = (torch.logspace(-12, 0, of, device=DEVICE) for of in (70, 133))
    along_a, along_b = a.clone(), b.clone()  # no k is large in both
    along_a[:, ::2] *= 2.0**-40
    along_b[1::2] *= 2.0**-40
    for block, tau in itertools.product((32, 64), (0.0, 1e-9)):
        spamm_torch.mm(a * rows[:, None], b * columns, tau=tau, block=block)
        spamm_torch.mm(along_a, along_b, tau=tau, block=block)
        spamm_torch.mm(along_b.mT, along_a.mT, tau=tau, block=block)


def claimed_tiles():
    """More tiles than multiprocessors, with norm maps computed and precomputed."""
    for dtype in (torch.float16, torch.float32):
        a, b = (randn(*of, dtype=dtype) for of in ((2560, 128), (128, 2560)))
        spamm_torch.mm(a, b, tau=90.0)
        maps = {"norm_a": spamm_torch.norm_map(a), "norm_b": spamm_torch.norm_map(b)}
        spamm_torch.mm(a, b, tau=90.0, **maps)


def stages():
    """A search by one thread block, by many and with norms in two turns; counts and bounds."""
    for dtype, (mb, kb, nb) in itertools.product(
        (torch.float32, torch.float64), ((5, 7, 4), (20, 48, 30), (70, 1100, 70))
    ):
        norm_a, norm_b = (torch.rand(*x, device=DEVICE, dtype=dtype) for x in ((mb, kb), (kb, nb)))
        tau = spamm_torch.find_tau(norm_a, norm_b, 0.5)
        spamm_torch.valid_counts(norm_a, norm_b, tau)
        spamm_torch.valid_ratio(norm_a, norm_b, tau)
        spamm_torch.error_bound(norm_a, norm_b, tau)
        OPS.find_tau(norm_a, norm_b, max_error=0.1)


def norms_passed_on():
    """Convolutions with pinned and with passed norms, and of a prepared weight, as the backend
    calls them.
    """
    blocks = {"block": (64, 64, 64)}
    for dtype, (images, channels, size) in itertools.product(
        DTYPES[:3], ((65, 72, 5), (128, 8, 24))
    ):
        x = randn(images, channels, size, size, dtype=dtype)
        weight = randn(72, channels, 3, 3, dtype=dtype)
        pinned = OPS.conv2d_weight_norm(weight, **blocks)
        setting = {"padding": 1, "valid_ratio": 0.5, "norm_weight": pinned, **blocks}
        hidden, norms = spamm_torch.conv2d(x, weight, relu=True, return_norms=True, **setting)
        square = randn(136, 72, 3, 3, dtype=dtype)
        spamm_torch.conv2d(hidden, square, padding=1, tau=1.0, norm_input=norms, **blocks)
        weight = weight.to(memory_format=torch.channels_last)  # else a copy of it is read
        OPS.conv2d(x, weight, activation="relu", weight_is_ready=True, **setting)


def forced(variable, value):
    """Sets an environment variable for a while."""
    return mock.patch.dict(os.environ, {variable: str(value)})


def product_segments():
    """Steps of a tile shared by several thread blocks. Those of two of float64 meet in the result."""
    for dtype, number in itertools.product((torch.float16, torch.float32, torch.float64), (2, 8)):
        of = {"dtype": dtype}
        with forced("SPAMM_TORCH_SEGMENTS", number):
            for (m, k, n), tau in itertools.product(
                ((65, 513, 130), (201, 777, 333)), (0.0, 64.0 * 64.0, 1e30)
            ):
                a, b, added = randn(m, k, **of), randn(k, n, **of), randn(m, n, **of)
                for left in (a, a.t().contiguous().t(), randn(m, k + 1, **of)[:, 1:]):
                    spamm_torch.mm(left, b, tau=tau)
                    spamm_torch.addmm(added, left, b, tau=tau, beta=0.5, alpha=2, out=added)
        for edge, tau in itertools.product((513, 601), (0.0, 64.0 * 64.0)):
            a = randn(edge, edge, **double)
            spamm_torch.mm(a, a, tau=tau, symmetric=True, return_norms=True)


def first_layers():
    """Few channels with nothing skipped, and max pools, past every edge of a thread block."""
    for dtype in DTYPES[:2]:
        x = randn(70, 3, 11, 13, dtype=dtype).to(memory_format=torch.channels_last)
        weight, bias = torch.randn(72, 3, 3, 3).to(x), torch.randn(72).to(x)
        setting = {"padding": 2, "stride": (2, 1), "relu": True, "return_norms": True}
        output, _ = spamm_torch.conv2d(x, weight, bias, tau=0.0, **setting)
        spamm_torch.conv2d(x[:5], weight, bias, tau=0.0, padding=2, activation="silu")
        aligned = randn(5, 3, 9, 16, dtype=dtype)
        spamm_torch.conv2d(aligned, weight, bias, tau=0.0, padding=1, stride=2)
        # Several tiles for each thread block, and more of K than registers hold at once.
        many = randn(300, 3, 17, 40, dtype=dtype)
        wide = torch.randn(72, 3, 7, 7).to(x)
        spamm_torch.conv2d(many, wide, bias, tau=0.0, padding=3, stride=2, relu=True)
        spamm_torch.conv2d(many[:2], torch.randn(8, 3, 9, 9).to(x), tau=0.0, stride=3)
        OPS.max_pool2d(output, 2, norms=True)
        OPS.max_pool2d(output, 3, 2, 1, norms=True)
        OPS.max_pool2d(output, 2)
        OPS.max_pool2d(output[:5], 3, 2, 1)


IN_BOTH_FORMATS = (wide_float32, norms_passed_on)  # of float32
ONCE = (
    *(drawn, convolution_segments, nothing_skipped, product_segments, claimed_tiles, stages),
    first_layers,
)


def main(arguments=None):
    parser = make_parser(__doc__)
    names = [part.__name__ for part in (*IN_BOTH_FORMATS, *ONCE)]
    said = f"run these alone, in this order: {', '.join(names)}"
    parser.add_argument("parts", nargs="*", metavar="PART", choices=[[], *names], help=said)
    chosen = parser.parse_args(arguments).parts or names
    choose_device(DEVICE)
    for name in chosen:
        part = globals()[name]
        for allow_tf32 in (False, True) if part in IN_BOTH_FORMATS else (True,):
            torch.backends.cuda.matmul.allow_tf32 = allow_tf32
            part()
        torch.cuda.synchronize()
        print(f"finished {name}", flush=True)
    print("every kernel ran" if chosen == names else "these kernels ran")


if __name__ == "__main__":
    sys.exit(exit_code(main))
