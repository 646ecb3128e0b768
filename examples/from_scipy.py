#!/usr/bin/env python
"""Heat that spreads over a grid: powers of a sparse matrix of scipy, as blocks.

    python examples/from_scipy.py
    python examples/from_scipy.py --side 128 --device cuda

Each squaring doubles the time. Powers fill up but decay with distance, so in points' spatial order
few blocks count. scipy computes the same powers, and drops nothing.
"""

import argparse
import time


def main(arguments=None):
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--side", type=int, default=48, help="of the grid (default: 48)")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(arguments)
    import scipy.sparse as sp  # not above: --help needs none of these
    import scipy.sparse.linalg as sp_linalg
    import torch

    import spamm_torch
    from spamm_torch import sparse

    side = options.side
    line = sp.diags_array([0.2, -0.4, 0.2], offsets=[-1, 0, 1], shape=(side, side))
    step = sp.csr_array(sp.eye_array(side * side) + sp.kronsum(line, line))  # a step of time
    x, y = (places.flatten() for places in torch.meshgrid(*[torch.arange(side)] * 2, indexing="ij"))
    order = sparse.spatial_order(torch.stack([x, y], 1).double()).numpy()
    own = sparse.from_scipy(step[order][:, order]).to(options.device)
    for squaring in range(1, 7):
        began = time.perf_counter()
        own, info = spamm_torch.mm(own, own, max_error=1e-6, drop=torch.inf, return_info=True)
        valid = f"{info.valid_ratio_of_all:.1%}"  # waits for the device
        between = time.perf_counter()
        step = step @ step
        seconds = between - began, time.perf_counter() - between
        found = sparse.to_scipy(own.cpu(), step.shape)
        error = sp_linalg.norm(found - step[order][:, order]) / sp_linalg.norm(step)
        print(
            f"{2**squaring:3} steps: {valid} of the products, {len(own.values()):4} blocks, error "
            f"{error:.0e}, {1e3 * seconds[0]:.0f} ms; scipy {1e3 * seconds[1]:.0f} ms"
        )


if __name__ == "__main__":
    main()
