#!/usr/bin/env python
"""A product over several processes, compared with one process bit for bit.

    torchrun --nproc-per-node 2 examples/distributed_mm.py

Each process takes a GPU of its machine, with NCCL; where there are fewer GPUs than processes, all
take the CPU, with gloo.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist


def rows_with_decay(begin, end, columns, device):
    """Rows begin to end of a matrix whose entries decay away from the diagonal."""
    i, j = torch.arange(begin, end, device=device), torch.arange(columns, device=device)
    return 0.95 ** (i[:, None] - j).abs()


def timed(call, device):
    """The result and the milliseconds of a call that all ranks make, once it is warm."""
    for _ in range(2):
        dist.barrier()
        start = time.perf_counter()
        result = call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return result, 1e3 * (time.perf_counter() - start)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=2048, help="of A and B (default: 2048)")
    parser.add_argument("--valid-ratio", type=float, default=0.2, help="of block products")
    options = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        raise SystemExit("error: start it with torchrun, as --help says")
    import spamm_torch  # not above: --help needs no library

    local_rank, local_ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    on_gpus = torch.cuda.device_count() >= local_ranks
    device = torch.device("cuda", local_rank) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpus else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()

    # Each rank makes its own rows. Any cuts do; multiples of the block, 64, save a copy.
    blocks = -(-options.rows // 64)
    cuts = [min(64 * (blocks * part // ranks), options.rows) for part in range(ranks + 1)]
    a = rows_with_decay(cuts[rank], cuts[rank + 1], options.rows, device)
    knob = {"valid_ratio": options.valid_ratio}
    c, ms = timed(lambda: spamm_torch.distributed.mm(a, a, **knob), device)

    # For the comparison every rank makes the whole, which a real program would not.
    whole = rows_with_decay(0, options.rows, options.rows, device)
    expected, one_ms = timed(lambda: spamm_torch.mm(whole, whole, **knob), device)
    equal = torch.tensor(int(torch.equal(c, expected[cuts[rank] : cuts[rank + 1]])), device=device)
    dist.all_reduce(equal, dist.ReduceOp.MIN)
    if rank == 0:
        norms = spamm_torch.norm_map(whole)
        tau = spamm_torch.find_tau(norms, norms, options.valid_ratio)
        print(spamm_torch.distributed.exchange_plan(norms, norms, tau, cuts, b_cuts=cuts))
        result = "equal to one process" if equal else "NOT equal to one process"
        print(f"{ranks} ranks with {dist.get_backend()}: C is {result}")
        print(f"{ms:.1f} ms; one process {one_ms:.1f} ms")
    dist.destroy_process_group()
    return 0 if equal else 1


if __name__ == "__main__":
    raise SystemExit(main())
