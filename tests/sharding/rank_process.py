"""One rank of the tests of ``spamm_torch.distributed``: runs all cases that fit its world.

    python rank_process.py RANK WORLD DEVICE FOLDER

The ranks meet in a file of the folder. After each case a rank writes what has come of it so far.
Where a case fails the rank ends, so that the others fail at once and do not wait for it.
"""

import json
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import distributed_cases
import torch
import torch.distributed as dist

TIMEOUT = timedelta(seconds=60)  # of each collective call


def main(rank, world, device, folder):
    def write(record):
        path = folder / f"rank{rank}.json"
        path.with_suffix(".new").write_text(json.dumps(record))
        path.with_suffix(".new").replace(path)

    torch.set_num_threads(1)
    # Fills torch.empty with NaN: what is read before it is written shows in the result.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    place = torch.device(device) if device == "cpu" else torch.device(device, rank)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group(
        "gloo" if place.type == "cpu" else "nccl",
        store=store,
        rank=rank,
        world_size=world,
        timeout=TIMEOUT,
    )
    record = {}
    for name, case in distributed_cases.cases(world, place.type).items():
        try:
            record[name] = "passed"
            case(distributed_cases.Rank(rank, world, place, store, lambda: write(record)))
        except BaseException:
            record[name] = traceback.format_exc()
        write(record)
        if record[name] != "passed":
            return 1
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    number, world_size, kind, where = sys.argv[1:]
    sys.exit(main(int(number), int(world_size), kind, Path(where)))
