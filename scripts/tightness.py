"""Measures how tight the bounds of docs/error_bound.md are: over the true error.

    python scripts/tightness.py --device cuda

It prints a table. The truth is float64's, for float64 that of numpy's long double.
"""

import math
import sys

import common  # noqa: F401  # isort: skip  before torch, whose import Ctrl-C may stop

import numpy as np
import torch

import spamm_torch
from common.console import exit_code
from common.options import make_parser
from models.water import matrices as water

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SIZE = 512


def pairs():
    """Operands by name, in float64."""
    i = torch.arange(SIZE, dtype=torch.float64)
    away = (i[:, None] - i).abs()
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, SIZE, SIZE, generator=generator, dtype=torch.float64)
    yield "decay", 0.8**away, 0.8**away
    yield "banded", a * (away < 40), b * (away < 40)
    yield "random", a, b
    yield "positive", a.abs(), b.abs()
    of = water.load()
    yield "density: D S", of.density, of.overlap
    yield "density: F F", of.fock, of.fock
    yield "network: relu(x) w", (a * torch.exp(-i / 100)).relu(), b / SIZE**0.5


def error_of(c, a, b):
    """norm(c - a b) for operands in their own type."""
    wide = [x.cpu().double().numpy() for x in (a, b, c)]
    if c.dtype == torch.float64:
        wide = [x.astype(np.longdouble) for x in wide]
    return float(np.sqrt(((wide[0] @ wide[1] - wide[2]) ** 2).sum()))


def rows(device):
    """Name, type, max_error, true error, and the bound over it."""
    for name, *operands in pairs():
        for dtype in DTYPES:
            a, b = (x.to(device, dtype) for x in operands)
            for max_error in (0.0, 1e-4):
                knob = {"max_error": max_error} if max_error else {"tau": 0.0}
                c, info = spamm_torch.mm(a, b, **knob, block=32, return_info=True)
                error = error_of(c, a, b) or math.nan
                yield name, dtype, max_error, error, info.total_bound.item() / error


def main(argv=None):
    parser = make_parser(__doc__)
    parser.add_argument("--device", default="cpu", help="of the products (default: cpu)")
    device = parser.parse_args(argv).device
    print("| operands | type | `max_error` | true error | bound / error |")
    print("| --- | --- | ---: | ---: | ---: |")
    for name, dtype, max_error, error, bound in rows(device):
        kind = str(dtype).removeprefix("torch.")
        print(f"| {name} | {kind} | {max_error:g} | {error:.2g} | {bound:.2g} |")


if __name__ == "__main__":
    sys.exit(exit_code(main))
